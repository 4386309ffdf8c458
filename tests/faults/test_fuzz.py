"""Recipes and command lines nobody would write: each ends well or in one line for a person, never in a traceback."""

from __future__ import annotations

import contextlib
import io
import string
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise import cli
from equipoise.config import parameters_of
from equipoise.data import DATASETS
from equipoise.errors import UserError
from equipoise.training import Trainer, apply_overrides, make_recipe, read_recipe
from equipoise.training.checkpoint import load, save
from equipoise.training.parts import make_parts
from equipoise.training.recipe import CATALOGUES, DEFAULTS, PLAIN, DataOptions, packaged_recipes
from train_helpers import assert_same_state, tiny

FEW = settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, derandomize=False)


# What is thrown at it

numbers = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 0.0, 0.5, 1.0, 1.5, -0.5, 1e-300, 1e300, 2**31, 2**62, 2**63, 10**30, 10**400]),
    st.integers(-5, 5),
    st.floats(),
)
words = st.one_of(
    st.sampled_from(["", "nan", "1e-3", "1e999", "true", "name", "x" * 3000, "ü", "[/b]", "\x1b[31m", "a\nb", "0"]),
    st.sampled_from([name for catalogue in CATALOGUES.values() for name in catalogue]),
    st.sampled_from(["erk", "er", "uniform", "bsr", "cosine", "linear", "replay", "running", "pays", "rigl-itop"]),
    st.text(string.printable, max_size=6),
)
scalars = st.none() | st.booleans() | numbers | words
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.integers(), inner, max_size=3),
    max_leaves=6,
)

OPTIONS: dict[str, list[str]] = {
    **{part: sorted({o for entry in c.values() for o in parameters_of(entry)}) for part, c in CATALOGUES.items()},
    "data": sorted(parameters_of(DataOptions)),
    "checkpoint": ["every", "steps", "keep"],
}
NAMES: dict[str, list[str]] = {**{part: list(c) for part, c in CATALOGUES.items()}, "data": list(DATASETS)}
DANGEROUS = {
    "hidden",
    "width",
}  # a network of any size: a whole number between these and the largest fills the memory


def safe(option: str, value: Any) -> Any:
    return 7 if option in DANGEROUS and isinstance(value, int | float | str) else value


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Wrong and right values in known and unknown places."""
    found: list[tuple[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        part = draw(st.sampled_from([*OPTIONS, *PLAIN, "nothing", ""]))
        kind = draw(st.integers(0, 3))
        if kind == 0 or part not in OPTIONS:
            found.append((part, draw(junk)))
        elif kind == 1 and part in NAMES:
            found.append((part, draw(st.sampled_from(NAMES[part]))))
        else:
            option = draw(st.sampled_from([*OPTIONS[part], "name", "nothing"]))
            found.append((f"{part}.{option}", safe(option, draw(scalars if kind == 2 else junk))))
    return found


def changed(raw: dict[str, Any], places: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(raw)
    for place, value in places:
        part, dot, option = place.partition(".")
        if not dot:
            result[part] = value
            continue
        old = result.get(part, DEFAULTS.get(part, {}))
        old = {"name": old} if isinstance(old, str) else old
        result[part] = {**(old if isinstance(old, dict) else {}), option: value}
    return result


@contextlib.contextmanager
def for_people() -> Iterator[None]:
    """What it raises is one line that can be read."""
    try:
        yield
    except UserError as error:
        assert str(error).strip()  # noqa: PT017
        assert len(str(error)) < 5000  # noqa: PT017


# Recipes


def check_recipe(raw: dict[str, Any]) -> None:
    with for_people():
        make_recipe(raw)


@settings(FEW, max_examples=150)
@given(name=st.sampled_from(sorted(packaged_recipes())), places=changes())
def test_changed_recipes(name: str, places: list[tuple[str, Any]]) -> None:
    check_recipe(changed(read_recipe(name), places))


@settings(FEW, max_examples=50)
@given(st.dictionaries(st.sampled_from([*DEFAULTS, *PLAIN]) | words, junk, max_size=5))
def test_recipes_of_junk(raw: dict[str, Any]) -> None:
    check_recipe(raw)


@settings(FEW, max_examples=60)
@given(places=changes())
def test_parts_of_changed_recipes(places: list[tuple[str, Any]]) -> None:
    with for_people():
        make_parts(make_recipe(changed(tiny(), places)))


def right_values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of the right type, most of them in range."""
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
    if origin is Literal:
        return st.sampled_from(options)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(right_values, options))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(st.sampled_from(["*", "layers.0*"]), right_values(options[1]), max_size=2)
    return st.lists(right_values(options[0]), max_size=3) if options else st.just("*0*")


