"""The training loop against loops written out by hand, and what it does when things go wrong."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.correction import CORRECTIONS
from equipoise.errors import NonFiniteLoss, UserError
from equipoise.models.small_networks import MLP
from equipoise.topology import ALGORITHMS
from equipoise.training import RunFolder, Trainer, make_recipe, resume
from equipoise.training.evaluate import Score
from equipoise.training.optimizers import OPTIMIZERS
from equipoise.training.run_batches import BatchRef, RefreshBatches
from equipoise.training.watchers import Watcher
from train_helpers import BATCHES, assert_same_state, leaves, same, tiny, trainer, without_times

LINE = {
    *("epoch", "step", "learning_rate", "train_loss", "train_accuracy", "split", "scores", "density", "exploration"),
    *("updates", "correction", "passes", "seconds", "startup_seconds", "images_per_second"),
}  # at least


def topology(name: str, **options: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"every": 2}
    others: dict[str, dict[str, Any]] = {
        "dense": {},
        "static": {},
        "bsr-net": {"distribution": "erk"},
        "sr-ste": {"pattern": "fan_in"},
        "hydra": {"begin": 0.1, "until": 0.5},
    }
    own = others.get(name, own)
    return {"name": name, **({} if name == "dense" else {"sparsity": 0.8}), **own, **options}


class WithDropout(MLP):
    """The perceptron, drawing random numbers at every pass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


class PartlyFrozen(MLP):
    """A perceptron with a frozen weight and a parameter without dimensions."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.layers[2].weight.requires_grad_(False)
        self.scale = nn.ParameterList([torch.tensor(1.0)])  # the last of its parameters

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale[0]


def in_folder(path: Path, **changes: Any) -> Trainer:
    raw = tiny(**changes)
    recipe = make_recipe(raw)
    return Trainer(recipe, RunFolder.create(path, raw, recipe.checkpoint.keep))


def assert_sparse(made: Trainer) -> None:
    """Counts as asked for, and exact zeros elsewhere, in the weights and in their average."""
    parameters = dict(made.parts.model.named_parameters())
    average = made.parts.ema
    for name, mask in made.parts.topology.masks.items():
        assert (parameters[name][~mask] == 0).all()
        assert average is None or (average.values[name][~mask] == 0).all()
    assert made.parts.topology.active == sum(int(mask.sum()) for mask in made.parts.topology.masks.values())


# What it computes


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_topology_trains_with_every_optimizer(name: str, optimizer: str) -> None:
    rate = 0.05 if "sgd" in optimizer else 0.005
    made = trainer(topology=topology(name), optimizer={"name": optimizer, "lr": rate})
    result = made.run()
    assert_sparse(made)
    first, last = made.history
    assert last["train_loss"] < first["train_loss"]
    near = 2e-2 if ALGORITHMS[name].pattern else 2e-3  # counts in whole units of the pattern
    assert last["density"] == pytest.approx(1.0 if name == "dense" else 0.2, abs=near)
    assert set(result["test"]) == {"plain", "bn_recalibrated", "ema"}
    if "every" in topology(name) and name != "gmp":
        assert made.parts.topology.updates > 2
        assert last["exploration"] > last["density"]


@pytest.mark.parametrize("name", ["set", "rigl"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_trains(correction: str, name: str) -> None:
    made = trainer(topology=topology(name), correction=correction, epochs=3)
    made.run()
    assert_sparse(made)
    assert made.history[-1]["train_loss"] < made.history[0]["train_loss"]
    own = {"forward": 3 * BATCHES, "backward": 3 * BATCHES}
    assert (made.history[-1]["passes"] == own) == (correction in ("sgd", "saga"))


@pytest.mark.parametrize("mode", ["recompute", "replay", "running"])
@pytest.mark.parametrize("coefficient", ["loss", "gradient", "fixed", "linear"])
def test_agent_trains_in_every_way_with_every_coefficient(mode: str, coefficient: str) -> None:
    made = trainer(correction={"name": "agent", "mode": mode, "coefficient": coefficient}, epochs=3)
    made.run()
    assert made.history[-1]["correction"]["corrected_steps"] > 0
    assert made.history[-1]["train_loss"] < made.history[0]["train_loss"]


def by_hand(changes: dict[str, Any], clip: float = 0.0) -> tuple[dict[str, Tensor], list[float]]:
    """The run of a recipe with SGD and a fixed mask, as one would write it without this package's loop."""
    made = trainer(**changes)
    recipe, model = made.recipe, made.parts.model
    model.load_state_dict(trainer(**changes).parts.model.state_dict())
    found = made.parts.topology.masks
    masks = {id(p): found.get(name, torch.ones(1)) for name, p in model.named_parameters()}
    made.parts.topology.detach()
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    losses = []
    for epoch in range(recipe.epochs):
        total, images = 0.0, 0
        for x, y in made.parts.train.epoch(epoch):
            optimizer.param_groups[0]["lr"] = 0.05 * (1.0 if 2 * epoch < recipe.epochs else 0.1)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for p in weights:
                assert p.grad is not None
                p.grad *= masks[id(p)]
            if clip:
                nn.utils.clip_grad_norm_(weights, clip)
            optimizer.step()
            for p in weights:
                p.data *= masks[id(p)]
            total, images = total + loss.item() * len(y), images + len(y)
        losses.append(total / images)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, losses


