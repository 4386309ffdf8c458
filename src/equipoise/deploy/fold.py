"""Fold the BatchNorm of a trained network into the layer before it, if the graph allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipoise.errors import UserError
from equipoise.storage.trace import read

NO_EPS = torch.finfo(torch.float32).tiny  # 1 + this is 1; some versions of torch do not take 0
Layer = nn.Linear | nn.Conv1d | nn.Conv2d


@torch.no_grad()
def fold(model: nn.Module) -> dict[str, str]:
    """Fold every BatchNorm in place that follows a layer directly.

    With γ, β, μ, σ² of the norm and s = γ / √(σ² + ε): W ← s W, b ← s b + β - s μ per output channel, computed in
    float64. Other norms stay as x ← s x + (β - s μ). VGG-C has such norms after the ReLUs of its classifier, and WRN
    before its convolutions.

    Returns:
        The names of the folded norms and of the layers they were folded into.
    """
    folded = foldable(model)
    numbers = {name: affine(norm, torch.float64) for name, norm in _norms(model).items()}
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
    """Return the norms that alone read a convolution or linear layer, and that layer, by name."""
    reading = read(model)
    if reading is None or reading.has_hooks():
        return {}
    nodes = list(reading.graph.nodes)
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
    """Give a model the modules it has after `fold`, without setting any numbers.

    Args:
        model: Changed in place: folded norms are removed, their layers get a bias, other norms become plain.
        folded: Names of the folded norms and of their layers.

    Raises:
        UserError: If a name does not belong to a norm or to a layer of its width.
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
            plain = type(norm)(norm.num_features, eps=NO_EPS)  # statistics 0 and 1 leave scale and shift
            _replace(model, name, plain.to(like.device, like.dtype))
    model.eval()


def affine(norm: _BatchNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scale and shift of a BatchNorm in eval mode, computed in `dtype`."""
    if norm.running_mean is None or norm.running_var is None:
        raise UserError("a BatchNorm without running statistics depends on its batch; it cannot be exported")
    scale = (norm.running_var.to(dtype) + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().to(dtype)
    shift = -norm.running_mean.to(dtype) * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().to(dtype)


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
