"""Recipes and command lines that nobody would write: each ends well or in one line, never in a traceback."""

from __future__ import annotations

import contextlib
import shutil
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.config import parameters_of
from equipoise.errors import UserError
from equipoise.training import Trainer, apply_overrides, make_recipe, read_recipe
from equipoise.training.checkpoint import load, save
from equipoise.training.parts import make_parts
from equipoise.training.recipe import CATALOGUES, KEYS
from equipoise.training.recipe_files import packaged_recipes
from harness.commands import run_command, without_training
from harness.file_kinds import write_run
from harness.strategies import NAMES, changed, changes, commands, junk, overrides, words
from train_helpers import assert_same_state, tiny

ANY = settings(suppress_health_check=list(HealthCheck))  # the profile decides about randomness


@contextlib.contextmanager
def for_people() -> Iterator[None]:
    """A `UserError` is allowed if it has a short message."""
    try:
        yield
    except UserError as error:
        assert str(error).strip()  # noqa: PT017
        assert len(str(error)) < 5000  # noqa: PT017


# Recipes


def check_recipe(raw: dict[str, Any]) -> None:
    with for_people():
        make_recipe(raw)


@settings(ANY, max_examples=150)
@given(name=st.sampled_from(sorted(packaged_recipes())), chosen=changes())
def test_changed_recipes(name: str, chosen: list[tuple[str, Any]]) -> None:
    check_recipe(changed(read_recipe(name), chosen))


@settings(ANY, max_examples=50)
@given(st.dictionaries(st.sampled_from(KEYS) | words, junk, max_size=5))
def test_recipes_of_junk(raw: dict[str, Any]) -> None:
    check_recipe(raw)


@settings(ANY, max_examples=60)
@given(chosen=changes())
def test_parts_of_changed_recipes(chosen: list[tuple[str, Any]]) -> None:
    with for_people():
        make_parts(make_recipe(changed(tiny(), chosen)))


def right_values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of the right type; most are in range."""
    options = get_args(hint)
    origin = get_origin(hint)
    simple: dict[Any, list[Any]] = {
        bool: [True, False],
        int: [0, 1, 2, 3, 5, 100],
        float: [0.0, 1e-6, 0.01, 0.1, 0.5, 0.9, 1.0, 1.5, 100.0],
        str: ["erk", "uniform", "l2", "normal", "none", "kl", "*0*"],
        type(None): [None],
    }
    if hint in simple:
        return st.sampled_from(simple[hint])
    if origin is Annotated:
        return st.sampled_from(sorted(hint.__metadata__[0]))
    if origin is Literal:
        return st.sampled_from(options)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(right_values, options))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(st.sampled_from(["*", "layers.0*"]), right_values(options[1]), max_size=2)
    return st.lists(right_values(options[0]), max_size=3) if options else st.just("*0*")


@st.composite
def plausible(draw: st.DrawFn) -> dict[str, Any]:
    """A recipe that a user might write: named parts with up to three options of the right types."""
    raw = tiny(epochs=draw(st.integers(1, 3)), ema=draw(st.sampled_from([0, 0.9])))
    raw["precision"] = draw(st.sampled_from(["float32", "bf16"]))
    raw["clip"] = draw(st.sampled_from([0, 1e-6, 1.0]))
    for part in draw(
        st.lists(st.sampled_from(sorted(CATALOGUES.keys() - {"model", "data"})), unique=True, max_size=3)
    ):
        name = draw(st.sampled_from(NAMES[part]))
        hints = get_type_hints(CATALOGUES[part][name], include_extras=True)
        known = sorted(parameters_of(CATALOGUES[part][name]))
        chosen = draw(st.lists(st.sampled_from(known), unique=True, max_size=3))
        raw[part] = {"name": name, **{option: draw(right_values(hints[option])) for option in chosen}}
        if part == "objective" and "steps" in known:
            raw[part].setdefault("steps", 2)
    return raw


def train(raw: dict[str, Any]) -> None:
    """Train to the end and load the state through a file into another trainer."""
    with for_people():
        recipe = make_recipe(raw)
        made = Trainer(recipe)
        made.run()
        other = Trainer(recipe)
        with TemporaryDirectory() as folder:
            save(Path(folder) / "a", made.state_dict())
            other.load_state_dict(load(Path(folder) / "a"))
        assert_same_state(other.state_dict(), made.state_dict())


@settings(ANY, max_examples=40)
@given(plausible())
def test_training_of_plausible_recipes(raw: dict[str, Any]) -> None:
    train(raw)


@settings(ANY, max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=3)), min_size=1, max_size=3))
def test_recipe_files_with_other_bytes(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, bytes]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    content = yaml.safe_dump(read_recipe("digits")).encode()
    for offset, piece in edits:
        start = offset % len(content)
        content = content[:start] + piece + content[start + len(piece) :]
    path.write_bytes(content)
    with for_people():
        make_recipe(read_recipe(str(path)))


@settings(ANY, max_examples=100)
@given(st.lists(overrides, max_size=4))
def test_overrides(words: list[str]) -> None:
    with for_people():
        make_recipe(apply_overrides(read_recipe("digits"), words))


# Command lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a finished run."""
    path = tmp_path_factory.mktemp("fuzz")
    write_run(path)
    shutil.copy(path / "recipe.yaml", path / "tiny.yaml")
    return path


@pytest.fixture
def no_training() -> Iterator[None]:
    with without_training():
        yield


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("no_training")
@settings(ANY, max_examples=100)
@given(line=commands)
def test_command_lines(folder: Path, line: list[str]) -> None:
    own = {folder / "run" / "measure.json"}  # `measure` writes it
    before = {path: content for path, content in contents(folder / "run").items() if path not in own}
    run_command(line, folder)
    after = contents(folder / "run")
    assert {path: content for path, content in after.items() if path not in own} == before


@pytest.mark.usefixtures("no_training")
@settings(ANY, max_examples=40)
@given(
    name=st.sampled_from(["recipe.yaml", "metrics.jsonl", "result.json", "checkpoints/best.safetensors"]),
    offset=st.integers(0, 3000),
    piece=st.binary(max_size=4),
    command=st.sampled_from([["show", "run"], ["eval", "run"], ["eval", "run", "--best"], ["resume", "run"]]),
)
def test_runs_with_damaged_files(folder: Path, name: str, offset: int, piece: bytes, command: list[str]) -> None:
    sound = contents(folder / "run")
    path = folder / "run" / name
    start = offset % len(sound[path])
    path.unlink()  # the best is a link to the newest
    path.write_bytes(sound[path][:start] + piece + sound[path][start + 4 :])
    try:
        run_command(command, folder)
        damaged = {path: path.read_bytes()}
        assert command[0] == "resume" or contents(folder / "run") == {**sound, **damaged}
    finally:
        for each, content in sound.items():
            each.write_bytes(content)


# The same at length


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(ANY, max_examples=3000)
@given(name=st.sampled_from(sorted(packaged_recipes())), chosen=changes())
def test_many_changed_recipes(name: str, chosen: list[tuple[str, Any]]) -> None:
    check_recipe(changed(read_recipe(name), chosen))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(ANY, max_examples=1000)
@given(plausible())
def test_training_of_many_plausible_recipes(raw: dict[str, Any]) -> None:
    train(raw)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("no_training")
@settings(ANY, max_examples=1000)
@given(line=commands)
def test_many_command_lines(folder: Path, line: list[str]) -> None:
    run_command(line, folder)
