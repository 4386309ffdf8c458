"""BatchNorm of a trained network folded into the layer before it, where the graph allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.errors import UserError

NO_EPS = torch.finfo(torch.float32).tiny  # 1 + this is 1; some versions of torch do not take 0
Layer = nn.Linear | nn.Conv1d | nn.Conv2d


@torch.no_grad()
def fold(model: nn.Module) -> dict[str, str]:
    """Fold, in place, every BatchNorm that can be; which norms went into which layers.

    With γ, β, μ, σ² of the norm and s = γ / √(σ² + ε): W ← s W, b ← s b + β - s μ per output channel, computed in
    float64. A norm that follows anything else than a layer of its own (VGG-C's come after the ReLU in its
    classifier, WRN's before its convolutions) stays, as x ← s x + (β - s μ).
    """
    folded = foldable(model)
    numbers = {name: _affine(norm) for name, norm in _norms(model).items()}
    weights: dict[str, Tensor] = {}
    for norm, layer_name in folded.items():
        scale, shift = numbers[norm]
        layer = _layer(model, layer_name)
        old = 0.0 if layer.bias is None else layer.bias.double()
        weights[f"{layer_name}.weight"] = layer.weight.double() * scale.view(-1, *[1] * (layer.weight.dim() - 1))
        weights[f"{layer_name}.bias"] = old * scale + shift
    restructure(model, folded)
    for name in _norms(model):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = numbers[name]
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        parameters[name].copy_(weight)
    return folded


def foldable(model: nn.Module) -> dict[str, str]:
    """The norms whose only input is a convolution or linear layer that nothing else reads, and that layer."""
    try:
        nodes = list(fx.symbolic_trace(model).graph.nodes)
    except Exception:  # whatever a forward may raise on symbolic values: such a model keeps its norms
        return {}
    calls = Counter(str(node.target) for node in nodes if node.op == "call_module")
    found = {}
    for node in nodes:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or {node.op, source.op} != {"call_module"} or len(source.users) != 1:
            continue
        norm, layer = str(node.target), str(source.target)
        kinds = isinstance(model.get_submodule(norm), _BatchNorm), isinstance(model.get_submodule(layer), Layer)
        if all(kinds) and calls[norm] == calls[layer] == 1:
            found[norm] = layer
    return found


def restructure(model: nn.Module, folded: Mapping[str, str]) -> None:
    """Give a model the form that `fold` leaves: no folded norms, a bias in their layers, plain norms elsewhere.

    The numbers are not set. Names that do not belong to a norm and a layer of its width are refused.
    """
    norms = _norms(model)
    for name, layer_name in folded.items():
        layer = _layer(model, layer_name)
        if name not in norms or layer.weight.shape[0] != norms[name].num_features:
            raise UserError(f'"{name}" is no BatchNorm that can be folded into "{layer_name}"')
        like = layer.weight
        layer.bias = nn.Parameter(torch.zeros(like.shape[0], device=like.device, dtype=like.dtype))
        _replace(model, name, nn.Identity())
    for name, norm in norms.items():
        if name not in folded:
            like = next(model.parameters())
            plain = type(norm)(norm.num_features, eps=NO_EPS)  # statistics 0 and 1: only scale and shift are left
            _replace(model, name, plain.to(like.device, like.dtype))
    model.eval()


def _affine(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Scale and shift of a BatchNorm in eval mode, in float64."""
    if norm.running_mean is None or norm.running_var is None:
        raise UserError("a BatchNorm without running statistics depends on its batch; it cannot be exported")
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.double()


def _norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def _layer(model: nn.Module, name: str) -> Layer:
    layer = dict(model.named_modules()).get(name)
    if not isinstance(layer, Layer):
        raise UserError(f'the model has no convolution or linear layer "{name}"')
    return layer


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, new)
