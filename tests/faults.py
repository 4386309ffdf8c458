"""The fault harness at length: `python tests/faults.py` kills runs and feeds wrong input, and writes what it found.

    python tests/faults.py --kills 200 --pairs 20 --inputs 10000 --page docs/reliability.md

Everything is drawn from --seed, except the moments of kills that come from outside.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from equipoise.errors import UserError
from equipoise.train import apply_overrides, make_recipe, read_recipe
from equipoise.train.parts import make_parts
from equipoise.train.recipe import packaged_recipes
from faults_input import Tally, run_command, try_files, without_training
from faults_kill import Tally as Kills
from faults_kill import kill_runs
from faults_kinds import FILES, write_run
from faults_page import page
from test_fuzz import changed, changes, commands, overrides
from train_helpers import tiny

# of all inputs, in percent; the rest is shared out evenly among the kinds of files
GENERATED = {"recipes, as values": 25, "overrides": 10, "command lines": 10, "recipes, made into models": 5}


@dataclass
class Found:
    """All that the page says."""

    seed: int
    alone: Kills = field(default_factory=Kills)
    pairs: Kills = field(default_factory=Kills)
    inputs: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    environment: str = ""

    @property
    def failures(self) -> list[str]:
        return [*self.alone.failures, *self.pairs.failures, *self.inputs.failures]


def generated(name: str, count: int, seed: int, folder: Path, tally: Tally) -> None:
    """So many inputs that hypothesis makes; of a failure the simplest that it finds is kept."""
    from hypothesis import strategies as st

    def recipe(case: tuple[str, list[tuple[str, object]]]) -> None:
        make_recipe(changed(read_recipe(case[0]), case[1]))

    def override(words: list[str]) -> None:
        make_recipe(apply_overrides(read_recipe("digits"), words))

    def model(places: list[tuple[str, object]]) -> None:
        make_parts(make_recipe(changed(tiny(), places)))

    def command(words: list[str]) -> None:
        run_command(words, folder)

    named = st.tuples(st.sampled_from(sorted(packaged_recipes())), changes())
    work: dict[str, tuple[st.SearchStrategy, Callable]] = {  # type: ignore[type-arg]
        "recipes, as values": (named, recipe),
        "overrides": (st.lists(overrides, max_size=4), override),
        "command lines": (commands, command),
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

    @seeded(seed)
    @options
    @given(strategy)
    def attempt(case: object) -> None:
        tally.inputs[name] += 1
        with contextlib.suppress(UserError):
            read(case)

    folder.mkdir(parents=True)
    if name == "command lines":
        write_run(folder)
        shutil.copy(folder / "recipe.yaml", folder / "tiny.yaml")
    try:
        with without_training():
            attempt()
    except Exception as error:
        tally.failures.append(f"{name}: {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}")
    shutil.rmtree(folder)


def feed(count: int, found: Found, folder: Path) -> None:
    for name, percent in GENERATED.items():
        generated(name, -(-count * percent // 100), found.seed, folder / "generated", found.inputs)
        say(found)
    each = -(-(count - sum(found.inputs.inputs.values())) // len(FILES))
    for kind in FILES:
        try_files(kind, folder / "files", max(each, 1), found.seed, found.inputs)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="runs that are killed")
    parser.add_argument("--pairs", type=int, default=20, help="runs in two processes that are killed")
    parser.add_argument("--inputs", type=int, default=10_000, help="wrong inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, help="the page to write the figures to")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    found = Found(asked.seed, environment=f"{datetime.now(UTC).date().isoformat()}, {versions}, one CPU core")
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # broken off, the page says how far it came
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        for name, work in (("kills", kill), ("pairs", kill_pairs), ("inputs", feed)):
            if count := getattr(asked, name):
                work(count, found, Path(folder) / name)
    found.seconds = time.monotonic() - started
    print(*found.failures, sep="\n")
    if asked.page is not None:
        asked.page.write_text(page(found), encoding="utf-8")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