@pytest.mark.parametrize(("name", "clip"), [("dense", 0.0), ("static", 0.0), ("static", 0.5)])
def test_the_loop_equals_one_written_by_hand(name: str, clip: float) -> None:
    schedule = {"name": "piecewise", "milestones": [0.5], "factors": [0.1]}
    changes = {"topology": topology(name), "schedule": schedule, "epochs": 4, "clip": clip}
    made = trainer(**changes)
    made.run()
    weights, losses = by_hand(changes, clip)
    for parameter, p in made.parts.model.named_parameters():
        torch.testing.assert_close(p.detach(), weights[parameter], rtol=1e-5, atol=1e-7)
    assert [line["train_loss"] for line in made.history] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("name", ["set", "rigl-itop", "snfs", "granet"])
def test_clipping_bounds_the_gradient_of_the_active_weights(name: str) -> None:
    """Also at steps where the algorithm wants the gradient of all weights."""
    made = trainer(topology=topology(name), clip=1e-3, epochs=1)
    norms = []

    def look(*_: Any) -> None:
        assert made.parts.flat is not None
        norms.append(float(made.parts.flat.gradient.norm()))

    made.parts.optimizer.register_step_pre_hook(look)
    made.run()
    assert made.parts.topology.updates > 0
    assert norms == pytest.approx([1e-3] * BATCHES, rel=1e-3)


def test_bf16_computes_in_bf16_and_keeps_float32_weights() -> None:
    made = trainer(precision="bf16")
    seen = set()
    first = made.parts.model.get_submodule("layers.0")
    first.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    made.run()
    assert seen <= {torch.bfloat16, torch.float32}
    assert torch.bfloat16 in seen
    assert {p.dtype for p in made.parts.model.parameters()} == {torch.float32}
    assert made.history[1]["train_loss"] < made.history[0]["train_loss"]


def test_the_learning_rate_is_the_schedules_times_the_corrections() -> None:
    schedule = {"name": "cosine", "warmup": 0.5}
    for correction, factor in (("sgd", 1.0), ("agent-reduced-lr", 0.1)):
        made = trainer(schedule=schedule, correction=correction, optimizer={"name": "sgd", "lr": 0.2})
        rates: list[float] = []
        made.parts.optimizer.register_step_pre_hook(
            lambda optimizer, *_, rates=rates: rates.append(optimizer.param_groups[0]["lr"])
        )
        made.run()
        expected = [0.2 * factor * made.recipe.schedule.factor(step, 2, BATCHES) for step in range(2 * BATCHES)]
        assert rates == pytest.approx(expected)
        assert made.history[-1]["learning_rate"] == pytest.approx(expected[-1])


