"""Reading results of studies and runs with tolerance: what cannot be used is named, the rest is read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from equipoise.errors import UserError, one_line
from equipoise.studies.results import VERSION, Claim, Epoch, PaperValue, Reading, Result, Study
from equipoise.training.run_folder import RunFolder

T = TypeVar("T")


class Unusable(ValueError):
    """Why a file or a part of it is left out."""


@contextmanager
def naming(where: object, problems: list[str]) -> Iterator[None]:
    """What cannot be used in this block is named in a line of `problems`, and the block is left."""
    try:
        yield
    except (Unusable, UserError) as why:
        problems.append(f"{where}: left out: {why}")
    except OSError as error:
        problems.append(f"{where}: left out: {error.strerror or error}")


def read_results(path: Path) -> Reading:
    """A folder of studies, one study, or one run; what cannot be used is named, the rest is read."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; name a folder of results or of a run")
    problems: list[str] = []
    one = (path / "recipe.yaml").is_file() or any(path.glob("*.json"))
    folders = [path] if one else sorted(f for f in path.iterdir() if f.is_dir() and not f.name.startswith("."))
    studies = [study for folder in folders if (study := _read_folder(folder, problems)) is not None]
    if not studies and not problems:
        problems.append(f"{path} holds no results: neither study.json and ARM-seedN.json nor a run's recipe.yaml")
    return Reading(tuple(studies), tuple(" ".join(line.split()) for line in problems))


def _read_folder(folder: Path, problems: list[str]) -> Study | None:
    study = None
    with naming(folder, problems):
        if (folder / "recipe.yaml").is_file():
            study = _read_run(folder, problems)
        elif any(folder.glob("*.json")):
            study = _read_study(folder, problems)
    return study


def _read_study(folder: Path, problems: list[str]) -> Study:
    file = folder / "study.json"
    asked: Mapping[str, Any] = {}
    if file.is_file():
        with naming(file, problems):
            asked = read_json(file)
    else:
        problems.append(f"{folder} has no study.json: arms are shown as found, without claims")
    name = _text(asked.get("name"))  # a study.json that cannot be read is no reason to doubt the results
    budgets = {arm: base for arm, base in as_mapping(asked.get("budgets")).items() if isinstance(base, str)}
    arms = _read_arms(folder, name, list(as_mapping(asked.get("arms"))), problems)
    splits = sorted({r.epochs[-1].split for results in arms.values() for r in results if r.epochs})
    if len(splits) > 1:
        problems.append(f"{folder}: accuracies of {' and '.join(splits)} images stand beside each other")
    name = name or folder.name
    if missing := [arm for arm, results in arms.items() if not results and arm not in budgets]:
        problems.append(f"{folder}: no finished seed of {', '.join(missing)}")
    return Study(
        name=name,
        title=_text(asked.get("title")) or name,
        about=_text(asked.get("about")),
        results={arm: tuple(r for r in results if not r.diverged) for arm, results in arms.items()},
        claims=_entries(asked.get("claims"), _claim, f"{file}: claim", problems),
        paper=_entries(asked.get("paper"), _paper_value, f"{file}: paper", problems),
        shows=tuple(text for text in _list(asked.get("shows")) if isinstance(text, str)),
        budgets=budgets,
        diverged={arm: lost for arm, results in arms.items() if (lost := tuple(r for r in results if r.diverged))},
    )


def _read_arms(folder: Path, study: str, arms: list[str], problems: list[str]) -> dict[str, tuple[Result, ...]]:
    """The finished results by arm: first the arms that were asked for, then others that are there."""
    by_arm: dict[str, dict[int, Result]] = {arm: {} for arm in arms}
    for file in sorted(folder.glob("*.json")):
        if file.name == "study.json":
            continue
        with naming(file, problems):
            result = _result(read_json(file), study, file, problems)
            seeds = by_arm.setdefault(result.arm, {})
            if result.seed in seeds:
                raise Unusable(f"seed {result.seed} of {result.arm} has been read from another file")
            for other in seeds.values():
                if apart := _differences(result.recipe, other.recipe):
                    raise Unusable(f"its recipe is not that of seed {other.seed}: {', '.join(apart)}")
            by_arm[result.arm][result.seed] = result
    return {arm: tuple(seeds[seed] for seed in sorted(seeds)) for arm, seeds in by_arm.items()}


