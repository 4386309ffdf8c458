"""The state of a run in a checkpoint: collect and restore it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise.correction.snapshot import RandomState
from equipoise.errors import UserError
from equipoise.training.convert_storage import in_storage, plain_names
from equipoise.training.evaluate import Score
from equipoise.training.named_state import NamedState
from equipoise.training.processes import local_part, state_for_process
from equipoise.training.recipe_fingerprint import fingerprint

if TYPE_CHECKING:
    from equipoise.training.trainer import Trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return the state that a resumed run needs to end bit-identical to an uninterrupted one."""
    state = _state_of_process(trainer)
    if not trainer.world.alone:
        state["others"] = trainer.world.gather_object(local_part(state))[1:]
    return state


def _state_of_process(trainer: Trainer) -> dict[str, Any]:
    parts = trainer.parts
    return {
        "fingerprint": _fingerprint(trainer),
        "storage": parts.topology.storage,
        "names": [name for name, _ in _named(trainer)],
        "position": [trainer.epoch, trainer.batch, trainer.images, parts.batches.attacks],
        "rollbacks": trainer.rollbacks,
        "best": trainer.best,
        "published": None if trainer.published is None else asdict(trainer.published),
        "seconds": trainer.seconds,
        "startup_seconds": trainer.startup_seconds,
        "model": parts.model.state_dict(),
        "optimizer": _optimizer(trainer).state_dict(),
        "topology": parts.topology.state_dict(),
        "correction": parts.correction.state_dict(),
        "ema": None if parts.ema is None else parts.ema.state_dict(),
        "meter": parts.meter.state_dict(),
        "random": list(RandomState(parts.device).state()),
    }


def _fingerprint(trainer: Trainer) -> dict[str, Any]:
    """The fingerprint of the recipe, with the mode of the correction that was chosen."""
    return fingerprint(replace(trainer.recipe, correction=trainer.parts.correction.estimator))


