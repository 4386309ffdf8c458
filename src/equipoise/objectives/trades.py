"""TRADES: a trade-off between accuracy on clean images and invariance of predictions to perturbations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Generator, Tensor, nn
from torch.nn import functional as F

from equipoise.objectives.attack import at_least_float32
from equipoise.objectives.objective import Classifier, DivergenceObjective


@dataclass(frozen=True)
class Trades(DivergenceObjective):
    """Clean cross-entropy + β·KL(clean ‖ adversarial) (TRADES, Zhang et al. 2019, arXiv:1901.08573).

    With p = softmax f(x) and q = softmax f(x′), averaged over the batch:

        loss = CE(f(x), y) + β·Σₖ pₖ (log pₖ − log qₖ)

    The gradient flows through both p and q, and x′ maximises the same divergence from x + 0.001·N(0, 1), as in
    the authors' code. Two differences from that code: the start is clipped to valid pixels, and f(x) is
    computed once, so that BatchNorm sees the clean batch once per step. Accuracy is measured on the clean images.

    Args:
        beta: Weight β of the divergence.
    """

    beta: float = 6.0

    attack_loss: ClassVar[str] = "kl"

    def prepare(self, model: nn.Module, x: Tensor, y: Tensor, generator: Generator | None) -> tuple[Tensor, ...]:
        return x, y, self.attack.perturb(model, x, y, generator)

    def loss(self, model: Classifier, *batch: Tensor) -> tuple[Tensor, Tensor]:
        x, y, adversarial = batch
        logits = model(x)
        clean = at_least_float32(logits)
        log_q = at_least_float32(model(adversarial)).log_softmax(1)
        robust = F.kl_div(log_q, clean.log_softmax(1), reduction="batchmean", log_target=True)
        return F.cross_entropy(clean, y) + self.beta * robust, logits
