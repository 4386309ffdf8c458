"""Pack a model for an algorithm, and find the packed weights of a model for a topology."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equipoise.checks import kind_of
from equipoise.errors import UserError
from equipoise.modules import require_model
from equipoise.storage import pack as storage
from equipoise.storage.pack import add_shortcuts, cannot_pack, check_packable, pack_layer, pack_masks, tied_parameters
from equipoise.storage.packed import PackedWeight
from equipoise.storage.packed_modules import PackedLayer, named_layers, no_kernel
from equipoise.storage.sparse_weight import SparseWeight
from equipoise.topology.algorithm import Algorithm
from equipoise.topology.distribution import active_counts
from equipoise.topology.initial import plan_layers, warn_about_lost
from equipoise.topology.selection import unwrap

if TYPE_CHECKING:
    from equipoise.topology.topology import Topology

CALL = "pack(model, what)"  # begins error messages


def pack(
    model: nn.Module,
    what: Mapping[str, Tensor] | Algorithm | Topology,
    precision: str = "float32",
    *,
    report: bool = False,
) -> nn.Module:
    """Return a copy of a model that computes the same function and stores only its active weights.

    To train in packed storage, pack and attach the same algorithm:

        model = eq.sparse.pack(model, eq.SET(sparsity=0.99))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        topology = eq.SET(sparsity=0.99).attach(model, optimizer, total_steps)

    The copy keeps its class, attributes, methods and hooks. Activations stay in the blocked layout from layer to layer
    in every part whose forward takes one tensor and whose source is a sequence of known calls: of submodules, of
    torch's functions and of tensor methods (`equipoise.storage.trace.read`). Everything else runs as it is, with
    conversions around each packed layer: a forward that looks at numbers, types or modes, catches exceptions, sets
    attributes, draws random numbers in Python or changes a tensor in place that is read elsewhere; a call with hooks
    inside, with other arguments, or under autocast. The first batch of each mode is computed both ways; if the results
    differ, a warning says so and the model runs layer by layer.

    The weight of a packed layer is a vector called `values`, so an optimizer that excludes vectors from weight decay by
    `ndim` must go by name. Frozen weights stay frozen. Tied weights cannot be packed. `unpack` reverses packing.

    A layer whose dense kernel is estimated to be faster, by its shape and density, computes with its dense weight. So
    does a layer without a sparse kernel, such as a transposed convolution, and a warning names it.

    Args:
        model: The model; it is copied.
        what: The active weights: masks by parameter name ("features.0.weight"), an attached topology, or an algorithm,
            whose initial mask is used.
        precision: `bf16` stores activations between blocked layers, and their gradients, in bfloat16, which halves the
            memory that a step moves. Weights, their gradients, statistics of BatchNorm and all sums stay float32.
            Inputs and outputs are float32. Layers that run outside the blocked layout compute in float32. On a
            processor with AVX512-BF16 it also computes `F.scaled_dot_product_attention` of 64 to 1024 keys with bf16
            operands and sums in float32, if the forward of a module in the model calls it, or a function that the
            forward names. Small attention, dropout, grouped queries, trained masks, other types than float32, a
            forward with a checkpoint, autocast and torch.export leave it to torch.
        report: Whether to print a table of the layers: shape, sparsity, and whether they run sparse or dense and why.
            `eq.sparse.report` returns it as text.

    Raises:
        UserError: If the model cannot be packed, or there is no such precision.
    """
    packed = _pack(model, what, precision)
    storage.warn_about_other(packed, stacklevel=3)
    if report:
        print(storage.report(packed))
    return packed


def _pack(model: nn.Module, what: Mapping[str, Tensor] | Algorithm | Topology, precision: str) -> nn.Module:
    from equipoise.topology.topology import Topology  # here, because it imports this module

    _check_model(model)
    if not isinstance(what, Mapping | Algorithm | Topology):
        raise UserError(
            f"{CALL}: the second argument is a {kind_of(what)}; pass an algorithm such as eq.RigL(sparsity=0.9), an "
            "attached topology, or boolean masks by parameter name"
        )
    if isinstance(what, Mapping):
        return pack_masks(model, what, precision)
    if isinstance(what, Algorithm):
        _check_storage(what)
        plan = plan_layers(what, model)  # before the copy: a model that is refused may not be copyable
        warn_about_lost(what, plan, stacklevel=3)
        check_packable(unwrap(model), [planned.name for planned in plan], what.exclude)
        model = copy.deepcopy(model)
        for planned in plan:
            mask = torch.zeros(planned.weight.numel(), dtype=torch.bool).index_fill_(0, planned.active, True)
            memory = what.bits_to_remember(planned.weight.detach())
            pack_layer(model, planned.name, mask.view(planned.weight.shape), planned.final, memory)
    else:
        check_packable(unwrap(model), [layer.name for layer in what.layers], what.algorithm.exclude)
        model = copy.deepcopy(model)
        for layer in what.layers:
            pack_layer(model, layer.name, layer.mask(), layer.final)
    return add_shortcuts(model, precision)


def _check_storage(algorithm: Algorithm) -> None:
    """Refuse algorithms that train inactive weights."""
    if obstacle := algorithm.packing_obstacle():
        raise UserError(f"{obstacle}: use masked storage")


def _check_model(model: nn.Module) -> None:
    """Refuse models whose layers cannot be replaced, before they are copied."""
    require_model(CALL, model)
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError(
            f"{CALL}: the layers of a {type(model).__name__} cannot be replaced; pack the nn.Module that it was made of"
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise UserError(f"{CALL}: the model is wrapped in {type(model).__name__}; pack model.module")
    if named_layers(model):
        raise UserError(
            f"{CALL}: the model is packed already; load the state_dict of eq.sparse.unpack(model) into the dense "
            "model, and pack that"
        )


def why_not(model: nn.Module, algorithm: Algorithm) -> str | None:
    """Return the reason why a model cannot be packed; `None` if it can."""
    for planned in plan_layers(algorithm, model):
        path, _, leaf = planned.name.rpartition(".")
        layer = model.get_submodule(path)
        if obstacle := cannot_pack(model, planned.name) or (leaf == "weight" and no_kernel(layer)):
            return f'"{planned.name}" of a {type(layer).__name__}: {obstacle}'
        if planned.weight.dtype != torch.float32 or planned.weight.device.type != "cpu":
            return f"packed weights are float32 on a CPU, not {planned.weight.dtype} on {planned.weight.device}"
        if (tied := tied_parameters(model, path)) is not None:
            return f'{tied[1]}; leave it out with exclude=("{tied[0]}",)'
    return None


def packed_weights(algorithm: Algorithm, model: nn.Module) -> list[SparseWeight]:
    """The packed weights of a model; an empty list if it is not packed."""
    modules = named_layers(model)
    if not modules or algorithm.sparsity == 0:
        return []
    _check_storage(algorithm)
    if algorithm.distribution == "nonzeros":
        counts = {name: module.values.numel() for name, module in modules.items()}
    elif any(module.final is None for module in modules.values()):
        shapes = {name: module.weight_shape for name, module in modules.items()}
        counts = active_counts(algorithm.distribution, shapes, 1 - algorithm.sparsity, model)
    else:
        _check_counts(algorithm, modules, model)
        counts = {}
    return [
        PackedWeight(name, module, counts[name] if module.final is None else module.final)
        for name, module in modules.items()
    ]


def _check_counts(algorithm: Algorithm, modules: Mapping[str, PackedLayer], model: nn.Module) -> None:
    """Refuse an algorithm whose final counts differ from those that the model was packed for."""
    if algorithm.distribution == "bsr":
        return  # only the dense model has a table of densities
    wanted = algorithm.final_counts({name: module.weight_shape for name, module in modules.items()}, model)
    size = sum(module.shape.weight_numel for module in modules.values())
    packed = sum(module.final or 0 for module in modules.values())
    for name, module in modules.items():
        if module.final != wanted[name]:
            raise UserError(
                f"the model was packed for a density of {packed / size:.4g}, {type(algorithm).__name__} needs "
                f'{sum(wanted.values()) / size:.4g} ("{name}": {module.final} and {wanted[name]} active weights); '
                "pack and attach the same algorithm"
            )
