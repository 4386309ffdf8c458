"""Print docs/command-line.md: every command with its arguments and options, read from the code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import typer

from equipoise.cli import app

HEAD = """# The command line

Written by `tools/command_page.py` from the code. `equipoise COMMAND --help` prints the same for one command.
`equipoise --version` prints the version.
"""


def page() -> str:
    """Return the page in Markdown."""
    group = typer.main.get_group(app)
    return HEAD + "\n".join(line for name in group.commands for line in _lines(name, group.commands[name]))


def _lines(name: str, command: typer.core.TyperCommand) -> Iterator[str]:
    context = typer.Context(command, info_name=name)
    yield from ("", f"## {name}", "", inspect.cleandoc(command.help or ""), "")
    yield from ("```", " ".join(["equipoise", name, *command.collect_usage_pieces(context)]), "```", "")
    for parameter in command.params:
        names, text = parameter.get_help_record(context) or ("", "")
        yield f"* `{names}`: {text}"


if __name__ == "__main__":
    print(page())
