"""The cost of a correction is estimated before a run, and a table that does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from correction_oracle import cross_entropy, make_batches
from equipoise.correction import MVR, SAGA, SGD, SVRG, Agent, Correction, Estimator, cost
from equipoise.errors import UserError
from equipoise.models import resnet18
from equipoise.topology import SET, RigL, Topology

ROW = 4  # bytes of a float32


def sparse(estimator: Estimator, **options: Any) -> tuple[Correction, Topology, int, int]:
    """Attach to a small ResNet at 90 %; return also its active values and the bytes of all its tensors."""
    model = resnet18(width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    topology = RigL(sparsity=0.9, **options).attach(model, optimizer, 1000)
    norms = sum(p.numel() for p in model.parameters()) - topology.size
    tensors = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    return estimator.attach(model, topology), topology, topology.active + norms, tensors


@pytest.mark.parametrize(
    ("estimator", "snapshots", "row"),
    [
        (Agent(), 1, 0),
        (Agent(mode="running"), 1, 0),
        (Agent(mode="replay"), 1, ROW),
        (Agent(mode="replay", table="bf16"), 1, ROW // 2),
        (SVRG(mode="replay"), 0, ROW),
        (SVRG(mode="replay", when="pays"), 1, ROW),
        (MVR(), 1, 0),
        (SAGA(), 0, ROW),
        (SAGA(table="bf16"), 0, ROW // 2),
    ],
)
def test_memory_is_counted_at_the_active_weights(estimator: Estimator, snapshots: int, row: int) -> None:
    correction, _, active, tensors = sparse(estimator)
    found = correction.estimate_cost(391)
    assert found.memory == snapshots * tensors + 3 * active * ROW + 391 * active * row
    assert found.passes == estimator.cost
    assert found.mode == estimator.mode
    assert "\n" not in str(found)
    assert f"{estimator.cost:.2f} x" in str(found)


def test_no_correction_costs_nothing() -> None:
    correction, *_ = sparse(SGD())
    assert correction.estimate_cost(391) == (None, 1.0, 0)
    assert str(correction.estimate_cost(391)) == "no correction"


def test_corrected_growth_keeps_inactive_weights_too() -> None:
    correction, topology, _, tensors = sparse(SVRG(), growth="corrected")
    values = sum(p.numel() for p in correction.model.parameters())
    assert correction.estimate_cost(10).memory == tensors + 3 * values * ROW
    assert topology.growth.corrected


def test_the_estimate_is_the_memory_that_is_held() -> None:
    """The tensors between the steps of an epoch, summed up."""
    batches = make_batches(5, dtype=torch.float32)
    for estimator in (
        SVRG(),
        SVRG(mode="replay"),
        SVRG(mode="replay", table="bf16"),
        SVRG(mode="running"),
        SAGA(),
        MVR(),
    ):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 500), torch.nn.ReLU(), torch.nn.Linear(500, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        topology = SET(sparsity=0.9).attach(model, optimizer, 1000)
        correction = estimator.attach(model, topology)
        expected = correction.estimate_cost(len(batches)).memory
        stored = 0
        for _ in range(2 if estimator.mode == "table" else 1):
            correction.refresh(batches, cross_entropy)
            stored = max(stored, held_bytes(correction.state_dict()["mode"]))  # replay saves no used rows
            for i in range(len(batches)):
                correction.backward(cross_entropy, *batches[i], index=i)
                optimizer.zero_grad()
        state = correction.state_dict()
        stored = max(stored, held_bytes(state["mode"]))
        held = held_bytes(state["snapshot"]) + stored + held_bytes(state["statistics"])
        assert held == pytest.approx(expected, rel=0.05), estimator


def held_bytes(value: Any) -> int:
    """Sum the tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(held_bytes(item) for key, item in value.items() if key != "randoms")
    return sum(map(held_bytes, value)) if isinstance(value, list | tuple) else 0


@pytest.mark.parametrize("estimator", [SVRG(mode="replay"), SAGA()])
def test_what_does_not_fit_is_refused_before_it_starts(estimator: Estimator, monkeypatch: pytest.MonkeyPatch) -> None:
    correction, *_ = sparse(estimator)
    needed = correction.estimate_cost(391).memory
    device = torch.device("cpu")
    monkeypatch.setattr(cost, "available_memory", lambda device: needed)
    correction.estimate_cost(391).check(device)
    monkeypatch.setattr(cost, "available_memory", lambda device: needed - 1)
    with pytest.raises(UserError, match=r"running.*bf16"):
        correction.estimate_cost(391).check(device)
    images = [(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))] * 391
    with pytest.raises(UserError, match="MiB are free on cpu"):
        correction.refresh(images, cross_entropy)
    assert not correction.enabled
    assert correction.passes == {"forward": 0, "backward": 0}


def test_other_modes_and_unknown_memory_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "available_memory", lambda device: 1)
    sparse(Agent())[0].estimate_cost(391).check(torch.device("cpu"))
    monkeypatch.setattr(cost, "available_memory", lambda device: None)
    sparse(SVRG(mode="replay"))[0].estimate_cost(10**9).check(torch.device("cpu"))


def test_this_machine_knows_its_free_memory() -> None:
    found = cost.available_memory(torch.device("cpu"))
    assert found is None or 2**20 < found < 2**50
    assert cost.available_memory(torch.device("meta")) is None


def test_sizes_are_readable() -> None:
    assert [cost.readable(n) for n in (12, 2048, 5 * 2**20, 3 * 2**29)] == [
        "12 bytes",
        "2.0 KiB",
        "5.0 MiB",
        "1.5 GiB",
    ]
