"""Gradient statistics of runs, at a checkpoint and during training, and their cost."""

from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise import UserError
from equipoise.analysis import measure_gradients
from equipoise.display.measure_tables import cost_table
from equipoise.seeds import derive
from equipoise.training import Trainer
from equipoise.training.measure import MeasureWatcher, measure_trainer
from equipoise.training.run_cost import measure_cost
from equipoise.training.run_folder import read_epochs
from equipoise.training.watchers import Watcher, Watchers
from train_helpers import BATCHES, assert_same_state, trainer


def test_a_run_is_measured_where_it_stands_and_left_as_it_was() -> None:
    made = trainer(model={"name": "mlp", "hidden": 16}, objective={"name": "at", "steps": 2})
    made.run()
    made.parts.model.eval()
    before, modes = copy.deepcopy(made.state_dict()), [m.training for m in made.parts.model.modules()]
    first, again = (measure_trainer(made, batches=4) for _ in range(2))
    assert first == again
    assert_same_state(made.state_dict(), before)
    assert [m.training for m in made.parts.model.modules()] == modes
    assert (first["batches"], first["noise"]) == (4, 0.015)
    assert first["weights"] == made.parts.topology.active + sum(
        p.numel() for name, p in made.parts.model.named_parameters() if name not in made.parts.topology.masks
    )
    assert set(first["variance_left"]) == {"0", "c_hat", "gamma_c_hat", "c_star", "1"}


def test_a_run_is_measured_on_the_batches_of_the_coming_epoch() -> None:
    made = trainer()
    made.run()
    model, loader = made.parts.model, made.parts.train

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    old = {name: value + 0.01 for name, value in model.state_dict().items() if value.is_floating_point()}
    expected = measure_gradients(model, loss, loader.epoch(2), old).report()
    found = measure_trainer(made, batches=100, old=old)
    assert found == {**expected, "noise": None, "draws": None, "deviation": None, "everywhere": None}
    assert found["batches"] == BATCHES


@pytest.mark.parametrize("sparsity", [0.0, 0.8])
def test_numbers_are_means_over_draws_of_noise_on_active_weights_and_on_all(sparsity: float) -> None:
    made = trainer(model={"name": "mlp", "hidden": 16}, topology={"name": "static", "sparsity": sparsity})
    made.run()
    model, loader, passes = made.parts.model, made.parts.train, []
    seen = model.register_forward_hook(lambda *_: passes.append(1))
    found = measure_trainer(made, batches=3, draws=2)
    seen.remove()
    assert len(passes) == 3 * (1 + 2 * (2 if sparsity else 1)), "one pass now, one a draw, none twice"

    def reports(everywhere: bool) -> list[dict[str, Any]]:
        seeds = [derive(0, "measure", i) for i in range(2)]
        batches = list(islice(loader.epoch(2), 3))
        return [
            measure_gradients(
                model, lambda m, x, y: F.cross_entropy(m(x), y), batches, everywhere=everywhere, seed=seed
            ).report()
            for seed in seeds
        ]

    assert (found["draws"], found["batches"], type(found["batches"])) == (2, 3, int)
    for everywhere, mean in ((False, found), (True, found["everywhere"])):
        first, second = reports(everywhere)
        assert first["correlation"] != second["correlation"]
        for key in (
            "variance_old",
            "correlation",
            "correlation_of_batches",
            "correlation_of_pairs",
            "c_star",
            "c_hat",
        ):
            assert mean[key] == pytest.approx((first[key] + second[key]) / 2, rel=1e-9), (everywhere, key)
            apart = abs(first[key] - second[key]) / 2**0.5
            assert mean["deviation"][key] == pytest.approx(apart, rel=1e-6, abs=1e-12), (everywhere, key)
    assert (found["everywhere"]["correlation"] == found["correlation"]) == (not sparsity)


@pytest.mark.parametrize("model", [{"name": "mlp", "hidden": 16}, {"name": "small"}], ids=["mlp", "small"])
def test_storage_makes_no_difference(model: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"model": model, "topology": {"name": "static", "sparsity": 0.9}}
    masked, packed = (trainer(**changes, storage=storage) for storage in ("masked", "packed"))
    masked.run()
    packed.load_state_dict(copy.deepcopy(masked.state_dict()))
    assert packed.parts.topology.storage == "packed"
    expected, found = (measure_trainer(each, batches=4) for each in (masked, packed))
    assert expected.pop("everywhere") is not None
    assert found["everywhere"] is None, "packed storage has no inactive weights"
    del expected["deviation"]
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-3), key
    costs = [measure_cost(each) for each in (masked, packed)]
    assert costs[0] == costs[1]


