"""What a checkpoint holds of a run, and how a run takes it up again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from equipoise.correction.snapshot import RandomState
from equipoise.errors import UserError
from equipoise.training.convert_storage import in_storage, plain_names
from equipoise.training.processes import local_part, taken_up

if TYPE_CHECKING:
    from equipoise.training.trainer import Trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """All that a resumed run needs to go on bit for bit."""
    parts = trainer.parts
    state = {
        "kinds": trainer.recipe.kinds,
        "storage": parts.topology.storage,
        "names": _names(trainer),
        "position": [trainer.epoch, trainer.batch, trainer.images, trainer.attacks],
        "rollbacks": trainer.rollbacks,
        "best": trainer.best,
        "seconds": trainer.seconds,
        "startup_seconds": trainer.startup_seconds,
        "model": parts.model.state_dict(),
        "optimizer": parts.optimizer.state_dict(),
        "topology": parts.topology.state_dict(),
        "correction": parts.correction.state_dict(),
        "average": None if parts.average is None else parts.average.state_dict(),
        "meter": trainer.meter.state_dict(),
        "random": list(RandomState(parts.device).state()),
    }
    if not trainer.world.alone:
        state["others"] = trainer.world.gather_object(local_part(state))[1:]
    return state


def _names(trainer: Trainer) -> dict[str, list[str]]:
    """What tensors that are known by their position belong to, in whatever storage."""
    parts = trainer.parts
    names = plain_names(parts.model)
    return {
        "model": [names[id(p)] for p in parts.model.parameters() if p.requires_grad],
        "optimizer": [names[id(p)] for group in parts.optimizer.param_groups for p in group["params"]],
    }


def restore(trainer: Trainer, state: dict[str, Any]) -> RandomState:
    """Stand where the state was saved; the streams of random numbers, which the process then has, too."""
    try:
        return _restore(trainer, state)
    except UserError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"the checkpoint does not fit the recipe: {line[:200]}") from None


def _restore(trainer: Trainer, state: dict[str, Any]) -> RandomState:
    parts, recipe = trainer.parts, trainer.recipe
    for part, kind in recipe.kinds.items():
        if state["kinds"][part] != kind:
            raise UserError(f"the checkpoint is of the {part} {state['kinds'][part]}, the recipe has {kind}")
    topology = parts.topology
    state = taken_up(state, trainer.world)
    state = in_storage(state, topology.storage, {layer.name: tuple(layer.mask().shape) for layer in topology.layers})
    parts.model.load_state_dict(state["model"])
    parts.optimizer.load_state_dict(state["optimizer"])
    parts.optimizer.zero_grad()  # those of a step that was not finished
    topology.load_state_dict(state["topology"])
    parts.correction.load_state_dict(state["correction"])
    if parts.average is not None:
        if state["average"] is None:
            raise UserError("the checkpoint has no weight average, which the recipe asks for")
        parts.average.load_state_dict(state["average"])
    trainer.epoch, trainer.batch, trainer.images, trainer.attacks = state["position"]
    trainer.rollbacks = state.get("rollbacks", 0)
    trainer.best, trainer.seconds, trainer.startup_seconds = (
        state["best"],
        state["seconds"],
        state.get("startup_seconds", 0.0),
    )
    trainer.meter.load_state_dict(state["meter"])
    cpu, cuda = state["random"]
    random = RandomState.of(cpu, cuda, parts.device)
    random.restore()
    return random
