"""MART: adversarial training with more weight on misclassified images."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, Tensor, nn
from torch.nn import functional as F

from equipoise.objectives.attack import at_least_float32
from equipoise.objectives.objective import Classifier, DivergenceObjective


@dataclass(frozen=True)
class Mart(DivergenceObjective):
    """Boosted cross-entropy + β·KL weighted by misclassification (MART, Wang et al. 2020).

    With p = softmax f(x) and q = softmax f(x′), averaged over the batch:

        loss = −log q_y − log(1.0001 − max_{k≠y} q_k) + β·(1 − p_y)·Σₖ pₖ (log pₖ − log qₖ)

    The 1.0001 (the paper has 1) and the start of the attack at x + 0.001·N(0, 1) follow the authors'
    code. That code adds 1e-12 inside logarithms; here they are exact. Accuracy is measured on the adversarial
    images.

    Args:
        beta: Weight β of the divergence.
    """

    beta: float = 5.0

    def prepare(self, model: nn.Module, x: Tensor, y: Tensor, generator: Generator | None) -> tuple[Tensor, ...]:
        return self.attack.perturb(model, x, y, generator), y, x

    def loss(self, model: Classifier, *batch: Tensor) -> tuple[Tensor, Tensor]:
        adversarial, y, x = batch
        label = y.unsqueeze(1)
        log_p = at_least_float32(model(x)).log_softmax(1)
        logits = model(adversarial)
        log_q = at_least_float32(logits).log_softmax(1)
        rival = log_q.exp().scatter(1, label, -1.0).amax(1)  # probability of the most likely wrong class
        boosted = F.nll_loss(log_q, y) - (1.0001 - rival).log().mean()
        wrongness = 1 - log_p.exp().gather(1, label).squeeze(1)
        divergence = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)
        return boosted + self.beta * (wrongness * divergence).mean(), logits
