"""Helpers of several commands: the console, arguments, and run folders."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from equipoise.errors import UserError

if TYPE_CHECKING:
    from equipoise.training import Recipe, Trainer
    from equipoise.world import World

console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)  # names and paths are printed verbatim

Run = Annotated[Path, typer.Argument(help="Folder of a run.")]
Best = Annotated[bool, typer.Option("--best", help="Use the best checkpoint instead of the newest.")]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Import Python code that a recipe or file names, such as package:Net.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write to. Default: a new one in runs/.")]


def import_approved(raw: Mapping[str, Any], typed: Sequence[str] = (), allow_code: bool = False) -> None:
    """Import the Python code that the user has typed on the command line and, if allowed, that a recipe names."""
    from equipoise.training.build_recipe import code_in, import_code
    from equipoise.training.recipe_files import apply_overrides

    approved = [apply_overrides({}, [word]) for word in typed] + ([raw] if allow_code else [])
    if any(map(code_in, approved)):
        modules_here()
    for each in approved:
        import_code(each)


def made_recipe(words: Sequence[str], allow_code: bool = False) -> Recipe:
    """Make the recipe that recipes, overlays and `key=value` on the command line describe."""
    from equipoise.training import apply_overrides, make_recipe, read_recipe

    typed = [word for word in words if "=" in word]
    raw = read_recipe(*[word for word in words if "=" not in word])
    import_approved(raw, typed, allow_code)
    return make_recipe(apply_overrides(raw, typed))


def modules_here() -> None:
    """Let Python import modules of the current folder, after all others."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def open_run(run: Path, best: bool = False, world: World | None = None, allow_code: bool = False) -> Trainer:
    """Return a trainer at the newest valid checkpoint of a run, or at its best. The folder is not changed."""
    from equipoise.training import RunFolder, Trainer, checkpoint, make_recipe
    from equipoise.world import ALONE

    folder = RunFolder.open(run)
    import_approved(folder.recipe(), allow_code=allow_code)
    trainer = Trainer(make_recipe(folder.recipe()), folder, world=world or ALONE)
    state = checkpoint.load(run / "checkpoints" / "best.safetensors") if best else folder.store.newest()
    if state is None:
        raise UserError(f"{run} has no valid checkpoint yet")
    trainer.load_state_dict(state)
    return trainer


def new_folder(out: Path | None, name: str) -> Path:
    """Return `out`, which must not be in use, or the next free folder in runs/."""
    from equipoise.training.run_folder import in_use

    if out is not None:
        if in_use(out):
            raise UserError(f"{out} exists and is not empty; name another folder with --out")
        return out
    path, count = Path("runs") / name, 1
    while path.exists():
        count += 1
        path = Path("runs") / f"{name}-{count}"
    return path
