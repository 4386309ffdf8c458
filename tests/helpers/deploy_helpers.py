"""Networks with random sparse weights and norms, and forged files, for the tests of deployment."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from equipoise.deploy import Blueprint, Network
from equipoise.deploy.packed_file import digest
from equipoise.models import MODELS
from equipoise.topology.distribution import active_counts

MEAN, STD = 0.4, 0.3


def random_network(name: str, sparsity: float = 0.95, seed: int = 0, **options: Any) -> tuple[Network, nn.Module]:
    """An untrained network with random masks of ERK counts, and the float64 model that judges it."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = MODELS[name](**options).eval()
    weights = {key: p for key, p in model.named_parameters() if p.dim() > 1}
    counts = active_counts("erk", {key: tuple(p.shape) for key, p in weights.items()}, 1 - sparsity)
    for key, weight in weights.items():
        keep = torch.randperm(weight.numel(), generator=generator)[: counts[key]]
        flat = torch.zeros(weight.numel()).index_fill_(0, keep, 1.0)
        weight.data *= flat.view(weight.shape)
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            for tensor, low, high in (
                (norm.running_mean, -0.5, 0.5),
                (norm.running_var, 0.2, 2.0),
                (norm.weight.data, -1.5, 1.5),
                (norm.bias.data, -0.5, 0.5),
            ):
                tensor.uniform_(low, high, generator=generator)
    shape = (1, 8, 8) if name in ("small", "mlp") else (3, 32, 32)
    blueprint = Blueprint(name, options, shape, (MEAN,) * shape[0], (STD,) * shape[0])
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    judge: Any = model.double()
    judge.normalize.set([MEAN] * shape[0], [STD] * shape[0])
    return Network(blueprint, state), judge


def images(network: Network, count: int = 3) -> Tensor:
    return torch.rand(count, *network.blueprint.input_shape, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def difference(model: nn.Module, judge: nn.Module, x: Tensor) -> float:
    """Largest difference of logits, relative to the largest logit."""
    right = judge(x.double())
    return float((model(x).double() - right).abs().max() / right.abs().max())


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["equipoise"])
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def forge(
    path: Path,
    out: Path,
    tensors: Callable[[dict[str, Tensor]], Any] = lambda _: None,
    header: Mapping[str, Any] | None = None,
) -> Path:
    """A copy of a file with other tensors or another header, and a checksum that fits them."""
    old_header, held = read(path)
    tensors(held)
    new = {**old_header, **(header or {})}
    new["digest"] = digest(new, held)
    save_file(held, out, metadata={"equipoise": json.dumps(new)})
    return out
