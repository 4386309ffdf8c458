"""Checks when a topology is attached."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import ReferenceType

from torch import nn
from torch.optim import LBFGS, Optimizer

from equipoise.checks import kind_of
from equipoise.errors import UserError
from equipoise.modules import require_model
from equipoise.shards import is_sharded
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import Algorithm
from equipoise.topology.bsr import BSRNet
from equipoise.topology.hydra import Hydra
from equipoise.topology.selection import unwrap
from equipoise.topology.srste import SRSTE
from equipoise.world import ALONE, World

if TYPE_CHECKING:
    from equipoise.topology.topology import Topology

PACKED = "packed weights change their length, which fully_shard does not support; use masked storage"


def check_arguments(algorithm: Algorithm, model: object, optimizer: object) -> None:
    """Refuse arguments of other kinds, such as swapped ones or a class instead of an optimizer."""
    call = f"{type(algorithm).__name__}().attach(model, optimizer)"
    if isinstance(model, Optimizer) and isinstance(optimizer, nn.Module):
        raise UserError(f"{call}: the model and the optimizer are swapped")
    require_model(call, model)
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise UserError(f"{call}: {name} is a class; pass an optimizer, such as {name}(model.parameters(), lr=0.1)")
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"{call}: the optimizer is a {kind_of(optimizer)}")


def check_attaching(
    topology: Topology, model: nn.Module, owners: Mapping[nn.Parameter, ReferenceType[Topology]]
) -> None:
    """Refuse a topology that cannot be attached, before any weight is changed.

    Args:
        topology: The topology to attach.
        model: Its model.
        owners: Topologies of weights that are already sparse.
    """
    _check_free(topology, owners)
    _check_not_pruned(topology, unwrap(model))
    _check_optimizer(topology)
    _check_sharding(topology)
    _check_wrapper(topology, model)


def _check_free(topology: Topology, owners: Mapping[nn.Parameter, ReferenceType[Topology]]) -> None:
    """Refuse a second topology: each would set the weights that the other has grown to zero."""
    for layer in topology.layers:
        owner = owners[layer.parameter]() if layer.parameter in owners else None
        if owner is not None and owner.attached:
            raise UserError(
                f'"{layer.name}" already belongs to a {type(owner.algorithm).__name__} topology; '
                "call Topology.of(model).detach() first"
            )


def _check_not_pruned(topology: Topology, model: nn.Module) -> None:
    """Refuse a weight that torch.nn.utils.prune multiplies by its own mask: its zeros are not in the parameter."""
    buffers = {name for name, _ in model.named_buffers()}
    for layer in topology.layers:
        if f"{layer.name.removesuffix('_orig')}_mask" in buffers and layer.name.endswith("_orig"):
            owner, _, leaf = layer.name.removesuffix("_orig").rpartition(".")
            raise UserError(
                f'"{owner}" is pruned by torch.nn.utils.prune; call prune.remove(module, "{leaf}") before attaching, '
                "which makes its zeros permanent"
            )


def _check_optimizer(topology: Topology) -> None:
    """Refuse an optimizer that cannot work, or that lacks a weight: another would revive it after it was dropped."""
    for kind, name in ((SRSTE, "SR-STE"), (Hydra, "HYDRA")):
        if isinstance(topology.algorithm, kind) and isinstance(topology.optimizer, LBFGS):
            raise UserError(
                f"{name} changes the weights between passes, which LBFGS does not support; use SGD or Adam"
            )
    known = {id(p) for group in topology.optimizer.param_groups for p in group["params"]}
    missing = [layer for layer in topology.layers if id(layer.stepped) not in known]
    if missing and len(missing) == len(topology.layers) and topology.storage == "packed":
        raise UserError("the optimizer has no packed weight; make it from the parameters of the model after pack()")
    if missing:
        name = missing[0].name
        raise UserError(f'the optimizer does not have "{name}"; pass it to the optimizer or exclude it')


def _check_wrapper(topology: Topology, model: nn.Module) -> None:
    """Refuse packed weights in DistributedDataParallel, which cannot handle parameters that change their length."""
    changes = topology.window is not None or isinstance(topology.algorithm, BSRNet)
    if changes and World.of(model) is not ALONE and topology.storage == "packed":
        raise UserError(
            "packed weights change their length, which DistributedDataParallel does not support; "
            "use masked storage, or `torchrun -m equipoise train`, which needs no wrapper"
        )


def _check_sharding(topology: Topology) -> None:
    """Refuse algorithms and storages that `fully_shard` does not support."""
    sharded = [is_sharded(layer.parameter) for layer in topology.layers]
    if not any(sharded):
        return
    if isinstance(topology.algorithm, BSRNet):
        raise UserError(
            "BSR-Net refills one budget of the whole network after every step, which fully_shard does not support; "
            "use DistributedDataParallel or another topology"
        )
    for kind, name in ((SRSTE, "SR-STE"), (Hydra, "HYDRA")):
        if isinstance(topology.algorithm, kind):
            raise UserError(
                f"{name} chooses among whole weights after every step, which fully_shard does not support; "
                "use DistributedDataParallel or another topology"
            )
    if topology.storage == "packed":
        raise UserError(PACKED)
    if not all(sharded):
        name = topology.layers[sharded.index(False)].name
        raise UserError(
            f'"{name}" is not sharded and others are: its gradients are not averaged; shard or exclude it'
        )


def check_current(topology: Topology) -> None:
    """Refuse to continue on parameters that `fully_shard` has replaced since the topology was attached."""
    for layer, (module, leaf) in zip(topology.layers, topology.owners, strict=True):
        sharded = is_sharded(module._parameters.get(leaf))
        if sharded and layer.index is not None:
            raise UserError(PACKED)
        if sharded and not is_sharded(layer.parameter):
            raise UserError(
                f'fully_shard has replaced "{layer.name}" since the topology was attached; '
                "create an optimizer of the new parameters and call topology.reattach(optimizer)"
            )


def warn_without_updates(topology: Topology, stacklevel: int) -> None:
    """Warn if no step of the training is an update step."""
    window = topology.window
    if topology.layers and window is not None and not window.last_update:
        warnings.warn(
            f"every={window.every}: no update falls inside the window of total_steps={window.total}, "
            "so the topology will never change; choose a smaller `every` or train longer",
            stacklevel=stacklevel + 1,
        )


class PrunedLayers:
    """Warns about `torch.nn.utils.prune` and parametrizations that are applied to an attached model.

    Both move the weight to another name and compute it in every pass. The zeros of their masks are active weights for
    the topology.

    Args:
        model: The model.
        layers: Its sparse weights.
    """

    def __init__(self, model: nn.Module, layers: Sequence[SparseWeight]) -> None:
        names = [layer.name.rpartition(".") for layer in layers if layer.index is None]
        self._owners = [(model.get_submodule(path), leaf, path) for path, _, leaf in names]

    def warn(self, stacklevel: int) -> None:
        """Warn once about the first weight that is no longer a parameter of its layer."""
        for owner, leaf, path in self._owners:
            if leaf not in owner._parameters:
                self._owners = []
                name = f"{path}.{leaf}" if path else leaf
                warnings.warn(
                    f'"{name}" was pruned or parametrized after attaching, and the topology does not know its zeros; '
                    "detach, call torch.nn.utils.prune.remove, and attach Static.from_nonzeros()",
                    stacklevel=stacklevel + 1,
                )
                return
