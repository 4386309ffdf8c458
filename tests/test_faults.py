"""A sample of the fault harness (`make test-faults`): kills, changed files, and files that would run code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from faults_input import GUARD, Kind, Tally, run_command, try_files, without_training
from faults_kill import kill_runs, pipelines
from faults_kinds import FILES, payloads
from faults_page import page

SAMPLE = 6  # runs that are killed
EACH = 25  # changed files of each kind


def test_a_sample_of_pipelines_survives_kills(tmp_path: Path) -> None:
    *_, tally = kill_runs(tmp_path, SAMPLE, seed=0)
    assert tally.failures == []
    assert tally.runs == len(tally.pipelines) == SAMPLE
    assert sum(tally.kills.values()) >= SAMPLE


def test_the_harness_knows_every_pipeline() -> None:
    from equipoise.correction import CORRECTIONS
    from equipoise.topology import ALGORITHMS

    variants = {"fixed", "agent-no-gamma", "agent-reduced-lr"}  # of others, with another constant
    made = pipelines()
    assert len(set(made)) == len(made) >= 150
    assert {p.topology.removesuffix("-itop") for p in made} == set(ALGORITHMS) - {"dense"}
    assert {p.correction.split(",")[0] for p in made} >= set(CORRECTIONS) - variants


@pytest.mark.parametrize("kind", FILES, ids=lambda kind: kind.name)
def test_changed_files_end_well_or_in_one_line(kind: Kind, tmp_path: Path) -> None:
    tally = Tally()
    try_files(kind, tmp_path / "box", EACH, 0, tally)
    assert tally.failures == []
    assert tally.inputs[kind.name] == EACH


# Nothing that is read can run code


@pytest.mark.parametrize("kind", FILES, ids=lambda kind: kind.name)
def test_no_file_can_run_code(kind: Kind, tmp_path: Path) -> None:
    """Every payload in the place of every kind of file, and read by every command that reads it."""
    from random import Random

    target, work = tmp_path / "executed", tmp_path / "work"
    work.mkdir()
    kind.prepare(work)
    places = {path.name.partition(".")[2] + path.name[:4]: path for path in kind.files(work)}  # one of each sort
    with without_training():
        for path in places.values():
            sound = path.read_bytes()
            for name, payload in payloads(target).items():
                path.unlink()
                path.write_bytes(payload)
                for seed in range(kind.ways):
                    kind.read(work, Random(seed))
                    assert not target.exists(), (path, name)
            path.write_bytes(sound)


@pytest.mark.parametrize("word", ["epochs", "topology", "model.hidden", "data.root"])
def test_no_override_can_run_code(word: str, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    (tmp_path / "work").mkdir()
    code = f'{word}=!!python/object/apply:os.mkdir ["{target}"]'
    with without_training():
        status, said = run_command(["train", "digits", code, "--out", "run"], tmp_path / "work")
    assert status == 2
    assert "not valid YAML" in said
    assert not target.exists()


# The page


def test_the_page_says_what_was_done_and_what_failed() -> None:
    from faults import Found

    found = Found(seed=3, seconds=600.0, environment="here, today")
    found.alone.runs, found.pairs.runs, found.alone.damages = 17, 5, 4
    found.alone.kills.update({"step": 20, "any moment": 3})
    found.pairs.kills.update({"step": 2})
    found.inputs.inputs.update({"recipes": 1234})
    assert "| failures | 0 |" in page(found)
    found.inputs.failures.append("recipes 7 of seed 3: KeyError")
    text = page(found)
    for line in (
        "here, today, seed 3, 10 minutes.",
        "| runs in one process that were killed and resumed | 17 |",
        "| runs in two processes that were killed and resumed | 5 |",
        "| kills with SIGKILL | 25 |",
        "| within a training step | 22 |",
        "| recipes | 1,234 |",
        "| failures | 1 |",
        "- recipes 7 of seed 3: KeyError",
    ):
        assert f"\n{line}\n" in text


# The harness itself can fail


def test_the_guard_hears_what_reading_does_not_do(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with GUARD.within(tmp_path / "in") as outside:
        (tmp_path / "in" / "a").write_text("")
        (tmp_path / "in" / "a").read_text()
        assert outside == []
        (tmp_path / "b").write_text("")
        (tmp_path / "in" / ".." / "c").mkdir()
        os.rename(tmp_path / "b", tmp_path / "d")
        os.system("true")
    assert [line.split()[0] for line in outside] == ["open", "os.mkdir", "os.rename", "os.system"]


def test_a_traceback_a_wrong_status_and_a_file_elsewhere_are_failures(tmp_path: Path) -> None:
    def read(work: Path, random: object) -> None:
        content = (work / "a").read_bytes()
        if content.startswith(b"sou"):
            raise ValueError("what a person should not see")
        (work.parent / "elsewhere").write_text("")

    def prepare(work: Path) -> None:
        (work / "a").write_bytes(b"sound")

    tally = Tally()
    try_files(Kind("k", prepare, lambda work: [work / "a"], read), tmp_path / "box", 30, 0, tally)
    assert any("ValueError" in line for line in tally.failures)
    assert any("beside its folder" in line for line in tally.failures)
