"""`equipoise list` and `recipe`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

import typer

from equipoise.catalogue import suggestion
from equipoise.cli.common import AllowCode, console, made_recipe
from equipoise.errors import UserError

WIDEST = 48  # characters of the first column of options
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
    name: Annotated[
        str | None, typer.Argument(help="A kind (recipes, models, ...), or a name such as rigl: print its options.")
    ] = None,
) -> None:
    """List the names that can be used: recipes, topologies, corrections, models, data, attacks, studies and more."""
    kinds = _all_kinds()
    if name is not None and name not in kinds:
        for line in _entry_lines(name, {kind: describe() for kind, describe in kinds.items()}):
            console.print(line)
        return
    for kind in kinds if name is None else [name]:
        console.print(kind, style="bold")
        for line in _lines(kind, kinds[kind]()):
            console.print(line)


def recipe(
    names: Annotated[
        list[str] | None, typer.Argument(help="A recipe, overlays and key=value, as for `equipoise train`.")
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Print a reference of all keys, in Markdown.")] = False,
    allow_code: AllowCode = False,
) -> None:
    """Print a full recipe to copy and edit: every key with its value and what it means."""
    from equipoise.training.full_recipe import full_recipe
    from equipoise.training.reference import reference

    if keys == bool(names):
        raise UserError("name a recipe, such as `equipoise recipe digits`, or give --keys for all keys")
    console.print(full_recipe(made_recipe(names, allow_code)) if names else reference(), end="")


def _all_kinds() -> dict[str, Callable[[], Mapping[str, str]]]:
    """Return, by kind, a function that returns descriptions by name. Those of studies take a while to read."""
    from equipoise.studies.design import packaged_studies, read_design
    from equipoise.studies.metrics import METRICS
    from equipoise.studies.robust import JUDGES
    from equipoise.topology import PATTERNS
    from equipoise.training.recipe import CATALOGUES
    from equipoise.training.recipe_files import packaged_recipes

    return {
        "recipes": packaged_recipes,
        **{catalogue.group: catalogue.describe for catalogue in CATALOGUES.values()},
        "patterns": PATTERNS.describe,
        "attacks": JUDGES.describe,
        "studies": lambda: {name: read_design(name).title for name in packaged_studies()},
        "metrics": METRICS.describe,
    }


def _entry_lines(name: str, kinds: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield the description and the options of every entry with a name; a name can be of several kinds."""
    from equipoise.training.build_recipe import without_suffix
    from equipoise.training.reference import entry_options

    named = {kind: without_suffix(name)[0] if kind == "topologies" else name for kind in kinds}
    found = {kind: entry for kind, entry in named.items() if entry in kinds[kind]}
    if not found:
        known = sorted({*kinds, *(entry for entries in kinds.values() for entry in entries)})
        raise UserError(f'nothing is called "{name}"{suggestion(name, known)}')
    for kind, entry in found.items():
        yield f"{kind}: {name}  {kinds[kind][entry]}"
        if kind == "recipes":
            yield f"  `equipoise recipe {entry}` prints it."
        options = entry_options(kind, name)
        heads = [f"{option.name}: {option.type} = {option.default}" for option in options]
        width = min(max(map(len, heads), default=0), WIDEST)
        for head, option in zip(heads, options, strict=True):
            yield f"  {head:<{width}}  {option.line}"


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