def test_the_same_recipe_gives_the_same_run_and_another_seed_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.training.build_model.MODELS", {"mlp": WithDropout})
    runs = [trainer(seed=seed) for seed in (0, 0, 1)]
    for number, made in enumerate(runs):
        torch.manual_seed(number)  # what others do with the global stream before does not matter
        made.run()
    first, second, other = (made.parts.model.state_dict() for made in runs)
    assert_same_state(first, second)
    assert not all(same(a, b) for a, b in zip(leaves(first).values(), leaves(other).values(), strict=True))


def test_adversarial_training_and_both_kinds_of_full_pass() -> None:
    attack = {"name": "at", "steps": 2, "eps": 0.1, "step_size": 0.05}
    losses = []
    for full_pass in ("clean", "adversarial"):
        made = trainer(objective=attack, correction="svrg", full_pass=full_pass, epochs=2)
        made.run()
        assert_sparse(made)
        losses.append(made.history[-1]["train_loss"])
    assert losses[0] != losses[1]


# Batches of a refresh


def test_saga_sees_the_same_images_under_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(correction="saga", epochs=3)
    seen: list[tuple[int, Tensor]] = []
    backward, batches = made.parts.correction.backward, made.parts.batches

    def spy(loss_fn: Any, ref: BatchRef, index: int | None = None) -> Tensor:
        assert index is not None
        seen.append((index, batches.of(ref, batches.prepare(ref))[0].clone()))
        return backward(loss_fn, ref, index=index)

    monkeypatch.setattr(made.parts.correction, "backward", spy)
    made.run()
    epochs = [seen[i : i + BATCHES] for i in range(0, len(seen), BATCHES)]
    known = dict(epochs[0])
    assert sorted(known) == list(range(BATCHES))
    for epoch in epochs:
        assert all(torch.equal(x, known[index]) for index, x in epoch)
    orders = {tuple(index for index, _ in epoch) for epoch in epochs}
    assert len(orders) > 1


