"""A recipe: everything a run is made of, as strict YAML."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from equipoise.catalogue import Catalogue, suggestion
from equipoise.config import build, call, check_names, checked, convert, parameters_of, parse_yaml
from equipoise.correction import CORRECTIONS, Estimator
from equipoise.data import DATASETS, Augment
from equipoise.errors import UserError
from equipoise.models import MODELS
from equipoise.objectives import OBJECTIVES, Objective
from equipoise.topology import ALGORITHMS, Algorithm, Dynamic
from equipoise.training.lr_schedule import SCHEDULES, Schedule
from equipoise.training.optimizers import OPTIMIZERS, OptimizerOptions
from equipoise.training.rollback import RollbackOptions


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """name: a dataset of the catalogue. root: where its files are. batch: images per step. validation: training
    images held out. augment: random crops, shifts and flips of the training images, or none. normalize: whether the
    model takes pixels to mean 0 and deviation 1 in its first layer or leaves them in [0, 1], as BSR-Net does. size,
    workers: side of the squares and worker processes of image folders.
    """

    name: str = "digits"
    root: str = "data"
    batch: int = 128
    test_batch: int = 500
    validation: int = 0
    augment: Augment | None = None
    normalize: bool = True
    drop_last: bool = False
    size: int = 224
    workers: int = 2

    def __post_init__(self) -> None:
        DATASETS[self.name]
        for name in ("batch", "test_batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: at least one image")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """every: epochs between checkpoints. steps: also every so many steps; 0 is never. keep: how many. best: also one
    at every epoch that is the best so far, which is kept.
    """

    every: int = 1
    steps: int = 0
    keep: int = 2
    best: bool = True

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1 or self.steps < 0:
            raise UserError("every and keep are at least 1, steps at least 0")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train and how. `raw` is the mapping it was made from, as it is saved beside the run."""

    model: str
    model_options: Mapping[str, Any]
    data: DataOptions
    topology: Algorithm
    objective: Objective
    correction: Estimator
    optimizer: OptimizerOptions
    schedule: Schedule
    epochs: int
    seed: int = 0
    precision: Literal["auto", "float32", "bf16"] = "auto"
    engine: Literal["auto", "eager"] = "auto"
    device: str = "auto"
    storage: Literal["auto", "masked", "packed"] = "auto"
    ema: float = 0.995
    bn_recalibration_batches: int = 32
    full_pass: Literal["clean", "adversarial"] = "clean"
    clip: float = 0.0
    checkpoint: CheckpointOptions = CheckpointOptions()
    rollback: RollbackOptions = field(default_factory=RollbackOptions)
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> dict[str, str]:
        """What a checkpoint must be of, to go on from it."""
        parts = {"topology": self.topology, "correction": self.correction, "optimizer": self.optimizer}
        return {"model": self.model, **{name: type(part).__name__ for name, part in parts.items()}}


DEFAULTS: dict[str, Any] = {
    "model": "small",
    "data": "digits",
    "topology": "dense",
    "objective": "standard",
    "correction": "sgd",
    "optimizer": "sgd",
    "schedule": "piecewise",
    "epochs": 10,
}

PLAIN: dict[str, Any] = {
    "epochs": int,
    "seed": int,
    "precision": Literal["auto", "float32", "bf16"],
    "engine": Literal["auto", "eager"],
    "device": str,
    "storage": Literal["auto", "masked", "packed"],
    "ema": float,
    "bn_recalibration_batches": int,
    "full_pass": Literal["clean", "adversarial"],
    "clip": float,
    "checkpoint": CheckpointOptions,
    "rollback": RollbackOptions,
}
"""The keys of a recipe that are not chosen by name, and their types: see `Recipe` for the defaults.

precision: `auto` is bf16 on a GPU and float32 elsewhere; with float32 a GPU uses no TF32 either. engine: `auto`
compiles and captures the steps on a GPU. storage: `masked` keeps sparse weights as dense tensors with zeros, `packed`
as the vectors of their active values, which the CPU kernels run on; `auto` packs on a CPU from 90 % sparsity on,
where the model allows it. ema: decay of the weight average, 0 for none. bn_recalibration_batches:
training batches that BatchNorm statistics are estimated anew from at evaluation. full_pass: what g̃ is computed on in
adversarial training, clean images (the paper) or such as are attacked at the snapshot; a recipe that names neither
corrects by `running`, which needs no full pass. clip: largest gradient norm, 0 for none. rollback: whether a loss or
a gradient that is not finite stops the run or sends it back to its last checkpoint, see `RollbackOptions`.
"""


def make_recipe(raw: Mapping[str, Any]) -> Recipe:
    """Check a mapping as read from YAML and make every part of it."""
    check_names(raw, {*DEFAULTS, *PLAIN}, "recipe")
    full = {**DEFAULTS, **raw}
    seed = convert(full.get("seed", 0), int, "seed")
    plain = {key: convert(full[key], hint, key) for key, hint in PLAIN.items() if key in full}
    if plain["epochs"] < 1:
        raise UserError(f"epochs={plain['epochs']}: at least 1")
    if not 0 <= plain.get("ema", 0.5) < 1:
        raise UserError(f"ema={plain['ema']}: the decay of the weight average, 0 for none, below 1")
    if plain.get("bn_recalibration_batches", 1) < 1:
        raise UserError(f"bn_recalibration_batches={plain['reestimate']}: at least 1 batch")
    if plain.get("clip", 0) < 0:
        raise UserError(f"clip={plain['clip']}: the largest gradient norm, 0 for none")
    model, options = split(full["model"], "model")
    data, data_options = split(full["data"], "data")
    recipe = Recipe(
        model=model,
        model_options=checked(MODELS[model], options, "model"),
        data=build(DataOptions, {"name": data, **data_options}, "data"),
        topology=_topology(full["topology"], seed),
        objective=choose(OBJECTIVES, full["objective"], "objective"),
        correction=choose(CORRECTIONS, full["correction"], "correction"),
        optimizer=choose(OPTIMIZERS, full["optimizer"], "optimizer"),
        schedule=choose(SCHEDULES, full["schedule"], "schedule"),
        raw=copy.deepcopy(dict(raw)),
        **plain,
    )
    if recipe.objective.attack_passes and recipe.correction.corrects and recipe.correction.mode == "replay":
        raise UserError("replay needs batches known ahead, and an attack makes them at their step; use mode=running")
    return recipe


