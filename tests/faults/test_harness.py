"""A sample of the fault harness (`make test-faults`): kills, damaged files, and files that would run code."""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from equipoise import cli
from harness.campaign import Found, run_campaign, shards, shares, until_a_signal, write_page
from harness.commands import GUARD, run_command, without_training
from harness.concurrency import KINDS, ORDER, run_together
from harness.damage import Kind, try_files
from harness.file_kinds import FILES, payloads
from harness.generation import GENERATED, generated
from harness.kills import Pipeline, Subject, kill, pipelines
from harness.page import page
from harness.subjects import Framework, Study, subjects
from harness.tally import Tally

EACH = 8  # inputs of each kind

SAMPLE: list[Subject] = [
    Pipeline("rigl", "agent, replay", "masked"),
    Pipeline("granet", "saga", "packed"),
    Pipeline("set", "svrg, every 4", "masked", processes=2),
    pytest.param(Pipeline("mest", "mvr", "packed", processes=3), marks=pytest.mark.slow),
    pytest.param(Study(Pipeline("snfs", "alpha-svrg", "packed")), marks=pytest.mark.slow),
    pytest.param(Framework("Lightning", "agent"), marks=pytest.mark.slow),
    pytest.param(Framework("Hugging Face Trainer", "agent"), marks=pytest.mark.slow),
]  # type: ignore[list-item]


@pytest.mark.parametrize("subject", SAMPLE, ids=str)
def test_a_sample_of_runs_survives_kills(subject: Subject, tmp_path: Path) -> None:
    tally = Tally()
    kill(subject, "0", tmp_path / "run", tally)
    assert tally.failures == []
    assert tally.kills.total() > 0
    assert tally.runs == {subject.kind: 1}


def test_what_is_killed_is_as_much_as_it_is_meant_to_be() -> None:
    found = subjects(seed=0)
    names = {str(subject) for subject in found}
    assert len(names) == len(found) >= 220
    assert {each.processes for each in found if isinstance(each, Pipeline)} == {1, 2, 3}
    assert {each.storage for each in found if isinstance(each, Pipeline)} == {"masked", "packed"}
    assert any(isinstance(each, Study) for each in found)
    assert {each.framework for each in found if isinstance(each, Framework)} == {"Lightning", "Hugging Face Trainer"}


def test_the_harness_knows_every_pipeline() -> None:
    from equipoise.correction import CORRECTIONS
    from equipoise.topology import ALGORITHMS

    variants = {"fixed", "agent-no-gamma", "agent-reduced-lr"}  # others with another constant
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


@pytest.mark.parametrize("name", GENERATED)
def test_generated_inputs_end_well_or_in_one_line(name: str, tmp_path: Path) -> None:
    tally = Tally()
    generated(name, EACH, 0, tmp_path / "box", tally)
    assert tally.failures == []
    assert tally.inputs[name] >= EACH


@pytest.mark.parametrize("number", range(8))
def test_threads_and_processes_at_the_same_time(number: int, tmp_path: Path) -> None:
    """Eight of the first twenty runs of a campaign."""
    tally = Tally()
    run_together(number, 1, 0, tmp_path / "box", tally)
    assert tally.failures == []
    assert tally.concurrent.total() == 1


@pytest.mark.slow
def test_all_kinds_of_concurrent_runs(tmp_path: Path) -> None:
    tally = Tally()
    run_together(0, len(ORDER), 0, tmp_path / "box", tally)
    assert tally.failures == []
    assert tally.concurrent.keys() == KINDS.keys()


def test_the_sample_and_a_whole_run_are_as_large_as_they_are_meant_to_be() -> None:
    whole = shares(20_000)
    assert len(whole) * EACH >= 150
    assert sum(whole.values()) >= 20_000
    assert min(whole.values()) >= 400
    assert sum(whole[kind.name] for kind in FILES if kind.signed) >= 3_000
    for name, count in whole.items():
        tried = [shard for shard in shards(20_000) if shard.name == name]
        assert sum(shard.count for shard in tried) == count
        assert sorted({shard.first for shard in tried}) == list(range(0, count, 100))
    named = {"overrides", "command lines", "recipes", "checkpoints", "packed files", "results files", "image files"}
    assert named <= whole.keys()


def test_a_line_is_short_and_means_nothing_to_a_terminal(tmp_path: Path) -> None:
    """Found by the harness: words of a command line come back in its complaint, however long they are."""
    (tmp_path / "work").mkdir()
    for words in (["measure", "run", "x" * 5000, "x" * 5000], ["train", "\x1b[2Jnothing"]):
        assert run_command(words, tmp_path / "work")[0] == 2


def test_what_pillow_logs_of_a_damaged_picture_is_no_second_line(tmp_path: Path) -> None:
    """Found by the harness: a TIFF with too many samples per pixel."""
    kind = next(kind for kind in FILES if kind.name == "image files")
    kind.prepare(tmp_path)
    path = tmp_path / "data" / "train" / "a" / "x.tiff"
    content = path.read_bytes()
    entry = struct.pack("<HHI", 277, 3, 1)  # the tag, of one 16-bit number
    assert content.count(entry) == 1
    path.write_bytes(content.replace(entry + struct.pack("<I", 3), entry + struct.pack("<I", 185)))
    status, said = run_command(["train", "recipe.yaml", "--out", "run"], tmp_path)
    assert status == 2
    assert "x.tiff cannot be read as an image" in said


# Nothing that is read can run code


