"""FolderLoader: the same epochs with any number of workers, and errors that name the file."""

import multiprocessing

import numpy as np
import pytest
import torch
from PIL import Image

import equipoise.data as data
from data_helpers import same, write_image_folder
from equipoise.data import FolderLoader, ResizedCrop
from equipoise.errors import UserError


@pytest.fixture
def root(tmp_path):
    return write_image_folder(tmp_path)


@pytest.fixture
def folder(root):
    return data.load("folder", root).train


@pytest.mark.parametrize("augment", [None, ResizedCrop()])
def test_workers_change_nothing(folder, augment):
    alone, helped = (FolderLoader(folder, 4, 1, augment, size=16, workers=workers) for workers in (0, 2))
    batches = list(alone.epoch(2))
    assert len(batches) == len(alone) == 4
    assert batches[0][0].shape == (4, 3, 16, 16)
    assert batches[0][0].dtype == torch.float32
    assert sorted(torch.cat([y for _, y in batches]).tolist()) == folder.labels.tolist()
    assert same(batches, helped.epoch(2))
    assert same(batches[2:], helped.epoch(2, start=2))
    assert same(batches, [helped.batch(2, i) for i in range(4)])
    assert list(alone.epoch(2, start=4)) == []
    assert not same(batches, alone.epoch(3))


def test_workers_may_be_spawned(folder):
    """Spawned workers, the default outside Linux, get the dataset as a pickle."""
    expected = list(FolderLoader(folder, 4, size=4, workers=0).epoch(0))
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        assert same(expected, FolderLoader(folder, 4, size=4, workers=1).epoch(0))
    finally:
        multiprocessing.set_start_method(method, force=True)


def test_processes_share_every_batch(folder):
    whole = list(FolderLoader(folder, 4, augment=ResizedCrop(), size=8, workers=0).epoch(1))
    for rank in range(2):
        loader = FolderLoader(folder, 4, augment=ResizedCrop(), size=8, workers=0, rank=rank, ranks=2)
        assert same(loader.epoch(1), [(x[rank::2], y[rank::2]) for x, y in whole])
        assert same([loader.batch(1, 3)], [(x[rank::2], y[rank::2]) for x, y in whole[3:]])


def test_crops_belong_to_the_image_and_change_with_the_epoch(folder):
    def seen(epoch: int, batch: int) -> torch.Tensor:
        loader = FolderLoader(folder, batch, augment=ResizedCrop(), shuffle=False, size=8, workers=0)
        return torch.cat([x for x, _ in loader.epoch(epoch)])

    assert torch.equal(seen(0, 4), seen(0, 15))
    differ = (seen(0, 15) != seen(1, 15)).flatten(1).any(1)
    assert bool(differ.all())


def test_equal_images_are_cropped_differently(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for name in ("train/a/1.png", "train/a/2.png", "train/a/3.png", "val/a/1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / name)
    x, _ = FolderLoader(data.load("folder", tmp_path).train, 3, augment=ResizedCrop(), size=8, workers=0).batch(0, 0)
    assert not any(torch.equal(x[a], x[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_fixed_batches_keep_their_members(folder):
    loader = FolderLoader(folder, 4, size=4, workers=0, fixed_batches=True)
    first = {loader.index(0, i): loader.batch(0, i) for i in range(4)}
    assert same([first[loader.index(1, i)] for i in range(4)], loader.epoch(1))


def test_the_global_generator_is_not_used(folder):
    before = torch.get_rng_state()
    for workers in (0, 1):
        list(FolderLoader(folder, 4, augment=ResizedCrop(), size=4, workers=workers).epoch(0))
    assert torch.equal(before, torch.get_rng_state())


def test_evaluation_is_resize_and_centre_crop(tmp_path):
    """The usual evaluation: resize the shorter side to 256/224 of the size, then crop the centre."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 128, 3), dtype=np.uint8)
    resized = np.asarray(Image.fromarray(pixels).resize((32, 16), Image.Resampling.BILINEAR))
    expected = resized[1:15, 9:23].transpose(2, 0, 1).astype(float)
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / part / "a" / "x.png")
    x, _ = FolderLoader(data.load("folder", tmp_path).test, 1, size=14, workers=0).batch(0, 0)
    np.testing.assert_allclose(x[0].numpy() * 255, expected, atol=1.01)  # one level of rounding


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "gone"])
def test_a_damaged_image_is_named_in_one_line(root, folder, damage, workers):
    path = root / "train" / "bee" / "2.JPEG"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"truncated": path.read_bytes()[:300], "text": b"hello", "empty": b""}[damage])
    with pytest.raises(UserError) as caught:
        list(FolderLoader(folder, 4, size=8, workers=workers).epoch(0))
    message = str(caught.value)
    assert "2.JPEG" in message
    assert str(path.parent) in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("options", "words"),
    [({"size": 0}, "size=0"), ({"workers": -1}, "workers=-1"), ({"batch": 0}, "batch=0")],
)
def test_wrong_options_are_explained(folder, options, words):
    with pytest.raises(UserError, match=words):
        FolderLoader(folder, **options)
