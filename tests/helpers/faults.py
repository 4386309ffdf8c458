"""The fault harness at length: `python tests/faults.py` kills runs and feeds wrong input, and writes what it found.

    python tests/faults.py --kills 200 --pairs 20 --inputs 10000 --page docs/reliability.md

Everything is drawn from --seed, except the moments of kills that come from outside. SIGTERM or Ctrl-C cuts it short:
what was found until then is written beside the page, which stays that of a whole run.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from test_fuzz import changed, changes, commands, numbers, overrides

from equipoise.errors import UserError
from equipoise.training import apply_overrides, make_recipe, read_recipe
from equipoise.training.parts import make_parts
from equipoise.training.recipe import packaged_recipes
from faults_input import Tally, run_command, shown, told, try_files, without_training
from faults_kill import Tally as Kills
from faults_kill import kill_runs
from faults_kinds import FILES, write_run
from faults_page import page
from train_helpers import tiny

# of all inputs, in percent; the rest is shared out evenly among the kinds of files
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
    """All that the page says."""

    seed: int
    alone: Kills = field(default_factory=Kills)
    pairs: Kills = field(default_factory=Kills)
    inputs: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    environment: str = ""
    cut_short: bool = False

    @property
    def failures(self) -> list[str]:
        return [*self.alone.failures, *self.pairs.failures, *self.inputs.failures]


def generated(name: str, count: int, seed: int, folder: Path, tally: Tally) -> None:
    """So many inputs that hypothesis makes; of each error the last is kept, which is the simplest that it found."""
    from hypothesis import strategies as st

    def recipe(case: tuple[str, list[tuple[str, object]]]) -> None:
        make_recipe(changed(read_recipe(case[0]), case[1]))

    def override(words: list[str]) -> None:
        make_recipe(apply_overrides(read_recipe("digits"), words))

    def model(places: list[tuple[str, object]]) -> None:
        make_parts(make_recipe(changed(tiny(), places)))

    def command(words: list[str]) -> None:
        run_command(words, folder)

    def theory(options: dict[str, object]) -> None:
        run_command(["theory", *(f"{option}={value}" for option, value in options.items())], folder)

    named = st.tuples(st.sampled_from(sorted(packaged_recipes())), changes())
    work: dict[str, tuple[st.SearchStrategy, Callable]] = {  # type: ignore[type-arg]
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
    """How many inputs of each kind make up so many, or a few more."""
    made = {name: -(-count * percent // 100) for name, percent in GENERATED.items()}
    each = -(-(count - sum(made.values())) // len(FILES))
    return made | {kind.name: max(each, 1) for kind in FILES}


def feed(count: int, found: Found, folder: Path) -> None:
    share = shares(count)
    for name in GENERATED:
        generated(name, share[name], found.seed, folder / "generated", found.inputs)
        say(found)
    for kind in FILES:
        try_files(kind, folder / "files", share[kind.name], found.seed, found.inputs)
        say(found)


def kill(count: int, found: Found, folder: Path) -> None:
    for found.alone in kill_runs(folder, count, found.seed):  # noqa: B020
        say(found)


def kill_pairs(count: int, found: Found, folder: Path) -> None:
    for found.pairs in kill_runs(folder, count, found.seed, processes=2):  # noqa: B020
        say(found)


def say(found: Found) -> None:
    kills = found.alone.kills + found.pairs.kills
    runs, inputs = found.alone.runs + found.pairs.runs, sum(found.inputs.inputs.values())
    print(f"{runs} runs, {kills.total()} kills, {inputs} inputs, {len(found.failures)} failures")


class CutShort(BaseException):
    """Not a KeyboardInterrupt, which the command line takes for its own."""


@contextlib.contextmanager
def until_a_signal(found: Found) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the work within at once; a training within may not take them for its own."""

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
    """The page itself, or one beside it for a run that was cut short."""
    if found.cut_short and not overwrite:
        path = path.with_suffix(".part.md")
    path.write_text(page(found), encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="runs that are killed")
    parser.add_argument("--pairs", type=int, default=20, help="runs in two processes that are killed")
    parser.add_argument("--inputs", type=int, default=10_000, help="wrong inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, help="the page to write the figures to")
    parser.add_argument("--overwrite", action="store_true", help="write the page even when cut short")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    found = Found(asked.seed, environment=f"{datetime.now(UTC).date().isoformat()}, {versions}, one CPU core")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, until_a_signal(found):
        for name, work in (("kills", kill), ("pairs", kill_pairs), ("inputs", feed)):
            if count := getattr(asked, name):
                work(count, found, Path(folder) / name)
    found.seconds = time.monotonic() - started
    print(*found.failures, sep="\n")
    if asked.page is not None:
        print(f"written: {write_page(found, asked.page, asked.overwrite)}")
    return 1 if found.failures or found.cut_short else 0


if __name__ == "__main__":
    sys.exit(main())