@st.composite
def plausible(draw: st.DrawFn) -> dict[str, Any]:
    """A recipe that a person might write: parts by name, up to three options each, of the right types."""
    raw = tiny(epochs=draw(st.integers(1, 3)), average=draw(st.sampled_from([0, 0.9])))
    raw["precision"] = draw(st.sampled_from(["float32", "bf16"]))
    raw["clip"] = draw(st.sampled_from([0, 1e-6, 1.0]))
    for part in draw(st.lists(st.sampled_from(sorted(CATALOGUES.keys() - {"model"})), unique=True, max_size=3)):
        name = draw(st.sampled_from(NAMES[part]))
        hints = get_type_hints(CATALOGUES[part][name])
        known = sorted(parameters_of(CATALOGUES[part][name]))
        chosen = draw(st.lists(st.sampled_from(known), unique=True, max_size=3))
        raw[part] = {"name": name, **{option: draw(right_values(hints[option])) for option in chosen}}
        if part == "objective" and "steps" in known:
            raw[part].setdefault("steps", 2)
    return raw


def train(raw: dict[str, Any]) -> None:
    """To the end, and through a file into another trainer."""
    with for_people():
        recipe = make_recipe(raw)
        made = Trainer(recipe)
        made.run()
        other = Trainer(recipe)
        with TemporaryDirectory() as folder:
            save(Path(folder) / "a", made.state_dict())
            other.load_state_dict(load(Path(folder) / "a"))
        assert_same_state(other.state_dict(), made.state_dict())


@settings(FEW, max_examples=40)
@given(plausible())
def test_training_of_plausible_recipes(raw: dict[str, Any]) -> None:
    train(raw)


@settings(FEW, max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=3)), min_size=1, max_size=3))
def test_recipe_files_with_other_bytes(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, bytes]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    content = yaml.safe_dump(read_recipe("digits")).encode()
    for place, piece in edits:
        place %= len(content)
        content = content[:place] + piece + content[place + len(piece) :]
    path.write_bytes(content)
    with for_people():
        make_recipe(read_recipe(str(path)))


overrides = st.one_of(
    st.builds("{}={}".format, st.sampled_from([*DEFAULTS, *PLAIN]), words),
    st.builds(
        "{}.{}={}".format,
        st.sampled_from(sorted(OPTIONS)),
        st.sampled_from(sorted({o for options in OPTIONS.values() for o in options} - DANGEROUS)),
        scalars,
    ),
    st.text(string.printable, max_size=12),
)


@settings(FEW, max_examples=100)
@given(st.lists(overrides, max_size=4))
def test_overrides(words: list[str]) -> None:
    with for_people():
        make_recipe(apply_overrides(read_recipe("digits"), words))


# Command lines

