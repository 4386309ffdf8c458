"""The command line.

Every module of this package has the commands of one group. Heavy imports are inside the commands, so that
`equipoise --help` is fast.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import typer

from equipoise.cli import deployment, listing, measurement, studies, training
from equipoise.cli.common import console
from equipoise.errors import UserError, one_line
from equipoise.files import disk_is_full

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": studies.demo,
    "train": training.train,
    "resume": training.resume,
    "eval": training.evaluate,
    "show": training.show,
    "list": listing.list_names,
    "recipe": listing.recipe,
    "measure": measurement.measure,
    "study": studies.study,
    "report": studies.report,
    "theory": measurement.theory,
    "export": deployment.export,
    "predict": deployment.predict,
    "bench": deployment.bench,
}
for name, command in COMMANDS.items():
    app.command(name)(command)


def print_version(requested: bool) -> None:
    """Print the version and exit if requested."""
    if requested:
        from equipoise import __version__

        console.print(f"equipoise {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train neural networks that are sparse from the first step to the last."""


# The base of Typer's errors. Newer versions of Typer contain their own copy of click.
CommandError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Wrong input ends in one line and exit status 2, never in a traceback.

    Args:
        arguments: The words after `equipoise`; by default the arguments of the process.
    """
    warnings.showwarning = _show_warning
    logging.getLogger("PIL").addHandler(logging.NullHandler())  # our own message names the damaged image
    console.quiet = _rank() != 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may have characters that the terminal has not
    words = sys.argv[1:] if arguments is None else arguments
    try:
        status = app(args=words or ["--help"], prog_name="equipoise", standalone_mode=False)
    except UserError as error:
        _fail(str(error))
    except CommandError as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        _fail(f"{message}{_hint(getattr(error, 'option_name', ''), words)}")
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:  # such as a folder without read permission, or a full disk
        _fail(f"{error}; what was written before is intact" if disk_is_full(error) else str(error))
    sys.exit(status if isinstance(status, int) else 0)


def _hint(option: str, words: list[str]) -> str:
    """Return how a key of a recipe is written that was given as an option, such as `--epochs 5`."""
    if not option or words[:1] not in (["train"], ["resume"], ["recipe"]):
        return ""
    from equipoise.training.build_recipe import keys_of

    keys = keys_of(option.lstrip("-").replace("-", "_"))
    given = next((i for i, word in enumerate(words) if word.partition("=")[0] == option), len(words))
    _, equals, value = words[given].partition("=") if given < len(words) else ("", "", "")
    if not equals and given + 1 < len(words):
        value = words[given + 1]
    return f" Keys of a recipe have no dashes: {' or '.join(f'{key}={value}' for key in keys)}." if keys else ""


def _fail(message: str) -> None:
    line = one_line(message)
    print(f"equipoise: process {_rank()}: {line}" if _rank() else f"equipoise: {line}", file=sys.stderr)
    sys.exit(2)


def _rank() -> int:
    """Return the number of this process under torchrun; the first one prints for all."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    if not console.quiet:
        print(f"equipoise: warning: {one_line(str(message))}", file=sys.stderr)
