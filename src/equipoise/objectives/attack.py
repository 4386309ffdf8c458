"""Projected gradient ascent on the input, the attack for both training and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.catalogue import Catalogue
from equipoise.errors import UserError
from equipoise.modules import preserved_modes
from equipoise.objectives.norm_ball import NORMS, Ball, per_image

NORMAL_START = 0.001  # standard deviation, for pixels in [0, 1]; Zhang et al. 2019


def at_least_float32(logits: Tensor) -> Tensor:
    """Convert 16-bit logits to float32, in which losses are computed."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: Tensor, y: Tensor, clean: Tensor) -> Tensor:
    """Cross-entropy with the label; its gradient vanishes if the logits saturate."""
    return F.cross_entropy(logits, y, reduction="sum")


def divergence(logits: Tensor, y: Tensor, clean: Tensor) -> Tensor:
    """KL(clean prediction ‖ perturbed prediction), independent of the label (TRADES)."""
    return F.kl_div(logits.log_softmax(1), clean.log_softmax(1), reduction="sum", log_target=True)


def margin(logits: Tensor, y: Tensor, clean: Tensor) -> Tensor:
    """Largest wrong logit minus the correct one (Carlini & Wagner 2017); it does not saturate."""
    label = y.unsqueeze(1)
    wrong = logits.scatter(1, label, -math.inf).amax(1)
    return (wrong - logits.gather(1, label).squeeze(1)).sum()


AttackLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: Catalogue[AttackLoss] = Catalogue("attack loss", {"ce": cross_entropy, "kl": divergence, "margin": margin})
STARTS = ("uniform", "normal", "none")


@contextmanager
def under_attack(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode without gradients and freeze its parameters; restore both on exit.

    Freezing prevents the computation of weight gradients: an `autograd.Function` computes them for every weight
    that requires a gradient, even if only the gradient of the input was requested.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with preserved_modes(model), torch.no_grad():
        try:
            model.eval()
            for parameter in trainable:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)


class Outcome(NamedTuple):
    """Result of a search for adversarial images.

    Attributes:
        examples: For every image, the first perturbed image that fooled the model, or the last one tried.
        correct: Whether the clean image is classified correctly.
        fooled: Whether any image tried is misclassified, the clean one included.
    """

    examples: Tensor
    correct: Tensor
    fooled: Tensor


