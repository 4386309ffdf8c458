"""Custom parts of recipes: `package.module:attribute`, entry points, and code that no file may import by itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

import equipoise as eq
from cli_helpers import Run, assert_refused, everything
from equipoise.errors import UserError
from equipoise.training.recipe import CATALOGUES
from train_helpers import tiny

CODE = '''
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from equipoise.correction import Agent
from equipoise.data import Images, Splits
from equipoise.models import Normalize
from equipoise.objectives import Standard
from equipoise.topology import SET

Path("imported").touch()


class Net(nn.Module):
    """A perceptron of somebody else."""

    def __init__(self, classes: int, hidden: int = 8, act: Literal["relu", "tanh"] = "relu", depth=1):
        super().__init__()
        self.normalize = Normalize(1)
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    def forward(self, x):
        return self.layers(self.normalize(x).flatten(1))


class Plain(Net):
    """The same without normalisation, for any number of options."""

    def __init__(self, num_classes, **options):
        super().__init__(num_classes)
        self.normalize = nn.Identity()
        self.extra = options


def read(root: Path, images: int = 96, shade: float = 1.0) -> Splits:
    """Random pixels."""
    g = torch.Generator().manual_seed(0)
    made = Images(torch.randint(0, 256, (images, 1, 8, 8), generator=g, dtype=torch.uint8), torch.arange(images) % 3)
    return Splits(made, None, made, ("a", "b", "c"), (0.5,), (0.5 * shade,))


@dataclass(frozen=True, kw_only=True)
class Grow(SET):
    """SET of somebody else."""

    vigour: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Correct(Agent):
    """AGENT of somebody else."""


@dataclass(frozen=True)
class Aim(Standard):
    """Cross-entropy of somebody else."""


NOT_CALLABLE = 3
'''


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package in the folder of `run`; returns the file that importing it creates."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").touch()
    (tmp_path / "theirs" / "nets.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = {part: dict(catalogue) for part, catalogue in CATALOGUES.items()}
    yield tmp_path / "imported"
    for part, catalogue in CATALOGUES.items():
        catalogue.clear()
        catalogue.update(before[part])
    for name in [name for name in sys.modules if name.partition(".")[0] in ("theirs", "installed")]:
        del sys.modules[name]


EVERY_PART = [
    "model=theirs.nets:Net",
    "model.hidden=12",
    "data=theirs.nets:read",
    "data.images=60",
    "data.batch=30",
    "topology=theirs.nets:Grow-itop",
    "topology.vigour=0.5",
    "topology.every=1",
    "correction=theirs.nets:Correct",
    "objective=theirs.nets:Aim",
]


def test_names_typed_on_the_command_line_are_imported(run: Run, code: Path, recipe: str, tmp_path: Path) -> None:
    trained = run("train", recipe, *EVERY_PART, "epochs=1", "--out", "here")
    assert (trained.status, trained.err) == (0, "")
    saved = yaml.safe_load((tmp_path / "here" / "recipe.yaml").read_text())
    assert saved["model"] == {"name": "theirs.nets:Net", "hidden": 12}
    assert saved["data"] == {"name": "theirs.nets:read", "batch": 30, "images": 60}
    assert saved["topology"]["name"] == "theirs.nets:Grow-itop"
    assert "60" in run("eval", "here").out.split()  # images
    network = eq.load(_exported(run, "here"))
    assert network(torch.rand(2, 1, 8, 8)).shape == (2, 3)


def _exported(run: Run, name: str) -> str:
    assert run("export", name, "net.safetensors").status == 0
    return "net.safetensors"


@pytest.mark.parametrize("part", ["model", "data", "topology", "correction", "objective"])
def test_a_recipe_that_names_code_is_refused(run: Run, code: Path, part: str, tmp_path: Path) -> None:
    (tmp_path / "evil.yaml").write_text(yaml.safe_dump(tiny(**{part: "theirs.nets:Net"})))
    before = everything(tmp_path)
    kind = CATALOGUES[part].kind
    told = f'the {kind} "theirs.nets:Net" is Python code, which is imported only if you type its name on the command'
    assert_refused(run("train", "evil.yaml"), told)
    assert_refused(run("train", "evil.yaml", f"{part}.seed=3"), told)  # typing an option approves no name
    assert everything(tmp_path) == before
    assert not code.exists()


def test_a_run_and_a_file_that_name_code_are_refused(run: Run, code: Path, recipe: str, tmp_path: Path) -> None:
    assert run("train", recipe, "model=theirs.nets:Net", "epochs=1", "--out", "here").status == 0
    assert run("export", "here", "net.safetensors").status == 0
    CATALOGUES["model"].pop("theirs.nets:Net")
    del sys.modules["theirs.nets"]
    code.unlink()
    for words in (["resume"], ["eval"], ["measure"], ["export", "x.safetensors"]):
        assert_refused(run(words[0], "here", *words[1:]), 'the model "theirs.nets:Net" is Python code')
    assert_refused(run("bench", "net.safetensors"), 'the model "theirs.nets:Net" is Python code')
    with pytest.raises(UserError, match="is Python code, which is imported only"):
        eq.load("net.safetensors")
    assert not code.exists()
    assert run("eval", "here", "--allow-code").status == 0
    assert code.exists()


def test_a_file_that_names_code_is_loaded_if_allowed(run: Run, code: Path, recipe: str) -> None:
    assert run("train", recipe, "model=theirs.nets:Net", "epochs=1", "--out", "here").status == 0
    assert run("export", "here", "net.safetensors").status == 0
    CATALOGUES["model"].pop("theirs.nets:Net")
    assert eq.load("net.safetensors", allow_code=True)(torch.rand(1, 1, 8, 8)).shape == (1, 10)


WRONG = {
    "unknown option": (
        ["model=theirs.nets:Net", "model.hiden=3"],
        'model: no option is called "hiden"; did you mean',
    ),
    "wrong type": (["model=theirs.nets:Net", "model.hidden=many"], "model.hidden='many': expected a whole number"),
    "wrong word": (["model=theirs.nets:Net", "model.act=elu"], "model.act='elu': expected one of relu, tanh"),
    "option of data": (["data=theirs.nets:read", "data.imags=3"], 'data: no option is called "imags"; did you mean'),
    "type of data": (["data=theirs.nets:read", "data.images=x"], "data.images='x': expected a whole number"),
    "option of topology": (["topology=theirs.nets:Grow", "topology.vigor=1"], 'did you mean "vigour"'),
    "module": (["model=theirs.nowhere:Net"], "cannot be imported: ModuleNotFoundError: No module named"),
    "attribute": (["model=theirs.nets:Nett"], "cannot be imported: AttributeError: module 'theirs.nets' has no"),
    "kind": (["topology=theirs.nets:Net"], "is not a class derived from equipoise.topology.algorithm.Algorithm"),
    "number": (["model=theirs.nets:NOT_CALLABLE"], "is not a class or a function"),
    "no module": (["model=theirs.nets:Aim", "model.label_smoothing=0"], "returned Aim, not a torch.nn.Module"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_are_checked_against_the_signature(run: Run, code: Path, recipe: str, case: str) -> None:
    words, told = WRONG[case]
    assert_refused(run("train", recipe, *words), told)


def test_code_that_fails_is_one_line_with_its_place(run: Run, code: Path, recipe: str, tmp_path: Path) -> None:
    (tmp_path / "theirs" / "broken.py").write_text("x = 1\nx / 0\n")
    outcome = run("train", recipe, "model=theirs.broken:Net")
    assert_refused(outcome, "cannot be imported: ZeroDivisionError: division by zero")
    assert "broken.py:2)" in outcome.err


def test_a_model_without_normalisation_and_with_any_options(run: Run, code: Path, recipe: str) -> None:
    words = ["model=theirs.nets:Plain", "model.drop=0.1", "epochs=1"]
    trained = run("train", recipe, *words, "--out", "here")
    assert trained.status == 0
    assert "has no layer `normalize`" in trained.err
    quiet = run("train", recipe, *words, "data.normalize=false", "--out", "there")
    assert (quiet.status, quiet.err) == (0, "")
    assert eq.load(_exported(run, "there"))(torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_a_study_imports_code_only_if_allowed(run: Run, code: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny(epochs=1)))
    arms = {"theirs": {"model": {"name": "theirs.nets:Net", "hidden": 4}}, "ours": {}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"title": "T", "recipe": "tiny.yaml", "arms": arms}))
    assert_refused(run("study", "s.yaml"), 'the model "theirs.nets:Net" is Python code')
    assert not code.exists()
    assert run("study", "s.yaml", "--allow-code").status == 0
    assert len(list((tmp_path / "results" / "s").glob("*-seed0.json"))) == 2


def test_installed_entry_points_have_names(
    run: Run, code: Path, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "installed-1.0.dist-info").mkdir(parents=True)
    (site / "installed.py").write_text(CODE)
    (site / "installed-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n"
    )
    points = {"models": "theirs-net = installed:Net", "topologies": "theirs-grow = installed:Grow"}
    points |= {"data": "theirs-data = installed:read", "corrections": "broken = nowhere:Correct"}
    text = "".join(f"[equipoise.{group}]\n{point}\n" for group, point in points.items())
    (site / "installed-1.0.dist-info" / "entry_points.txt").write_text(text)
    assert_refused(run("train", recipe, "model=theirs-net"), 'no model is called "theirs-net"')
    monkeypatch.syspath_prepend(site)
    listed = run("list").out.splitlines()
    assert any(line.split() == ["theirs-net", "A", "perceptron", "of", "somebody", "else."] for line in listed)
    assert any(line.split()[:3] == ["theirs-data", "Random", "pixels."] for line in listed)
    assert any(line.startswith("  broken") and "cannot be imported" in line for line in listed)
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(tiny(model={"name": "theirs-net", "hidden": 4}, epochs=1)))
    assert run("train", "theirs.yaml", "topology=theirs-grow", "--out", "here").status == 0
    assert_refused(run("train", "theirs.yaml", "model.hiden=2"), 'did you mean "hidden"')
    assert_refused(run("train", recipe, "model=theirs-nett"), 'did you mean "theirs-net"?')