@pytest.mark.parametrize("every", [0, 1, 4, 6, 7, 100])
def test_replay_runs_every_batch_once_whatever_the_interval(every: int) -> None:
    """Also where an interval reaches into the next epoch, or past the end of training."""
    made = trainer(correction={"name": "svrg", "mode": "replay", "every": every}, epochs=3)
    made.run()
    steps = 3 * BATCHES
    assert made.parts.correction.passes == {"forward": 2 * steps, "backward": 2 * steps}
    assert made.parts.correction.refreshes == -(-steps // (every or BATCHES))


def test_replay_refuses_a_step_of_another_batch() -> None:
    step = trainer(correction={"name": "svrg", "mode": "replay"}, epochs=3).parts.step
    step.refresh(0, 3 * BATCHES)
    step(0, 0.1)
    with pytest.raises(UserError, match="replay got another batch"):
        step(2, 0.1)
    step(1, 0.1)


def test_batches_of_a_refresh_are_those_of_the_steps() -> None:
    made = trainer(correction="svrg", epochs=3)
    loader, run_batches = made.parts.train, made.parts.batches
    wanted = [x for epoch in range(3) for x, _ in loader.epoch(epoch)][4:11]
    batches = RefreshBatches(run_batches, len(loader), 4, 7)
    assert len(batches) == 7
    for _ in range(2):  # they can be iterated again
        for (ref,), x in zip(batches, wanted, strict=True):
            assert torch.equal(run_batches.of(ref, run_batches.prepare(ref))[0], x)


# What it writes


def test_a_line_per_epoch_says_everything(tmp_path: Path) -> None:
    made = in_folder(tmp_path, correction="agent", epochs=3)
    result = made.run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == made.history
    for epoch, line in enumerate(lines, 1):
        assert set(line) >= LINE
        assert (line["epoch"], line["step"], line["split"]) == (epoch, epoch * BATCHES, "test")
        assert set(line["scores"]) == {"plain", "bn_recalibrated", "ema"}
        assert all(0 <= s["accuracy"] <= 1 and s["loss"] > 0 for s in line["scores"].values())
        assert line["density"] == pytest.approx(0.2, abs=1e-3)
        assert line["density"] <= line["exploration"] <= 1
        assert line["images_per_second"] == pytest.approx(epoch * 1437 / line["seconds"])
    assert lines[-1]["correction"].keys() >= {"c", "c_hat", "weight", "correction_norm", "variance_left"}
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert result["test"]["plain"]["images"] == 360
    assert result["test"]["plain"]["accuracy"] == lines[-1]["scores"]["plain"]["accuracy"]
    assert result["best"] == max(s["accuracy"] for line in lines for s in line["scores"].values())


def test_training_accuracy_and_loss_are_those_of_the_epochs_batches() -> None:
    still = {"name": "sgd", "lr": 1e-12, "momentum": 0}
    made = trainer(topology=topology("static"), optimizer=still, ema=0, epochs=1)
    made.run()
    expected = made.evaluate("train")["plain"]  # the weights have not moved
    assert made.history[0]["train_loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert made.history[0]["train_accuracy"] == pytest.approx(expected.accuracy)
    assert "ema" not in made.history[0]["scores"]


@pytest.mark.parametrize(("lr", "epochs", "warns"), [(1e-12, 5, True), (1e-12, 4, False), (0.5, 5, False)])
def test_a_run_that_learned_nothing_is_warned_about(lr: float, epochs: int, warns: bool) -> None:
    made = trainer(epochs=epochs, optimizer={"name": "sgd", "lr": lr})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.run()
    assert any("the network learned nothing" in str(warning.message) for warning in caught) is warns


def test_a_schedule_without_updates_is_told_when_the_training_begins() -> None:
    """Not when a finished run is opened, as `equipoise export` and `eval` do."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = trainer(topology=topology("rigl", every=100), epochs=1)
        made.evaluate("test")
    with pytest.warns(UserWarning, match="every=100: no update falls inside the window") as caught:
        made.run()
    assert len([w for w in caught if "no update" in str(w.message)]) == 1


def test_held_out_images_judge_the_epochs_and_the_test_images_the_run() -> None:
    made = trainer(data={"name": "digits", "batch": 240, "validation": 237})
    result = made.run()
    assert {line["split"] for line in made.history} == {"validation"}
    assert made.step == 2 * 5
    assert {
        split: s["plain"].images for split in ("train", "validation", "test") for s in [made.evaluate(split)]
    } == {
        "train": 1200,
        "validation": 237,
        "test": 360,
    }
    assert result["test"]["plain"]["images"] == 360


def test_training_images_are_scored_as_they_are() -> None:
    """Not shuffled, not augmented, none dropped."""
    data = {"name": "digits", "batch": 300, "drop_last": True, "augment": {"pad": 2}}
    made = trainer(data=data)
    plain = trainer()
    x, y = (torch.cat(parts) for parts in zip(*made.parts.loaders["train"].epoch(0), strict=True))
    other_x, other_y = (torch.cat(parts) for parts in zip(*plain.parts.loaders["train"].epoch(3), strict=True))
    assert torch.equal(x, other_x)
    assert torch.equal(y, other_y)
    assert len(y) == 1437
    assert len(made.parts.train) == 4


def scripted(made: Trainer, accuracies: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter(accuracies)
    monkeypatch.setattr(made, "evaluate", lambda split=None: {"plain": Score(1.0, next(scores), 1)})


def test_the_best_checkpoint_is_the_best_epochs_also_between_regular_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = in_folder(tmp_path, epochs=6, checkpoint={"every": 3, "keep": 9})
    scripted(made, [0.1, 0.9, 0.2, 0.3, 0.9, 0.4, 0.0], monkeypatch)
    made.run()
    assert made.folder is not None
    saved = [int(path.stem.removeprefix("step-")) // BATCHES for path in made.folder.store.paths()]
    assert sorted(saved) == [1, 2, 3, 6]  # new bests, every third, the last
    best = tmp_path / "checkpoints" / "best.safetensors"
    assert best.read_bytes() == (tmp_path / "checkpoints" / f"step-{2 * BATCHES:09d}.safetensors").read_bytes()


def test_a_score_that_is_not_a_number_is_nothing_in_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = in_folder(tmp_path, epochs=1)
    monkeypatch.setattr(made, "evaluate", lambda split=None: {"plain": Score(float("nan"), 0.5, 1)})
    assert made.run()["test"]["plain"]["loss"] is None
    assert made.history[0]["scores"]["plain"] == {"loss": None, "accuracy": 0.5}
    assert made.folder is not None
    assert made.folder.metrics() == made.history


def test_seconds_count_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    made = in_folder(tmp_path, epochs=2, checkpoint={"steps": 2})
    step, evaluate, save = made.take_step, made.evaluate, made.save

    def passes(seconds: float, function: Any) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            clock[0] += seconds
            return function(*arguments, **options)

        return timed

    monkeypatch.setattr(made, "take_step", passes(1.0, step))
    monkeypatch.setattr(made, "evaluate", passes(100.0, evaluate))
    monkeypatch.setattr(made, "save", passes(1000.0, save))
    made.run()
    assert [line["seconds"] for line in made.history] == [BATCHES, 2 * BATCHES]


# When things go wrong


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_last_checkpoint(tmp_path: Path) -> None:
    exploding = {"name": "piecewise", "milestones": [1], "factors": [1e30]}
    made = in_folder(tmp_path, schedule=exploding, epochs=3, checkpoint={"steps": 4})
    with pytest.raises(
        NonFiniteLoss, match=r"not finite at batch [2-6] of epoch 2 .*layers.*; the last checkpoint is intact"
    ):
        made.run()
    assert made.folder is not None
    newest = made.folder.store.newest()
    assert newest is not None
    assert newest["position"][:2] in ([1, 0], [1, 4])
    assert all(leaf.isfinite().all() for leaf in leaves(newest["model"]).values())
    assert len(made.folder.metrics()) == 1
    assert not made.folder.has_result


def test_a_loss_that_is_not_finite_in_the_full_pass_names_the_epoch() -> None:
    made = trainer(correction="agent")
    with torch.no_grad():
        next(made.parts.model.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteLoss, match=r"^epoch 1: the loss is nan at batch 1 of the full pass"):
        made.run()


class Stop(Watcher):
    """Interrupts a run after a step."""

    def __init__(self, after: int) -> None:
        self.after = after

    def step(self, trainer: Trainer) -> None:
        if trainer.step == self.after:
            raise InterruptedError


@pytest.mark.parametrize("stop", [1, 5, 7, 11])
@pytest.mark.parametrize("correction", ["sgd", {"name": "agent", "mode": "replay"}, "svrg"])
def test_an_interrupted_trainer_continues_bit_for_bit(
    stop: int, correction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.training.build_model.MODELS", {"mlp": WithDropout})
    assert_continues(stop, correction=correction)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("storage", ["masked", "packed"])
def test_frozen_weights_and_parameters_without_dimensions_are_resumed(
    optimizer: str, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.training.build_model.MODELS", {"mlp": PartlyFrozen})
    assert_continues(5, optimizer={"name": optimizer, "lr": 0.01}, storage=storage)


def assert_continues(stop: int, **changes: Any) -> None:
    """A run that is interrupted after some steps ends as one that is not."""
    whole, first, second = trainer(**changes), trainer(**changes), trainer(**changes)
    whole.run()
    first.watcher = Stop(stop)
    with pytest.raises(InterruptedError):
        first.run()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.history = list(first.history)
    second.run()
    assert_same_state(second.state_dict(), whole.state_dict(), without="str seconds")
    assert list(map(without_times, second.history)) == list(map(without_times, whole.history))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "mlp", "hidden": 17}},
        {"model": "small"},
        {"optimizer": {"name": "adam"}},
        {"topology": {"name": "rigl", "sparsity": 0.8}},
        {"topology": "dense"},
        {"correction": "saga"},
        {"ema": 0.5},
    ],
)
def test_a_checkpoint_of_another_recipe_is_told_in_one_line(changes: dict[str, Any]) -> None:
    state = trainer(ema=0).state_dict()
    with pytest.raises(UserError) as error:
        trainer(**{"ema": 0, **changes}).load_state_dict(state)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def changed(state: Any, path: list[Any], value: Any) -> Any:
    """A copy of a state with another value at a path; `...` removes the key."""
    if not path:
        return value
    result = dict(state)
    if value is ... and len(path) == 1:
        del result[path[0]]
    else:
        result[path[0]] = changed(state[path[0]], path[1:], value)
    return result


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("seed", 1, "seed was 0 and is now 1;"),
        ("data", {"name": "digits", "batch": 240, "validation": 100}, "data.validation was 0 and is now 100;"),
        ("data", {"name": "digits", "batch": 240, "drop_last": True}, "data.drop_last was False and is now True;"),
        ("data", {"name": "digits", "batch": 120}, "data.batch was 240 and is now 120;"),
        ("data", {"name": "digits", "batch": 240, "augment": {}}, "data.augment was None and is now Augment;"),
        ("model", {"name": "mlp", "hidden": 17}, "model.hidden was 16 and is now 17;"),
        ("topology", {"name": "set", "sparsity": 0.8, "every": 5}, "topology.every was 4 and is now 5;"),
        (
            "objective",
            {"name": "standard", "label_smoothing": 0.1},
            "objective.label_smoothing was 0.0 and is now 0.1;",
        ),
        ("correction", {"name": "agent", "mode": "running"}, "correction.mode was replay and is now running;"),
        ("optimizer", "adam", "optimizer was SGDOptions and is now AdamOptions;"),
    ],
)
def test_what_must_not_change_is_named(key: str, value: Any, told: str) -> None:
    correction = {"name": "agent", "mode": "replay"}
    state = trainer(correction=correction).state_dict()
    with pytest.raises(UserError, match=f"^the checkpoint does not fit the recipe: {re.escape(told)}"):
        trainer(**{"correction": correction, key: value}).load_state_dict(state)


def test_what_may_change_is_accepted(tmp_path: Path) -> None:
    first = trainer()
    first.run_epoch()
    data = {"name": "digits", "batch": 240, "root": str(tmp_path), "test_batch": 77, "workers": 1}
    other = trainer(
        model={"name": "mlp", "hidden": 16, "size": 8},  # the default
        data=data,
        optimizer={"name": "sgd", "lr": 0.01},
        checkpoint={"steps": 3},
        storage="packed",
        engine="eager",
        device="cpu",
        precision="float32",
        epochs=4,
        clip=1,
    )
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    assert other.step == BATCHES


@pytest.mark.parametrize("storage", ["masked", "packed"])
@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("position", [1], "position has 1 items instead of 4"),
        ("model", 3, "model is a number instead of a dictionary"),
        ("names", ..., "it has no names"),
        ("fingerprint", None, "it has no fingerprint"),
        ("random", {}, "random is a dictionary instead of a list"),
        ("meter/sums", ..., "it has no meter/sums"),
        ("meter/sums", torch.zeros(2, 2), "meter/sums has the shape"),
        ("correction/statistics", ..., "it has no correction/statistics"),
        ("correction/counters", "many", "correction/counters is a word instead of a list"),
        ("ema/values", [], "ema/values is a list instead of a dictionary"),
        ("ema/steps", ..., "it has no ema/steps"),
        ("topology/layers", ..., "it has no topology/layers"),
        ("correction/statistics", {}, "correction has no '"),
        ("optimizer", {}, "it has no optimizer/"),
        ("correction/counters", [None] * 4, "it has no correction/counters/0"),
        ("topology/updates", 0.5, "topology/updates is 0.5 instead of a whole number"),
    ],
)
def test_a_state_of_another_shape_is_named(path: str, value: Any, told: str, storage: str) -> None:
    changes: dict[str, Any] = {"correction": "agent", "storage": storage}
    made = trainer(**changes)
    made.run_epoch()
    state = changed(made.state_dict(), path.split("/"), value)
    with pytest.raises(UserError, match=f"^the checkpoint does not fit the recipe: {told}"):
        trainer(**changes).load_state_dict(state)


def test_a_momentum_of_another_shape_is_named() -> None:
    made = trainer()
    made.run_epoch()
    state = made.state_dict()
    name = state["names"][0]
    wrong = changed(state, ["optimizer", name, "momentum_buffer"], torch.zeros(3))
    with pytest.raises(UserError, match=rf"optimizer/{name}/momentum_buffer has the shape \[3\] instead of "):
        trainer().load_state_dict(wrong)


@pytest.mark.parametrize(
    ("part", "change", "told"),
    [
        (("model", "layers.0.index"), lambda t: t + 10**6, '"layers.0" cannot be loaded: index has'),
        (
            ("model", "layers.0.values"),
            lambda t: t * torch.nan,
            "model/layers.0.values has values that are not a number",
        ),
        (("ema", "values", "layers.0.values"), lambda t: t[:3], 'the average of "layers.0.values" has the shape'),
        (("ema", "values", "layers.0.values"), lambda t: t * torch.nan, "ema/values/layers.0.values has values"),
        (
            ("ema", "values", "layers.0.values"),
            lambda t: t + torch.inf,
            "ema/values/layers.0.values has values that are infinite",
        ),
        (("model", "layers.0.bias"), lambda t: t + torch.inf, "model/layers.0.bias has values that are infinite"),
        (
            ("optimizer", "layers.0.weight", "momentum_buffer"),
            lambda t: t.long(),
            "momentum_buffer is of torch.int64",
        ),
        (("optimizer", "layers.0.weight", "momentum_buffer"), lambda t: t[:5], "momentum_buffer has the shape"),
        (("optimizer", "layers.0.weight", "momentum_buffer"), lambda t: t * torch.nan, "momentum_buffer has values"),
    ],
)
def test_a_packed_state_with_impossible_numbers_is_refused(
    part: tuple[str, ...], change: Callable[[Tensor], Tensor], told: str
) -> None:
    """As in a file whose checksum is right and whose contents are wrong."""
    made = trainer(storage="packed")
    made.run_epoch()
    state = value = made.state_dict()
    for key in part:
        value = value[key]
    with pytest.raises(UserError, match=re.escape(told)) as raised:
        trainer(storage="packed").load_state_dict(changed(state, list(part), change(value)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("state", [{}, {"model": 3}])
def test_a_state_of_something_else_is_told_in_one_line(state: Any) -> None:
    with pytest.raises(UserError, match="the checkpoint does not fit the recipe: it has no fingerprint"):
        trainer().load_state_dict(state)


def test_resuming_a_run_that_has_no_checkpoint_starts_it(tmp_path: Path) -> None:
    recipe = make_recipe(tiny())
    folder = RunFolder.create(tmp_path, tiny())
    folder.append({"epoch": 1, "from": "a killed process"})
    made = resume(folder, recipe)
    assert (made.epoch, made.batch, made.history, folder.metrics()) == (0, 0, [], [])
