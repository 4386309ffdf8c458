"""The set of allowed perturbations: a ball around each image, intersected with the pixel range."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from equipoise.catalogue import Catalogue


class SharedGenerator(torch.Generator):
    """Generator for a batch shared by several processes.

    Noise is drawn for the whole batch and each process keeps its rows, so that an image gets the same noise with
    any number of processes.

    Args:
        device: Device of the generator.
        rank: Number of this process, which has every `ranks`-th image of a batch.
        ranks: Number of processes.
        images: Number of images of a batch, over all processes.
    """

    def __new__(cls, device: torch.device, rank: int, ranks: int, images: int) -> Self:
        return super().__new__(cls, device)  # type: ignore[call-arg]  # typed as arguments of __init__

    def __init__(self, device: torch.device, rank: int, ranks: int, images: int) -> None:
        self.rank, self.ranks, self.images = rank, ranks, images

    def rows(self, count: int) -> tuple[int, slice]:
        """Number of images to draw for if this process attacks `count` (all of its share, or half), and its rows."""
        total = self.images if self.images % self.ranks else count * self.ranks
        return total, slice(self.rank, self.rank + count * self.ranks, self.ranks)


def round_towards(value: Tensor, anchor: Tensor) -> Tensor:
    """Convert `value` to the dtype of `anchor` without increasing its distance from `anchor`."""
    if value.dtype == anchor.dtype:
        return value
    rounded = value.to(anchor.dtype)
    overshot = torch.where(value >= anchor, rounded > value, rounded < value)
    return torch.where(overshot, torch.nextafter(rounded, anchor), rounded)


class Ball(ABC):
    """The ε-ball around each image of a batch, intersected with the pixel range [0, 1].

    The attack moves *points*; the model sees their *images*. For 32- and 64-bit images they are the same. The
    points of 16-bit images are float32, because small steps would be rounded away in 16 bits.

    Images are inside the ball in exact arithmetic, not only up to rounding: the bounds are computed in a wider
    dtype with a radius a few rounding errors below ε, and then rounded towards the clean image.

    Args:
        x: Clean images, pixels in [0, 1].
        eps: Radius ε.
    """

    def __init__(self, x: Tensor, eps: float) -> None:
        self.x = x
        self.eps = eps
        self.point_dtype = torch.promote_types(x.dtype, torch.float32)
        # Apple GPUs do not support float64
        wide = torch.float32 if x.device.type == "mps" else torch.float64
        self.centre = x.to(wide)
        rounding = 2 * torch.finfo(wide).eps
        self.radius = max(0.0, eps * (1 - 2 * rounding) - rounding * math.sqrt(self.dimension))

    @property
    def dimension(self) -> int:
        """Number of values in one image."""
        return math.prod(self.x.shape[1:])

    def keep(self, rows: Tensor) -> Ball:
        """The balls around the selected images."""
        return type(self)(self.x[rows], self.eps)

    def around(self, noise: Tensor) -> Tensor:
        """The images plus `noise`, projected onto the ball."""
        return self.project(self.x.to(self.point_dtype) + noise)

    def normal(self, generator: torch.Generator) -> Tensor:
        """Standard normal noise in the shape of the images, drawn on the generator's device."""
        return self._drawn(generator, self.x.shape, lambda noise: noise.normal_(generator=generator))

    def _drawn(self, generator: torch.Generator, shape: torch.Size, fill: Callable[[Tensor], Tensor]) -> Tensor:
        total, own = generator.rows(shape[0]) if isinstance(generator, SharedGenerator) else (shape[0], slice(None))
        noise = fill(torch.empty((total, *shape[1:]), dtype=self.point_dtype, device=generator.device))
        return noise[own].to(self.x.device, non_blocking=True)

    @abstractmethod
    def uniform(self, generator: torch.Generator) -> Tensor:
        """Noise distributed uniformly in the ball."""

    @abstractmethod
    def direction(self, gradient: Tensor) -> Tensor:
        """Direction of steepest ascent: the vector of norm one with the largest increase of the loss."""

    @abstractmethod
    def project(self, point: Tensor) -> Tensor:
        """Project `point` onto the ball."""

    @abstractmethod
    def image(self, point: Tensor) -> Tensor:
        """Convert a projected point to the dtype of the images; it stays inside the ball."""


class LinfBall(Ball):
    """Images whose pixels change by at most ε."""

    def __init__(self, x: Tensor, eps: float) -> None:
        super().__init__(x, eps)
        # bounds in the dtype of the images, so that rounding a point between them cannot leave them
        self.low = self._bound(self.centre - self.radius)
        self.high = self._bound(self.centre + self.radius)

    def _bound(self, edge: Tensor) -> Tensor:
        return round_towards(edge.clamp(0, 1), self.x).to(self.point_dtype)

    def uniform(self, generator: torch.Generator) -> Tensor:
        return self._drawn(
            generator, self.x.shape, lambda noise: noise.uniform_(-self.eps, self.eps, generator=generator)
        )

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient.sign()  # 0 for NaN

    def project(self, point: Tensor) -> Tensor:
        return point.clamp(self.low, self.high)

    def image(self, point: Tensor) -> Tensor:
        return point.to(self.x.dtype)


class L2Ball(Ball):
    """Images whose change has Euclidean length of at most ε."""

    def uniform(self, generator: torch.Generator) -> Tensor:
        share = self._drawn(generator, self.x.shape[:1], lambda noise: noise.uniform_(generator=generator))
        length = self.eps * share ** (1 / self.dimension)
        return self.direction(self.normal(generator)) * per_image(length, self.x)

    def direction(self, gradient: Tensor) -> Tensor:
        # divide by the largest entry first: squares of a saturated model's gradient would underflow
        flat = gradient.flatten(1)
        flat = flat / flat.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
        flat = flat / torch.linalg.vector_norm(flat, dim=1, keepdim=True)
        return flat.nan_to_num(0.0, 0.0, 0.0).view_as(gradient)

    def project(self, point: Tensor) -> Tensor:
        offset = point.to(self.centre.dtype) - self.centre
        length = torch.linalg.vector_norm(offset.flatten(1), dim=1)
        factor = (self.radius / length.clamp_min(torch.finfo(length.dtype).tiny)).clamp_max(1)
        projected = (self.centre + offset * per_image(factor, offset)).clamp(0, 1)
        return round_towards(projected, self.x.to(self.point_dtype))

    def image(self, point: Tensor) -> Tensor:
        return round_towards(point, self.x)


def per_image(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one number per image to broadcast over the images of `like`."""
    return values.view(-1, *[1] * (like.dim() - 1))


NORMS: Catalogue[type[Ball]] = Catalogue("norm", {"linf": LinfBall, "l2": L2Ball})
