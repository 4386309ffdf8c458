"""The tables of docs/accelerate.md, from committed results.

    PYTHONPATH=src python bench/accelerate_tables.py [--write]

Prints the tables, or writes them into the page. tools/charts.py draws its charts.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from equipoise.analysis.flops import count, total
from equipoise.models import MODELS
from equipoise.studies.design import packaged_studies, read_design
from equipoise.studies.reading import read_results
from equipoise.studies.results import Result
from equipoise.topology import GMP
from equipoise.topology.selection import select
from equipoise.training import make_recipe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "accelerate.md"
FILES = ROOT / "bench" / "results"
SCORES = ("plain", "bn_recalibrated", "ema")
FAST, DENSE, PLAIN = "fast", "dense", "no correction, 12 epochs"
REFERENCES = {"ablation": FAST, "options": FAST, "correction": PLAIN}  # arms that the others are compared with
EPOCHS = re.compile(r"(.*), (\d+) epochs")
Line = dict[str, Any]


def read(file: Path) -> list[Line]:
    """Read a file of JSON lines; none if it does not exist."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation."""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}" if values else ""


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Arms of bench/accelerate.py


def table(results: Sequence[Line], reference: str = "") -> str:
    """Accuracy of each arm in points: mean and standard deviation, and the difference to a reference arm."""
    found: dict[str, list[dict[str, float]]] = {}
    for result in results:
        if "scores" in result:
            found.setdefault(result["arm"], []).append(result["scores"])

    def values(arm: str, score: str) -> list[float]:
        return [scores[score] for scores in found[arm] if score in scores]

    body = []
    for arm in found:
        cells = [arm, *(spread(values(arm, score)) for score in SCORES)]
        if reference:
            gap = statistics.mean(values(arm, "plain")) - statistics.mean(values(reference, "plain"))
            cells.append("" if arm == reference else f"{gap:+.2f}")
        body.append([*cells, f"{min(values(arm, 'plain')):.2f}", str(len(found[arm]))])
    difference = ["plain, difference"] if reference else []
    return rows(["arm", *SCORES, *difference, "worst plain", "runs"], body)


def from_study(arm: str, epochs: int, name: str) -> list[Line]:
    """The runs of an arm of time-to-accuracy, as those of an arm of another name."""
    found = study("time-to-accuracy").get(f"{arm}, {epochs} epochs", ())
    return [{"arm": name, "scores": {score: 100 * value for score, value in run.test.items()}} for run in found]


def group(name: str) -> list[Line]:
    """The lines of a table of arms: those of a group, and runs of the same recipes from elsewhere."""
    file = name if name in ("stability", "short") else "ablation"
    lines = read(FILES / f"{file}.jsonl")
    found = [line for line in lines if line["group"] == name]
    if name == "ablation":
        return [*from_study(FAST, 8, FAST), *from_study(DENSE, 8, DENSE), *found]
    if name == "options":
        own = [line for line in lines if line["group"] == "ablation" and line["arm"] == FAST]
        return [*from_study(FAST, 8, FAST), *own, *found]
    return [*from_study(FAST, 12, PLAIN), *found] if name == "correction" else found


# Budgets


def seconds_of(starts: Sequence[Line]) -> tuple[float, float] | None:
    """Seconds of start-up with a warm cache, and of the steps of an epoch, in processes alone on the device."""
    fresh = [line["to_fast_steps"] for line in starts if "stages" in line][1:]
    trained = [line["seconds"] / line["epochs"] for line in starts if "train" in line]
    return (statistics.mean(fresh), statistics.mean(trained)) if fresh and trained else None


def final(results: Sequence[Result]) -> list[float]:
    return [100 * result.test["plain"] for result in results]


def relative_flops(raw: Mapping[str, Any]) -> float:
    """FLOPs of the steps of a run relative to those of dense training, without dense gradients at updates.

    The number of active weights falls on a cubic until the last update, so its mean is final + (initial - final)/4.
    """
    recipe = make_recipe(raw)
    algorithm = recipe.topology
    with torch.device("meta"):  # numbers are not needed
        model, image = MODELS[recipe.model](), torch.zeros(1, 3, 32, 32)
    chosen = select(model, algorithm.include, algorithm.exclude, algorithm.dense_first, algorithm.dense_last)
    shapes = {name: tuple(weight.shape) for name, weight in chosen.items()}
    initial, final = algorithm.initial_counts(shapes, model), algorithm.final_counts(shapes, model)
    falling = algorithm.until / 4 if isinstance(algorithm, GMP) else 0.0
    mean = {n: (final[n] + (initial[n] - final[n]) * falling) / chosen[n].numel() for n in shapes}
    cost = total(count(model, image, mean))
    return cost.sparse_training / cost.dense_training


