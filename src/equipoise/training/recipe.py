"""Recipes: everything that a run is made of, as strict YAML."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import yaml

from equipoise.catalogue import Catalogue, names_code, suggestion
from equipoise.config import (
    build,
    call,
    check_names,
    checked,
    convert,
    parameters_of,
    parse_yaml,
    split,
    takes_any_name,
)
from equipoise.correction import CORRECTIONS, Estimator
from equipoise.data import DATASETS, Augment
from equipoise.errors import UserError
from equipoise.lr_schedule import SCHEDULES, Schedule
from equipoise.models import MODELS
from equipoise.objectives import OBJECTIVES, Objective
from equipoise.topology import ALGORITHMS, Algorithm, Dynamic
from equipoise.training.optimizers import OPTIMIZERS, OptimizerOptions
from equipoise.training.published import PublishedOptions
from equipoise.training.rollback import RollbackOptions

CATALOGUES: dict[str, Catalogue[Any]] = {
    "model": MODELS,
    "data": DATASETS,
    "topology": ALGORITHMS,
    "objective": OBJECTIVES,
    "correction": CORRECTIONS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}

DEFAULT_NAMES = {
    "model": "small",
    "data": "digits",
    "topology": "dense",
    "objective": "standard",
    "correction": "sgd",
    "optimizer": "sgd",
    "schedule": "piecewise",
}

MODEL_OPTIONS_OF_DATA = ("classes", "num_classes", "channels", "in_chans", "size")
"""Options of models that a run takes from its data, unless the recipe sets them. timm uses the second and fourth."""

OLD_NAMES = {
    "average": "ema",
    "reestimate": "bn_recalibration_batches",
    "correction.way": "correction.mode",
    "correction.share": "correction.step_fraction",
    "correction.fraction": "correction.batch_fraction",
    "correction.value": "correction.coefficient: {name: fixed, value: ...}",
}
"""Keys of earlier versions, and their names now."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The dataset and how its images are read.

    Args:
        name: A dataset of the catalogue.
        root: Folder of its files.
        batch: Images per training step.
        test_batch: Images per batch in evaluations.
        validation: Number of training images that are held out.
        augment: Random crops, shifts and flips of the training images; `null` for none.
        normalize: Whether the first layer of the model scales pixels to mean 0 and deviation 1. BSR-Net leaves them
            in [0, 1].
        drop_last: Whether the incomplete last batch of an epoch is left out.
        size: Side of the square images that are cut from image folders.
        workers: Processes that read image folders.
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
    """When checkpoints are written and how many are kept.

    Args:
        every: Epochs between checkpoints.
        steps: Also write one every `steps` steps; 0 for never.
        keep: Number of checkpoints that are kept.
        best: Also write and keep a checkpoint of the best epoch so far.
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
    """What to train and how.

    Args:
        model: Name of a model of the catalogue.
        model_options: Options of the model.
        data: The dataset and how its images are read.
        data_options: Options of the dataset besides those that all datasets have.
        topology: Which weights exist.
        objective: The loss that is minimised.
        correction: Which gradient is used.
        optimizer: The optimizer and its learning rate.
        schedule: The learning rate over time.
        epochs: Epochs of training.
        seed: The seed of the run. All other seeds are derived from it.
        precision: `auto` is bf16 on a GPU and float32 on a CPU. With `float32` a GPU does not use TF32 either. With
            `bf16` a packed model stores the activations between its layers in bf16 and computes in float32.
        engine: `auto` compiles and captures the steps on a GPU; `eager` does not.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        storage: `masked` keeps sparse weights as dense tensors with zeros, `packed` as vectors of their active
            values, which the CPU kernels use. `auto` packs on a CPU from 90 % sparsity if the model allows it.
        ema: Decay of the exponential moving average of the weights; 0 for none.
        bn_recalibration_batches: Training batches from which BatchNorm statistics are recomputed at evaluation.
        full_pass: In adversarial training, the images of the full gradient g̃: `clean` as in the paper, or
            `adversarial`, attacked at the snapshot.
        clip: Largest gradient norm; 0 for no clipping.
        weights: File of pretrained weights: a state_dict (`.pt`, `.safetensors`) or an exported network. Reading it
            executes no code. With the topology `{name: static, distribution: nonzeros}` its zeros stay zero.
        checkpoint: When checkpoints are written and how many are kept.
        rollback: What happens if a loss or gradient is not finite.
        as_published: What only the published code of AGENT does, for comparisons with it.
        raw: The mapping that the recipe was made from. It is saved in the run folder.
    """

    model: str
    model_options: Mapping[str, Any]
    data: DataOptions
    data_options: Mapping[str, Any]
    topology: Algorithm
    objective: Annotated[Objective, OBJECTIVES]
    correction: Annotated[Estimator, CORRECTIONS]
    optimizer: Annotated[OptimizerOptions, OPTIMIZERS]
    schedule: Annotated[Schedule, SCHEDULES]
    epochs: int = 10
    seed: int = 0
    precision: Literal["auto", "float32", "bf16"] = "auto"
    engine: Literal["auto", "eager"] = "auto"
    device: str = "auto"
    storage: Literal["auto", "masked", "packed"] = "auto"
    ema: float = 0.995
    bn_recalibration_batches: int = 32
    full_pass: Literal["clean", "adversarial"] = "clean"
    clip: float = 0.0
    weights: str | None = None
    checkpoint: CheckpointOptions = CheckpointOptions()
    rollback: RollbackOptions = field(default_factory=RollbackOptions)
    as_published: PublishedOptions = field(default_factory=PublishedOptions)
    raw: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise UserError(f"epochs={self.epochs}: at least 1")
        if not 0 <= self.ema < 1:
            raise UserError(f"ema={self.ema}: the decay of the weight average, at least 0 and below 1")
        if self.bn_recalibration_batches < 1:
            raise UserError(f"bn_recalibration_batches={self.bn_recalibration_batches}: at least 1 batch")
        if self.clip < 0:
            raise UserError(f"clip={self.clip}: the largest gradient norm, 0 for no clipping")
        if self.objective.attack_passes and self.correction.corrects and self.correction.mode == "replay":
            raise UserError("replay needs batches that are known ahead, and attacked ones are not; use mode=running")
        self._check_published()

    def _check_published(self) -> None:
        published, correction = self.as_published, self.correction
        full_pass = correction.corrects and correction.mode in ("recompute", "replay")
        if (published.raw_full_pass or published.bn_trace) and not full_pass:
            raise UserError("as_published: raw_full_pass and bn_trace need a full pass; use correction=agent")
        if published.raw_full_pass and (correction.mode != "recompute" or correction.when != "always"):
            raise UserError("as_published.raw_full_pass needs correction.mode=recompute and correction.when=always")
        if published.raw_full_pass and self.full_pass != "clean":
            raise UserError("as_published.raw_full_pass is on images that are not attacked; use full_pass=clean")

    @property
    def loss_passes(self) -> int:
        """Number of forward passes over the batch in a step, each followed by a backward pass."""
        return self.objective.loss_passes + (self.as_published.raw_gradient > 0)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that a checkpoint and a recipe must have in common, by key; see `MAY_CHANGE`."""
        signature = inspect.signature(MODELS[self.model]).parameters
        defaults = {name: signature[name].default for name in parameters_of(MODELS[self.model])}
        found = {"seed": self.seed, "model": self.model}
        for part, options in (("model", defaults | dict(self.model_options)), ("data", self.data_options)):
            found |= {f"{part}.{key}": _plain(value) for key, value in options.items()}
        for key in KEYS:
            if key not in found:
                found |= _flat(key, getattr(self, key))
        return {key: value for key, value in found.items() if not _may_change(key)}