def _differences(recipe: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What two seeds of one arm differ in but where and how they ran."""
    keys = sorted({*recipe, *other} - {"seed", "device", "storage", "checkpoint"})
    return [key for key in keys if recipe and other and _asked(recipe.get(key)) != _asked(other.get(key))]


def _asked(part: Any) -> Any:
    """A part of a recipe without what memory chose: whether old gradients are computed again or replayed."""
    options = {"name": part} if isinstance(part, str) else part
    chosen = isinstance(options, dict) and options.get("score") in ("recompute", "replay")
    return {key: value for key, value in options.items() if key != "score"} if chosen else options


def _read_run(folder: Path, problems: list[str]) -> Study:
    """The folder of a run as a study of one arm and one seed; a run that goes on is shown as far as it is."""
    recipe: Mapping[str, Any] = {}
    with naming(folder / "recipe.yaml", problems):
        recipe = RunFolder(folder).recipe()
    name = folder.resolve().name
    file = folder / "result.json"
    end: Mapping[str, Any] = {}
    if file.is_file():
        with naming(file, problems):
            end = read_json(file)
    else:
        problems.append(f"{folder}: not finished: it is shown as far as it is")
    epochs = _epochs(_numbered_lines(folder / "metrics.jsonl"), folder / "metrics.jsonl", problems)
    result = Result(
        arm=name,
        seed=_count(recipe.get("seed"), least=0) or 0,
        epochs=epochs,
        finished=bool(end),
        recipe=recipe,
        test=_accuracies(end.get("test")),
        layers=_layers(end.get("layers")),
    )
    return Study(name, name, _in_words(recipe), {name: (result,)})


def _in_words(recipe: Mapping[str, Any]) -> str:
    """What a run is of: `model small, data digits, topology rigl, correction agent, 10 epochs`."""
    parts = []
    for key in ("model", "data", "topology", "objective", "correction", "optimizer"):
        value = recipe.get(key)
        if name := _text(as_mapping(value).get("name")) or _text(value):
            parts.append(f"{key} {name}")
    epochs = _count(recipe.get("epochs"))
    return ", ".join([*parts, *([f"{epochs} epochs"] if epochs else [])])


def _numbered_lines(path: Path) -> list[tuple[int, Any]]:
    """The lines of a file as JSON, by number; None for one that is no JSON object."""
    lines: list[tuple[int, Any]] = []
    if not path.is_file():
        raise Unusable("it has no metrics.jsonl yet")
    for i, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            lines.append((i, parse_json(text)))
        except Unusable:
            lines.append((i, None))
    return lines


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object of this version."""
    value = parse_json(path.read_bytes())
    if value.get("version") != VERSION:
        raise Unusable(f"version {value.get('version')!r}, where {VERSION} can be read"[:120])
    return value


def parse_json(text: bytes) -> Mapping[str, Any]:
    """A JSON object; NaN and infinity, which JSON does not have, are no part of it."""
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Unusable("not JSON, perhaps written by half") from None
    if not isinstance(value, dict):
        raise Unusable("not a JSON object")
    return value


def _refuse(word: str) -> float:
    raise ValueError(word)


def _result(value: Mapping[str, Any], study: str, where: Path, problems: list[str]) -> Result:
    """A result from its file; an epoch that is not as it should be is named and left out."""
    arm, seed = _text(value.get("arm")), _count(value.get("seed"), least=0)
    if not arm or seed is None:
        raise Unusable("it does not say which arm and seed it is of")
    if study and value.get("study", study) != study:
        raise Unusable(f"it is of another study, {str(value['study'])[:80]}")
    if value.get("finished") is not True:
        raise Unusable("it is not finished")
    lines = value.get("epochs")
    if not isinstance(lines, list):
        raise Unusable("it has no epochs")
    diverged = one_line(_text(value.get("diverged")), 200)
    epochs = _epochs(list(enumerate(lines, 1)), where, problems) if lines or not diverged else ()
    asked = _count(as_mapping(value.get("recipe")).get("epochs"))
    if not diverged and asked and epochs[-1].epoch != asked:
        raise Unusable(f"its last epoch is {epochs[-1].epoch} of {asked}")
    environment = as_mapping(value.get("environment"))
    if not _seconds_count(environment, lines):
        epochs = tuple(replace(epoch, seconds=None) for epoch in epochs)
    return Result(
        arm=arm,
        seed=seed,
        epochs=_with_measurements(epochs, as_mapping(value.get("measured")).get("along")),
        recipe=as_mapping(value.get("recipe")),
        environment=environment,
        test=_accuracies(as_mapping(value.get("result")).get("test")),
        layers=_layers(value.get("layers")),
        robust={score: numbers(found) for score, found in as_mapping(value.get("robust")).items()},
        measured=_measured(as_mapping(value.get("measured"))),
        diverged=diverged,
    )


def _seconds_count(environment: Mapping[str, Any], lines: list[Any]) -> bool:
    """Whether seconds can be compared: no other run was on the device, and a GPU's start-up is told apart.

    Compiling takes longer than many an epoch, and less for the later arms of a study than for its first.
    """
    alone = (number(environment.get("jobs_on_device")) or 1) <= 1
    return alone and (
        environment.get("device") == "cpu" or all("startup_seconds" in as_mapping(line) for line in lines)
    )


def _epochs(lines: list[tuple[int, Any]], where: Path, problems: list[str]) -> tuple[Epoch, ...]:
    """Epochs from numbered lines, in order; one that is not as it should be is named by its number and left out."""
    found: dict[int, Epoch] = {}
    bad = []
    for number, line in lines:
        try:
            epoch = _epoch(line)
        except Unusable:
            bad.append(number)
        else:
            found[epoch.epoch] = epoch
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        problems.append(f"{where}: {len(bad)} of {len(lines)} epochs left out, not as a run writes them: {shown}")
    if not found:
        raise Unusable("it has no finished epoch")
    return tuple(found[epoch] for epoch in sorted(found))


def _epoch(line: Any) -> Epoch:
    if not isinstance(line, dict):
        raise Unusable("not an object")
    epoch, step, scores = _count(line.get("epoch")), _count(line.get("step")), line.get("scores")
    if epoch is None or step is None or not isinstance(scores, dict):
        raise Unusable("no epoch, step or scores")
    if any(not 0 <= accuracy <= 1 for accuracy in _accuracies(scores).values()):
        raise Unusable("an accuracy is not a share")
    return Epoch(
        epoch=epoch,
        step=step,
        scores=_accuracies(scores),
        passes=numbers(line.get("passes")),
        seconds=number(line.get("seconds")),
        correction=numbers(line.get("correction")),
        split=_text(line.get("split")) or "test",
        train_loss=number(line.get("train_loss")),
        density=number(line.get("density")),
        exploration=number(line.get("exploration")),
        peak_memory=number(line.get("peak_memory")),
        learning_rate=number(line.get("learning_rate")),
    )


def _measured(value: Mapping[str, Any]) -> dict[str, float]:
    """The numbers, and those of noise on all weights under their names and `everywhere`."""
    everywhere = numbers(value.get("everywhere"))
    return numbers(value) | {f"{key} everywhere": found for key, found in everywhere.items()}


def _with_measurements(epochs: tuple[Epoch, ...], along: Any) -> tuple[Epoch, ...]:
    """The epochs with what was measured at their ends."""
    found = {_count(as_mapping(line).get("epoch")): numbers(line) for line in _list(along)}
    return tuple(replace(epoch, measured=found.get(epoch.epoch, {})) for epoch in epochs)


def _claim(value: Mapping[str, Any]) -> Claim:
    better, than = _required(value, "better"), _required(value, "than")
    metric = _text(value.get("metric")) or "accuracy"
    says = _text(value.get("says")) or f"{better} is better than {than} in {metric}"
    margin = number(value.get("margin", 0.0))
    if margin is None or margin < 0:
        raise Unusable("its margin is not a number from 0 on")
    return Claim(says, better, than, metric, margin=margin, **_question(value))


def _paper_value(value: Mapping[str, Any]) -> PaperValue:
    found = number(value.get("value"))
    if found is None:
        raise Unusable("its value is not a number")
    return PaperValue(_required(value, "arm"), _text(value.get("what")) or "accuracy", found, **_question(value))


def _question(value: Mapping[str, Any]) -> dict[str, Any]:
    """at, score and threshold, which say where a metric is looked at."""
    at = _count(value.get("at"))
    if at is None and value.get("at") is not None:
        raise Unusable("`at` is not an epoch")
    return {"at": at, "score": _text(value.get("score")) or "plain", "threshold": number(value.get("threshold"))}


def _required(value: Mapping[str, Any], key: str) -> str:
    if not (text := _text(value.get(key))):
        raise Unusable(f"`{key}` is missing")
    return text


def _entries(value: Any, parse: Callable[[Mapping[str, Any]], T], where: str, problems: list[str]) -> tuple[T, ...]:
    entries = []
    for i, item in enumerate(_list(value), 1):
        with naming(f"{where} {i}", problems):
            entries.append(parse(as_mapping(item)))
    if value and not isinstance(value, list):
        problems.append(f"{where}: left out: not a list")
    return tuple(entries)


# Values of whatever type they came as


def as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A finite number, or None for whatever else there is."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e100:
        return None
    return float(value) if math.isfinite(value) else None


def numbers(value: Any) -> dict[str, float]:
    return {key: found for key, item in as_mapping(value).items() if (found := number(item)) is not None}


def _accuracies(value: Any) -> dict[str, float]:
    """Accuracy by score, of scores as they are written: {score: {accuracy, loss}}."""
    pairs = {score: number(as_mapping(found).get("accuracy")) for score, found in as_mapping(value).items()}
    return {score: accuracy for score, accuracy in pairs.items() if accuracy is not None}


def _layers(value: Any) -> dict[str, tuple[int, int]]:
    found = {}
    for name, layer in as_mapping(value).items():
        size, active = _count(as_mapping(layer).get("size")), _count(as_mapping(layer).get("active"), least=0)
        if size is not None and active is not None:
            found[name] = (size, active)
    return found


def _count(value: Any, least: int = 1) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return int(value) if whole and least <= value < 2**53 else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
