"""What several commands share: the console, arguments, and run folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from equipoise.errors import UserError

if TYPE_CHECKING:
    from equipoise.training import Trainer
    from equipoise.world import World

console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)  # names and paths are printed verbatim

Run = Annotated[Path, typer.Argument(help="Folder of a run.")]
Best = Annotated[bool, typer.Option("--best", help="Use the best checkpoint instead of the newest.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write to. Default: a new one in runs/.")]


def open_run(run: Path, best: bool = False, world: World | None = None) -> Trainer:
    """Return a trainer at the newest valid checkpoint of a run, or at its best. The folder is not changed."""
    from equipoise.training import RunFolder, Trainer, checkpoint, make_recipe
    from equipoise.world import ALONE

    folder = RunFolder.open(run)
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