def study(name: str) -> Mapping[str, Sequence[Result]]:
    """The finished runs of a study by arm; arms without runs are left out."""
    folder = ROOT / "results" / name
    found = read_results(folder).studies[0].results if folder.is_dir() else {}
    return {arm: results for arm, results in found.items() if results}


def budgets(name: str) -> str:
    """Mean final accuracy of every arm of a study at its budget: budgets of one training stand together."""
    seconds = seconds_of(read(FILES / "startup.jsonl"))
    found = study(name)
    first = {label: i for i, label in reversed([*enumerate(split(arm)[0] for arm in found)])}
    body = []
    for arm in sorted(found, key=lambda arm: (arm.startswith("VGG-16"), first[split(arm)[0]], split(arm)[1])):
        results, (label, epochs) = found[arm], split(arm)
        flops = epochs * relative_flops(results[0].recipe)
        cells = [label, str(epochs), spread(final(results)), str(len(results)), f"{flops:.2f}"]
        if seconds is not None:
            start, each = seconds
            on_vgg_c = results[0].recipe.get("model") == "vgg_c"
            cells += [f"{epochs * each:.1f}", f"{start + epochs * each:.1f}"] if on_vgg_c else ["", ""]
        body.append(cells)
    head = ["arm", "epochs", "accuracy, %", "runs", "FLOPs, in dense epochs"]
    head += [] if seconds is None else ["seconds of steps", "with start-up"]
    return rows(head, body) if body else ""


def not_run() -> str:
    """What is planned and has no runs: studies, arms of a study that has some, and groups of bench/accelerate.py."""
    lines = []
    for name in (name for name in packaged_studies() if name.startswith("time-to-accuracy")):
        design, found = read_design(name), study(name)
        missing = [arm for arm in design.every_arm if arm not in found]
        if not found:
            lines.append(f"- {design.title}: `equipoise study {name}`.")
        elif missing:
            lines.append(f"- {'; '.join(missing)}: `equipoise study {name}`.")
    if not group("short"):
        lines.append(
            "- Very short trainings on a GPU, from other initial sparsities: `python bench/accelerate.py short`."
        )
    return "\n".join(["Planned, and without runs so far:", "", *lines]) if lines else "Every planned study has runs."


def split(arm: str) -> tuple[str, int]:
    """Name and epochs of an arm that is called `NAME, N epochs`."""
    match = EPOCHS.fullmatch(arm)
    assert match is not None, arm
    return match[1], int(match[2])


def startup() -> str:
    """Seconds of fresh processes."""
    body = []
    for i, line in enumerate(read(FILES / "startup.jsonl")):
        if "stages" in line:
            what = "empty" if i == 0 else "warm"
            body.append([f"to fast steps, {what} compile cache", f"{line['to_fast_steps']:.1f}"])
        else:
            what = f"`equipoise train {line['train']} epochs={line['epochs']}`, whole process"
            counted = f" ({line['seconds']:.1f} training, {line['startup_seconds']:.1f} compiling and capturing)"
            body.append([what, f"{line['process']:.1f}{counted}"])
    return rows(["fresh process", "seconds"], body) if body else "Not measured."


# The page


def blocks() -> dict[str, str]:
    """Every table of the page by name."""
    names = ("stability", "ablation", "options", "correction")
    return {
        "budgets": budgets("time-to-accuracy"),
        **{name: table(group(name), REFERENCES.get(name, "")) for name in names},
        "sparsities": titled("Other sparsities and ResNet-18", budgets("time-to-accuracy-sparsities")),
        "startup": startup(),
        "not run": not_run(),
        "short": titled("Very short trainings on a GPU", table(group("short")) if group("short") else ""),
    }


def titled(title: str, text: str) -> str:
    """A section with a table; empty if there is no table."""
    return f"## {title}\n\n{text}" if text else ""


def with_blocks(page: str, found: Mapping[str, str]) -> str:
    """The page with its tables replaced: those between `<!-- NAME -->` and `<!-- /NAME -->`."""
    for name, text in found.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        page = pattern.sub(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page)  # type: ignore[misc]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/accelerate.md")
    found = blocks()
    if parser.parse_args().write:
        PAGE.write_text(with_blocks(PAGE.read_text(), found))
    else:
        print("\n\n".join(f"{name}\n\n{text}" for name, text in found.items()))


if __name__ == "__main__":
    main()
