"""docs/accelerate.md shows the committed results."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accelerate_tables", ROOT / "bench" / "accelerate_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_of_the_committed_results(tables: ModuleType) -> None:
    """If not: python bench/accelerate_tables.py --write."""
    page = tables.PAGE.read_text()
    found = tables.blocks()
    assert all(f"<!-- {name} -->" in page for name in found), "a table has no place on the page"
    assert tables.with_blocks(page, found) == page


def test_a_row_is_the_mean_and_the_deviation_of_its_runs(tables: ModuleType) -> None:
    files = sorted((ROOT / "results" / "time-to-accuracy").glob("set-itop-published-*.json"))
    found = [100 * json.loads(file.read_text())["result"]["test"]["plain"]["accuracy"] for file in files]
    row = f"| SET-ITOP published | 50 | {statistics.mean(found):.2f} ± {statistics.stdev(found):.2f} | {len(found)} |"
    assert row in tables.budgets("time-to-accuracy")


def test_the_flops_of_gradual_pruning_are_those_of_its_mean_density(tables: ModuleType) -> None:
    uniform = {"name": "granet", "sparsity": 0.99, "initial_sparsity": 0.9, "until": 0.8, "distribution": "uniform"}
    time = (np.arange(100_000) + 0.5) / 100_000
    density = 0.01 + 0.09 * np.clip(1 - time / 0.8, 0, None) ** 3
    found = tables.relative_flops({"model": "vgg_c", "topology": uniform})
    assert found == pytest.approx(density.mean(), rel=2e-3)
    assert tables.relative_flops({"model": "vgg_c", "topology": "dense"}) == 1


def test_differences_are_to_the_reference(tables: ModuleType) -> None:
    def run(arm: str, *accuracies: float) -> list[dict[str, object]]:
        return [{"arm": arm, "scores": {"plain": accuracy}} for accuracy in accuracies]

    text = tables.table([*run("fast", 80.0, 82.0), *run("slow", 79.0, 78.0), {"arm": "broken", "error": "x"}], "fast")
    assert text.splitlines()[2:] == [
        "| fast | 81.00 ± 1.41 |  |  |  | 80.00 | 2 |",
        "| slow | 78.50 ± 0.71 |  |  | -2.50 | 78.00 | 2 |",
    ]


def test_budgets_of_one_training_stand_together_and_vgg_16_last(tables: ModuleType) -> None:
    found = [line.split("|")[1:3] for line in tables.budgets("time-to-accuracy").splitlines()[2:]]
    arms = [(name.strip(), int(epochs)) for name, epochs in found]
    assert [epochs for name, epochs in arms if name == "dense"] == [4, 5, 6, 7, 8, 12, 25]
    assert arms.index(("fast", 5)) == 0
    assert arms.index(("dense", 25)) - arms.index(("dense", 4)) == 6
    assert len({name.startswith("VGG-16") for name, _ in arms[-4:]}) == 1


def test_what_is_planned_and_has_no_runs_is_named(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"fast, 12 epochs": ["a run"]}
    monkeypatch.setattr(tables, "study", lambda name: runs if name == "time-to-accuracy" else {})
    monkeypatch.setattr(tables, "group", lambda name: [])
    text = tables.not_run()
    assert "ResNet-18: `equipoise study time-to-accuracy-sparsities`." in text
    assert "VGG-16 dense, 15 epochs: `equipoise study time-to-accuracy`." in text
    assert "`python bench/accelerate.py short`" in text
    assert "fast, 12 epochs" not in text
    every = {arm: ["a run"] for name in tables.packaged_studies() for arm in tables.read_design(name).every_arm}
    monkeypatch.setattr(tables, "study", lambda name: every)
    monkeypatch.setattr(tables, "group", lambda name: ["a run"])
    assert tables.not_run() == "Every planned study has runs."


def test_a_table_without_runs_has_no_title(tables: ModuleType) -> None:
    assert tables.titled("Short", "") == ""
    assert tables.titled("Short", "| a |") == "## Short\n\n| a |"


def test_runs_of_the_same_recipe_are_added_to_a_group(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        {"group": "ablation", "arm": "fast", "scores": {"plain": 1.0}},
        {"group": "options", "arm": "more", "scores": {"plain": 2.0}},
    ]
    (tmp_path / "ablation.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    monkeypatch.setattr(tables, "FILES", tmp_path)
    monkeypatch.setattr(tables, "from_study", lambda arm, epochs, name: [{"arm": name, "from": (arm, epochs)}])
    assert [line["arm"] for line in tables.group("ablation")] == ["fast", "dense", "fast"]
    assert [line["arm"] for line in tables.group("options")] == ["fast", "fast", "more"]
    assert tables.group("correction") == [{"arm": tables.PLAIN, "from": ("fast", 12)}]
    assert tables.group("short") == []
