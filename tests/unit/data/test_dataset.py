"""The catalogue of datasets, images, splits, channel statistics and the built-in digits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import equipoise.data as data
from equipoise.data import DATASETS, Images, statistics
from equipoise.errors import UserError


def test_the_catalogue_lists_and_describes_all_datasets():
    assert list(DATASETS) == ["digits", "cifar10", "cifar100", "svhn", "imagenet", "folder"]
    assert all(len(line) > 20 for line in DATASETS.describe().values())
    with pytest.raises(UserError, match='did you mean "cifar10"'):
        data.load("cifar01")


def test_the_split_of_the_digits_is_stratified_and_fixed():
    from sklearn.datasets import load_digits

    splits = data.load("digits")
    assert splits.train.images.shape == (1437, 1, 8, 8)
    assert splits.test.images.shape == (360, 1, 8, 8)
    assert splits.validation is None
    assert splits.classes == tuple("0123456789")
    share = splits.test.labels.bincount() / 360 - load_digits().target.size ** -1 * torch.from_numpy(
        np.bincount(load_digits().target)
    )
    assert float(share.abs().max()) * 360 < 1  # within one image of proportional
    # Together the splits hold each image of scikit-learn once, with its label.
    levels = {
        (tuple(np.rint(image.ravel() * 255 / 16).astype(int).tolist()), int(label))
        for image, label in zip(load_digits().images, load_digits().target, strict=True)
    }
    ours = [
        (tuple(image.flatten().tolist()), int(label))
        for part in (splits.train, splits.test)
        for image, label in zip(part.images, part.labels, strict=True)
    ]
    assert len(ours) == 1797
    assert set(ours) == levels
    assert torch.equal(splits.test.images, data.load("digits", seed=5).test.images)


@given(st.integers(1, 1436), st.integers(0, 1000))
def test_validation_images_are_held_out_of_the_training_split(count, seed):
    whole = numbered_splits(1437)
    held = whole.hold_out(count, seed)
    train, validation = held.train.labels.tolist(), held.validation.labels.tolist()
    assert len(validation) == count
    assert sorted(train + validation) == list(range(1437))
    again = whole.hold_out(count, seed)
    assert again.validation.labels.tolist() == validation


def numbered_splits(count: int) -> data.Splits:
    images = Images(torch.zeros(count, 1, 1, 1, dtype=torch.uint8), torch.arange(count))
    return data.Splits(images, None, images, (), (), ())


def test_other_seeds_hold_out_other_images():
    chosen = {tuple(numbered_splits(100).hold_out(20, seed).validation.labels.tolist()) for seed in range(10)}
    assert len(chosen) == 10


@pytest.mark.parametrize("validation", [-1, 1437, 5000, 2.5, True])
def test_impossible_validation_sizes_are_explained(validation):
    with pytest.raises(UserError, match=f"validation={validation}"):
        data.load("digits", validation=validation)


@given(st.integers(1, 3), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_statistics_are_numpys(channels, count, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, channels, 4, 5), dtype=np.uint8)
    measured = statistics(Images(torch.from_numpy(pixels), torch.zeros(count, dtype=torch.int64)))
    scaled = pixels.astype(np.float64) / 255
    np.testing.assert_allclose(measured.mean, scaled.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(measured.std, scaled.std(axis=(0, 2, 3)), rtol=1e-7, atol=1e-9)


def test_statistics_of_many_bright_images_do_not_overflow():
    bright = Images(torch.full((3000, 1, 32, 32), 255, dtype=torch.uint8), torch.zeros(3000, dtype=torch.int64))
    assert statistics(bright) == ((1.0,), (0.0,))


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64), "float32"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), r"\[2, 4, 4\]"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2), "labels must be int64"),
        (
            torch.zeros(2, 3, 4, 4, dtype=torch.uint8),
            torch.zeros(3, dtype=torch.int64),
            r"labels must be int64 \[2\]",
        ),
    ],
)
def test_wrong_tensors_are_explained(images, labels, words):
    with pytest.raises(UserError, match=words):
        Images(images, labels)


def test_the_digits_are_read_without_scikit_learns_file_too(monkeypatch):
    from equipoise.data import digits

    there = data.load("digits")
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    again = data.load("digits")
    for left, right in ((there.train, again.train), (there.test, again.test)):
        assert torch.equal(left.images, right.images)
        assert torch.equal(left.labels, right.labels)


def test_libraries_for_reading_are_imported_on_use():
    import subprocess
    import sys

    code = "import sys, equipoise.data; equipoise.data.load('digits'); "
    code += "print([m for m in ('sklearn', 'scipy', 'PIL') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
