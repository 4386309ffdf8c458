"""Read the results of studies and runs.

A file, or a part of one, that cannot be used is reported in one line, and the rest is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from equipoise.config import convert, parse_yaml
from equipoise.errors import UserError, one_line
from equipoise.studies.recipe_match import differences
from equipoise.studies.results import VERSION, Claim, Epoch, PaperValue, Reading, Result, Study
from equipoise.training.run_folder import RunFolder

T = TypeVar("T")
LARGEST = 1e100  # a larger number is read as null, so that no mean or deviation overflows
OPTIONAL = ("seconds", "train_loss", "density", "exploration", "peak_memory", "learning_rate")
MIGRATE = "python tools/migrate_results.py"


def read_results(path: Path) -> Reading:
    """Read a folder of studies, the folder of one study, or the folder of a run.

    A folder of studies may hold `images.yaml`, a description of the images by the name of their dataset.

    Raises:
        UserError: If `path` is not a folder.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; name a folder of results or of a run")
    problems: list[str] = []
    single = (path / "recipe.yaml").is_file() or any(path.glob("*.json"))
    folders = [path] if single else sorted(f for f in path.iterdir() if f.is_dir() and not f.name.startswith("."))
    images = _images(path.parent if single else path, problems)
    studies: list[Study] = []
    for folder in folders:
        with _reporting(folder, problems):
            if (folder / "recipe.yaml").is_file():
                studies.append(_read_run(folder, problems))
            elif any(folder.glob("*.json")):
                study = _read_study(folder, problems)
                studies.append(replace(study, images=images.get(_dataset(study), "")))
    if not studies and not problems:
        problems.append(f"{path} holds no results: neither study.json and ARM-seedN.json nor a run's recipe.yaml")
    return Reading(tuple(studies), tuple(" ".join(line.split()) for line in problems))


@contextmanager
def _reporting(path: Path, problems: list[str]) -> Iterator[None]:
    """Turn an error in the block into a line of `problems`."""
    try:
        yield
    except UserError as error:
        problems.append(f"{path}: left out: {error}")
    except OSError as error:
        problems.append(f"{path}: left out: {error.strerror or error}")


def _images(folder: Path, problems: list[str]) -> Mapping[str, str]:
    """Read the descriptions of the images by dataset; empty if there are none."""
    file = folder / "images.yaml"
    if not file.is_file():
        return {}
    with _reporting(file, problems):
        return convert(parse_yaml(file.read_text(encoding="utf-8"), file.name), Mapping[str, str], file.name)
    return {}


def _dataset(study: Study) -> str:
    """Return the name of the dataset of a study; empty if it has no run."""
    recipe = next((run.recipe for runs in (*study.results.values(), *study.diverged.values()) for run in runs), {})
    data = recipe.get("data", "digits")
    return str(_mapping(data).get("name", data))


# Studies


def _read_study(folder: Path, problems: list[str]) -> Study:
    file = folder / "study.json"
    design: dict[str, Any] = {}
    study = Study(folder.name, folder.name, "", {})
    if not file.is_file():
        problems.append(f"{folder} has no study.json: arms are shown as found, without claims")
    else:
        with _reporting(file, problems):
            design = read_json(file)
            title = design.get("name", folder.name)
            read: dict[str, Any] = {"results": {}, "claims": (), "paper": (), "diverged": {}}
            study = _fill(Study, {"name": folder.name, "title": title, "about": "", **design, **read})
    arms = _read_arms(folder, design, problems)
    splits = sorted({r.epochs[-1].split for results in arms.values() for r in results if r.epochs})
    if len(splits) > 1:
        problems.append(f"{folder}: the accuracies are of {' and of '.join(splits)} images")
    if missing := [arm for arm, results in arms.items() if not results and arm not in study.budgets]:
        problems.append(f"{folder}: no finished seed of {', '.join(missing)}")
    return replace(
        study,
        results={arm: tuple(r for r in results if not r.diverged) for arm, results in arms.items()},
        claims=_entries(Claim, design, "claims", file, problems),
        paper=_entries(PaperValue, design, "paper", file, problems),
        diverged={arm: lost for arm, results in arms.items() if (lost := tuple(r for r in results if r.diverged))},
    )


def _entries(cls: type[T], design: Mapping[str, Any], key: str, file: Path, problems: list[str]) -> tuple[T, ...]:
    """Make a dataclass of each entry of a list in study.json."""
    entries = []
    with _reporting(file, problems):
        for i, value in enumerate(convert(design.get(key, []), Sequence[Any], key)):
            with _reporting(file, problems):
                entries.append(convert(value, cls, f"{key}[{i}]"))
    return tuple(entries)