plain_words = st.one_of(
    st.sampled_from(["digits", "agent", "run", "tiny.yaml", "nowhere", ".", "..", "", "-", "--", "runs", "models"]),
    st.sampled_from(
        ["--out", "--epochs", "--tensorboard", "--help", "--best", "--split", "test", "train", "--attack"]
    ),
    st.sampled_from(["--eps", "--images", "pgd20", "1", "-1", "0.1", "--nothing", "-x"]),
    st.sampled_from(["--format", "onnx", "state_dict", "--values", "int8", "--force", "out.bin", "--weights"]),
    st.sampled_from(["--against", "best", "--noise", "--batches", "--json", "-o", "out.html", "--list", "--seeds"]),
    overrides,
).filter(lambda word: "\0" not in word)
commands = st.tuples(
    st.sampled_from(
        ["train", "resume", "eval", "list", "show", "demo", "export", "measure", "report", "study", "", "nothing"]
    ),
    st.lists(plain_words, max_size=5),
).map(lambda pair: [pair[0], *pair[1]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with a recipe and a finished run."""
    path = tmp_path_factory.mktemp("fuzz")
    (path / "tiny.yaml").write_text(yaml.safe_dump(tiny(epochs=1)))
    with contextlib.chdir(path), contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit):
        cli.main(["train", "tiny.yaml", "--out", "run"])
    return path


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line without hours of training."""
    result = {"test": {"plain": {"accuracy": 0.5}}}
    monkeypatch.setattr("equipoise.training.trainer.Trainer.run", lambda self: result)
    monkeypatch.setattr("equipoise.studies.demo.run_demo", lambda *_: None)
    monkeypatch.setattr("equipoise.display.figures._draw", lambda *_: None)


def check_command(folder: Path, line: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(line)
        except SystemExit as stopped:
            status = stopped.code
        else:
            raise AssertionError("the command line always exits")
    assert status in (0, 2)
    complaints = [text for text in err.getvalue().splitlines() if "warning" not in text]
    assert len(complaints) == (1 if status == 2 else 0), err.getvalue()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("no_work")
@settings(FEW, max_examples=100)
@given(line=commands)
def test_command_lines(folder: Path, line: list[str]) -> None:
    own = {folder / "run" / "measure.json"}  # what `measure` leaves there
    before = {path: content for path, content in contents(folder / "run").items() if path not in own}
    check_command(folder, line)
    after = contents(folder / "run")
    assert {path: content for path, content in after.items() if path not in own} == before


@pytest.mark.usefixtures("no_work")
@settings(FEW, max_examples=40)
@given(
    name=st.sampled_from(["recipe.yaml", "metrics.jsonl", "result.json", "checkpoints/best.safetensors"]),
    place=st.integers(0, 3000),
    piece=st.binary(max_size=4),
    command=st.sampled_from([["show", "run"], ["eval", "run"], ["eval", "run", "--best"], ["resume", "run"]]),
)
def test_runs_with_damaged_files(folder: Path, name: str, place: int, piece: bytes, command: list[str]) -> None:
    sound = contents(folder / "run")
    path = folder / "run" / name
    place %= len(sound[path])
    path.unlink()  # the best is a link to the newest
    path.write_bytes(sound[path][:place] + piece + sound[path][place + 4 :])
    try:
        check_command(folder, command)
        damaged = {path: path.read_bytes()}
        assert command[0] == "resume" or contents(folder / "run") == {**sound, **damaged}
    finally:
        for each, content in sound.items():
            each.write_bytes(content)


# The same at length


@pytest.mark.slow
@settings(MANY, max_examples=3000)
@given(name=st.sampled_from(sorted(packaged_recipes())), places=changes())
def test_many_changed_recipes(name: str, places: list[tuple[str, Any]]) -> None:
    check_recipe(changed(read_recipe(name), places))


@pytest.mark.slow
@settings(MANY, max_examples=1000)
@given(plausible())
def test_training_of_many_plausible_recipes(raw: dict[str, Any]) -> None:
    train(raw)


@pytest.mark.slow
@pytest.mark.usefixtures("no_work")
@settings(MANY, max_examples=1000)
@given(line=commands)
def test_many_command_lines(folder: Path, line: list[str]) -> None:
    check_command(folder, line)
