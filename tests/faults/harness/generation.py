"""Wrong input that hypothesis generates."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from equipoise.errors import UserError
from equipoise.training import apply_overrides, make_recipe, read_recipe
from equipoise.training.parts import make_parts
from equipoise.training.recipe_files import packaged_recipes
from harness.commands import run_command, shown, told, without_training
from harness.file_kinds import write_run
from harness.strategies import changed, changes, commands, numbers, overrides
from harness.tally import Tally
from train_helpers import tiny

# percent of all inputs
GENERATED = {
    "recipes, as values": 25,
    "overrides": 10,
    "command lines": 10,
    "command lines of numbers": 2,
    "recipes, made into models": 5,
}
THEORY = ["--L", "--eta", "--c", "--n", "--N", "--alpha", "--gap", "--sigma", "--steps"]


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