def _read_arms(folder: Path, design: Mapping[str, Any], problems: list[str]) -> dict[str, tuple[Result, ...]]:
    """Read the finished results by arm: first the arms of study.json, then others that are found."""
    by_arm: dict[str, dict[int, Result]] = {arm: {} for arm in _mapping(design.get("arms"))}
    for file in sorted(folder.glob("*.json")):
        if file.name == "study.json":
            continue
        with _reporting(file, problems):
            result = _result(read_json(file), design.get("name"), file, problems)
            seeds = by_arm.get(result.arm, {})
            if result.seed in seeds:
                raise UserError(f"another file holds seed {result.seed} of {result.arm}")
            for other in seeds.values():
                if result.recipe and other.recipe and (apart := differences(result.recipe, other.recipe)):
                    raise UserError(f"its recipe differs from that of seed {other.seed}: {', '.join(apart)}")
            by_arm[result.arm] = {**seeds, result.seed: result}
    return {arm: tuple(seeds[seed] for seed in sorted(seeds)) for arm, seeds in by_arm.items()}


def _result(value: Mapping[str, Any], study: Any, file: Path, problems: list[str]) -> Result:
    if not value.get("arm") or "seed" not in value:
        raise UserError("it does not say which arm and seed it is of")
    if isinstance(study, str) and value.get("study", study) != study:
        raise UserError(f"it is of another study, {str(value['study'])[:80]}")
    if value.get("finished") is not True:
        raise UserError("it is not finished")
    measured = _mapping(value.get("measured"))
    everywhere = _numbers(measured.get("everywhere"))
    read = {
        "epochs": (),
        "test": _accuracies(_mapping(value.get("result")).get("test")),
        "layers": _layers(value.get("layers")),
        "robust": {score: _numbers(found) for score, found in _mapping(value.get("robust")).items()},
        "measured": _numbers(measured) | {f"{key} everywhere": number for key, number in everywhere.items()},
        "diverged": one_line(str(value.get("diverged", "")), 200),
        "spent": _spent(_list(value.get("epochs"))),
    }
    result = _fill(Result, {**value, **read})
    lines = _list(value.get("epochs"))
    epochs = _epochs(lines, file, problems) if lines or not result.diverged else ()
    planned = result.recipe.get("epochs")
    if not result.diverged and isinstance(planned, int) and epochs[-1].epoch != planned:
        raise UserError(f"its last epoch is {epochs[-1].epoch} of {planned}")
    along = {_number(line.get("epoch")): _numbers(line) for line in map(_mapping, _list(measured.get("along")))}
    epochs = tuple(replace(epoch, measured=along.get(epoch.epoch, {})) for epoch in epochs)
    if not _seconds_are_comparable(result.environment, lines):
        epochs = tuple(replace(epoch, seconds=None) for epoch in epochs)
    return replace(result, epochs=epochs)


def _spent(lines: Sequence[Any]) -> float | None:
    """Return the seconds of the last epoch's line, start-up included."""
    last = _mapping(lines[-1]) if lines else {}
    seconds = _number(last.get("seconds"))
    return None if seconds is None else seconds + (_number(last.get("startup_seconds")) or 0.0)


def _seconds_are_comparable(environment: Mapping[str, Any], lines: Sequence[Any]) -> bool:
    """Whether the run had its device to itself and, on a GPU, recorded its start-up separately.

    Compiling takes longer than an epoch of many studies, and less for later arms than for the first one.
    """
    alone = (_number(environment.get("jobs_on_device")) or 1) <= 1
    on_cpu = environment.get("device") == "cpu"
    return alone and (on_cpu or all("startup_seconds" in _mapping(line) for line in lines))


# Runs


def _read_run(folder: Path, problems: list[str]) -> Study:
    """Read the folder of a run, finished or not, as a study of one arm and one seed."""
    run = RunFolder(folder)
    recipe: Mapping[str, Any] = {}
    end: Mapping[str, Any] | None = {}
    with _reporting(folder / "recipe.yaml", problems):
        recipe = run.recipe()
    with _reporting(folder, problems):
        end = run.result()
    if end is None:
        problems.append(f"{folder}: the run is not finished; its epochs so far are shown")
    if not run.metrics_file.is_file():
        raise UserError("it has no metrics.jsonl yet")
    name = folder.resolve().name
    result = Result(
        arm=name,
        seed=int(_number(recipe.get("seed")) or 0),
        epochs=_epochs(_lines(run.metrics_file), run.metrics_file, problems),
        finished=bool(end),
        recipe=recipe,
        test=_accuracies(_mapping(end).get("test")),
        layers=_layers(_mapping(end).get("layers")),
    )
    return Study(name, name, _summary(recipe), {name: (result,)})


