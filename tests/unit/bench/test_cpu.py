"""The CPU benchmark: its rivals, its ratios and its file of results."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture(scope="module")
def cpu() -> ModuleType:
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module("cpu")
    finally:
        sys.path.remove(str(BENCH))  # where files have the names of packages, such as accelerate


def test_the_rivals_are_all_forms_of_the_dense_model(cpu: ModuleType) -> None:
    assert len({str(form) for form in cpu.DENSE}) == 8
    eager = [form for form in cpu.DENSE if form.mode == "eager"]
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 10)), torch.rand(2, 3, 6, 6)
    found = cpu.case("tiny", model, x, cpu.training_step, cpu.Options([0.5], eager))
    assert [str(form) for form in eager] == list(found.rivals)[:4]
    assert "packed 50 %" in found.rivals
    measured = cpu.measure(found, 1, lambda: 0.0)
    assert measured["milliseconds"].keys() == found.rivals.keys()


def test_ratios_are_against_the_best_float32_and_the_best_of_all(cpu: ModuleType) -> None:
    times = {
        "dense float32, NCHW, eager": 12.0,
        "dense float32, channels_last, compile": 8.0,
        "dense bf16, NCHW, eager": 4.0,
        "packed 90 %": 2.0,
        "onnxruntime, dense float32": 1.0,  # a rival, but not PyTorch
    }
    lines = cpu.table({"case": "a case", "milliseconds": times}).splitlines()
    assert lines[0] == "| a case | ms | of the best float32 | of the best dense |"
    assert lines[5] == "| packed 90 % | 2.0 | 4.00 × | 2.00 × |"
    assert lines[6] == "| onnxruntime, dense float32 | 1.0 | 8.00 × | 4.00 × |"


def test_a_run_replaces_the_results_of_its_sections(
    cpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "RESULTS", tmp_path / "results" / "cpu.json")
    monkeypatch.setattr(cpu, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("before\n\n<!-- cpu -->\nold\n<!-- /cpu -->\nafter\n")
    measured = [{"case": "a", "repeats": 1, "milliseconds": {"dense float32, NCHW, eager": 3.0}}]
    cpu.save(cpu.RESULTS, "vgg_c", cpu.about(False), [])
    cpu.save(cpu.RESULTS, "size", cpu.about(False), {"file, packed": 2_500_000})
    cpu.save(cpu.RESULTS, "vgg_c", cpu.about(False), measured)
    assert json.loads(cpu.RESULTS.read_text())["vgg_c"]["measured"] == measured
    cpu.write()
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("<!-- /cpu -->\nafter\n")
    assert "old" not in page
    assert "| file, packed | 2.50 MB |" in page
    assert "| dense float32, NCHW, eager | 3.0 | 1.00 × | 1.00 × |" in page
    assert "another CPU" not in page
    cpu.save(cpu.RESULTS.with_name("cpu-other.json"), "size", cpu.about(False), {"file, packed": 3_500_000})
    cpu.write()
    first, _, other = (tmp_path / "page.md").read_text().partition("### Packed models on another CPU")
    assert "2.50 MB" in first
    assert "3.50 MB" in other
