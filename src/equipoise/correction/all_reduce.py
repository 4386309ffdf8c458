"""The one all-reduce of a step, where several processes each have a share of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.topology import Topology
from equipoise.world import World


@torch.no_grad()
def average_gradients(
    world: World, parameters: Sequence[nn.Parameter], topology: Topology | None, others: Sequence[Tensor]
) -> list[Tensor]:
    """The mean over the processes, of `.grad` and of what growth will look at in place, and of the `others`.

    A parameter that took part in the loss of some processes only has a zero gradient on the rest.
    """
    missing = [parameter for parameter in parameters if parameter.grad is None]
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    absent = {id(parameter) for parameter in missing}
    own = [p.grad for p in parameters if p.grad is not None] + ([] if topology is None else topology.put_aside())
    used = own[0].new_tensor([float(id(p) not in absent) for p in parameters])
    found = world.all_reduce_mean([*own, used, *others])
    for tensor, mean in zip(own, found, strict=False):
        tensor.copy_(mean)
    if missing:
        for parameter, share in zip(parameters, found[len(own)].tolist(), strict=True):
            if share == 0:
                parameter.grad = None
    # copies: a view, of the loss say, would keep the whole bucket alive for as long as somebody keeps it
    return [mean.clone() for mean in found[len(own) + 1 :]]