@pytest.mark.parametrize("kind", [kind for kind in FILES if not kind.trains], ids=lambda kind: kind.name)
def test_no_file_can_run_code(kind: Kind, tmp_path: Path) -> None:
    """Every payload instead of every kind of file, read by every command that reads the file."""
    target, work = tmp_path / "executed", tmp_path / "work"
    work.mkdir()
    kind.prepare(work)
    places = {path.name.partition(".")[2] + path.name[:4]: path for path in kind.files(work)}  # one of each name
    with without_training():
        for path in places.values():
            sound = path.read_bytes()
            for name, payload in payloads(target).items():
                path.unlink()
                path.write_bytes(payload)
                for seed in range(kind.commands):
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
    found = Found(seed=3, seconds=600.0, environment="here, today")
    found.tally.add(Tally(damages=4, kill_seconds=50.0, pipelines={"a", "b"}))
    found.tally.add(Tally(pipelines={"b", "c"}))
    found.tally.runs.update({"one process": 17, "Lightning": 5})
    found.tally.kills.update({"step": 22, "any moment": 3})
    found.tally.inputs.update({"recipes": 1234, "custom files, signed": 2000})
    found.tally.concurrent.update({"threads": 9})
    assert "| failures | 0 |" in page(found)
    found.tally.failures.append("recipes 7 of seed 3: KeyError")
    text = page(found)
    for line in (
        "here, today, seed 3, 10 minutes.",
        "| kills with SIGKILL | 25 |",
        "| runs that were killed and resumed | 22 |",
        "| different pipelines among them | 3 |",
        "| `equipoise train` in one process | 17 |",
        "| PyTorch Lightning, from its checkpoints | 5 |",
        "| within a training step | 22 |",
        "| wrong inputs | 3,234 |",
        "| files with valid checksums and wrong contents among them | 2,000 |",
        "| concurrent runs of threads and processes | 9 |",
        "| recipes | 1,234 |",
        "| failures | 1 |",
        "- recipes 7 of seed 3: KeyError",
        "## Bugs that the harness found",
    ):
        assert f"\n{line}\n" in text
    assert "A kill took 2.0 seconds on average" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_campaign_that_is_stopped_keeps_the_page_of_a_complete_one(number: signal.Signals, tmp_path: Path) -> None:
    found, whole = Found(seed=0), tmp_path / "page.md"
    with until_a_signal(found):
        os.kill(os.getpid(), number)
        time.sleep(60)
    assert found.cut_short
    whole.write_text("of a complete campaign")
    part = write_page(found, whole, overwrite=False)
    assert "\n**This campaign was stopped early.**" in part.read_text()
    assert whole.read_text() == "of a complete campaign"
    assert write_page(found, whole, overwrite=True) == whole
    assert whole.read_text() == part.read_text()


def test_the_page_of_a_complete_campaign_is_written(tmp_path: Path) -> None:
    found = Found(seed=0)
    with until_a_signal(found):
        pass
    assert write_page(found, tmp_path / "page.md", overwrite=False) == tmp_path / "page.md"
    assert "stopped early" not in (tmp_path / "page.md").read_text()


# A campaign


def test_a_campaign_reaches_its_counts_and_ends_with_its_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def work_here(do: object, next_unit: Callable[[], Any], *_: object) -> Iterator[Tally]:
        while (unit := next_unit()) is not None:
            made.append(unit.part)
            yield {"kills": Tally(kills=Counter(step=4)), "inputs": Tally(inputs=Counter(recipes=100))}[unit.part]

    monkeypatch.setattr("harness.campaign.work", work_here)
    asked = {"kills": 10, "inputs": 400, "concurrent": 0, "calls": 0, "threads": 0}
    found = Found(seed=0)
    run_campaign(found, asked, 2, tmp_path)
    assert sorted(made) == ["inputs"] * 4 + ["kills"] * 3
    assert made[:3] == ["kills", "inputs", "inputs"]  # the part that is the furthest from its count
    assert not found.cut_short
    found = Found(seed=0)
    run_campaign(found, asked, 2, tmp_path, minutes=1e-9)
    assert found.cut_short


# The harness itself can fail


def test_a_failure_names_its_input_and_what_was_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str]) -> None:
        print("one\ntwo", file=sys.stderr)
        raise SystemExit(3)

    monkeypatch.setattr(cli, "main", fail)
    tally = Tally()
    generated("command lines of numbers", 20, 0, tmp_path / "box", tally)
    assert len(tally.failures) == 1
    for part in ("command lines of numbers: {", "ended with 3", "it printed: one / two"):
        assert part in tally.failures[0]


def test_a_bug_in_what_reads_generated_input_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.generation.make_recipe", lambda _: dict[str, int]()["a key"])
    tally = Tally()
    generated("overrides", 20, 0, tmp_path / "box", tally)
    assert tally.failures == [tally.failures[0]]
    assert tally.failures[0].startswith("overrides: []: KeyError: 'a key' (test_harness.py, line ")


def test_a_reader_that_hangs_is_a_failure_whatever_it_catches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(words: list[str]) -> None:
        try:
            time.sleep(30)
        except Exception:
            raise SystemExit(0) from None

    monkeypatch.setattr("harness.commands.LIMIT", 1)
    monkeypatch.setattr(cli, "main", hang)
    with pytest.raises(AssertionError, match="no end within 1 seconds"):
        run_command(["list"], tmp_path)


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
    assert any("outside its folder" in line for line in tally.failures)
