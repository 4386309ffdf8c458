"""BSR-Net: weights that keep their sign, and rewiring after every step to one global budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.seeds import derive
from equipoise.storage.bitmap import pack_bits
from equipoise.storage.layer import Layer
from equipoise.topology.algorithm import Algorithm
from equipoise.topology.distribution import Distribution, Shapes

if TYPE_CHECKING:
    from equipoise.topology.topology import Topology

NEWBORN = 1e-12  # |w| of a connection that has just been made


@dataclass(frozen=True, kw_only=True)
class BSRNet(Algorithm):
    """BSR-Net (Özdenizci & Legenstein 2021): w = s·θ with a fixed sign s; a weight is off once θ ≤ 0.

    After every step the network is refilled to its global budget: each missing connection picks a layer with
    probability proportional to its size, a uniform inactive place in it, and starts at 1e-12. Layers have no budget
    of their own, and momentum is not reset. Gaussian noise lr·N(0, noise²) is added to active weights at every step
    (noise = 1e-6). distribution: `bsr`, BSR-Net's initial densities, known for vgg16, wrn_28_4 and the resnets; what
    they leave of the budget is filled by the first rewiring. The sign of a place is that of its initial weight, in
    one byte more per weight (one bit in packed storage, where newborn connections start without momentum).
    rewire_every: steps between rewirings, 1 as published; until then a weight that would cross its sign stays zero.
    """

    distribution: Distribution = "bsr"
    noise: float = 1e-6
    rewire_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise < 0:
            raise UserError(f"noise={self.noise}: a standard deviation, not negative")
        if self.rewire_every < 1:
            raise UserError(f"rewire_every={self.rewire_every}: at least 1 step")

    def initial_counts(self, shapes: Shapes, model: nn.Module) -> dict[str, int]:
        """The model's own initial densities, where they stay below the budget."""
        final = self.final_counts(shapes, model)
        densities = getattr(model, "bsr_densities", None)
        if self.distribution != "bsr" or densities is None:
            return final
        own = densities(1 - self.sparsity)
        initial = {name: round(own[name] * math.prod(shape)) for name, shape in shapes.items()}
        return initial if sum(initial.values()) <= sum(final.values()) else final

    def prepare(self, layer: Layer) -> None:
        """Remember the sign of every place, before inactive weights are set to zero."""
        layer.remember_signs()

    def bits_to_remember(self, weight: Tensor) -> Tensor:
        return pack_bits(weight.reshape(-1) >= 0)

    def after_step(self, topology: Topology) -> None:
        """Switch off what has crossed its sign, then refill. One look at the device per step, for all layers."""
        layers = [layer for layer in topology.layers if layer.parameter.requires_grad]
        rewires = (topology.steps + 1) % self.rewire_every == 0
        for layer in layers:
            if self.noise:
                self._add_noise(layer, topology)
            crossed = layer.parameter * layer.signs <= 0
            if rewires:
                for tensor in topology.followed(layer.parameter):
                    tensor.masked_fill_(crossed, 0)  # the refilling may grow the same place again
                layer.switch_off(crossed, topology.states(layer.parameter))
            else:
                layer.parameter.masked_fill_(crossed, 0)
        if not layers or not rewires:
            return
        counts = torch.stack([layer.count() for layer in layers]).tolist()
        for layer, count in zip(layers, counts, strict=True):
            layer.active = count
        self._refill(topology, layers)

    def _add_noise(self, layer: Layer, topology: Topology) -> None:
        weight = layer.parameter
        generator = torch.Generator(weight.device)
        generator.manual_seed(derive(self.seed, "noise", topology.steps, layer.name))
        noise = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=weight.dtype)
        scale = topology.optimizer.param_groups[0]["lr"] * self.noise
        layer.hide_inactive(noise)
        weight.add_(noise, alpha=float(scale))

    def _refill(self, topology: Topology, layers: list[Layer]) -> None:
        missing = sum(layer.final for layer in topology.layers) - topology.active
        if missing <= 0:
            return
        random = np.random.default_rng(derive(self.seed, "rewire", topology.steps))
        counts = share_out(missing, layers, random)
        ranks = [
            np.sort(random.choice(layer.size - layer.active, count, replace=False, shuffle=False))
            for layer, count in zip(layers, counts, strict=True)
        ]
        # one copy to the device for all layers: each would make the host wait
        chosen = torch.from_numpy(np.concatenate(ranks).astype(np.int32)).to(layers[0].parameter.device)
        for layer, places in zip(layers, chosen.split(counts), strict=True):
            if len(places):
                layer.grow_inactive(places, NEWBORN, topology.states(layer.parameter))
        topology.updates += 1


def share_out(missing: int, layers: list[Layer], random: np.random.Generator) -> list[int]:
    """How many connections each layer gets: drawn in proportion to size, drawn again where a layer is full."""
    sizes = np.array([layer.size for layer in layers], dtype=np.float64)
    room = np.array([layer.size - layer.active for layer in layers])
    counts = np.zeros(len(layers), dtype=np.int64)
    while missing:
        open_ = counts < room
        drawn = random.multinomial(missing, np.where(open_, sizes, 0) / sizes[open_].sum())
        taken = np.minimum(drawn, room - counts)
        counts += taken
        missing -= int(taken.sum())
    return [int(count) for count in counts]
