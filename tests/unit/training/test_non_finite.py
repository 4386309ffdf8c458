"""Losses, gradients and weights that are not finite are named by epoch, batch and layer; a run may roll back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.errors import NonFiniteLoss, UserError
from equipoise.training import RunFolder, Trainer, make_recipe, resume
from equipoise.training.non_finite import check_loss, check_weights, clip_gradients, first_bad_output
from equipoise.training.watchers import Watcher
from train_helpers import BATCHES, assert_same_state, tiny, trainer, without_times

STORAGES = ["masked", "packed"]
SPARSE = {"name": "static", "sparsity": 0.8}


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))


def in_folder(path: Path, **changes: Any) -> Trainer:
    raw = tiny(**changes)
    return Trainer(make_recipe(raw), RunFolder.create(path, raw))


def spoil(made: Trainer, layer: str, step: int, value: float) -> None:
    """Make the gradient of a layer infinite, once."""
    weight = next(p for name, p in made.parts.model.named_parameters() if name.startswith(f"{layer}."))

    def hook(gradient: Tensor) -> Tensor | None:
        if made.step != step:
            return None
        return torch.full_like(gradient, value)

    weight.register_hook(hook)


# The parts


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_first_layer_with_a_bad_output_is_named(bad: float) -> None:
    model = chain()
    assert first_bad_output(model, torch.ones(3, 4)) is None
    model[2].bias.data[1] = bad
    assert first_bad_output(model, torch.ones(3, 4)) == "2"
    assert not any(layer._forward_hooks for layer in model.modules())


def test_a_loss_names_epoch_batch_and_layer() -> None:
    model, images = chain(), torch.full((1, 4), torch.inf)
    check_loss(torch.tensor(1.0), model, images, 4, 2)
    with pytest.raises(NonFiniteLoss, match=r"loss is not finite at batch 3 of epoch 5 \(first in the output of 0\)"):
        check_loss(torch.tensor(torch.nan), model, images, 4, 2)
    with pytest.raises(NonFiniteLoss, match=r"loss is not finite at batch 3 of epoch 5; the last"):
        check_loss(torch.tensor(torch.inf), model, torch.ones(1, 4), 4, 2)


def test_a_bad_weight_is_laid_to_the_step_before() -> None:
    model = chain()
    check_weights(model, 4, 2)
    for layer in (model[0], model[2]):  # a backward pass spoils what comes before
        layer.weight.data[0, 0] = torch.nan
    for found in (lambda: check_weights(model, 4, 2), lambda: check_loss(torch.tensor(torch.nan), model, None, 4, 2)):
        with pytest.raises(NonFiniteLoss, match=r"^the gradient of 2\.weight is not finite at batch 2 of epoch 5;"):
            found()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_clipping_names_the_layer_of_a_bad_gradient(bad: float) -> None:
    model = chain()
    model(torch.ones(2, 4)).sum().backward()
    expected = chain()
    expected(torch.ones(2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
    optimizer = torch.optim.SGD(model.parameters())
    clip_gradients(optimizer, model, 0.1, 0, 0)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    model[0].bias.grad[0] = bad
    model[2].bias.grad[1] = bad
    with pytest.raises(NonFiniteLoss, match=r"^the gradient of 2\.bias is not finite at batch 4 of epoch 1;"):
        clip_gradients(optimizer, model, 0.1, 0, 3)


# In a run


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("layer", ["layers.0", "layers.2"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize(("step", "place"), [(8, "batch 3 of epoch 2"), (BATCHES - 1, "batch 6 of epoch 1")])
def test_a_bad_gradient_is_named(
    tmp_path: Path, storage: str, layer: str, clip: float, step: int, place: str
) -> None:
    made = in_folder(tmp_path, storage=storage, clip=clip, epochs=3, checkpoint={"steps": 1}, topology=SPARSE)
    spoil(made, layer, step, torch.inf)
    with pytest.raises(NonFiniteLoss, match=rf"^the gradient of {layer}\.weight is not finite at {place};"):
        made.run()
    assert made.folder is not None
    newest = made.folder.store.newest()
    assert newest is not None
    assert newest["position"][0] * BATCHES + newest["position"][1] == step  # what was spoilt is not saved


def test_a_bad_gradient_before_a_refresh_is_named() -> None:
    made = trainer(correction={"name": "svrg", "every": 2}, topology=SPARSE)
    spoil(made, "layers.0", 1, torch.nan)
    with pytest.raises(NonFiniteLoss, match=r"gradient of layers\.0\.weight is not finite at batch 2 of epoch 1"):
        made.run()


# Roll-back


@pytest.mark.parametrize("wrong", [{"times": -1}, {"factor": 0}, {"factor": 1}, {"factor": -0.5}, {"often": 1}, 3])
def test_wrong_options_are_told(wrong: Any) -> None:
    with pytest.raises(UserError, match="rollback"):
        make_recipe(tiny(rollback=wrong))


def exploding(path: Path, times: int, **changes: Any) -> Trainer:
    """From its second epoch on it has 1e38 times the learning rate that would do."""
    schedule = {"name": "piecewise", "milestones": [1], "factors": [1e38]}
    rollback = {"times": times, "factor": 1e-19}
    return in_folder(path, schedule=schedule, epochs=3, rollback=rollback, **changes)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_run_goes_back_until_its_learning_rate_is_small_enough(tmp_path: Path, storage: str) -> None:
    made = exploding(tmp_path / "run", 3, storage=storage, correction="agent")
    with pytest.warns(UserWarning, match=r"not finite.*; back to step \d+ at 1e-19 x the learning rate") as caught:
        made.run()
    assert len(caught) == 2
    assert [line["rollbacks"] for line in made.history] == [0, 2, 2]
    assert [line["epoch"] for line in made.folder.metrics()] == [1, 2, 3]  # type: ignore[union-attr]
    assert made.history[1]["learning_rate"] == pytest.approx(0.05)


def test_it_goes_back_only_so_often(tmp_path: Path) -> None:
    made = exploding(tmp_path / "run", 1)
    with pytest.warns(UserWarning, match="back to"), pytest.raises(NonFiniteLoss):
        made.run()
    assert made.rollbacks == 1
    with pytest.raises(NonFiniteLoss):
        exploding(tmp_path / "other", 0).run()


def test_it_can_go_back_to_the_start(tmp_path: Path) -> None:
    raw = tiny(optimizer={"name": "sgd", "lr": 1e38}, rollback={"times": 1, "factor": 1e-40})
    made = Trainer(make_recipe(raw), RunFolder.create(tmp_path / "run", raw))
    with pytest.warns(UserWarning, match="back to step 0 at"):
        made.run()
    plain = trainer(optimizer={"name": "sgd", "lr": 1e38 * 1e-40})
    plain.run()
    assert_same_state(made.state_dict()["model"], plain.state_dict()["model"])


class Stop(Watcher):
    """Interrupts a run after a number of steps, including those that were rolled back."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def step(self, trainer: Trainer) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise InterruptedError


@pytest.mark.filterwarnings("ignore:.*back to step")
def test_a_run_that_has_gone_back_and_is_resumed_ends_bit_equal(tmp_path: Path) -> None:
    whole = exploding(tmp_path / "whole", 3, correction="agent")
    whole.run()
    for calls in (3, 7, 8, 11, 15):  # the second epoch is begun three times
        made = exploding(tmp_path / str(calls), 3, correction="agent")
        made.watcher = Stop(calls)
        with pytest.raises(InterruptedError):
            made.run()
        again = resume(RunFolder.open(tmp_path / str(calls)), make_recipe(made.raw))
        again.run()
        assert_same_state(again.state_dict(), whole.state_dict(), without="str seconds")
        assert [without_times(line) for line in again.history] == [without_times(line) for line in whole.history]
