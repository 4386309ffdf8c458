"""Optimizer, masks and weight average of one step, on vectors of all weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.storage.masked import ACTIVE, DROPPED
from equipoise.topology import BSRNet, Topology
from equipoise.topology.ema import EMA
from equipoise.topology.rewire import Rewiring
from equipoise.training.flat import Flat
from equipoise.training.rule import RULES, Rule

Compiled = Callable[[Callable[..., Any]], Callable[..., Any]]


class Update:
    """Calling it does what optimizer, topology and average do after a backward pass, in one kernel for all weights.

    Inactive weights are exactly zero after it, in the average too. BSR-Net's rewiring is part of it; other changes of
    the topology are made between calls.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        topology: Topology,
        average: EMA | None,
        flat: Flat,
        compiled: Compiled,
    ) -> None:
        self.optimizer, self.topology, self.average, self.flat = optimizer, topology, average, flat
        rule = RULES[type(optimizer)]
        self.rules: list[Rule] = [rule(group) for group in optimizer.param_groups]
        self.states = {name: flat.new() for name in self.rules[0].states}
        # of each group its rule's numbers, then 1 - the decay of the average
        self.numbers = torch.zeros(len(self.rules) * rule.count + 1, dtype=flat.dtype, device=flat.device)
        self._known: list[float] = []
        self._steps = 0
        self._averages = flat.new() if average is not None else None
        self._step = compiled(step)
        self.rewiring: Rewiring | None = None
        if isinstance(topology.algorithm, BSRNet):
            self.rewiring = self._make_rewiring(topology.algorithm, compiled)
        self._house_average()
        self.follow_optimizer()

    def _make_rewiring(self, algorithm: BSRNet, compiled: Compiled) -> Rewiring:
        signs = self.flat.new(torch.int8, 1)
        for layer in self.topology.layers:
            assert layer.memory is not None
            layer.memory = self.flat.moved(layer.parameter, layer.memory, signs)
        flat = self.flat
        starts = [flat.start(layer.parameter) for layer in self.topology.layers]
        return Rewiring(algorithm, self.topology, flat.parameters, flat.places, signs, starts, compiled)

    def _house_average(self) -> None:
        if self.average is None or self._averages is None:
            return
        for name, parameter in self.average.parameters.items():
            self.average.values[name] = self.flat.moved(parameter, self.average.values[name], self._averages)

    def follow_optimizer(self) -> None:
        """Put the optimizer's state where the step works on it; it may have made or loaded new tensors."""
        for slot in self.flat.slots:
            state = self.optimizer.state[slot.parameter]
            for name, vector in self.states.items():
                view = slot.view(vector)
                if name not in state:
                    view.zero_()
                elif state[name].data_ptr() != view.data_ptr():
                    view.copy_(state[name])
                state[name] = view
            if "exp_avg" in self.states:
                state.setdefault("step", torch.zeros(()))
                self._steps = int(state["step"])

    # A step

    def set_numbers(self) -> None:
        """Learning rate and the like of the coming step, sent only when they have changed."""
        numbers = [number for rule in self.rules for number in rule.numbers(self._steps)]
        numbers.append(0.0 if self.average is None else 1 - self.average.next_decay)
        for i, number in enumerate(numbers):
            if len(self._known) != len(numbers) or self._known[i] != number:
                self.numbers[i].fill_(number)
        self._known = numbers
        if self.rewiring is not None:
            self.rewiring.seed()

    @torch.no_grad()
    def __call__(self) -> None:
        flat, count = self.flat, RULES[type(self.optimizer)].count
        noise = None if self.rewiring is None else self.rewiring.noise()
        for i, (rule, part) in enumerate(zip(self.rules, flat.groups, strict=True)):
            self._step(
                rule,
                flat.parameters[part],
                flat.gradients[part],
                [vector[part] for vector in self.states.values()],
                flat.places[part],
                None if self._averages is None else self._averages[part],
                self.numbers[i * count : (i + 1) * count],
                self.numbers[-1],
                None if noise is None or i else (noise, self.rewiring.signs[part], self.rewiring.scale),  # type: ignore[union-attr]
            )
        if self.rewiring is not None:
            self.rewiring.refill()

    def count_step(self) -> None:
        """The host's side of a step that the device has been told to take."""
        self._steps += 1
        self.topology.steps += 1
        if self.average is not None:
            self.average.steps += 1
        if self.rewiring is not None:
            self.topology.updates += 1

    def settle(self) -> None:
        """Bring counters up to date that the host keeps no track of."""
        if "exp_avg" in self.states:
            for slot in self.flat.slots:
                self.optimizer.state[slot.parameter]["step"].fill_(self._steps)
        if self.rewiring is not None:
            for layer in self.topology.layers:
                layer.active = int(layer.mask().sum())


def step(
    rule: Rule,
    weights: Tensor,
    gradients: Tensor,
    states: list[Tensor],
    places: Tensor,
    average: Tensor | None,
    numbers: Tensor,
    blend: Tensor,
    crossing: tuple[Tensor, Tensor, float] | None,
) -> None:
    """One group's step.

    crossing: BSR-Net's noise, its signs, and the noise's scale; what has crossed its sign is switched off.
    """
    active = places < 0
    new = torch.where(active, rule.step(weights, torch.where(active, gradients, 0), states, numbers), 0)
    if crossing is not None:
        noise, signs, scale = crossing
        own = places == ACTIVE
        new = torch.where(own, new + noise[: len(new)] * (scale * numbers[0]), new)
        crossed = own & (new * signs <= 0)
        new = torch.where(crossed, 0, new)
        places.copy_(torch.where(crossed, DROPPED, places))
        active = active & ~crossed
    weights.copy_(new)
    if average is not None:
        average.copy_(torch.where(active, average.lerp(new, blend), 0))
