"""A full disk: one line, status 2, the last checkpoint is intact, and the run can be resumed later."""

from __future__ import annotations

import errno
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from equipoise import cli
from equipoise.files import write_whole
from equipoise.training.checkpoint import Store
from killing import SERVER, launch
from train_helpers import assert_same_runs, tiny

MARKS = {  # part of the name of the file that does not fit, and part of the message
    "recipe.yaml": "cannot write to",
    "metrics.jsonl": "No space left on device; what was written before is intact",
    "step-": "could not write the checkpoint",
    "result.json": "No space left on device; what was written before is intact",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "r.yaml").write_text(yaml.safe_dump(tiny(epochs=3, correction="agent", checkpoint={"steps": 4})))
    assert launch(["train", str(folder / "r.yaml"), "--out", str(folder / "run")], folder / "log") == 0
    return folder / "run", str(folder / "r.yaml")


def fill_disk(monkeypatch: pytest.MonkeyPatch, mark: str, after: int) -> None:
    """Let `after` flushes of files with that name succeed, then fail."""
    fsync, seen = os.fsync, [0]

    def full(descriptor: int) -> None:
        if mark in os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")):
            seen[0] += 1
            if seen[0] > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)


def command(*words: str) -> Any:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(words))
    return stopped.value.code


@pytest.mark.parametrize(
    ("mark", "after"), [("recipe.yaml", 0), ("metrics.jsonl", 1), ("step-", 0), ("step-", 4), ("result.json", 0)]
)
def test_a_full_disk_is_one_line_and_nothing_is_lost(
    whole: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mark: str,
    after: int,
) -> None:
    run, (sound, recipe) = tmp_path / "run", whole
    with monkeypatch.context() as patch:
        fill_disk(patch, mark, after)
        assert command("train", recipe, "--out", str(run)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert MARKS[mark] in line
    assert not list(run.rglob("*.tmp"))
    if mark == "recipe.yaml":
        assert not list(run.iterdir())
        return
    steps = [int(path.stem[5:]) for path in Store(run / "checkpoints").paths()]
    assert steps == {"metrics.jsonl": [8, 6], "step-": [16, 12] if after else [], "result.json": [18, 16]}[mark]
    assert not (run / "result.json").exists()
    assert launch(["resume", str(run)], tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert_same_runs(sound, run)


def test_a_resume_onto_a_full_disk_changes_nothing(
    whole: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert launch(["train", whole[1], "--out", str(run)], tmp_path / "log", ("after a line", 2)) == -9
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        fill_disk(patch, "metrics.jsonl", 0)
        assert command("resume", str(run)) == 2
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


# A real limit of the file size in a separate process


def limited(arguments: list[str], log: Path, size: int) -> None:
    sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    cli.main(arguments)


def launch_limited(arguments: list[str], log: Path, size: int) -> tuple[int | None, list[str]]:
    """The status and the printed lines, through a pipe, because the limit holds for a log file too."""
    os.mkfifo(log)
    mine = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    process = SERVER.Process(target=limited, args=(arguments, log, size))
    process.start()
    process.join(60)
    said = os.read(mine, 1 << 16)
    os.close(mine)
    log.unlink()
    return process.exitcode, said.decode().splitlines()


@pytest.mark.parametrize("size", [0, 100, 3_000, 15_000])
def test_files_that_may_not_grow(whole: tuple[Path, str], tmp_path: Path, size: int) -> None:
    run = tmp_path / "run"
    status, lines = launch_limited(["train", whole[1], "--out", str(run)], tmp_path / "log", size)
    assert status == 2, lines[-1:]
    assert lines[-1].startswith("equipoise: c")  # cannot, could not
    assert sum("equipoise:" in line for line in lines) == 1
    assert not any("Traceback" in line for line in lines)
    assert not list(run.rglob("*.tmp"))
    assert Store(run / "checkpoints").newest() is None


@pytest.mark.parametrize("words", [["export", "RUN", "OUT"], ["report", "RUN", "--out", "OUT"]])
def test_what_is_made_of_a_run_is_there_whole_or_not_at_all(
    whole: tuple[Path, str], tmp_path: Path, words: list[str]
) -> None:
    out = tmp_path / "out"
    line = [str(whole[0]) if word == "RUN" else str(out) if word == "OUT" else word for word in words]
    if words[0] == "report":
        out.write_text("an older one")
    status, lines = launch_limited(line, tmp_path / "log", 1000)
    assert status == 2, lines[-1:]
    assert len(lines) == 1
    assert lines[0].startswith("equipoise: cannot write")
    assert [path.read_text() for path in tmp_path.iterdir()] == (["an older one"] if words[0] == "report" else [])


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "a", b"old")
    fill_disk(monkeypatch, "a", 0)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "a", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def no_room(job: str, on_device: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_study_on_a_full_disk_says_so_without_a_traceback() -> None:
    from equipoise.studies.launch import Failure, attempt

    failure = attempt(no_room, "job")
    assert isinstance(failure, Failure)
    assert "No space left on device" in failure.line
    assert failure.traceback == ""
