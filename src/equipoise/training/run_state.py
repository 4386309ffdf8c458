"""The state of a run in a checkpoint: collect and restore it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from equipoise.correction.snapshot import RandomState
from equipoise.errors import UserError
from equipoise.training.convert_storage import in_storage, plain_names
from equipoise.training.optimizers import NamedState
from equipoise.training.processes import local_part, state_for_process

if TYPE_CHECKING:
    from equipoise.training.trainer import Trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return the state that a resumed run needs to end bit-identical to an uninterrupted one."""
    parts = trainer.parts
    state = {
        "kinds": trainer.recipe.kinds,
        "storage": parts.topology.storage,
        "names": [name for name, _ in _named(trainer)],
        "position": [trainer.epoch, trainer.batch, trainer.images, parts.passes.attacks],
        "rollbacks": trainer.rollbacks,
        "best": trainer.best,
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
    if not trainer.world.alone:
        state["others"] = trainer.world.gather_object(local_part(state))[1:]
    return state


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
    try:
        return _restore(trainer, state)
    except UserError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"the checkpoint does not fit the recipe: {line[:200]}") from None


def _restore(trainer: Trainer, state: dict[str, Any]) -> RandomState:
    parts = trainer.parts
    for part, kind in trainer.recipe.kinds.items():
        if state["kinds"][part] != kind:
            raise UserError(f"the checkpoint is of the {part} {state['kinds'][part]}, the recipe has {kind}")
    topology = parts.topology
    state = state_for_process(state, trainer.world)
    state = in_storage(state, topology.storage, {layer.name: tuple(layer.mask().shape) for layer in topology.layers})
    parts.model.load_state_dict(state["model"])
    _optimizer(trainer).load_state_dict(state["optimizer"])
    topology.load_state_dict(state["topology"])
    parts.correction.load_state_dict(state["correction"])
    if parts.ema is not None:
        if state["ema"] is None:
            raise UserError("the checkpoint has no weight average, but the recipe sets ema")
        parts.ema.load_state_dict(state["ema"])
    trainer.epoch, trainer.batch, trainer.images, parts.passes.attacks = state["position"]
    trainer.rollbacks = state.get("rollbacks", 0)
    trainer.best, trainer.seconds = state["best"], state["seconds"]
    trainer.startup_seconds = state.get("startup_seconds", 0.0)
    parts.meter.load_state_dict(state["meter"])
    cpu, cuda = state["random"]
    random = RandomState.of(cpu, cuda, parts.device)
    random.restore()
    return random