def _named(trainer: Trainer) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters by their names in the unpacked model."""
    names = plain_names(trainer.parts.model)
    return [(names[id(p)], p) for p in trainer.parts.model.parameters() if p.requires_grad]


def _optimizer(trainer: Trainer) -> NamedState:
    return NamedState(trainer.parts.optimizer, _named(trainer), trainer.parts.flat)


def restore(trainer: Trainer, state: dict[str, Any]) -> RandomState:
    """Restore the state of a trainer; return the random state of the process at that point.

    Raises:
        UserError: If the state does not fit the recipe.
    """
    with _one_line("the checkpoint"):
        return _restore(trainer, state)


def _restore(trainer: Trainer, state: dict[str, Any]) -> RandomState:
    parts, topology = trainer.parts, trainer.parts.topology
    here = _state_of_process(trainer)
    for part, value in here.items():
        if part not in state or (state[part] is None and part not in ("ema", "published")):
            raise _misfit(f"it has no {part}")
        _check_kind(state[part], value, part)
    _check_fingerprint(state["fingerprint"], here["fingerprint"])
    state = state_for_process(state, trainer.world)
    state = in_storage(state, topology.storage, {layer.name: tuple(layer.mask().shape) for layer in topology.layers})
    if parts.ema is not None and state["ema"] is None:
        raise UserError("the checkpoint has no weight average, but the recipe sets ema")
    for part, value in here.items():
        _check_like(state[part], value, part, topology.storage)
    _check_optimizer(trainer, state)
    weights = {name for name, _ in parts.model.named_parameters()}
    for part in ("model", "optimizer", "ema"):
        _check_numbers(state[part], part, weights)
    loaded: dict[str, Any] = {
        "model": parts.model,
        "optimizer": _optimizer(trainer),
        "topology": topology,
        "correction": parts.correction,
        "ema": parts.ema,
        "meter": parts.meter,
    }
    for part, owner in loaded.items():
        if owner is not None:
            with _one_line(part):
                owner.load_state_dict(state[part])
    trainer.epoch, trainer.batch, trainer.images, parts.batches.attacks = state["position"]
    trainer.rollbacks, trainer.best = state["rollbacks"], state["best"]
    trainer.published = None if state["published"] is None else Score(**state["published"])
    trainer.seconds, trainer.startup_seconds = state["seconds"], state["startup_seconds"]
    cpu, cuda = state["random"]
    random = RandomState.of(cpu, cuda, parts.device)
    random.restore()
    return random


def _misfit(reason: str) -> UserError:
    return UserError(f"the checkpoint does not fit the recipe: {reason}")


@contextmanager
def _one_line(part: str) -> Iterator[None]:
    """Turn errors of a wrong state into one line that names its part."""
    try:
        yield
    except UserError:
        raise
    except KeyError as error:
        raise _misfit(f"{part} has no {error}") from None
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise _misfit(f"{part}: {' '.join(str(error).split())[:200]}") from None


def _check_fingerprint(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for key, value in here.items():
        if saved.get(key) != value:
            raise _misfit(f"{key} was {saved.get(key)} and is now {value}; restore it, or train a new run")


def _check_like(saved: Any, here: Any, path: str, storage: str) -> None:
    """Refuse a value that cannot replace the one in a trainer, and name it.

    States grow in training: there is nothing to compare with `None` or with the length of a vector in packed storage,
    and inside the entries of optimizer, topology and correction only kinds of values are compared.
    """
    if here is None or (saved is None and path == "ema"):
        return
    if saved is None:
        raise _misfit(f"it has no {path}")
    _check_kind(saved, here, path)
    grows = path.startswith(("optimizer/", "topology/", "correction/"))
    if isinstance(here, Mapping):
        for key, value in here.items():
            if saved.get(key) is not None or (key in saved and not grows):
                _check_like(saved[key], value, f"{path}/{key}", storage)
            elif not grows:
                raise _misfit(f"it has no {path}/{key}")
    elif isinstance(here, list | tuple):
        if len(saved) != len(here) and not grows:
            raise _misfit(f"{path} has {len(saved)} items instead of {len(here)}")
        for i, (old, new) in enumerate(zip(saved, here, strict=False)):
            _check_like(old, new, f"{path}/{i}", storage)
    elif isinstance(here, Tensor) and not grows:
        any_length = storage == "packed" and here.dim() == 1
        _check_shape(saved, torch.Size([torch.as_tensor(saved).numel()]) if any_length else here.shape, path)


def _check_optimizer(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Refuse a tensor of the optimizer that is neither one number nor of the shape of its parameter."""
    plain = plain_names(trainer.parts.model)
    for name, parameter in trainer.parts.model.named_parameters():
        for key, value in state["optimizer"].get(plain[id(parameter)], {}).items():
            path = f"optimizer/{plain[id(parameter)]}/{key}"
            if isinstance(value, Tensor) and not value.is_floating_point():
                raise _misfit(f"{path} is of {value.dtype}")
            if isinstance(value, Tensor) and value.numel() != 1:
                _check_shape(value, state["model"][name].shape, path)


def _check_numbers(saved: Any, path: str, weights: Container[str]) -> None:
    """Refuse NaN, and weights that are infinite: training ends before it writes a checkpoint with them."""
    if not isinstance(saved, Mapping):
        return
    for key, value in saved.items():
        _check_numbers(value, f"{path}/{key}", weights)
        if isinstance(value, Tensor) and bool(value.isnan().any()):
            raise _misfit(f"{path}/{key} has values that are not a number")
        if isinstance(value, Tensor) and key in weights and bool(value.isinf().any()):
            raise _misfit(f"{path}/{key} has values that are infinite")


def _check_shape(saved: Any, shape: torch.Size, path: str) -> None:
    if torch.as_tensor(saved).shape != shape:
        raise _misfit(f"{path} has the shape {list(torch.as_tensor(saved).shape)} instead of {list(shape)}")


def _check_kind(saved: Any, here: Any, path: str) -> None:
    kind, expected = _kind(saved), _kind(here)
    if saved is not None and here is not None and kind != expected:
        raise _misfit(f"{path} is a {kind} instead of a {expected}")
    if isinstance(here, int) and isinstance(saved, float):
        raise _misfit(f"{path} is {saved} instead of a whole number")


def _kind(value: Any) -> str:
    """Return the kind of a value; a tensor is a number, because some numbers become tensors in training."""
    kinds: dict[str, Any] = {"dictionary": Mapping, "list": list | tuple, "word": str}
    return next((name for name, types in kinds.items() if isinstance(value, types)), "number")
