"""README, docs and notebooks: code runs, commands and recipes are valid, generated pages and links are current."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typer
import yaml

from docs_helpers import PAGES, ROOT, Block, blocks, run_python
from equipoise.cli import app
from equipoise.cli.common import made_recipe
from equipoise.studies.design import packaged_studies
from equipoise.training import make_recipe

BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
SHELL = [block for block in BLOCKS if block.language == "bash"]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
README = re.sub(r"<!-- figure.*?-->|<!-- /figure -->", "", (ROOT / "README.md").read_text(encoding="utf-8"))
TIMEOUT = 600  # seconds of a slow page


def by_page(chosen: list[Block]) -> dict[str, list[Block]]:
    pages: dict[str, list[Block]] = {}
    for block in chosen:
        pages.setdefault(block.page, []).append(block)
    return pages


QUICK = by_page([block for block in PYTHON if block.mark in ("", "fresh")])
SLOW = {
    page: some
    for page, some in by_page([block for block in PYTHON if not block.mark.startswith("not")]).items()
    if any(block.mark == "slow" for block in some)
}
COMMANDS = by_page([block for block in SHELL if not block.mark])


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The variables of a page: those of a module, which dataclasses need. It is the only process of its group."""
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    yield vars(module)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", QUICK)
def test_blocks_run(page: str, variables: dict[str, Any]) -> None:
    run_python(QUICK[page], variables)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "budget", [{"STEPS": 30, "EPOCHS": 1}, pytest.param({}, marks=pytest.mark.slow)], ids=["short", "whole"]
)
def test_notebooks_run(notebook: Path, budget: dict[str, int], variables: dict[str, Any]) -> None:
    variables["display"] = lambda *shown, **options: SimpleNamespace(update=lambda figure: None)  # of IPython
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), variables)
        variables |= {name: value for name, value in budget.items() if name in variables}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_show_what_they_print_and_draw(notebook: Path) -> None:
    """If not: make notebooks."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert all(cell["execution_count"] for cell in cells if cell["cell_type"] == "code")
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) >= 2


def test_the_site_shows_notebooks_with_their_outputs() -> None:
    hooks = runpy.run_path(str(ROOT / "tools" / "site_hooks.py"))
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Text."]},
        {
            "cell_type": "code",
            "source": ["1 + 1"],
            "outputs": [
                {"output_type": "stream", "text": ["printed\n"]},
                {"output_type": "display_data", "data": {"image/png": "aGk=", "text/plain": ["<Figure>"]}},
            ],
        },
    ]
    page, pictures = hooks["as_markdown"]({"cells": cells}, Path("examples/some.ipynb"))
    assert page == (
        "# Title\nText.\n\nThe notebook is `examples/some.ipynb`.\n\n```python\n1 + 1\n```\n\n"
        "```text\nprinted\n```\n\n![figure of the code above](some-1.png)\n"
    )
    assert pictures == {"some-1.png": b"hi"}


def test_the_site_breaks_no_line_between_a_number_and_its_unit_but_leaves_code() -> None:
    hooks = runpy.run_path(str(ROOT / "tools" / "site_hooks.py"))
    page = "<p>5_±_1_% of 3_×, <code>5 % 2</code></p><pre><code>7 % 2</code></pre><p>2_%</p>"
    shown = hooks["on_page_content"](page.replace("_", " "))
    assert shown == page.replace("_", "\N{NO-BREAK SPACE}")


def test_a_picture_of_the_site_links_to_its_file() -> None:
    hooks = runpy.run_path(str(ROOT / "tools" / "site_hooks.py"))
    picture = '<img alt="a chart" src="chart.png" />'
    assert hooks["on_page_content"](f"<p>{picture}</p>") == f'<p><a href="chart.png">{picture}</a></p>'


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("page", SLOW)
def test_slow_blocks_run(page: str, variables: dict[str, Any]) -> None:
    run_python(SLOW[page], variables)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("page", COMMANDS)
def test_shell_blocks_run(page: str, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for block in COMMANDS[page]:
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code], check=True, cwd=tmp_path, env=os.environ | {"PATH": path}
        )


def test_blocks_that_do_not_run_are_counted() -> None:
    """A block that is added here needs a reason; a block that is repaired leaves the list."""
    reasons = [block.mark.removeprefix("not run: ") for block in PYTHON + SHELL if block.mark.startswith("not")]
    assert Counter(reasons) == {
        "needs CIFAR-10 and a GPU": 2,
        "needs a GPU": 2,
        "needs a GPU and torchao": 1,
        "rigl-torch is not installed": 1,
        "sparsimony is not installed": 1,
        "SparseML is not installed": 1,
    }


def test_readme_is_as_short_as_it_says() -> None:
    def lengths(heading: str) -> list[int]:
        section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
        return [len(code.strip().splitlines()) for code in re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)]

    def sentences(text: str) -> int:
        return len(re.findall(r"\.(?:\s|$)", text.replace("et al.", "et al")))

    assert lengths("Five lines in your own loop")[0] - 2 == 5  # without the import and an empty line
    assert lengths("The command line") == [6]
    assert [length - 1 for length in lengths("Lightning and Hugging Face")] == [4, 4]
    caveats = README.split("## Caveats\n- ")[1].split("\n\n")[0].split("\n- ")
    assert [sentences(caveat) for caveat in caveats] == [1, 1, 1]
    assert sentences(README.split("what became of it\n")[1].split("\n\n")[0]) == 3


def commands(block: Block) -> list[list[str]]:
    """The words of every line that begins with `equipoise`, or runs it by torchrun."""
    lines = block.code.replace("\\\n", " ").splitlines()
    found = [re.match(r"(?:torchrun .* -m )?equipoise (?=[a-z])(?!.*\[OPTIONS])([^|>]*)", line) for line in lines]
    return [shlex.split(match[1], comments=True) for match in found if match]


@pytest.mark.parametrize("page", by_page([b for b in BLOCKS if b.language in ("", "bash") and commands(b)]))
def test_commands_are_valid(page: str) -> None:
    group = typer.main.get_group(app)
    for block in by_page(BLOCKS)[page]:
        for name, *words in commands(block) if block.language in ("", "bash") else ():
            given = group.commands[name].make_context(name, list(words)).params
            if name in ("train", "recipe") and not any(":" in word or word.endswith(".yaml") for word in words):
                made_recipe([given["recipe"], *given["overrides"]] if name == "train" else given["names"])
            if name == "study" and given["file"] not in (None, "FILE"):
                assert given["file"] in packaged_studies()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in ("yaml", "toml")], ids=str)
def test_files_are_valid(block: Block) -> None:
    if block.language == "toml":
        tomllib.loads(block.code)
    else:
        make_recipe(yaml.safe_load(block.code))


def test_every_block_has_a_known_language() -> None:
    assert {block.language for block in BLOCKS} <= {"", "python", "bash", "yaml", "toml", "text", "c"}


def test_the_page_of_commands_is_up_to_date() -> None:
    """If not: make docs."""
    page = runpy.run_path(str(ROOT / "tools" / "command_page.py"))["page"]()
    assert (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8") == page + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_quoted_figures_are_those_of_the_results(page: Path) -> None:
    """`<!-- figures of docs/benchmarks.md: 1.17 × | 1.39 × -->` names what a page quotes of another one."""
    for source, figures in re.findall(r"<!-- figures of (\S+): (.+?) -->", page.read_text(encoding="utf-8")):
        results = " ".join((ROOT / source).read_text(encoding="utf-8").split())
        for figure in figures.split(" | "):
            assert figure in results, f"{page}: {source} has no {figure}"


def targets(page: Path) -> list[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:|#", link)]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    for link in targets(page):
        target = (page.parent / link.split("#")[0]).resolve()
        if target.parent == ROOT / "docs" / "notebooks":  # the site makes pages and pictures of notebooks
            target = ROOT / "examples" / f"{re.sub(r'-[0-9]+$', '', target.stem)}.ipynb"
        assert target.exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_and_files_in_the_text_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", text):
        if name := re.fullmatch(r"(?:eq|equipoise)\.([\w.]+)(?:\(.*)?", code):
            pkgutil.resolve_name(f"equipoise.{name[1]}")
        elif path := re.fullmatch(
            r"(?:python )?((?:src|tests|bench|tools|docs|examples)/[a-z_0-9/.-]+)(?: .*)?", code
        ):
            assert (ROOT / path[1]).exists(), code


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    notebooks = {f"notebooks/{path.stem}.md" for path in NOTEBOOKS}
    files = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages(site["nav"])) == sorted(files | notebooks)
