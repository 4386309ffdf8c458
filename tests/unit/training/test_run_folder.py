"""The folder of a run: never overwritten, never half-written, readable in any state."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from equipoise.errors import UserError
from equipoise.training.run_folder import FolderTaken, RunFolder, strict
from train_helpers import held_by_another_process


def create(path: Path, **raw: Any) -> RunFolder:
    return RunFolder.create(path, raw or {"epochs": 3})


def test_a_new_folder_holds_its_recipe(tmp_path: Path) -> None:
    run = create(tmp_path / "a" / "b", epochs=3, topology={"name": "set", "sparsity": 0.5})
    assert run.recipe() == {"epochs": 3, "topology": {"name": "set", "sparsity": 0.5}}
    assert RunFolder.open(tmp_path / "a" / "b").recipe() == run.recipe()
    assert [p.name for p in run.path.iterdir()] == ["recipe.yaml"]
    assert run.metrics() == []
    assert run.result() is None
    assert not run.has_result


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    assert create(tmp_path).recipe() == {"epochs": 3}


def test_what_exists_is_never_written_over(tmp_path: Path) -> None:
    run = create(tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("mine")
    for name in ("run", "file", "folder"):
        with pytest.raises(UserError, match=f"{name} exists"):
            create(tmp_path / name, epochs=9)
    assert run.recipe() == {"epochs": 3}
    assert (tmp_path / "file").read_text() == "mine"
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["notes"]


def test_a_folder_is_created_by_one_of_many(tmp_path: Path) -> None:
    def race(i: int) -> bool:
        try:
            create(tmp_path / "run", epochs=i)
        except FolderTaken:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(race, range(1, 17)))
    assert sum(created) == 1
    assert RunFolder.open(tmp_path / "run").recipe() == {"epochs": created.index(True) + 1}


@pytest.mark.parametrize("leftover", [".recipe.yaml.tmp", ".recipe.yaml.0123.tmp"])
def test_what_a_run_killed_at_its_start_left_is_removed(tmp_path: Path, leftover: str) -> None:
    (tmp_path / leftover).write_text("mod")
    run = create(tmp_path)
    (tmp_path / ".result.json.0123.tmp").write_text("{")
    run.claim()
    run.release()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "recipe.yaml"]


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "checkpoints"])
def test_a_run_does_not_follow_links_out_of_its_folder(tmp_path: Path, name: str) -> None:
    run = create(tmp_path / "run")
    (tmp_path / "outside").write_text("precious")
    (run.path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="is a symbolic link"):
        run.claim()
    assert (tmp_path / "outside").read_text() == "precious"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        create(tmp_path / "file" / "run")


def test_what_is_no_run_is_told(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", tmp_path / ("x" * 5000), Path("\0")):
        with pytest.raises(UserError, match=r"is not a run: it has no recipe\.yaml"):
            RunFolder.open(path)


def test_lines_come_back_one_per_epoch(tmp_path: Path) -> None:
    run = create(tmp_path)
    for epoch in (1, 2, 3):
        run.append({"epoch": epoch, "loss": 1 / epoch, "scores": {"plain": {"accuracy": 0.5}}})
    assert [line["epoch"] for line in run.metrics()] == [1, 2, 3]
    assert run.metrics()[2]["loss"] == 1 / 3
    assert len(run.metrics_file.read_text().splitlines()) == 3


def test_lines_are_strict_json(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.append({"epoch": 1, "loss": float("nan"), "correction": {"c_hat": float("inf"), "c": [0.5, float("-inf")]}})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    (line,) = (json.loads(text, parse_constant=refuse) for text in run.metrics_file.read_text().splitlines())
    assert line == {"epoch": 1, "loss": None, "correction": {"c_hat": None, "c": [0.5, None]}}
    run.finish({"seconds": float("nan")})
    assert run.result() == {"seconds": None}


def test_strict_leaves_everything_else_alone() -> None:
    value = {"a": [1, 0.5, True, None, "nan"], "b": {"c": 1e308}}
    assert strict(value) == value
    assert strict(float("nan")) is None


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.append({"epoch": 1})
    run.append({"epoch": 2})
    whole = run.metrics_file.read_bytes()
    second = len(whole) // 2
    for length in range(second, len(whole)):  # at the last, only the end of the line is missing
        run.metrics_file.write_bytes(whole[:length])
        assert [line["epoch"] for line in run.metrics()] == ([1, 2] if length == len(whole) - 1 else [1])
    run.metrics_file.write_bytes(whole[: second + 5])
    run.forget_after(1)
    run.append({"epoch": 2})
    assert run.metrics_file.read_bytes() == whole


@pytest.mark.parametrize("junk", ["null", "3", '"x"', "[]", "{}", '{"epoch": "1"}', "\\xff", "", "NaN"])
def test_lines_that_are_none_are_left_out(tmp_path: Path, junk: str) -> None:
    run = create(tmp_path)
    run.append({"epoch": 1})
    with open(run.metrics_file, "a") as file:
        file.write(junk + "\n")
    run.append({"epoch": 2})
    assert [line["epoch"] for line in run.metrics()] == [1, 2]


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 9])
def test_epochs_that_are_done_again_are_forgotten(tmp_path: Path, kept: int) -> None:
    run = create(tmp_path)
    for epoch in (1, 2, 3):
        run.append({"epoch": epoch})
    run.forget_after(kept)
    assert [line["epoch"] for line in run.metrics()] == [1, 2, 3][:kept]


def test_a_failure_while_forgetting_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError

    run = create(tmp_path)
    run.append({"epoch": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError):
            run.forget_after(0)
    assert [line["epoch"] for line in run.metrics()] == [1]


def test_the_result_is_written_once_and_read_back(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.finish({"test": {"plain": {"accuracy": 0.5}}})
    assert run.has_result
    assert run.result() == {"test": {"plain": {"accuracy": 0.5}}}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["recipe.yaml", "result.json"]


def test_a_run_is_claimed_by_one_process_at_a_time(tmp_path: Path) -> None:
    run = create(tmp_path)
    with held_by_another_process(tmp_path), pytest.raises(UserError, match="is being trained by another process"):
        run.claim()
    run.claim()  # the other was killed with kill -9
    run.claim()
    run.release()
    run.release()
    with held_by_another_process(tmp_path):  # it can be had again
        pass
