"""What a recipe's parts are made into, and what does not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data_helpers import write_image_folder
from equipoise.errors import UserError
from equipoise.training import make_recipe
from equipoise.training.parts import find_device, make_parts
from train_helpers import tiny, trainer


def test_the_model_has_the_shape_of_the_data() -> None:
    made = make_parts(make_recipe(tiny(model="small")))
    x, y = next(iter(made.train.epoch(0)))
    assert made.model(x).shape == (240, 10)
    pixels = torch.cat([x for x, _ in made.loaders["train"].epoch(0)])
    normalize = made.model.get_submodule("normalize")
    seen = normalize(pixels)  # normalised by the statistics of the training images
    assert seen.mean().abs() < 1e-4
    assert float(seen.std()) == pytest.approx(1, abs=1e-3)
    assert y.dtype == torch.int64


def test_making_parts_leaves_the_model_in_training_mode_and_untouched() -> None:
    """Looking whether a model takes the images moves neither its statistics nor its weights."""
    made = make_parts(make_recipe(tiny(model="small", topology="dense")))
    assert all(module.training for module in made.model.modules())
    state = made.model.state_dict()
    assert all((value == 0).all() for name, value in state.items() if name.endswith(("running_mean", "tracked")))
    assert all((value == 1).all() for name, value in state.items() if name.endswith("running_var"))


def test_seeds_decide_weights_masks_and_batches() -> None:
    first, again, other = (make_parts(make_recipe(tiny(seed=seed))) for seed in (1, 1, 2))
    for name, p in first.model.named_parameters():
        assert torch.equal(p, dict(again.model.named_parameters())[name])
        assert not torch.equal(p, dict(other.model.named_parameters())[name])
    for name, mask in first.topology.masks.items():
        assert torch.equal(mask, again.topology.masks[name])
        assert not torch.equal(mask, other.topology.masks[name])
    batches = [next(iter(made.train.epoch(0)))[0] for made in (first, again, other)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_images_of_another_size_than_the_models_are_told(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    for model, side in (("vgg_c", 32), ({"name": "mlp", "size": 12}, 12)):
        with pytest.raises(
            UserError, match=f"takes images of 3x{side}x{side}, not of 3x224x224; set data.size={side}$"
        ):
            trainer(model=model, data={"name": "folder", "root": str(tmp_path), "workers": 0, "batch": 5})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": {"name": "small", "size": 16}}, "model: it does not take images of 1x8x8"),
        ({"model": {"name": "mlp", "size": 0}}, "model: size=0"),
        ({"model": {"name": "mlp", "channels": 3}}, "mean has 1 numbers; the model's input has 3 channels"),
        ({"model": {"name": "mlp", "classes": 4}}, "model: classes=4, and the data has 10"),
        ({"model": {"name": "mlp", "hidden": 2**62}}, "model: "),
        ({"model": "vgg16"}, "model: size=8 is too small"),
        ({"data": {"name": "digits", "augment": {"pad": 20}}}, "cannot be reflect-padded by 20"),
        ({"data": {"name": "digits", "validation": 1437}}, "validation=1437 leaves none"),
        ({"data": {"name": "digits", "validation": -1}}, "validation=-1"),
        ({"data": {"name": "digits", "batch": 2000, "drop_last": True}}, "do not fill one batch"),
        ({"data": {"name": "digits", "batch": 359}, "model": "small"}, "a batch has one image"),
        ({"data": {"name": "digits", "batch": 1}, "model": "small"}, "a batch has one image"),
        ({"data": {"name": "cifar10", "root": "/nowhere"}}, "CIFAR-10: no data_batch_1 in /nowhere"),
        ({"topology": {"name": "set", "include": ["nothing*"]}}, "nothing*"),
        ({"topology": {"name": "set", "distribution": [0.5]}}, "1 densities are given for 3 sparse layers"),
        ({"device": "cuda:99"}, "device=cuda:99, but torch finds"),
        ({"device": "gpu"}, 'no device is called "gpu"'),
    ],
)
def test_what_does_not_fit_is_told_before_anything_runs(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        trainer(**changes)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_one_image_is_enough_where_nothing_is_normalised() -> None:
    assert len(trainer(data={"name": "digits", "batch": 359}).parts.train) == 5
    assert len(trainer(data={"name": "digits", "batch": 359, "drop_last": True}, model="small").parts.train) == 4


@pytest.mark.parametrize(
    "name", ["meta", "mps", "cpu:1", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "", "Cuda", "cuda:²"]
)
def test_devices_that_are_none(name: str) -> None:
    with pytest.raises(UserError, match="no device is called"):
        find_device(name)


def test_devices() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_the_seed_reaches_the_correction() -> None:
    """It chooses which batches a `fraction` takes."""
    for correction in ("agent", {"name": "agent", "batch_fraction": 0.5}):
        assert make_parts(make_recipe(tiny(seed=5, correction=correction))).correction.seed == 5
