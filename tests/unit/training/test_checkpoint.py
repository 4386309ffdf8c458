"""Checkpoints: saved states are loaded bit-identical, and damaged files are refused."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import warnings
from collections import OrderedDict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file

from equipoise import files
from equipoise.errors import UserError
from equipoise.training import checkpoint
from equipoise.training.checkpoint import DamagedCheckpoint, Store, load, save
from train_helpers import assert_same_state

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
TYPES += [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


class Pair(NamedTuple):
    left: int
    right: int


def state() -> dict[str, Any]:
    return {
        "weights": OrderedDict(a=torch.randn(3, 4), b=torch.tensor(2.5), empty=torch.zeros(2, 0)),
        "state": {0: {"step": torch.tensor(3.0), "buffer": None}, 17: {"buffer": torch.arange(5)}},
        "groups": [{"betas": (0.9, 0.999), "lr": 0.1, "fused": None, "params": [0, 1]}],
        "numbers": [1, -(2**70), 0.1, float("nan"), float("inf"), True, "ü \n \0", ""],
        "nothing": {"dict": {}, "list": [], "tuple": (), "none": None},
        "random": [torch.get_rng_state(), None],
    }


# Round trips


def test_nested_states_come_back_to_the_bit(tmp_path: Path) -> None:
    written = state()
    save(tmp_path / "deep" / "er" / "a.safetensors", written)
    found = load(tmp_path / "deep" / "er" / "a.safetensors")
    assert_same_state(found, written)
    assert list(found["state"]) == [0, 17]
    assert found["groups"][0]["betas"] == (0.9, 0.999)
    assert found["nothing"] == written["nothing"]
    assert math.isnan(found["numbers"][3])


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_of_number(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    save(tmp_path / "a", {"x": values, "one": values[1], "none": values[:0]})
    found = load(tmp_path / "a")
    assert_same_state(found, {"x": values, "one": values[1], "none": values[:0]})


def test_nan_payloads_and_negative_zeros_survive(tmp_path: Path) -> None:
    patterns = torch.tensor([0x7FC00001, -0x00400001 & 0x7FFFFFFF, -(2**31), 1], dtype=torch.int32).view(
        torch.float32
    )
    save(tmp_path / "a", {"x": patterns})
    assert torch.equal(load(tmp_path / "a")["x"].view(torch.int32), patterns.view(torch.int32))


def test_shared_and_strided_tensors_are_written_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    written = {
        "whole": base,
        "tied": base,
        "view": base[:, 1],
        "transposed": base.transpose(0, 2),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    save(tmp_path / "a", written)
    assert_same_state(load(tmp_path / "a"), written)


def test_keys_that_spell_alike_are_kept_apart(tmp_path: Path) -> None:
    tensors = [torch.full((2,), float(i)) for i in range(5)]
    written = {
        "a": {"b": tensors[0], 1: tensors[1], "1": tensors[2]},
        "a/b": tensors[3],
        "a/b'": tensors[4],
    }
    save(tmp_path / "a", written)
    assert_same_state(load(tmp_path / "a"), written)


def test_named_tuples_come_back_as_tuples(tmp_path: Path) -> None:
    save(tmp_path / "a", {"pair": Pair(1, 2)})
    assert load(tmp_path / "a")["pair"] == (1, 2)


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes", lambda: 1, {(1, 2): 3}, {1.5: 2}])
def test_what_cannot_come_back_is_not_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"a checkpoint cannot hold .* at /deep/0"):
        save(tmp_path / "a", {"deep": [value]})
    assert list(tmp_path.iterdir()) == []


keys = st.text(max_size=4) | st.integers()
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
tensors = st.lists(st.floats(width=32), max_size=3).map(torch.tensor)
values = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=50)
@given(st.dictionaries(keys, values, max_size=4))
def test_any_nested_state_comes_back(tmp_path_factory: pytest.TempPathFactory, written: dict[Any, Any]) -> None:
    path = tmp_path_factory.mktemp("state") / "a"
    save(path, written)
    assert_same_state(load(path), written)


# Atomic writes


@pytest.mark.parametrize("failing", ["training.checkpoint.save_file", "files.flush", "files.os.replace"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O"), KeyboardInterrupt()]
)
def test_a_failure_while_writing_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: BaseException
) -> None:
    def fail(*arguments: Any, **_: Any) -> None:
        if failing.endswith("save_file"):
            Path(arguments[1]).write_bytes(b"half of it")
        raise error

    path = tmp_path / "a.safetensors"
    save(path, {"x": torch.ones(2)})
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(f"equipoise.{failing}", fail)
        expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UserError
        with pytest.raises(expected):
            save(path, {"x": torch.zeros(2)})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_the_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    replace, fsync = os.replace, files.flush

    def flushed(path: Path) -> None:
        calls.append(f"flush {path.name}")
        fsync(path)

    def replaced(old: Path, new: Path) -> None:
        calls.append(f"replace {new.name}")
        replace(old, new)

    monkeypatch.setattr("equipoise.files.flush", flushed)
    monkeypatch.setattr("os.replace", replaced)
    save(tmp_path / "a", {})
    assert calls[0].startswith("flush .a.")
    assert calls[1:] == ["replace a", f"flush {tmp_path.name}"]


# Damaged files


@cache
def sound() -> tuple[bytes, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    written = {"weight": torch.randn(5, generator=generator), "step": 3, "pair": (1, None)}
    with TemporaryDirectory() as folder:
        save(Path(folder) / "a", written)
        return (Path(folder) / "a").read_bytes(), written


def read_damaged(path: Path, content: bytes) -> None:
    """Detected, or harmless."""
    path.write_bytes(content)
    try:
        found = load(path)
    except DamagedCheckpoint as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert_same_state(found, sound()[1])


def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    content, _ = sound()
    for index in range(len(content)):
        damaged = bytearray(content)
        damaged[index] ^= 0xFF
        (tmp_path / "a").write_bytes(bytes(damaged))
        with pytest.raises(DamagedCheckpoint):
            load(tmp_path / "a")


@settings(max_examples=150)
@given(index=st.integers(0, 10_000), value=st.integers(0, 255))
@example(index=0, value=0)
def test_any_changed_byte_is_detected_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, index: int, value: int
) -> None:
    content = bytearray(sound()[0])
    content[index % len(content)] = value
    read_damaged(tmp_path_factory.getbasetemp() / "changed", bytes(content))


@pytest.mark.parametrize(
    ("was", "now"), [(b'"F32"', b'"I32"'), (b"[2,3]", b"[3,2]"), (b'"/x"', b'"/z"'), (b"x", b"z"), (b'"2"', b'"3"')]
)
def test_a_tensor_under_another_type_shape_or_name_is_detected(tmp_path: Path, was: bytes, now: bytes) -> None:
    """The bytes of the tensor are intact, but would be read as something else."""
    save(tmp_path / "a", {"x": torch.arange(6.0).view(2, 3)})
    content = (tmp_path / "a").read_bytes()
    assert was in content
    (tmp_path / "a").write_bytes(content.replace(was, now))
    with pytest.raises(DamagedCheckpoint):
        load(tmp_path / "a")


def test_every_truncation_and_any_tail_is_detected(tmp_path: Path) -> None:
    content, _ = sound()
    for length in range(len(content)):
        (tmp_path / "a").write_bytes(content[:length])
        with pytest.raises(DamagedCheckpoint):
            load(tmp_path / "a")
    (tmp_path / "a").write_bytes(content + b"more")
    with pytest.raises(DamagedCheckpoint):
        load(tmp_path / "a")


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.call, (["touch", str(self.target)],)


def test_a_pickle_is_refused_and_not_executed(tmp_path: Path) -> None:
    target, path = tmp_path / "executed", tmp_path / "a.safetensors"
    path.write_bytes(pickle.dumps(Malicious(target)))
    with pytest.raises(DamagedCheckpoint):
        load(path)
    torch.save({"model": Malicious(target)}, path)
    with pytest.raises(DamagedCheckpoint):
        load(path)
    assert not target.exists()


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "plain")
    with pytest.raises(DamagedCheckpoint, match="not a checkpoint of equipoise"):
        load(tmp_path / "plain")
    (tmp_path / "text").write_text("not at all")
    (tmp_path / "folder").mkdir()
    for name in ("text", "folder"):
        with pytest.raises(DamagedCheckpoint):
            load(tmp_path / name)
    with pytest.raises(UserError, match="there is no checkpoint"):
        load(tmp_path / "missing")


@pytest.mark.parametrize("structure", ['{"tensor": "x"}', "[", "[" * 10_000, '{"dict": [1]}', '{"dict": [[[], 1]]}'])
def test_a_structure_that_leads_nowhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, structure: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("equipoise.training.checkpoint.json.dumps", lambda _: structure)
        save(tmp_path / "a", {})
    with pytest.raises(DamagedCheckpoint):
        load(tmp_path / "a")


def test_another_version_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "VERSION", 7)
    save(tmp_path / "a", {})
    monkeypatch.undo()
    with pytest.raises(UserError, match="is a checkpoint of version 7; this equipoise reads 2") as error:
        load(tmp_path / "a")
    assert not isinstance(error.value, DamagedCheckpoint)


# The checkpoints of a run


def steps(store: Store) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in store.paths()]


def test_the_last_few_and_the_best_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for step in (1, 2, 3, 10, 20):
        store.save(step, {"step": step}, best=step in (1, 3))
    assert steps(store) == [20, 10]
    assert load(tmp_path / "best.safetensors") == {"step": 3}
    assert store.newest() == {"step": 20}
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best.safetensors",
        "step-000000010.safetensors",
        "step-000000020.safetensors",
    ]


def test_a_save_that_was_interrupted_before_it_removed_old_ones_is_completed(tmp_path: Path) -> None:
    for step in range(1, 4):
        save(tmp_path / f"step-{step:09d}.safetensors", {"step": step})
    (tmp_path / ".best.safetensors.0.tmp").touch()
    store = Store(tmp_path, keep=1)
    store.tidy(7)
    assert len(list(tmp_path.iterdir())) == 4
    store.tidy(3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000003.safetensors"]


def test_the_best_is_kept_where_files_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("os.link", no_links)
    store = Store(tmp_path, keep=1)
    store.save(1, {"step": 1}, best=True)
    store.save(2, {"step": 2})
    assert load(tmp_path / "best.safetensors") == {"step": 1}


def test_an_empty_store_has_no_newest(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Store(tmp_path / "nowhere").newest() is None


def test_a_damaged_newest_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=3)
    for step in (1, 2, 3):
        store.save(step, {"step": step})
    newest = store.paths()[0]
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"step-000000003.* is damaged.*; using the one before it"):
        assert store.newest() == {"step": 2}
    for path in store.paths():
        path.write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged") as caught:
        assert store.newest() is None
    told = [str(warning.message).rpartition("; ")[2] for warning in caught]
    assert told == ["using the one before it"] * 2 + ["there is no earlier one"]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_one_never_takes_the_place_of_a_sound_one(tmp_path: Path, keep: int) -> None:
    """The run goes back to step 2 and saves step 3; the damaged file of step 9 has the higher number."""
    store = Store(tmp_path, keep)
    store.save(2, {"step": 2})
    (tmp_path / "step-000000009.safetensors").write_bytes(b"damaged")
    store.save(3, {"step": 3})
    assert steps(store) == [3, 2][:keep]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.newest() == {"step": 3}


def test_what_a_killed_process_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".step-000000001.safetensors.123.tmp").write_bytes(b"half")
    store = Store(tmp_path)
    store.save(2, {"step": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000002.safetensors"]


def test_the_best_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        (store.folder / ".best.tmp").symlink_to(tmp_path / "outside")  # at this very moment
        raise OSError(1, "Operation not permitted")

    (tmp_path / "outside").write_text("precious")
    store = Store(tmp_path / "checkpoints")
    store.folder.mkdir()
    (store.folder / "best.safetensors").symlink_to(tmp_path / "outside")
    monkeypatch.setattr("os.link", no_links)
    store.save(1, {"step": 1}, best=True)
    assert (tmp_path / "outside").read_text() == "precious"
    assert sorted(p.name for p in store.folder.iterdir()) == ["best.safetensors", "step-000000001.safetensors"]
    assert load(store.folder / "best.safetensors") == {"step": 1}