MAY_CHANGE = (
    # where and how fast the same numbers are computed
    "device",
    "engine",
    "precision",  # `auto` depends on the device
    "storage",  # checkpoints are converted
    "data.root",
    "data.workers",
    # the start, which a checkpoint replaces; the file may have moved
    "topology.initial_mask",
    "weights",
    # what is written and scored, which has no effect on the training
    "checkpoint",
    "data.test_batch",
    "bn_recalibration_batches",
    # settings of the coming steps, on which the state in the checkpoint does not depend
    "epochs",
    "optimizer.",  # the options, not the optimizer
    "schedule",
    "clip",
    "ema",
    "rollback",
)
"""Keys of a recipe, with the keys below them, that may differ between a checkpoint and the run that continues it."""


def _may_change(key: str) -> bool:
    return any(key == each or key.startswith(f"{each.removesuffix('.')}.") for each in MAY_CHANGE)


def _flat(key: str, value: Any) -> dict[str, Any]:
    """Return the name of a dataclass and its fields by their keys; other values as they are."""
    if not is_dataclass(value):
        return {key: _plain(value)}
    found = {key: type(value).__name__}
    for each in fields(value):
        found |= _flat(f"{key}.{each.name}", getattr(value, each.name))
    return found


def _plain(value: Any) -> Any:
    """Return a value that checkpoints can hold."""
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


