"""A sample of the fault harness (`make test-faults`): kills, damaged files, and files that would run code."""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
from pathlib import Path
from random import Random

import pytest
import yaml

from equipoise import cli
from harness.campaign import GENERATED, Found, generated, shares, until_a_signal, write_page
from harness.commands import GUARD, run_command, without_training
from harness.damage import Kind, Tally, try_files
from harness.file_kinds import FILES, payloads
from harness.kills import kill_runs, pipelines
from harness.page import page
from train_helpers import tiny

SAMPLE = 6  # runs that are killed
EACH = 25  # inputs of each kind


def test_a_sample_of_pipelines_survives_kills(tmp_path: Path) -> None:
    *_, tally = kill_runs(tmp_path, SAMPLE, seed=0)
    assert tally.failures == []
    assert tally.runs == len(tally.pipelines) == SAMPLE
    assert sum(tally.kills.values()) >= SAMPLE


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


def test_the_sample_and_a_whole_run_are_as_large_as_they_are_meant_to_be() -> None:
    whole = shares(10_000)
    assert len(whole) * EACH >= 300
    assert sum(whole.values()) >= 10_000
    assert min(whole.values()) >= 200
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


@pytest.mark.parametrize("kind", FILES, ids=lambda kind: kind.name)
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
    found.alone.runs, found.pairs.runs, found.alone.damages = 17, 5, 4
    found.alone.kills.update({"step": 20, "any moment": 3})
    found.pairs.kills.update({"step": 2})
    found.inputs.inputs.update({"recipes": 1234})
    found.sanitized.calls.update({"ThreadSanitizer: concurrent runs": 40})
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
        "| calls of the kernels under sanitizers | 40 |",
        "| ThreadSanitizer: concurrent runs | 40 |",
        "| failures | 1 |",
        "- recipes 7 of seed 3: KeyError",
        "## Bugs that the harness found",
    ):
        assert f"\n{line}\n" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_campaign_that_is_stopped_keeps_the_page_of_a_complete_one(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also inside a command, which would handle Ctrl-C itself and finish its step at SIGTERM."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tiny()))
    monkeypatch.setattr("equipoise.training.trainer.Trainer.run", lambda self: os.kill(os.getpid(), number))
    found, whole = Found(seed=0), tmp_path / "page.md"
    with until_a_signal(found):
        run_command(["train", "recipe.yaml", "--out", "run"], tmp_path)
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
    monkeypatch.setattr("harness.campaign.make_recipe", lambda _: dict[str, int]()["a key"])
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
