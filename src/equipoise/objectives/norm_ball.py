"""Where an adversarial image may lie: a ball around the clean one, cut to valid pixels."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.catalogue import Catalogue


class SharedGenerator(torch.Generator):
    """Draws for all images of a batch that several processes share, so that each image gets what one process would
    have drawn for it. Process `rank` of `ranks` has every so-many-th of `images` in all.
    """

    rank: int
    ranks: int
    images: int

    def rows(self, count: int) -> tuple[int, slice]:
        """For how many images to draw where this process attacks `count` (all of its own, or half), and which."""
        total = self.images if self.images % self.ranks else count * self.ranks
        return total, slice(self.rank, self.rank + count * self.ranks, self.ranks)


def round_towards(value: Tensor, anchor: Tensor) -> Tensor:
    """`value` in `anchor`'s dtype, rounded so that it never ends up further from `anchor`."""
    if value.dtype == anchor.dtype:
        return value
    rounded = value.to(anchor.dtype)
    overshot = torch.where(value >= anchor, rounded > value, rounded < value)
    return torch.where(overshot, torch.nextafter(rounded, anchor), rounded)


class Ball(ABC):
    """The ε-ball around each image of a batch, intersected with the pixel range [0, 1].

    The attack moves *points*; the model sees their *images*. For 32- and 64-bit images they are the same; the
    points of 16-bit images are kept in 32 bits, or small steps would be rounded away.
    Images are inside the ball in exact arithmetic, not only up to rounding: the bounds are worked out in a
    wider dtype on a radius a few rounding errors short of ε, and then rounded towards the clean image.
    """

    def __init__(self, x: Tensor, eps: float) -> None:
        self.x = x
        self.eps = eps
        self.point_dtype = torch.promote_types(x.dtype, torch.float32)
        # Apple's GPUs have no 64-bit floats
        wide = torch.float32 if x.device.type == "mps" else torch.float64
        self.centre = x.to(wide)
        rounding = 2 * torch.finfo(wide).eps
        self.radius = max(0.0, eps * (1 - 2 * rounding) - rounding * math.sqrt(self.dimension))

    @property
    def dimension(self) -> int:
        """Numbers in one image."""
        return math.prod(self.x.shape[1:])

    def keep(self, rows: Tensor) -> Ball:
        """The ball of some of the images."""
        return type(self)(self.x[rows], self.eps)

    def around(self, noise: Tensor) -> Tensor:
        """The points at `noise` from the images, brought into the ball."""
        return self.project(self.x.to(self.point_dtype) + noise)

    def normal(self, generator: torch.Generator) -> Tensor:
        """Standard normal noise of the images' shape, drawn where the generator lives."""
        return self._drawn(generator, self.x.shape, lambda noise: noise.normal_(generator=generator))

    def _drawn(self, generator: torch.Generator, shape: torch.Size, fill: Callable[[Tensor], Tensor]) -> Tensor:
        total, own = generator.rows(shape[0]) if isinstance(generator, SharedGenerator) else (shape[0], slice(None))
        noise = fill(torch.empty((total, *shape[1:]), dtype=self.point_dtype, device=generator.device))
        return noise[own].to(self.x.device, non_blocking=True)

    @abstractmethod
    def uniform(self, generator: torch.Generator) -> Tensor:
        """Noise drawn uniformly from the ball."""

    @abstractmethod
    def direction(self, gradient: Tensor) -> Tensor:
        """Steepest ascent: the vector of length one in this norm along which the loss grows most."""

    @abstractmethod
    def project(self, point: Tensor) -> Tensor:
        """The point of the ball that replaces `point`."""

    @abstractmethod
    def image(self, point: Tensor) -> Tensor:
        """A projected point as an image of the batch's dtype, still inside the ball."""


class LinfBall(Ball):
    """No pixel changes by more than ε."""

    def __init__(self, x: Tensor, eps: float) -> None:
        super().__init__(x, eps)
        # representable in the images' dtype, so rounding a point between them cannot leave them
        self.low = self._bound(self.centre - self.radius)
        self.high = self._bound(self.centre + self.radius)

    def _bound(self, edge: Tensor) -> Tensor:
        return round_towards(edge.clamp(0, 1), self.x).to(self.point_dtype)

    def uniform(self, generator: torch.Generator) -> Tensor:
        return self._drawn(
            generator, self.x.shape, lambda noise: noise.uniform_(-self.eps, self.eps, generator=generator)
        )

    def direction(self, gradient: Tensor) -> Tensor:
        return gradient.sign()  # 0 where the gradient is not a number

    def project(self, point: Tensor) -> Tensor:
        return point.clamp(self.low, self.high)

    def image(self, point: Tensor) -> Tensor:
        return point.to(self.x.dtype)


class L2Ball(Ball):
    """The Euclidean length of an image's change is at most ε."""

    def uniform(self, generator: torch.Generator) -> Tensor:
        share = self._drawn(generator, self.x.shape[:1], lambda noise: noise.uniform_(generator=generator))
        length = self.eps * share ** (1 / self.dimension)
        return self.direction(self.normal(generator)) * per_image(length, self.x)

    def direction(self, gradient: Tensor) -> Tensor:
        # divided by its largest entry first: the squares of a saturated model's gradient would underflow
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
    """One number per image, shaped to broadcast over the images of `like`."""
    return values.view(-1, *[1] * (like.dim() - 1))


NORMS: Catalogue[type[Ball]] = Catalogue("norm", {"linf": LinfBall, "l2": L2Ball})
