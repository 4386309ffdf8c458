"""Cost of AGENT on top of PGD-10 adversarial training, per epoch, on the CPU.

    python bench/robust.py [--model small] [--batch 64] [--batches 4] [--rounds 5]

A net of three convolutions, or ResNet-18 of width 16, on 32x32 images, under BSR-Net at 99 % with its optimizer.
Every arm has a model of its own and trains one epoch per round, in turn and in rotating order, so that a machine that
slows down slows all of them; the first epoch, in which there is no older snapshot to compare with, does not count. An
epoch is what the training loop does in one: the refresh, then for every batch an attack, the gradients and the step.

`ratio` is the median over rounds of an arm's epoch divided by that of AT alone in the same round. `by passes`
counts a forward pass as 1, a backward pass to the weights as 2 and one to the input alone, as an attack makes it,
as 1. Seconds are processor time, which other programs on the machine lengthen less than the time on the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equipoise.correction import SGD, Agent, Correction, Estimator
from equipoise.models import resnet18, small
from equipoise.objectives import AdversarialTraining, Objective, Standard
from equipoise.topology import BSRNet
from equipoise.training.optimizers import SGDW

OBJECTIVE = AdversarialTraining()
MODELS: dict[str, Callable[[], nn.Module]] = {
    "small": lambda: small(channels=3, size=32),
    "resnet18": lambda: resnet18(width=16),
}
AT_MOST = {"AGENT, running": 1.30}  # what a recipe does by default
Batch = tuple[Tensor, Tensor]
LossFunction = Callable[..., Tensor]


@dataclass
class Arm:
    """A way to train, and the seconds of its epochs."""

    name: str
    make_model: Callable[[], nn.Module]
    estimator: Estimator
    clean: bool = True  # what g̃ is computed on
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.make_model()
        self.optimizer = SGDW(self.model.parameters(), lr=0.04)
        topology = BSRNet(sparsity=0.99, distribution="uniform").attach(self.model, self.optimizer)
        self.correction: Correction = self.estimator.attach(self.model, topology)
        self.generator = torch.Generator().manual_seed(0)

    def train(self, batches: list[Batch]) -> None:
        """One epoch."""
        begin = time.process_time()
        if self.estimator.corrects:
            self.correction.refresh(*self._full_pass(batches))
        for x, y in batches:
            batch = OBJECTIVE.prepare(self.model, x, y, self.generator)
            self.correction.backward(loss_of(OBJECTIVE), *batch)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.seconds.append(time.process_time() - begin)

    def _full_pass(self, batches: list[Batch]) -> tuple[Iterable[tuple[Tensor, ...]], LossFunction]:
        if self.clean:
            return batches, loss_of(Standard())
        prepared = (OBJECTIVE.prepare(self.model, x, y, self.generator) for x, y in batches)
        return prepared, loss_of(OBJECTIVE)

    @property
    def passes(self) -> float:
        """Of an epoch, as a multiple of AT alone: the attack, and 3 for every forward and backward pass."""
        attack, extra = 2 * OBJECTIVE.attack_passes, 3 * (self.estimator.cost - 1)
        if not self.clean:
            extra += attack
        return (attack + 3 + extra) / (attack + 3)


def loss_of(objective: Objective) -> LossFunction:
    def loss(model: nn.Module, *batch: Tensor) -> Tensor:
        return objective.loss(model, *batch)[0]

    return loss


def random_batches(count: int, size: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(size, 3, 32, 32, generator=generator), torch.randint(10, (size,), generator=generator))
        for _ in range(count)
    ]


def make_arms(model: Callable[[], nn.Module]) -> list[Arm]:
    return [
        Arm("AT alone", model, SGD()),
        Arm("AGENT, recompute", model, Agent()),
        Arm("AGENT, recompute, g̃ from a quarter of the batches", model, Agent(batch_fraction=0.25)),
        Arm("AGENT, running", model, Agent(mode="running")),
        Arm("AGENT, recompute, adversarial full pass", model, Agent(), clean=False),
    ]


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, default="small")
    chosen = parser.parse_args()

    batches = random_batches(chosen.batches, chosen.batch)
    arms = make_arms(MODELS[chosen.model])
    order = list(arms)
    for _ in range(chosen.rounds + 1):
        for arm in order:
            arm.train(batches)
        order = order[1:] + order[:1]
    what = f"{chosen.model}, {chosen.batches} batches of {chosen.batch}, {torch.get_num_threads()} threads"
    print(f"PGD-10 AT, BSR-Net at 99 %, {what}\n")
    print("| | processor seconds per epoch | ratio | by passes | at most |")
    print("|---|---|---|---|---|")
    alone = arms[0].seconds
    for arm in arms:
        ratio = statistics.median(own / base for own, base in zip(arm.seconds[1:], alone[1:], strict=True))
        bound = f"{AT_MOST[arm.name]:.2f}" if arm.name in AT_MOST else ""
        middle = statistics.median(arm.seconds[1:])
        print(f"| {arm.name} | {middle:.2f} | {ratio:.3f} | {arm.passes:.3f} | {bound} |")


if __name__ == "__main__":
    main()
