"""`equipoise list`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import typer

from equipoise.catalogue import Catalogue
from equipoise.cli.common import console

PLURALS = {"topology": "topologies"}
NOTES = {
    "recipes": "equipoise train RECIPE [OVERLAY ...] [key=value ...], such as\n"
    "equipoise train bsr-vgg16-cifar10-at agent bsr-own-schedule topology.sparsity=0.9",
    "topologies": "Every dynamic topology also exists as NAME-itop, on ITOP's schedule, and as NAME-fast, for short\n"
    "budgets.",
    "patterns": "topology.pattern=2:4 topology.sparsity=0.5, topology.pattern=16x1, topology.pattern=fan_in",
    "attacks": "equipoise eval RUN --attack NAME",
    "studies": "equipoise study NAME --data DIR",
    "metrics": "A claim of a study is about one of these.",
}


def list_names(
    kind: Annotated[str | None, typer.Argument(help="Only one kind: recipes, models, data, ...")] = None,
) -> None:
    """List the names that can be used: recipes, topologies, corrections, models, data, attacks, studies and more."""
    kinds = _all_kinds()
    for name in kinds if kind is None else [kind]:
        entries = kinds[name]
        console.print(name, style="bold")
        for line in _lines(name, entries):
            console.print(line)


def _all_kinds() -> Catalogue[Mapping[str, str]]:
    """Return descriptions by name, by kind."""
    from equipoise.data import DATASETS
    from equipoise.studies.design import packaged_studies, read_design
    from equipoise.studies.metrics import METRICS
    from equipoise.studies.robust import JUDGES
    from equipoise.topology import PATTERNS
    from equipoise.training.recipe import CATALOGUES, packaged_recipes

    kinds: dict[str, Mapping[str, str]] = {"recipes": packaged_recipes()}
    kinds |= {PLURALS.get(name, f"{name}s"): catalogue.describe() for name, catalogue in CATALOGUES.items()}
    kinds["patterns"] = PATTERNS.describe()
    kinds |= {"data": DATASETS.describe(), "attacks": JUDGES.describe()}
    kinds["studies"] = {name: read_design(name).title for name in packaged_studies()}
    kinds["metrics"] = METRICS.describe()
    return Catalogue("kind", kinds)


def _lines(kind: str, entries: Mapping[str, str]) -> Iterator[str]:
    """Yield one line per name. Recipes are grouped by the family that their description begins with."""
    width = max(map(len, entries), default=0)
    for family, members in _families(entries).items() if kind == "recipes" else [("", entries)]:
        if family:
            yield f"  {family}"
        for name, line in members.items():
            yield f"{'    ' if family else '  '}{name:<{width}}  {line}"
    if kind in NOTES:
        yield from NOTES[kind].splitlines()


def _families(recipes: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Group `family: description` by family; overlays, which are not complete recipes, come last."""
    families: dict[str, dict[str, str]] = {}
    for name, line in recipes.items():
        family, _, description = line.partition(": ")
        families.setdefault(family, {})[name] = description
    return dict(sorted(families.items(), key=lambda item: item[0].startswith("overlay")))
