"""The scripts in `examples/` run as they are and do what they say."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.xdist_group("frameworks")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a script in a temporary folder, in this process; return its variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_every_script_is_tried() -> None:
    tried = {"own_loop", "with_lightning", "with_transformers", "fine_tune_pruned", "deploy"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tried


def test_own_loop(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("own_loop")
    assert found["accuracy"] > 0.9
    assert found["agent"].refreshes == found["epochs"]
    assert found["topology"].updates > 2
    assert "10.00%" in capsys.readouterr().out


def test_lightning(run: Any) -> None:
    found = run("with_lightning")
    assert found["accuracy"] > 0.9
    assert found["sparse"].topology.density == pytest.approx(0.1, abs=0.001)
    assert found["sparse"].correction.refreshes == 6


def test_transformers(run: Any, tmp_path: Path) -> None:
    found = run("with_transformers")
    assert found["accuracy"] > 0.9
    assert found["topology"].density == pytest.approx(0.2, abs=0.001)
    assert (tmp_path / "runs/gpt2/checkpoint-80/equipoise.safetensors").is_file()


def test_fine_tuning(run: Any, tmp_path: Path) -> None:
    found = run("fine_tune_pruned")
    pruned = torch.load(tmp_path / "pruned.pt")
    for name, weight in found["model"].state_dict().items():
        if name.endswith("weight"):
            assert not torch.count_nonzero(weight[pruned[name] == 0])
            assert torch.count_nonzero(weight) == torch.count_nonzero(pruned[name]) == round(0.05 * weight.numel())
    assert found["accuracy"](found["model"]) > found["accuracy"](found["dense"]) + 0.1


def test_deploy(run: Any) -> None:
    found = run("deploy")
    assert found["small"] * 10 < found["dense"]
    assert found["accuracy"](found["deployed"]) == pytest.approx(found["accuracy"](found["model"]), abs=0.02)
    assert found["accuracy"](found["deployed"]) > 0.8