KEYS = [f.name for f in fields(Recipe) if f.name not in ("model_options", "data_options", "raw")]
"""The keys of a recipe file."""


def make_recipe(raw: Mapping[str, Any]) -> Recipe:
    """Check a mapping as read from YAML and build every part of it.

    Raises:
        UserError: If a key is unknown or a value is wrong.
    """
    _refuse_old_names(raw, "recipe")
    for key in raw:
        if key not in KEYS and (places := places_of(str(key))):
            raise UserError(f'recipe: "{key}" is not a key of a recipe; write {" or ".join(places)}')
    check_names(raw, KEYS, "recipe")
    full = {**DEFAULT_NAMES, **raw}
    model, options = split(full["model"], "model")
    data, data_options = _data(full["data"])
    values: dict[str, Any] = {
        "model": model,
        "model_options": checked(MODELS[model], options, "model", MODEL_OPTIONS_OF_DATA),
        "data": data,
        "data_options": data_options,
        "topology": _topology(full["topology"], convert(full.get("seed", 0), int, "seed")),
    }
    hints = get_type_hints(Recipe, include_extras=True)
    values |= {key: convert(value, hints[key], key) for key, value in full.items() if key not in values}
    return Recipe(**values, raw=copy.deepcopy(dict(raw)))


def places_of(option: str) -> list[str]:
    """Return the keys of a recipe that an option may mean: `lr` is `optimizer.lr`; none if it is not known."""
    if option in KEYS:
        return [option]
    owners: dict[str, list[Any]] = {part: [*catalogue.values()] for part, catalogue in CATALOGUES.items()}
    owners["data"] = [DataOptions]
    owners |= {"checkpoint": [CheckpointOptions], "rollback": [RollbackOptions]}
    return [
        f"{part}.{option}" for part, entries in owners.items() if any(option in parameters_of(e) for e in entries)
    ]


def _data(value: Any) -> tuple[DataOptions, dict[str, Any]]:
    """Build the options that all datasets have, and check those of this one against its function."""
    name, options = split(value, "data")
    reader, common = DATASETS[name], parameters_of(DataOptions)
    if not takes_any_name(reader):
        check_names(options, {*common, *parameters_of(reader)}, "data")
    own = {key: item for key, item in options.items() if key not in common}
    rest = {key: item for key, item in options.items() if key in common}
    return build(DataOptions, {"name": name, **rest}, "data"), checked(reader, own, "data", supplied=["root"])


def import_code(raw: Mapping[str, Any]) -> None:
    """Import the code that a recipe names as `package.module:attribute`, so that `make_recipe` accepts the names.

    Call it only with names that the user has typed or approved.

    Raises:
        UserError: If the import fails.
    """
    for part, name in code_in(raw).items():
        CATALOGUES[part].import_code(name)