def _lines(file: Path) -> list[Any]:
    """Parse a file of JSON lines; a line that is not a JSON object becomes `None`."""
    lines: list[Any] = []
    for text in file.read_bytes().splitlines():
        try:
            lines.append(_parse_json(text))
        except UserError:
            lines.append(None)
    return lines


def _summary(recipe: Mapping[str, Any]) -> str:
    """Describe a recipe: `model small, data digits, topology rigl, correction agent, 10 epochs`."""
    parts = []
    for key in ("model", "data", "topology", "objective", "correction", "optimizer"):
        value = recipe.get(key)
        name = value.get("name") if isinstance(value, dict) else value
        parts += [f"{key} {name}"] if isinstance(name, str) else []
    epochs = recipe.get("epochs")
    return ", ".join([*parts, *([f"{epochs} epochs"] if isinstance(epochs, int) else [])])


# Epochs


def _epochs(lines: Sequence[Any], file: Path, problems: list[str]) -> tuple[Epoch, ...]:
    """Read epochs from their lines, in order; report those that are left out by line number."""
    found: dict[int, Epoch] = {}
    bad = []
    for i, line in enumerate(lines, 1):
        try:
            epoch = _epoch(line)
        except UserError:
            bad.append(str(i))
        else:
            found[epoch.epoch] = epoch
    if bad:
        shown = ", ".join(bad[:5]) + (", ..." if len(bad) > 5 else "")
        problems.append(f"{file}: {len(bad)} of {len(lines)} epochs left out, not as a run writes them: {shown}")
    if not found:
        raise UserError("it has no finished epoch")
    return tuple(found[epoch] for epoch in sorted(found))


def _epoch(line: Any) -> Epoch:
    match line:
        case {"epoch": int(epoch), "step": int(step), "scores": dict(scores)}:
            given: dict[str, Any] = {key: _number(line.get(key)) for key in OPTIONAL}
            given |= {key: _numbers(line.get(key)) for key in ("passes", "correction")}
            return Epoch(epoch, step, _accuracies(scores), split=str(line.get("split", "test")), **given)
    raise UserError("expected epoch, step and scores")


# Values


def read_json(path: Path) -> dict[str, Any]:
    """Read a result or study file of this version.

    Raises:
        UserError: If the file is not a JSON object or of another version.
    """
    value = _parse_json(path.read_bytes())
    version = value.get("version")
    if version == 1:
        raise UserError(f"it is of version 1; `{MIGRATE} {path.parent.parent}` rewrites it")
    if version != VERSION:
        raise UserError(f"it is of version {version!r}; this equipoise reads version {VERSION}"[:120])
    return value


def _parse_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object, without NaN and infinity."""
    try:
        value = json.loads(text.decode("utf-8"), parse_float=_bounded, parse_int=_bounded, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise UserError("it is damaged (not JSON); remove it and run the study again") from None
    if not isinstance(value, dict):
        raise UserError("it is damaged (not a JSON object); remove it and run the study again")
    return value


def _bounded(text: str) -> float | None:
    number = float(text)
    if not abs(number) < LARGEST:
        return None
    return number if set(text) & set(".eE") else int(text)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _fill(cls: type[T], value: Mapping[str, Any]) -> T:
    """Make a dataclass from those keys of a mapping that it has, with checked types."""
    return cls(**{key: convert(value[key], hint, key) for key, hint in get_type_hints(cls).items() if key in value})


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _numbers(value: Any) -> dict[str, float]:
    """Return the entries of a mapping that are numbers."""
    return {key: float(item) for key, item in _mapping(value).items() if _number(item) is not None}


def _accuracies(scores: Any) -> dict[str, float]:
    """Return accuracy by score from `{score: {accuracy, loss}}`."""
    found = {score: _numbers(values).get("accuracy") for score, values in _mapping(scores).items()}
    return {score: accuracy for score, accuracy in found.items() if accuracy is not None}


def _layers(layers: Any) -> dict[str, tuple[int, int]]:
    """Return size and active count by layer from `{layer: {size, active}}`."""
    found = {name: _numbers(layer) for name, layer in _mapping(layers).items()}
    return {
        name: (int(n["size"]), int(n["active"]))
        for name, n in found.items()
        if n.get("size", 0) >= 1 and n.get("active", -1) >= 0
    }
