"""Check that numbers in README and docs are those of the committed results, or write them.

    python tools/check_figures.py [--write]

A number, or a whole table, stands between two comments, which readers do not see:

    <!-- figure: accuracy set-itop SGD -->84.7 ± 0.0 %<!-- /figure -->

The first word is one of the functions below, the others are its arguments; words with spaces are quoted, and
`name=value` is an option. The check computes the text from `results/` and `bench/results/` and compares it letter by
letter. It also compares docs/reproduction.md with the page that `equipoise study --reproduction` writes, and the charts
of tools/charts.py with their data. Prints one line for each difference; exit status 1 if one is left.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import charts
import cpu_times
from charts import stale_charts
from equipoise.report.reproduction import write_page
from equipoise.studies.compare import spread_of
from equipoise.studies.reading import read_results
from equipoise.studies.results import Claim, Question, Study
from equipoise.studies.verdict import judge

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "bench"))
import accelerate_tables  # noqa: E402
import gpu_compare  # noqa: E402

MARK = re.compile(r"(<!-- figure: (.*?) -->)(.*?)(<!-- /figure -->)", re.DOTALL)
FIGURES: dict[str, Callable[..., str]] = {}


class Unknown(Exception):
    """A figure that cannot be computed; the text says why."""


def figure(function: Callable[..., str]) -> Callable[..., str]:
    """Make a function available by its name; its arguments are strings."""
    FIGURES[function.__name__] = function
    return function


# Studies: results/STUDY


@functools.cache
def study(name: str) -> Study:
    found = read_results(ROOT / "results" / name).studies if (ROOT / "results" / name).is_dir() else ()
    if len(found) != 1:
        raise Unknown(f"results/{name} has no study")
    return found[0]


def asked(options: dict[str, str]) -> dict[str, Any]:
    """Convert the options of a `Question`: metric, at, threshold, score."""
    kinds: dict[str, Callable[[str], Any]] = {"at": int, "threshold": float}
    return {"metric": "accuracy"} | {key: kinds.get(key, str)(value) for key, value in options.items()}


def signed(value: float, digits: int) -> str:
    text = f"{100 * value:+.{digits}f}"
    return (text if float(text) else text[1:]).replace("-", "−")


@figure
def accuracy(name: str, arm: str, digits: str = "1", **options: str) -> str:
    """`84.7 ± 0.3 %`: mean and standard deviation over the runs of an arm."""
    found = spread_of(study(name).results.get(arm, ()), Question(**asked(options)))
    if found is None:
        raise Unknown(f"{arm} has no result in the study {name}")
    deviation = "" if found.std is None else f" ± {100 * found.std:.{digits}f}"
    return f"{100 * found.mean:.{digits}f}{deviation} %"


@figure
def gain(
    name: str, better: str, than: str, digits: str = "1", interval: str = "", words: str = "", **options: str
) -> str:
    """`−1.3 points`: the difference of two arms.

    `interval=yes` adds ` (−4.5 to +1.9)`, its 95 % interval; `words=yes` gives `1.3 points below`.
    """
    found = judge(study(name), Claim("", better, than, **asked(options)))
    if found.gain is None:
        raise Unknown(f"{better} and {than} cannot be compared in the study {name}: {found.why}")
    text = f"{signed(found.gain, int(digits))} points"
    if words:
        return f"{text.lstrip('+−')} {'above' if found.gain >= 0 else 'below'}"
    if not interval:
        return text
    if found.effect is None:
        raise Unknown(f"{better} and {than} have too few runs for an interval in the study {name}")
    low, high = found.effect.interval()
    return f"{text} ({signed(low, int(digits))} to {signed(high, int(digits))})"


def effects(name: str, pairs: Sequence[str]) -> Iterator[tuple[float, float, float]]:
    """Return the difference and its 95 % interval of each pair `A=B`, in points."""
    for pair in pairs:
        found = judge(study(name), Claim("", *pair.split("="), metric="accuracy"))
        if found.gain is None or found.effect is None:
            raise Unknown(f"{pair} cannot be compared in the study {name}: {found.why}")
        low, high = found.effect.interval()
        yield 100 * found.gain, 100 * low, 100 * high


@figure
def clear_differences(name: str, *pairs: str) -> str:
    """`2 of the 6`: how many of the 95 % intervals of the differences of pairs `A=B` exclude zero."""
    clear = [low > 0 or high < 0 for _, low, high in effects(name, pairs)]
    return f"{sum(clear)} of the {len(clear)}"


@figure
def largest_loss(name: str, *pairs: str, digits: str = "1") -> str:
    """`0.9 points`: the most that A is below B in one of the pairs `A=B`."""
    return f"{max(-gain for gain, _, _ in effects(name, pairs)):.{digits}f} points"


@figure
def correlation_gap(name: str, better: str, than: str) -> str:
    """`by 0.02 (−0.13 to 0.17)`: how much lower a correlation is in the second arm."""
    found = judge(study(name), Claim("", better, than, metric="correlation"))
    if found.gain is None or found.effect is None:
        raise Unknown(f"{better} and {than} cannot be compared in the study {name}: {found.why}")
    low, high = found.effect.interval()
    return f"by {found.gain:.2f} ({low:.2f} to {high:.2f})".replace("-", "−")


@figure
def score_gain(name: str, arm: str, better: str, than: str = "plain", at: str = "", digits: str = "1") -> str:
    """`+7.7 points`: the mean of five epochs of one arm in two scores, up to epoch `at`."""
    questions = [
        Question(metric="window-accuracy", at=int(at) if at else None, score=score) for score in (better, than)
    ]
    sides = [spread_of(study(name).results.get(arm, ()), question) for question in questions]
    if sides[0] is None or sides[1] is None:
        raise Unknown(f"{arm} has no {better} and {than} in the study {name}")
    return f"{signed(sides[0].mean - sides[1].mean, int(digits))} points"


@figure
def runs(name: str, *arms: str) -> str:
    """`2 and 2`: the number of runs of each arm."""
    return " and ".join(str(len(study(name).results.get(arm, ()))) for arm in arms)


PACKED = (90, 95, 99)
PATTERNS = {"unstructured": "single weights", "n:m": "n:m", "16x1": "`16x1`", "fan-in": "`fan_in`"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


@figure
def three_epochs(name: str, *arms: str) -> str:
    """Accuracy by epoch of all runs of a study of three epochs."""
    columns = [(0, "plain"), (0, "ema"), (1, "plain"), (1, "ema"), (2, "plain"), (2, "bn_recalibrated"), (2, "ema")]
    head = [
        "run, seed",
        "epoch 1: plain",
        "ema",
        "epoch 2: plain",
        "ema",
        "epoch 3: plain",
        "bn_recalibrated",
        "ema",
    ]
    rows = [
        [f"{arm}, {run.seed}", *(f"{100 * run.epochs[epoch].scores[score]:.2f}" for epoch, score in columns)]
        for arm in arms
        for run in study(name).results[arm]
    ]
    return table(head, rows)


@figure
def pattern_accuracies(*sparsities: str) -> str:
    """Accuracy of the study `patterns` by pattern and sparsity; an n:m stands with its name under `50=2:4`."""
    columns = [word.split("=") for word in sparsities]

    def cell(pattern: str, percent: str, n_to_m: str) -> str:
        arm = n_to_m if pattern == "n:m" else f"{pattern} {percent} %"
        name = f"{n_to_m}: " if pattern == "n:m" else ""
        return f"{name}{accuracy('patterns', arm, digits='2')} ({runs('patterns', arm)})"

    rows = [[name, *(cell(pattern, *column) for column in columns)] for pattern, name in PATTERNS.items()]
    return table(["", *(f"{percent} %" for percent, _ in columns)], rows)


# Benchmarks: bench/results


@functools.cache
def bench(file: str) -> Any:
    try:
        text = (ROOT / "bench" / "results" / file).read_text()
        return [json.loads(line) for line in text.splitlines()] if file.endswith(".jsonl") else json.loads(text)
    except (OSError, ValueError) as error:
        raise Unknown(f"bench/results/{file} cannot be read ({type(error).__name__})") from None


def entry(file: str, path: str) -> Any:
    """Return a value of a JSON file by its keys: `vgg_c/train/0.99`."""
    value = bench(file)
    for key in path.split("/"):
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (LookupError, TypeError, ValueError):
            raise Unknown(f"bench/results/{file} has no {path}") from None
    return value


def at(file: str, path: str) -> float:
    """Return a number of a JSON file by its keys."""
    value = entry(file, path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unknown(f"bench/results/{file}: {path} is not a number")
    return value


@figure
def value(file: str, path: str, scale: str = "1", format: str = ".1f") -> str:
    """A number of a benchmark, such as `value deploy.json 0/file_bytes scale=1e-3 format=.0f`."""
    return f"{at(file, path) * float(scale):{format}}"


@figure
def ratio(file: str, first: str, second: str, format: str = ".1f") -> str:
    """The ratio of two numbers of a benchmark."""
    return f"{at(file, first) / at(file, second):{format}}"


@figure
def faster(case: str, rival: str, than: str = "dense ") -> str:
    """How many times as fast a rival of bench/cpu.py is as the fastest dense one: `faster vgg_c/0 "packed 90 %"`.

    Dense rivals are those whose name begins with `than`, such as `than="dense float32"`.
    """
    section, number = case.split("/")
    path = f"{section}/measured/{number}/milliseconds"
    dense = [at("cpu.json", f"{path}/{name}") for name in entry("cpu.json", path) if name.startswith(than)]
    if not dense:
        raise Unknown(f'bench/results/cpu.json: {case} has no rival "{than}"')
    return f"{min(dense) / at('cpu.json', f'{path}/{rival}'):.1f}"


@figure
def speed_summary() -> str:
    """Times as fast as the fastest dense form, for each case of bench/cpu.py with packed models, by sparsity."""
    rows = []
    for found in (case for section in bench("cpu.json").values() for case in section["measured"]):
        times = {} if isinstance(found, str) else found["milliseconds"]
        dense = [name for name in times if name.startswith("dense ")]
        if any(f"packed {p} %" not in times for p in PACKED) or not dense:
            continue
        best = min(dense, key=times.__getitem__)
        packed = {
            p: min(times[name] for name in (f"packed {p} %", f"packed bf16 {p} %") if name in times) for p in PACKED
        }
        factors = [f"{times[best] / found:.1f}\N{NO-BREAK SPACE}×" for found in packed.values()]
        rows.append([found["case"], f"{best.removeprefix('dense ')}: {times[best]:,.0f} ms", *factors])
    return table(["", "fastest dense form", *(f"{percent} %" for percent in PACKED)], rows)


@figure
def cell(page: str, head: str, row: str, column: str) -> str:
    """`2.01 ×`: a cell of a table of a page, by the first cells of the table's head and of the row.

    The table has the command that prints it next to it.
    """
    found = []
    inside = ""
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        cells = [text.strip() for text in line.strip("|").split("|")] if line.startswith("|") else []
        inside = (inside or cells[0]) if cells else ""
        if cells and inside == head and cells[0] == row:
            found.append(cells)
    if len(found) != 1 or int(column) >= len(found[0]):
        raise Unknown(f"{page} has {len(found)} rows {row} below {head}, or none with a cell {column}")
    return found[0][int(column)]


@figure
def saved(file: str, first: str, second: str) -> str:
    """`26`: by how many percent the second number of a benchmark is lower than the first."""
    return f"{100 * (1 - at(file, second) / at(file, first)):.0f}"


@figure
def pattern_speeds(file: str, *sparsities: str) -> str:
    """Speed-up over dense float32 on a CPU by task, activations, pattern and sparsity, from bench/patterns_cpu.py."""
    arms = {
        ("train", ""): "training step, float32",
        ("train", " bf16"): "training step, bf16",
        ("infer", ""): "inference of 128, float32",
        ("infer", " bf16"): "inference of 128, bf16",
        ("infer 1", ""): "inference of 1, float32",
    }
    rows = [
        [f"{told}, {name}", *(f"{at(file, f'{task}/speedup/{pattern} {p} %{form}'):.1f} ×" for p in sparsities)]
        for (task, form), told in arms.items()
        for pattern, name in PATTERNS.items()
        if pattern != "n:m"
    ]
    return table(["", *(f"{percent} %" for percent in sparsities)], rows)


def layers(kind: str, *parts: str) -> list[dict[str, Any]]:
    """Return the rows of bench/patterns.py that have a kind of weight and one of these parts in their name."""
    found = [row for row in bench("patterns-gpu.json")["rows"] if isinstance(row.get(kind), dict)]
    found = [row for row in found if not parts or any(part in row["layer"] for part in parts)]
    if not found:
        raise Unknown(f"bench/results/patterns-gpu.json has no {kind} of {', '.join(parts)}")
    return found


def gpu_gain(row: dict[str, Any], kind: str, clock: str = "graph") -> float:
    return row["dense"][clock] / row[kind][clock]


def span(values: Iterable[float], format: str) -> str:
    found = sorted(values)
    low, high = f"{found[0]:{format}}", f"{found[-1]:{format}}"
    return low if low == high else f"{low} to {high}"


@figure
def gpu_gains(kind: str, *parts: str, clock: str = "graph", format: str = ".2f") -> str:
    """`1.14 to 1.28`: times as fast as dense bf16, over layers with one of these parts in their name."""
    return span((gpu_gain(row, kind, clock) for row in layers(kind, *parts)), format)


@figure
def gpu_times(kind: str, *parts: str, clock: str = "graph", format: str = ".2f") -> str:
    """`0.43 to 0.61`: milliseconds, over layers with one of these parts in their name."""
    return span((row[kind][clock] for row in layers(kind, *parts)), format)


@figure
def gpu_two_to_four() -> str:
    """Milliseconds of every layer, dense and 2:4, in a CUDA graph and as Python launches it."""

    def cells(row: dict[str, Any]) -> list[str]:
        times = [f"{row[kind][clock]:.3f}" for clock in ("graph", "eager") for kind in ("dense", "2:4")]
        gains = [f"{gpu_gain(row, '2:4', clock):.2f} ×" for clock in ("graph", "eager")]
        return [row["layer"], *times[:2], gains[0], *times[2:], gains[1]]

    head = ["layer", "dense, graph", "2:4, graph", "speed-up", "dense, eager", "2:4, eager", "speed-up"]
    return table(head, [cells(row) for row in layers("2:4")])


@figure
def gpu_blocks(*sides: str) -> str:
    """Milliseconds of layers with square blocks in a CUDA graph, and their speed-up."""

    def cells(row: dict[str, Any]) -> list[str]:
        found = [f"{row[side]['graph']:.3f} ({gpu_gain(row, side):.2f} ×)" for side in sides]
        return [row["layer"].removesuffix(", blocks"), f"{row['dense']['graph']:.3f}", *found]

    return table(["layer", "dense", *(f"blocks {side}" for side in sides)], [cells(row) for row in layers(sides[0])])


# Arms of bench/accelerate.py, in the tables of docs/accelerate.md


def scores(group: str, arm: str) -> list[float]:
    """Return the accuracy in percent of each run of an arm."""
    lines = [line for line in accelerate_tables.group(group) if line["arm"] == arm and "scores" in line]
    if not lines:
        raise Unknown(f"the group {group} of bench/accelerate.py has no runs of {arm}")
    return [line["scores"]["plain"] for line in lines]


def reference(group: str) -> str:
    if group not in accelerate_tables.REFERENCES:
        raise Unknown(f"the group {group} has no reference")
    return accelerate_tables.REFERENCES[group]


@figure
def loss(group: str, arm: str, than: str = "", digits: str = "1", sign: str = "") -> str:
    """`6.3`: how many points an arm is below the reference of its group; `sign=yes` gives the difference, `−6.3`."""
    gap = statistics.mean(scores(group, arm)) - statistics.mean(scores(group, than or reference(group)))
    return signed(gap / 100, int(digits)) if sign else f"{-gap:.{digits}f}".replace("-", "−")


@figure
def group_runs(group: str, arm: str) -> str:
    """`6`: the number of runs of an arm."""
    return str(len(scores(group, arm)))


@figure
def group_deviation(group: str, times: str = "1", digits: str = "1") -> str:
    """`0.5`: the standard deviation over the runs of the reference, in points, multiplied by `times`."""
    return f"{float(times) * statistics.stdev(scores(group, reference(group))):.{digits}f}"


def others(group: str) -> list[str]:
    found = {line["arm"]: None for line in accelerate_tables.group(group) if "scores" in line}
    return [arm for arm in found if arm != reference(group)]


@figure
def group_arms(group: str) -> str:
    """`13`: the number of arms that are compared with the reference."""
    return str(len(others(group)))


@figure
def best_by_chance(group: str, digits: str = "2") -> str:
    """`0.45`: how far the best of as many single runs of the reference as there are arms is above its mean.

    It is the mean of the maximum of n normal numbers, times the standard deviation of the difference of a run and the
    mean of the runs of the reference.
    """
    n, runs = len(others(group)), scores(group, reference(group))
    normal, step = statistics.NormalDist(), 0.001
    grid = [step * i for i in range(-8000, 8001)]
    most = sum(x * n * normal.pdf(x) * normal.cdf(x) ** (n - 1) for x in grid) * step
    return f"{most * statistics.stdev(runs) * math.sqrt(1 + 1 / len(runs)):.{digits}f}"


APART = 5.0  # points: a run that ends so far below the best one of its arm has collapsed


@figure
def collapsed(group: str, arm: str, words: str = "") -> str:
    """`2 of 5 runs`: how many runs of an arm collapsed; `words=yes` adds how far they end below the others."""
    found = scores(group, arm)
    low = [score for score in found if score < max(found) - APART]
    if not low:
        return f"none of {len(found)} runs"
    gap = statistics.mean(score for score in found if score not in low) - statistics.mean(low)
    told = f" end {gap:.0f} points below the other{'s' * (len(found) - len(low) > 1)}" if words else ""
    return f"{len(low)} of {len(found)} runs{told}"


@figure
def units_without_input(arm: str, epoch: str) -> str:
    """`840`: units without an active weight after an epoch, the mean over the runs of an arm of `stability`."""
    runs = [dict(line["units"]) for line in accelerate_tables.group("stability") if line["arm"] == arm]
    counts = [sum(layer[1] for layer in units[int(epoch)]) for units in runs if int(epoch) in units]
    if not counts:
        raise Unknown(f"the group stability has no units of {arm} after epoch {epoch}")
    return f"{statistics.mean(counts):,.0f}"


def fast_scores(epochs: int) -> list[float]:
    """Return the accuracy of all runs of the fast recipe at 99 % on docs/accelerate.md, in percent."""
    named = {
        8: [("ablation", "fast")],
        12: [("correction", accelerate_tables.PLAIN), ("stability", "GraNet, fan-in 1")],
    }
    if epochs in named:
        return [score for group, arm in named[epochs] for score in scores(group, arm)]
    return [100 * run.test["plain"] for run in study("time-to-accuracy").results.get(f"fast, {epochs} epochs", ())]


@figure
def fast_runs(*epochs: str) -> str:
    """`21`: the runs of the fast recipe in these numbers of epochs, none of which collapsed."""
    found = [fast_scores(int(number)) for number in epochs]
    if any(not some or min(some) < max(some) - APART for some in found):
        raise Unknown("a run collapsed, or there is none")
    return str(sum(map(len, found)))


@figure
def largest_deviation(name: str, *arms: str, digits: str = "2") -> str:
    """`0.32`: the largest standard deviation of arms of a study, in points."""
    spreads = [spread_of(study(name).results.get(arm, ()), Question(metric="accuracy")) for arm in arms]
    deviations = [found.std for found in spreads if found is not None and found.std is not None]
    if len(deviations) < len(arms):
        raise Unknown(f"not all of {', '.join(arms)} have a deviation in the study {name}")
    return f"{100 * max(deviations):.{digits}f}"


@figure
def operations_left(sparsity: str, distribution: str) -> str:
    """`16.5`: percent of the operations of VGG-C that a distribution leaves."""
    recipe = {
        "model": "vgg_c",
        "topology": {"name": "static", "sparsity": float(sparsity), "distribution": distribution},
    }
    return f"{100 * accelerate_tables.relative_flops(recipe):.1f}"


@figure
def constant(module: str, name: str, format: str = "g") -> str:
    """`2`: a number in the code, such as `constant equipoise.storage.layer_cost SPARSE_WEIGHT`."""
    try:
        return f"{getattr(importlib.import_module(module), name):{format}}"
    except (ImportError, AttributeError) as error:
        raise Unknown(str(error)) from None


@figure
def epochs_in_turns() -> str:
    """The table of bench/gpu_compare.py."""
    found = bench("gpu_compare.json")
    told = f"{found['date']}, {found['device']}, torch {found['torch']}, medians of {rounds_in_turns()} epochs."
    return f"\n{told}\n\n{gpu_compare.table(found['checkouts'], found['seconds'])}\n"


@figure
def rounds_in_turns() -> str:
    """Number of epochs of each case of bench/gpu_compare.py."""
    return str(len(next(iter(entry("gpu_compare.json", "seconds").values()))[0]))


@figure
def slowest_in_turns() -> str:
    """`2.0`: by how many percent the second checkout of bench/gpu_compare.py takes longer, at most."""
    medians = ([statistics.median(each) for each in sides] for sides in entry("gpu_compare.json", "seconds").values())
    return f"{max(100 * (second / first - 1) for first, second in medians):.1f}"


# Time to an accuracy on a CPU


WITH_AMX = "cpu_accuracy-amx.jsonl"


@figure
def cpu_table(file: str = "cpu_accuracy.jsonl") -> str:
    """Accuracy and minutes of the arms of bench/cpu_accuracy.py, and how to read them."""
    measured = charts.on_cpu(file)
    told = cpu_times.explanation(measured)
    return f"\n{cpu_times.table(measured)}\n{told and f'{chr(10)}{told}{chr(10)}'}"


@figure
def cpu_section() -> str:
    """The section of README on time to an accuracy on a CPU; empty if it was not measured."""
    found = cpu_times.compare(charts.on_cpu())
    if found is None:
        return "\n"
    minutes = found.ours.minutes if found.ours.process is None else found.ours.process
    title = f"## CIFAR-10 to {found.target} % on {charts.on_cpu().cores} in {minutes:.0f} minutes"
    told = (
        "VGG-C by the recipe `fast`, packed, and the shortest dense training that reaches its accuracy, in plain\n"
        "PyTorch (channels_last, fused SGD; `python bench/cpu_accuracy.py`, [all runs](docs/accelerate.md#on-a-cpu))."
    )
    if any(arm.on_gpu for arm in charts.on_cpu().arms):
        told += " Dense\ntraining was only timed; its accuracy is that of the same training on a GPU."
    if processor := charts.on_cpu().processor:
        told += f" Processor: {processor}."
    if (other := cpu_times.compare(charts.on_cpu(WITH_AMX))) and other.bf16 and other.float32:
        factors = (other.bf16.minutes / other.ours.minutes, other.float32 / other.ours.minutes)
        told += (
            "\nOn a processor with AMX, which computes dense bf16 several times as fast, dense training to "
            f"{other.target} % takes {factors[0]:.1f} × (bf16)\n"
            f"and {factors[1]:.1f} × (float32) as long as sparse training."
        )
    return f"\n{title}\n\n{told}\n\n{cpu_times.short_table(charts.on_cpu())}\n"


# Charts of README

TIMES = "![accuracy over training time on a GPU and a CPU: dense, the paper's and ours](docs/time-to-accuracy.png)"
SIZES = "![size, latency and throughput of VGG-C next to PyTorch and onnxruntime](docs/deploy.png)"


@figure
def first_chart() -> str:
    """The chart at the top of README: accuracy over time if it was measured on a CPU, else the exported model."""
    return f"\n{TIMES if cpu_times.compare(charts.on_cpu()) else SIZES}\n"


@figure
def second_chart() -> str:
    """The chart of exported models in its section of README, if it is not the first one."""
    return f"\n{SIZES}\n" if cpu_times.compare(charts.on_cpu()) else "\n"


# The check


def text_of(call: str) -> str:
    """Compute a figure from the words of its comment."""
    try:
        name, *words = shlex.split(call)
    except ValueError as error:
        raise Unknown(str(error)) from None
    if name not in FIGURES:
        raise Unknown(f"no figure is called {name}; choose from {', '.join(FIGURES)}")
    options = dict(word.split("=", 1) for word in words if re.match(r"[a-z]+=", word))
    arguments = [word for word in words if not re.match(r"[a-z]+=", word)]
    try:
        return FIGURES[name](*arguments, **options)
    except (TypeError, ValueError) as error:
        raise Unknown(f"{error}") from None


def checked(text: str, problems: list[str], page: str) -> str:
    """Return a page with its figures as they should be; append a line to `problems` for each that is not."""

    def replaced(match: re.Match[str]) -> str:
        begin, call, quoted, end = match.groups()
        where = f"{page}:{text.count(chr(10), 0, match.start()) + 1}"
        if text[: match.start()].rpartition("\n")[2].strip() == "" and not quoted.startswith("\n"):
            problems.append(
                f"{where}: figure {call}: move it away from the start of the line, which ends a paragraph"
            )
        try:
            computed = text_of(call)
        except Unknown as error:
            problems.append(f"{where}: figure {call}: {error}")
            return match[0]
        if computed != quoted:
            problems.append(
                f"{where}: figure {call}: the text has {quoted.strip()!r}, the results {computed.strip()!r}"
            )
        return f"{begin}{computed}{end}"

    done = MARK.sub(replaced, text)
    rest = MARK.sub("", text)
    if "<!-- figure:" in rest or "<!-- /figure" in rest:
        problems.append(f"{page}: a figure is not closed; write <!-- figure: NAME ... -->text<!-- /figure -->")
    return done


def pages() -> Iterator[Path]:
    yield from sorted([*ROOT.glob("README.md"), *(ROOT / "docs").rglob("*.md")])


def reproduction(write: bool) -> list[str]:
    """Compare docs/reproduction.md and its drawings with what the results give, or write them."""
    docs = ROOT / "docs"
    with tempfile.TemporaryDirectory() as folder:
        write_page(ROOT / "results", Path(folder) / "reproduction.md")
        stale = [file for file in Path(folder).iterdir() if not _same(file, docs / file.name)]
        for file in stale if write else ():
            (docs / file.name).write_bytes(file.read_bytes())
        return [f"docs/{file.name}: the results give another page" for file in stale]


def _same(file: Path, other: Path) -> bool:
    return other.is_file() and file.read_bytes() == other.read_bytes()


def differences(write: bool) -> list[str]:
    """Return a line for each number, page and chart that is not what the results give, and write those with `write`."""
    problems: list[str] = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        done = checked(text, problems, str(page.relative_to(ROOT)))
        if write and done != text:
            page.write_text(done, encoding="utf-8")
    return problems + reproduction(write) + stale_charts(write)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write what the results give")
    write = parser.parse_args().write
    found = differences(write)
    for line in found:
        print(line)
    if found and not write:
        print("run `make figures`, and read what changed")
    if found and (not write or differences(write=False)):
        sys.exit(1)


if __name__ == "__main__":
    main()
