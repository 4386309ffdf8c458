"""Datasets of image files: class folders, splits, statistics, and errors for missing parts."""

import pytest
from PIL import Image

import equipoise.data as data
from data_helpers import CLASSES, write_image_folder
from equipoise.errors import UserError


def test_labels_are_the_indices_of_the_sorted_class_folders(tmp_path):
    root = write_image_folder(tmp_path)
    (root / "train" / "ant" / "notes.txt").write_text("not an image")
    (root / "train" / "ant" / "._0.jpg").write_bytes(b"resource fork")
    (root / "train" / ".cache").mkdir()
    splits = data.load("folder", root)
    assert splits.classes == CLASSES
    assert splits.train.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert splits.train.names[5] == "bee/0.JPEG"
    assert splits.validation is None
    held = data.load("folder", root, validation=4)
    assert (len(held.train), len(held.validation)) == (11, 4)
    assert set(held.train.names) | set(held.validation.names) == set(splits.train.names)


def test_val_is_for_validation_if_there_is_a_test_folder(tmp_path):
    write_image_folder(tmp_path, ("train", "val", "test"), each=1)
    splits = data.load("folder", tmp_path)
    assert splits.validation is not None
    with pytest.raises(UserError, match="validation=1: the dataset has a validation split already"):
        data.load("folder", tmp_path, validation=1)
    assert (splits.validation.root.name, splits.test.root.name) == ("val", "test")


def test_imagenet_is_read_from_its_own_folder(tmp_path):
    write_image_folder(tmp_path / "imagenet", each=1)
    splits = data.load("imagenet", tmp_path)
    assert splits.test.root == tmp_path / "imagenet" / "val"
    assert splits.mean == (0.485, 0.456, 0.406)


def test_statistics_are_those_of_the_training_images(tmp_path):
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
    for n, level in enumerate((51, 153)):
        Image.new("RGB", (30, 20), (level, 0, 255)).save(tmp_path / "train" / "a" / f"{n}.png")
        Image.new("L", (8, 8)).save(tmp_path / "val" / "a" / f"{n}.png")
    splits = data.load("folder", tmp_path)
    assert splits.mean == pytest.approx((0.4, 0, 1))
    assert splits.std == pytest.approx((0.2, 0, 0))


def test_missing_and_empty_folders_are_explained(tmp_path):
    def complaint(name: str, root) -> str:
        with pytest.raises(UserError) as caught:
            data.load(name, root)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert f"no train in {tmp_path / 'imagenet'}" in complaint("imagenet", tmp_path)
    assert "www.image-net.org" in complaint("imagenet", tmp_path)
    assert f"no train in {tmp_path}" in complaint("folder", tmp_path)
    (tmp_path / "train").mkdir()
    assert "no class folders" in complaint("folder", tmp_path)
    (tmp_path / "train" / "ant").mkdir()
    assert "ant in" in complaint("folder", tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "train" / "ant" / "a.png")
    assert f"no val in {tmp_path}" in complaint("folder", tmp_path)
    (tmp_path / "val" / "dog").mkdir(parents=True)
    assert "dog" in complaint("folder", tmp_path)
