"""One-line descriptions of runs, and a table of the runs in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from equipoise.config import split
from equipoise.display.tables import make_table, percent
from equipoise.errors import UserError
from equipoise.training.recipe import DEFAULT_NAMES, Recipe
from equipoise.training.run_folder import RunFolder

PARTS = ("model", "data", "topology", "correction")


def runs_table(runs: Sequence[Path], folder: Path) -> Table:
    """Return a table of runs: what they train, how far they are, and their accuracy on the last line of metrics."""
    columns = ["", *PARTS, "epoch", "accuracy", "state"]
    return make_table(columns, [[str(run.relative_to(folder)), *_row(RunFolder(run))] for run in runs], str(folder))


def method_of(raw: Mapping[str, Any]) -> str:
    """Describe a recipe: `vgg_c on cifar10, set-itop with agent`."""
    model, data, topology, correction = _names(raw)
    return f"{model} on {data}, {topology}{'' if correction == 'sgd' else f' with {correction}'}"


def _names(raw: Mapping[str, Any]) -> list[str]:
    return [split(raw.get(part, DEFAULT_NAMES[part]), part)[0] for part in PARTS]


def _row(run: RunFolder) -> list[str]:
    try:
        raw = run.recipe()
        names = _names(raw)
        metrics = run.metrics()
    except UserError as error:
        return ["", "", "", "", "", "", f"damaged: {error}"[:60]]
    done = metrics[-1]["epoch"] if metrics else 0
    state = "finished" if run.has_result else "unfinished"
    return [*names, f"{done}/{raw.get('epochs', Recipe.epochs)}", _accuracy(metrics), state]


def _accuracy(metrics: list[dict[str, Any]]) -> str:
    try:
        return percent(metrics[-1]["scores"]["plain"]["accuracy"])
    except (LookupError, TypeError):
        return ""
