"""SVHN files: official .mat files are read, all others refused in one line."""

import numpy as np
import pytest
from scipy.io import savemat

import equipoise.data as data
from data_helpers import svhn_content
from equipoise.errors import UserError


@pytest.fixture
def root(tmp_path):
    for split, count in (("train", 20), ("test", 11)):
        savemat(tmp_path / f"{split}_32x32.mat", svhn_content(count, count))
    return tmp_path


def test_images_and_labels_are_read_and_label_10_is_digit_0(root):
    splits = data.load("svhn", root)
    assert splits.train.images.shape == (20, 3, 32, 32)
    assert splits.test.labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert splits.classes == tuple("0123456789")
    pixels = svhn_content(11, 11)["X"]
    for n, channel, y, x in [(0, 0, 0, 0), (10, 2, 31, 3), (4, 1, 7, 30)]:
        assert splits.test.images[n, channel, y, x] == pixels[y, x, channel, n]


@pytest.mark.parametrize("name", ["train_32x32.mat", "test_32x32.mat"])
def test_a_missing_file_is_named_with_its_folder_and_origin(root, name):
    (root / name).unlink()
    with pytest.raises(UserError) as caught:
        data.load("svhn", root)
    message = str(caught.value)
    assert f"no {name} in {root}" in message
    assert "ufldl.stanford.edu/housenumbers" in message
    assert "\n" not in message


@pytest.mark.parametrize("size", [0, 10, 130, 1000, 60_000])
def test_a_truncated_file_is_explained(root, size):
    path = root / "train_32x32.mat"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match="train_32x32") as caught:
        data.load("svhn", root)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y": np.zeros((20, 1), np.uint8)}, r"labels 0\.\.0, not 1\.\.10"),
        ({"y": np.full((20, 1), 11, np.uint8)}, r"labels 11\.\.11"),
        ({"y": np.ones((19, 1), np.uint8)}, "20 images and 19 labels"),
        ({"y": "text"}, "integer labels"),
        ({"y": None}, "integer labels"),
        ({"X": np.zeros((32, 32, 3, 20))}, "uint8"),
        ({"X": np.zeros((28, 28, 3, 20), np.uint8)}, "32, 32, 3, N"),
        ({"X": np.zeros((32, 32, 3), np.uint8)}, "32, 32, 3, N"),
        ({"X": None}, "32, 32, 3, N"),
    ],
)
def test_wrong_content_is_explained(root, change, words):
    changed = {key: value for key, value in {**svhn_content(20, 20), **change}.items() if value is not None}
    savemat(root / "train_32x32.mat", changed)
    with pytest.raises(UserError, match=words) as caught:
        data.load("svhn", root)
    assert "train_32x32.mat" in str(caught.value)
    assert "\n" not in str(caught.value)