def split(value: Any, where: str) -> tuple[str, dict[str, Any]]:
    """`rigl`, or `{name: rigl, sparsity: 0.9}`, as a name and its options."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return value["name"], {key: item for key, item in value.items() if key != "name"}
    raise UserError(f"{where}: expected a name, or keys and values with a name among them")


def choose(catalogue: Catalogue[Any], value: Any, where: str) -> Any:
    name, options = split(value, where)
    return build(catalogue[name], options, where)


def _topology(value: Any, seed: int) -> Algorithm:
    """An algorithm by name; with `-itop` after it, on ITOP's schedule."""
    name, options = split(value, "topology")
    base = name.removesuffix("-itop")
    cls = ALGORITHMS[base]
    options = {"seed": seed, **options}
    if name == base:
        return build(cls, options, "topology")
    if not issubclass(cls, Dynamic):
        raise UserError(f'topology: "{base}" never changes, so there is no "{name}"')
    return call(cls.itop, checked(cls, options, "topology"), "topology")


# Reading


def read_recipe(*sources: str) -> dict[str, Any]:
    """Recipes by file, or by name among those that come with the package; later ones are laid over earlier ones.

    A recipe may name another as its `base` and say only what differs.
    """
    result: dict[str, Any] = {}
    for source in sources:
        result = lay_over(result, _read_with_base(source, []))
    return result


def _read_with_base(source: str, seen: list[str]) -> dict[str, Any]:
    raw = _read_one(source)
    if "base" not in raw:
        return raw
    base = raw.pop("base")
    if not isinstance(base, str):
        raise UserError(f"{source}: base is the name or the file of another recipe")
    if _is_file_name(base):
        base = os.path.normpath(Path(source).parent / base)  # beside the recipe that names it
    if base in seen:
        raise UserError(f"{source}: its base leads back to itself")
    return lay_over(_read_with_base(base, [*seen, source, base]), raw)


def lay_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A part of the same name, or of none, takes the options given; a part of another name takes its place."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        old = {"name": old} if isinstance(old, str) and key in DEFAULTS else old
        if (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and value.get("name", old.get("name")) == old.get("name")
        ):
            value = {**old, **value}
        result[key] = value
    return result


def _read_one(source: str) -> dict[str, Any]:
    if _is_file_name(source) or os.path.isfile(source):
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the recipe {source}: {error}") from None
    else:
        text = _packaged(source)
    raw = parse_yaml(text, source)
    if not isinstance(raw, Mapping) or not all(isinstance(key, str) for key in raw):
        raise UserError(f"{source}: a recipe is keys and values, such as `model: vgg_c`")
    return dict(raw)


def _is_file_name(source: str) -> bool:
    return source.endswith((".yaml", ".yml"))


def packaged_recipes() -> dict[str, str]:
    """The recipes that come with the package and the comment in their first line, by name."""
    folder = resources.files("equipoise") / "recipes"
    files = {f.name.removesuffix(".yaml"): f for f in folder.iterdir() if f.name.endswith(".yaml")}
    return {name: files[name].read_text().partition("\n")[0].lstrip("# ") for name in sorted(files)}


def _packaged(name: str) -> str:
    if name not in packaged_recipes():
        hint = suggestion(name, list(packaged_recipes()))
        raise UserError(f'no recipe is called "{name}" and there is no such file{hint}')
    return (resources.files("equipoise") / "recipes" / f"{name}.yaml").read_text()


def apply_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`key=value` and `part.key=value`. A new name for a part keeps the options that it knows too."""
    result = copy.deepcopy(dict(raw))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f'"{override}" is not an override; write key=value, such as topology.sparsity=0.95')
        _set(result, key, parse_yaml(text, override))
    return result


CATALOGUES: dict[str, Catalogue[Any]] = {
    "model": MODELS,
    "topology": ALGORITHMS,
    "objective": OBJECTIVES,
    "correction": CORRECTIONS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    *outer, last = key.split(".")
    inner, defaults = raw, DEFAULTS
    for word in outer:
        found = inner.get(word, defaults.get(word))
        found = {"name": found} if isinstance(found, str) else {} if found is None else found
        if not isinstance(found, dict):
            raise UserError(f'"{word}" has no options, so "{key}" cannot be set')
        inner[word] = found
        inner, defaults = found, {}
    inner[last] = value if outer or not isinstance(value, str) else _renamed(last, raw.get(last), value)


def _renamed(part: str, old: Any, name: str) -> Any:
    """The part under its new name, with those of its options that this has too."""
    if not isinstance(old, dict) or "name" not in old:
        return name
    known = set(old)
    if part in CATALOGUES:
        base = name.removesuffix("-itop") if part == "topology" else name
        known = set(parameters_of(CATALOGUES[part][base]))
    return {**{key: item for key, item in old.items() if key in known}, "name": name}


def dump_recipe(raw: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(raw), sort_keys=False)
