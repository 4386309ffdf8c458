"""In replay mode a step must have the batch that the refresh was given for it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from correction_oracle import cross_entropy, make_batches, perceptron
from equipoise.correction import SVRG
from equipoise.correction.fingerprint import Fingerprint
from equipoise.errors import UserError
from equipoise.training import checkpoint

REFUSED = r'another batch in a step.*coming batches in order.*mode="recompute" or mode="running"$'


def shuffled(generator: torch.Generator) -> DataLoader[Any]:
    x, y = (torch.cat(parts) for parts in zip(*make_batches(6), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, generator=generator)


def test_a_loader_that_shuffles_by_its_generator_is_refused() -> None:
    correction = SVRG(mode="replay").attach(perceptron())
    batches = shuffled(torch.Generator().manual_seed(5))
    correction.refresh(batches, cross_entropy)
    with pytest.raises(UserError, match=REFUSED) as error:
        correction.backward(cross_entropy, *next(iter(batches)), scale=0.5)
    assert "\n" not in str(error.value)


def test_a_generator_with_the_same_seed_is_accepted() -> None:
    correction = SVRG(mode="replay").attach(perceptron())
    generator = torch.Generator()
    batches = shuffled(generator)
    for epoch in range(3):
        generator.manual_seed(epoch)
        correction.refresh(batches, cross_entropy)
        generator.manual_seed(epoch)
        for x, y in batches:
            correction.backward(cross_entropy, x, y)
    assert correction.report()["corrected_steps"] == 18


def test_a_refused_step_changes_nothing_and_the_right_batch_is_accepted_afterwards() -> None:
    model, batches = perceptron(), make_batches(3)
    correction = SVRG(mode="replay").attach(model)
    correction.refresh(batches, cross_entropy)
    before = correction.passes.copy()
    with pytest.raises(UserError, match=REFUSED):
        correction.backward(cross_entropy, *batches[1])
    assert correction.passes == before
    assert all(p.grad is None for p in model.parameters())
    for batch in batches:
        correction.backward(cross_entropy, *batch)


def test_a_resumed_epoch_is_checked(tmp_path: Path) -> None:
    batches = make_batches(4)
    correction = SVRG(mode="replay").attach(perceptron())
    correction.refresh(batches, cross_entropy)
    correction.backward(cross_entropy, *batches[0])
    checkpoint.save(tmp_path / "state.safetensors", correction.state_dict())
    resumed = SVRG(mode="replay").attach(perceptron())
    resumed.load_state_dict(checkpoint.load(tmp_path / "state.safetensors"))
    with pytest.raises(UserError, match=REFUSED):
        resumed.backward(cross_entropy, *batches[2])
    for batch in batches[1:]:
        resumed.backward(cross_entropy, *batch)


def images() -> Tensor:
    return torch.rand(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))


OTHERS: dict[str, tuple[Any, Any]] = {
    "images": (images(), images().flip(0)),
    "labels": (torch.arange(32) % 10, torch.arange(1, 33) % 10),
    "one number": (torch.tensor(1.0), torch.tensor(2.0)),
    "shape": (torch.zeros(4, 2), torch.zeros(2, 4)),
    "type": (torch.zeros(4), torch.zeros(4).double()),
    "mapping": ({"x": images()}, {"x": images() + 1}),
    "nested": ([(torch.zeros(2), "a")], [(torch.zeros(2), "b")]),
    "reference": ((3, 1), (3, 2)),
    "columns of images with an empty border": tuple(
        nn.functional.pad(torch.rand(64, 1, 20, 20), (4, 4, 4, 4)) for _ in range(2)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_batches_differ_and_copies_do_not(name: str) -> None:
    one, other = OTHERS[name]
    fingerprint = Fingerprint.of((one,))
    assert not fingerprint.differs(Fingerprint.of((copy.deepcopy(one),)))
    assert fingerprint.differs(Fingerprint.of((other,)))


def test_equal_values_are_equal_in_every_memory_format_and_with_nan() -> None:
    x = images()
    x[0] = torch.nan
    assert not Fingerprint.of((x,)).differs(Fingerprint.of((x.to(memory_format=torch.channels_last),)))
    few = torch.full((3,), torch.nan, requires_grad=True)
    assert not Fingerprint.of((few,)).differs(Fingerprint.of((few.clone(),)))


def test_a_fingerprint_is_of_the_batch_before_a_loss_changes_it() -> None:
    """The refresh normalises copies of a loader in place, the steps get new ones."""

    def normalising(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x.sub_(1.0), y)

    correction = SVRG(mode="replay").attach(perceptron())
    correction.refresh(make_batches(3), normalising)
    for batch in make_batches(3):
        correction.backward(normalising, *batch)


class Elsewhere(Tensor):
    """A tensor that claims to be on a GPU."""

    is_cpu = False  # type: ignore[assignment]


@pytest.mark.parametrize("ask", ["refresh", "report", "state_dict"])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
        ),
    ],
)
def test_on_a_gpu_the_error_comes_later(device: str, ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step does not wait for the result of the comparison."""
    if device == "cpu":
        differs = Fingerprint.differs
        monkeypatch.setattr(Fingerprint, "differs", lambda *pair: differs(*pair).as_subclass(Elsewhere))
    batches = [(x.to(device), y.to(device)) for x, y in make_batches(3)]
    correction = SVRG(mode="replay").attach(perceptron().to(device))
    correction.refresh(batches, cross_entropy)
    correction.backward(cross_entropy, *batches[0])
    correction.report()
    correction.backward(cross_entropy, *batches[2])
    correction.backward(cross_entropy, *batches[2])
    with pytest.raises(UserError, match=REFUSED):
        correction.refresh(batches, cross_entropy) if ask == "refresh" else getattr(correction, ask)()
