"""A campaign of faults: kill runs, damage files, generate wrong input, and collect what fails."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from equipoise.errors import UserError
from equipoise.training import apply_overrides, make_recipe, read_recipe
from equipoise.training.parts import make_parts
from equipoise.training.recipe import packaged_recipes
from harness.commands import run_command, shown, told, without_training
from harness.damage import Tally, try_files
from harness.file_kinds import FILES, write_run
from harness.kills import Tally as Kills
from harness.kills import kill_runs
from harness.page import page
from harness.sanitizers import Sanitized, missing, sanitize
from harness.strategies import changed, changes, commands, numbers, overrides
from train_helpers import tiny

# percent of all inputs; the kinds of files share the rest evenly
GENERATED = {
    "recipes, as values": 25,
    "overrides": 10,
    "command lines": 10,
    "command lines of numbers": 2,
    "recipes, made into models": 5,
}
THEORY = ["--L", "--eta", "--c", "--n", "--N", "--alpha", "--gap", "--sigma", "--steps"]


@dataclass
class Found:
    """The results of a campaign."""

    seed: int
    alone: Kills = field(default_factory=Kills)
    pairs: Kills = field(default_factory=Kills)
    inputs: Tally = field(default_factory=Tally)
    sanitized: Sanitized = field(default_factory=Sanitized)
    seconds: float = 0.0
    environment: str = ""
    cut_short: bool = False

    @property
    def failures(self) -> list[str]:
        return [*self.alone.failures, *self.pairs.failures, *self.inputs.failures, *self.sanitized.failures]


def generated(name: str, count: int, seed: int, folder: Path, tally: Tally) -> None:
    """Try `count` generated inputs of a kind. Of each error the last input is kept, which is the simplest."""

    def recipe(case: tuple[str, list[tuple[str, object]]]) -> None:
        make_recipe(changed(read_recipe(case[0]), case[1]))

    def override(words: list[str]) -> None:
        make_recipe(apply_overrides(read_recipe("digits"), words))

    def model(chosen: list[tuple[str, object]]) -> None:
        make_parts(make_recipe(changed(tiny(), chosen)))

    def command(words: list[str]) -> None:
        run_command(words, folder)

    def theory(options: dict[str, object]) -> None:
        run_command(["theory", *(f"{option}={value}" for option, value in options.items())], folder)

    named = st.tuples(st.sampled_from(sorted(packaged_recipes())), changes())
    work: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None]]] = {
        "recipes, as values": (named, recipe),
        "overrides": (st.lists(overrides, max_size=4), override),
        "command lines": (commands, command),
        "command lines of numbers": (st.dictionaries(st.sampled_from(THEORY), numbers, max_size=4), theory),
        "recipes, made into models": (changes(), model),
    }
    strategy, read = work[name]
    options = settings(
        max_examples=count,
        deadline=None,
        derandomize=False,  # the seed is the campaign's
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    failed: dict[str, str] = {}

    @seeded(seed)
    @options
    @given(strategy)
    def attempt(case: object) -> None:
        tally.inputs[name] += 1
        try:
            read(case)
        except UserError:
            pass
        except Exception as error:
            failed[type(error).__name__] = f"{shown(case)}: {told(error)}"
            raise

    folder.mkdir(parents=True)
    if name == "command lines":
        write_run(folder)
        shutil.copy(folder / "recipe.yaml", folder / "tiny.yaml")
    try:
        with without_training():
            attempt()
    except Exception as error:
        tally.failures += [f"{name}: {line}" for line in failed.values() or [told(error)]]
    shutil.rmtree(folder)


def shares(count: int) -> dict[str, int]:
    """Divide `count` inputs, or a few more, among the kinds."""
    made = {name: -(-count * percent // 100) for name, percent in GENERATED.items()}
    each = -(-(count - sum(made.values())) // len(FILES))
    return made | {kind.name: max(each, 1) for kind in FILES}


def feed(count: int, found: Found, folder: Path) -> None:
    """Try `count` wrong inputs of all kinds."""
    share = shares(count)
    for name in GENERATED:
        generated(name, share[name], found.seed, folder / "generated", found.inputs)
        say(found)
    for kind in FILES:
        try_files(kind, folder / "files", share[kind.name], found.seed, found.inputs)
        say(found)


def call_kernels(count: int, found: Found, folder: Path) -> None:
    """Make `count` calls of the kernels under AddressSanitizer and UBSan."""
    _sanitize(found, folder, calls=count, runs=0)


def run_threads(count: int, found: Found, folder: Path) -> None:
    """Make `count` concurrent runs under ThreadSanitizer."""
    _sanitize(found, folder, calls=0, runs=count)


def _sanitize(found: Found, folder: Path, calls: int, runs: int) -> None:
    if reason := missing():
        found.sanitized.failures.append(f"sanitizers: {reason}")
    else:
        sanitize(calls, runs, found.seed, folder, found.sanitized)
    say(found)


def kill(count: int, found: Found, folder: Path) -> None:
    """Kill and resume `count` runs."""
    for found.alone in kill_runs(folder, count, found.seed):  # noqa: B020
        say(found)


def kill_pairs(count: int, found: Found, folder: Path) -> None:
    """Kill and resume `count` runs in two processes."""
    for found.pairs in kill_runs(folder, count, found.seed, processes=2):  # noqa: B020
        say(found)


def say(found: Found) -> None:
    kills = found.alone.kills + found.pairs.kills
    runs, inputs = found.alone.runs + found.pairs.runs, sum(found.inputs.inputs.values())
    calls = found.sanitized.calls.total()
    print(
        f"{runs} runs, {kills.total()} kills, {inputs} inputs, {calls} kernel calls, {len(found.failures)} failures"
    )


class CutShort(BaseException):
    """Not a `KeyboardInterrupt`, which the command line handles itself."""


@contextlib.contextmanager
def until_a_signal(found: Found) -> Iterator[None]:
    """End the block at SIGTERM and Ctrl-C; a training inside the block does not handle them."""

    def stop(*_: object) -> None:
        raise CutShort

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with mock.patch("equipoise.training.signals.stoppable", contextlib.nullcontext):
            yield
    except CutShort:
        found.cut_short = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for process in multiprocessing.active_children():
            process.kill()
            process.join()


def write_page(found: Found, path: Path, overwrite: bool) -> Path:
    """Write the page; after a campaign that was stopped early, one with the suffix .part.md instead."""
    if found.cut_short and not overwrite:
        path = path.with_suffix(".part.md")
    path.write_text(page(found), encoding="utf-8")
    return path