class Weights(Watcher):
    """The weights at the end of every epoch, those before the first one first."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def begin(self, trainer: Trainer) -> None:
        self.epoch(trainer, {})

    def epoch(self, trainer: Trainer, line: dict[str, Any]) -> None:
        self.seen.append(copy.deepcopy(trainer.parts.model.state_dict()))


@pytest.mark.parametrize("correction", ["sgd", {"name": "agent", "mode": "replay"}])
def test_measuring_during_training_is_against_the_epoch_before_and_changes_nothing(
    correction: Any, tmp_path: Path
) -> None:
    plain, watched = (trainer(epochs=4, correction=correction) for _ in range(2))
    weights, file = Weights(), tmp_path / "measure.jsonl"
    plain.watcher = weights
    plain.run()
    watched.watcher = MeasureWatcher(file, every=2, batches=3)
    watched.run()
    assert_same_state(watched.state_dict(), plain.state_dict(), without="str seconds")
    lines = read_epochs(file)
    assert [(line["epoch"], line["step"]) for line in lines] == [(2, 2 * BATCHES), (4, 4 * BATCHES)]
    assert lines[1]["learning_rate"] == plain.history[3]["learning_rate"]
    expected = measure_trainer(plain, 3, old=weights.seen[3])
    assert {key: lines[1][key] for key in expected} == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_measuring_does_not_change_captured_steps(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"device": "cuda", "precision": "float32", "epochs": 3}
    plain, watched = (trainer(**changes) for _ in range(2))
    file = tmp_path / "measure.jsonl"
    watched.watcher = MeasureWatcher(file, batches=3)
    for each in (plain, watched):
        each.run()
        assert each.parts.engine.captures
    for a, b in zip(plain.parts.model.parameters(), watched.parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert [line["epoch"] for line in read_epochs(file)] == [1, 2, 3]


def test_a_resumed_run_measures_its_epochs_once(tmp_path: Path) -> None:
    file = tmp_path / "measure.jsonl"
    whole = trainer(epochs=3)
    whole.watcher = MeasureWatcher(file, batches=2)
    whole.run()
    lines = file.read_text()

    class Stop(Watcher):
        def epoch(self, trainer: Trainer, line: dict[str, Any]) -> None:
            states.append(copy.deepcopy(trainer.state_dict()))

    states: list[dict[str, Any]] = []
    again = trainer(epochs=3)
    again.watcher = Watchers(MeasureWatcher(file, batches=2), Stop())
    again.run()
    assert file.read_text() == lines
    with open(file, "a") as cut_short:
        cut_short.write('{"epoch": 9')
    resumed = trainer(epochs=3)
    resumed.load_state_dict(states[1])
    resumed.watcher = MeasureWatcher(file, batches=2)
    resumed.run()
    assert file.read_text() == lines


def test_an_epoch_whose_beginning_was_not_seen_is_not_measured(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = []

    class Middle(Watcher):
        def step(self, trainer: Trainer) -> None:
            if trainer.step == 3:
                states.append(copy.deepcopy(trainer.state_dict()))

    first, file = trainer(), tmp_path / "measure.jsonl"
    first.watcher = Middle()
    first.run()
    resumed = trainer()
    resumed.load_state_dict(states[0])
    resumed.watcher = MeasureWatcher(file, batches=2)
    resumed.run()
    assert [line["epoch"] for line in read_epochs(file)] == [2]


def test_wrong_numbers_of_batches_and_epochs_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="batches=1: a variance over batches needs at least 2"):
        measure_trainer(trainer(), batches=1)
    with pytest.raises(UserError, match="draws=0: the noise is drawn at least once"):
        measure_trainer(trainer(), draws=0)
    with pytest.raises(UserError, match="every=0"):
        MeasureWatcher(tmp_path / "measure.jsonl", every=0)


# Costs of runs

IMAGES = 1437


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, (2, 2)),
        ({"topology": {"name": "rigl", "sparsity": 0.8, "every": 4}}, (2, 2)),
        ({"correction": {"name": "svrg", "mode": "recompute"}}, (6, 6)),
        ({"objective": {"name": "at", "steps": 3}}, (8, 2)),
    ],
)
def test_the_passes_of_a_run(changes: dict[str, Any], passes: tuple[int, int]) -> None:
    """Two epochs of 1437 images. RigL needs dense gradients at its updates."""
    made = trainer(**changes)
    made.run()
    found = measure_cost(made)
    backward, gradients = (IMAGES * times for times in passes)
    updates = made.parts.topology.updates if "topology" in changes else 0
    assert found["passes"] == {
        "forward": backward,
        "backward": backward,
        "sample_gradients": gradients,
        "dense_gradients": round(updates * IMAGES / BATCHES),
    }
    # 64-16-16-10: a multiply-add is two, training is three forward passes, an attack's step is two
    dense = 2 * (64 * 16 + 16 * 16 + 16 * 10)
    assert found["inference"]["dense"] == dense
    assert found["run"]["dense"] == dense * (3 * gradients + 2 * (backward - gradients))
    active = sum(layer.active for layer in made.parts.topology.layers)
    assert found["inference"]["sparse"] == 2 * active
    assert found["active"] == active + 16 + 16 + 10
    assert found["run"]["sparse"] is not None
    assert found["seconds"] == made.seconds
    assert found["peak_memory"] is None


@pytest.mark.parametrize("name", ["gmp", "granet"])
def test_the_cost_of_a_run_is_not_guessed_from_its_final_density(name: str) -> None:
    made = trainer(topology={"name": name, "sparsity": 0.8, "every": 2})
    made.run()
    found = measure_cost(made)
    assert found["run"]["sparse"] is None
    assert found["inference"]["sparse"] < found["inference"]["dense"]
    assert "unknown" in [str(cell) for cell in cost_table(found, {}, "").columns[3].cells]