def code_in(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the form `package.module:attribute` in a recipe, by part."""
    values = {part: raw.get(part) for part in CATALOGUES}
    named = {part: value.get("name") if isinstance(value, Mapping) else value for part, value in values.items()}
    names = {part: without_suffix(str(name))[0] for part, name in named.items()}
    return {part: name for part, name in names.items() if names_code(name)}


def _topology(value: Any, seed: int) -> Algorithm:
    """Build an algorithm by name; the suffixes `-itop` and `-fast` change its defaults."""
    name, options = split(value, "topology")
    base, suffix = without_suffix(name)
    cls = ALGORITHMS[base]
    options = {"seed": seed, **options}
    if not suffix:
        return build(cls, options, "topology")
    if not issubclass(cls, Dynamic):
        raise UserError(f'topology: "{base}" has no schedule of updates, so there is no "{name}"')
    return call(cls.itop if suffix == "itop" else cls.fast, checked(cls, options, "topology"), "topology")


def without_suffix(name: str) -> tuple[str, str]:
    """Split the name of a topology, such as `rigl-itop`, into algorithm and suffix."""
    base, _, suffix = name.rpartition("-")
    return (base, suffix) if suffix in ("itop", "fast") else (name, "")


def _refuse_old_names(raw: Mapping[str, Any], where: str) -> None:
    for old, new in OLD_NAMES.items():
        part, _, key = old.rpartition(".")
        options = raw.get(part) if part else raw
        if isinstance(options, Mapping) and key in options:
            raise UserError(f'{where}: "{old}" is now called "{new}"')


# Reading


def read_recipe(*sources: str) -> dict[str, Any]:
    """Read recipes and merge them; later ones override earlier ones, see `lay_over`.

    Args:
        sources: Files, or names of packaged recipes. A recipe may name another one, or a list of them, as its `base`.
    """
    result: dict[str, Any] = {}
    for source in sources:
        result = lay_over(result, _read_with_base(source, []))
    return result


def _read_with_base(source: str, seen: list[str]) -> dict[str, Any]:
    raw = _read_one(source)
    bases = raw.pop("base", [])
    result: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases if isinstance(bases, list) else [None]:
        if not isinstance(base, str):
            raise UserError(f"{source}: base is the name or the file of another recipe, or a list of them")
        if _is_file_name(base):
            base = os.path.normpath(Path(source).parent / base)
        if base in seen:
            raise UserError(f"{source}: its base leads back to itself")
        result = lay_over(result, _read_with_base(base, [*seen, source, base]))
    return lay_over(result, raw) if bases else raw


def lay_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two recipes.

    A part of `over` with the same name as in `base`, or without a name, adds its options; a part with another name
    replaces the one in `base`, of which it keeps the options that it lists under `keep`.
    """
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        old = {"name": old} if isinstance(old, str) and key in DEFAULT_NAMES else old
        if isinstance(value, Mapping):
            value, old = dict(value), old if isinstance(old, Mapping) else {}
            kept = value.pop("keep", ()) if key in DEFAULT_NAMES else ()
            renamed = value.get("name", old.get("name")) != old.get("name")
            value = {**{option: old[option] for option in old if not renamed or option in kept}, **value}
        result[key] = value
    return result


def _read_one(source: str) -> dict[str, Any]:
    if _is_file_name(source) or os.path.isfile(source):
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the recipe {source}: {error}") from None
    elif source in (known := packaged_recipes()):
        text = (resources.files("equipoise") / "recipes" / f"{source}.yaml").read_text()
    else:
        hint = suggestion(source, list(known))
        raise UserError(f'no recipe is called "{source}" and there is no such file{hint}')
    raw = parse_yaml(text, source)
    if not isinstance(raw, Mapping) or not all(isinstance(key, str) for key in raw):
        raise UserError(f"{source}: a recipe is keys and values, such as `model: vgg_c`")
    _refuse_old_names(raw, source)
    return dict(raw)


def _is_file_name(source: str) -> bool:
    return source.endswith((".yaml", ".yml"))


def packaged_recipes() -> dict[str, str]:
    """Return the comment in the first line of every packaged recipe, by name."""
    folder = resources.files("equipoise") / "recipes"
    files = {f.name.removesuffix(".yaml"): f for f in folder.iterdir() if f.name.endswith(".yaml")}
    return {name: files[name].read_text().partition("\n")[0].lstrip("# ") for name in sorted(files)}


def dump_recipe(raw: Mapping[str, Any]) -> str:
    """Return a recipe as YAML."""
    return yaml.safe_dump(dict(raw), sort_keys=False)


# Overrides


def apply_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set `key=value` and `part.key=value` in a copy of a recipe.

    A part that gets another name keeps the options that both have.
    """
    result = copy.deepcopy(dict(raw))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f'"{override}" is not an override; write key=value, such as topology.sparsity=0.95')
        _set(result, key, parse_yaml(text, override))
    return result


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    *outer, last = key.split(".")
    inner, defaults = raw, DEFAULT_NAMES
    for word in outer:
        found = inner.get(word, defaults.get(word))
        found = {"name": found} if isinstance(found, str) else {} if found is None else found
        if not isinstance(found, dict):
            raise UserError(f'"{word}" has no options, so "{key}" cannot be set')
        inner[word] = found
        inner, defaults = found, {}
    inner[last] = value if outer or not isinstance(value, str) else _renamed(last, raw.get(last), value)


def _renamed(part: str, old: Any, name: str) -> Any:
    """Return a part under another name, with the options that the new one has too."""
    if not isinstance(old, dict) or "name" not in old:
        return name
    known = set(old)
    if part in CATALOGUES:
        base = without_suffix(name)[0] if part == "topology" else name
        known = {*parameters_of(CATALOGUES[part][base]), *(parameters_of(DataOptions) if part == "data" else ())}
    return {**{key: item for key, item in old.items() if key in known}, "name": name}