@dataclass
class _Climb:
    """The images of a batch that are still under attack, and their current perturbations."""

    attack: PGD
    ball: Ball
    point: Tensor
    y: Tensor
    clean: Tensor  # logits of the unperturbed images
    rows: Tensor  # indices of these images in the batch

    def keep(self, mask: Tensor) -> None:
        if bool(mask.all()):
            return
        self.ball, self.point = self.ball.keep(mask), self.point[mask]
        self.y, self.clean, self.rows = self.y[mask], self.clean[mask], self.rows[mask]

    def image(self) -> Tensor:
        return self.ball.image(self.point)

    def step(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Take one step; return the images before the step and their logits."""
        image = self.image()
        logits, gradient = self.attack.gradient(model, image, self.y, self.clean)
        ascent = self.ball.direction(gradient.to(self.point.dtype))
        self.point = self.ball.project(self.point.add(ascent, alpha=self.attack.step_size))
        return image, logits


@dataclass(frozen=True)
class PGD:
    """Projected gradient ascent on the input (Madry et al. 2018, arXiv:1706.06083).

    x ← Π(x + step_size · direction(∇ₓ loss)), `steps` times. Π projects onto the ball of radius `eps` around the
    image and onto [0, 1]; direction is the sign of the gradient for linf and the gradient divided by its length
    for l2. Images are pixels in [0, 1], so normalisation must be part of the model. The defaults are those of
    the paper's adversarial training.

    The model is attacked in eval mode and left unchanged. Only the given generator is drawn from. `perturb`
    costs `steps` forward-backward passes for the gradient of the input alone and does not synchronise with
    the GPU unless `early_exit` is set. Pass the bare module, not its DistributedDataParallel wrapper.

    Args:
        norm: "linf" or "l2".
        eps: Radius of the ball.
        step_size: Length of a step in the norm.
        steps: Number of steps.
        restarts: Number of starts.
        start: "uniform" in the ball, "normal" (0.001·N(0, 1), TRADES) or "none".
        loss: "ce" (cross-entropy), "kl" (TRADES) or "margin".
        early_exit: Stop the attack on an image once it is misclassified.
    """

    norm: str = "linf"
    eps: float = 8 / 255
    step_size: float = 2 / 255
    steps: int = 10
    restarts: int = 1
    start: str = "uniform"
    loss: str = "ce"
    early_exit: bool = False

    def __post_init__(self) -> None:
        _ = NORMS[self.norm], LOSSES[self.loss]  # raises on an unknown name here rather than in the first step
        if self.start not in STARTS:
            raise UserError(f'start must be "uniform", "normal" or "none", not "{self.start}"')
        if not 0 <= self.eps < math.inf:
            raise UserError(f"eps must be at least 0 and finite, not {self.eps}")
        if self.norm == "linf" and self.eps > 1:
            raise UserError(f"eps={self.eps} exceeds the pixel range [0, 1]; 8 levels of 255 are eps=8/255")
        if not 0 < self.step_size < math.inf:
            raise UserError(f"step_size must be above 0 and finite, not {self.step_size}")
        if self.steps < 1 or self.restarts < 1:
            raise UserError(f"steps and restarts must be at least 1, not {self.steps} and {self.restarts}")
        if self.loss == "kl" and self.start == "none":
            raise UserError('loss="kl" has no gradient at the image itself; use start="uniform" or start="normal"')

    @property
    def passes(self) -> int:
        """Number of forward-backward passes over the batch without early exit."""
        return self.steps * self.restarts

    def perturb(self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Adversarial images: the last iterate; with restarts or early exit, the examples of `search`."""
        if self.restarts > 1 or self.early_exit:
            return self.search(model, x, y, generator).examples
        self._check(x, y, generator)
        if x.device.type == "cpu":  # on a GPU this would synchronise in every training step
            check_pixels(x)
        with under_attack(model):
            clean = model(x) if self.loss == "kl" else x.new_empty(len(x), 0)
            climb = self._begin(x, y, clean, generator)
            for _ in range(self.steps):
                climb.step(model)
            return climb.image()

    def search(self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Outcome:
        """Search the ball for a misclassified image, for evaluation.

        An image counts as fooled if any iterate of any restart is misclassified, the clean image included. So
        robust accuracy cannot exceed clean accuracy, and with the same generator state more steps or restarts
        cannot raise it: the starts depend on neither, nor on the images fooled before. `early_exit` saves time
        and does not change the count.
        """
        self._check(x, y, generator)
        check_pixels(x)
        starts = None if self.start == "none" else _offspring(generator)
        with under_attack(model):
            clean = model(x)
            correct = clean.argmax(1) == y
            examples, fooled = x.clone(), ~correct
            for _ in range(self.restarts):
                self._follow(model, self._begin(x, y, clean, starts), examples, fooled)
        return Outcome(examples, correct, fooled)

    def gradient(self, model: nn.Module, image: Tensor, y: Tensor, clean: Tensor) -> tuple[Tensor, Tensor]:
        """Logits at `image`, and the gradient with respect to it of the loss summed over the batch."""
        image = image.detach().requires_grad_()
        with torch.enable_grad():
            logits = at_least_float32(model(image))
            if not logits.requires_grad:
                raise UserError(
                    "the model's output has no gradient with respect to its input, which a gradient attack needs; "
                    "make every operation between image and logits differentiable"
                )
            loss = LOSSES[self.loss](logits, y, at_least_float32(clean))
            (gradient,) = torch.autograd.grad(loss, image)
        return logits.detach(), gradient

    def _begin(self, x: Tensor, y: Tensor, clean: Tensor, generator: torch.Generator | None) -> _Climb:
        ball = NORMS[self.norm](x, self.eps)
        return _Climb(self, ball, self._first(ball, generator), y, clean, torch.arange(len(x), device=x.device))

    def _first(self, ball: Ball, generator: torch.Generator | None) -> Tensor:
        if self.start == "none" or generator is None:
            return ball.x.to(ball.point_dtype)
        noise = ball.uniform(generator) if self.start == "uniform" else ball.normal(generator) * NORMAL_START
        return ball.around(noise)

    def _follow(self, model: nn.Module, climb: _Climb, examples: Tensor, fooled: Tensor) -> None:
        """Run one restart and record the outcome of each iterate in `examples` and `fooled`."""
        if self.early_exit:
            climb.keep(~fooled)
        for step in range(self.steps + 1):
            if not len(climb.rows):
                return
            last = step == self.steps
            image, logits = (climb.image(), model(climb.image())) if last else climb.step(model)
            hit, rows = logits.argmax(1) != climb.y, climb.rows
            noted = ~fooled[rows] & (hit | last)
            examples[rows] = torch.where(per_image(noted, image), image, examples[rows])
            fooled[rows] = fooled[rows] | hit
            if self.early_exit:
                climb.keep(~hit)

    def _check(self, x: Tensor, y: Tensor, generator: torch.Generator | None) -> None:
        if self.start != "none" and generator is None:
            raise UserError(f'start="{self.start}" is random; pass a torch.Generator, or use start="none"')
        if not x.is_floating_point():
            raise UserError(f"images to attack must be floating point pixels in [0, 1], not {x.dtype}")
        if x.dim() < 2 or not len(x) or y.shape != x.shape[:1] or y.dtype != torch.long:
            raise UserError(
                "an attack needs a batch of images with one integer (int64) label each, "
                f"not images {tuple(x.shape)} and labels {tuple(y.shape)} of {y.dtype}"
            )


def check_pixels(x: Tensor) -> None:
    """Refuse images with values outside [0, 1]; reads values from the device."""
    low, high = (float(bound) for bound in torch.aminmax(x))
    if not (low >= 0 and high <= 1):
        raise UserError(
            f"images to attack must be pixels in [0, 1], not [{low:.3g}, {high:.3g}]; "
            "move the normalisation inside the model"
        )


def fgsm(eps: float = 8 / 255) -> PGD:
    """The fast gradient sign method (Goodfellow et al. 2015, arXiv:1412.6572): one L∞ step of ε."""
    return PGD(eps=eps, step_size=eps or 1.0, steps=1, start="none")


def _offspring(generator: torch.Generator | None) -> torch.Generator | None:
    """A separate generator for one search, so that the next search does not depend on the number of draws."""
    if generator is None:
        return None
    seed = torch.randint(2**63 - 1, (1,), generator=generator, device=generator.device)
    return torch.Generator(generator.device).manual_seed(int(seed))
