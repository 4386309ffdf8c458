"""Files with valid checksums and wrong contents: a file is read, one to three of its values are changed, and the
checksum is computed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from equipoise.deploy.packed_file import KEY, WEIGHTS, write_file
from equipoise.training import checkpoint

HUGE = (2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
VALUES: list[Any] = [
    *(None, True, 0, 1, -1, 7, -(2**40), *HUGE, 0.5, -1e-3, 1e308, float("nan"), float("inf")),
    *("", "x" * 3000, "masked", "cpu", "\x1b[2J", [], {}, [0], {"a": 1}, [[[[1]]]]),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]


def _replaced(tensor: Tensor, random: Random, values: list[float]) -> Tensor:
    """Replace one element, or all."""
    if not tensor.numel():
        return tensor
    new = tensor.clone()
    if new.dtype is torch.bool:
        return ~new
    limits = torch.finfo(new.dtype) if new.is_floating_point() else torch.iinfo(new.dtype)
    value = random.choice(values)
    if not new.is_floating_point():
        value = int(min(max(value, limits.min), limits.max)) if value == value else 0
    where: Any = random.randrange(new.numel()) if random.random() < 0.7 else slice(None)
    new.view(-1)[where] = value
    return new


CHANGES: dict[str, Callable[[Tensor, Random], Tensor]] = {
    "index out of range": lambda t, r: _replaced(t, r, [-1, -1000, t.numel(), 10**6, *HUGE]),
    "not a number": lambda t, r: _replaced(t, r, [float("nan"), float("inf"), -float("inf")]),
    "too large": lambda t, r: _replaced(t, r, [3e38, -3e38, 1e30, 1e-45]),
    "too short": lambda t, r: t.reshape(-1)[: r.randrange(t.numel())].clone() if t.numel() else t,
    "empty": lambda t, r: t.reshape(-1)[:0].clone(),
    "too long": lambda t, r: t.reshape(-1).repeat(r.choice((2, 3, 1000 if t.numel() < 10**4 else 4))),
    "other type": lambda t, r: t.to(r.choice(DTYPES)),
    "other shape": lambda t, r: r.choice((t.reshape(-1), t[None], t.reshape(1, -1, 1).clone(), t.reshape(-1, 1))),
    "other order": lambda t, r: t.reshape(-1).flip(0).reshape(t.shape).clone(),
    "one number": lambda t, r: t.reshape(-1)[0].clone() if t.numel() else t,
}


def changed_value(value: Any, random: Random) -> Any:
    """Change a value: a tensor into a wrong one, anything else into a value of another kind or size."""
    if isinstance(value, Tensor) and random.random() < 0.95:
        return CHANGES[random.choice(list(CHANGES))](value, random).contiguous()
    if isinstance(value, bool | str | None) or random.random() < 0.3:
        return random.choice(VALUES)
    if isinstance(value, int | float):
        return random.choice((-value, value + 1, value - 1, value * 10**6, value * 1.5, random.choice(HUGE)))
    if isinstance(value, dict) and value:
        key = random.choice(list(value))
        rest = {name: item for name, item in value.items() if name != key}
        return random.choice((rest, {**rest, "another": value[key]}, {}, None))
    if isinstance(value, list | tuple) and value:
        return random.choice((value[:-1], [*value, value[-1]], value[::-1], None))
    return random.choice(VALUES)


def changed(state: Any, random: Random) -> Any:
    """Change one to three values of nested dictionaries and lists, at any depth."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        state = _changed_at(state, random)
    return state


def _changed_at(value: Any, random: Random) -> Any:
    """Go down to a value at random; containers with many values are entered more often than changed."""
    if not isinstance(value, dict | list | tuple) or not value or random.random() < 0.04:
        return changed_value(value, random)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = random.choice(keys)
    new = dict(value) if isinstance(value, dict) else list(value)
    new[key] = _changed_at(value[key], random)
    return tuple(new) if isinstance(value, tuple) else new


def sign_checkpoint(path: Path, random: Random) -> None:
    """Change values of a checkpoint."""
    state = checkpoint.load(path)
    path.unlink()  # it may be a link to another file
    new = changed(state, random)
    checkpoint.save(path, new if isinstance(new, dict) else {"state": new})


def sign_packed(path: Path, random: Random) -> None:
    """Change values of a file of `equipoise.export` or `equipoise.save`."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    key = KEY if KEY in metadata else WEIGHTS
    header = json.loads(metadata[key])
    if random.random() < 0.3:
        header = changed(header, random)
    else:
        tensors = changed(tensors, random)
    path.unlink()
    held = tensors if isinstance(tensors, dict) else {}
    named = {str(name): value for name, value in held.items() if isinstance(value, Tensor)}
    write_file(path, key, header if isinstance(header, dict) else {"version": 1, "header": header}, named)
