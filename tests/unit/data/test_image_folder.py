"""equipoise.data.image_folder, picture and folder_loader: image files, decoded alike by any number of workers."""

import pickle
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import equipoise.data as data
from equipoise.data.folder_loader import FolderLoader
from equipoise.data.image_files import ResizedCrop, centre_box, cut, decode
from equipoise.errors import UserError

CLASSES = ("ant", "bee", "cat")


def write_pictures(root, parts=("train", "val"), each=5) -> None:
    rng = np.random.default_rng(0)
    for part in parts:
        for name in CLASSES:
            folder = root / part / name
            folder.mkdir(parents=True)
            for n in range(each):
                width, height = rng.integers(20, 60, 2)
                pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{n}.{'png' if n % 2 else 'JPEG'}")


@pytest.fixture
def root(tmp_path):
    write_pictures(tmp_path)
    return tmp_path


def same(first, second) -> bool:
    """Whether two sequences of batches are bit-equal."""
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))


def test_labels_are_the_sorted_class_folders(root):
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


def test_sixteen_bits_of_grey_become_eight_and_unknown_ranges_are_refused(tmp_path):
    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey).save(tmp_path / "grey.tif")
    for name in ("grey.png", "grey.tif"):
        pixels = np.asarray(decode(tmp_path / name))
        assert pixels.shape == (8, 8, 3)
        np.testing.assert_array_equal(pixels[..., 1], grey // 256)
    for name, values in (("i.tif", grey.astype(np.int32)), ("f.tif", grey.astype(np.float32) / 65535)):
        Image.fromarray(values).save(tmp_path / name)
        with pytest.raises(UserError, match=f"{name} cannot be read as an image .*32 bits a pixel of no known range"):
            decode(tmp_path / name)


def test_of_val_and_test_the_first_is_for_validation(tmp_path):
    write_pictures(tmp_path, ("train", "val", "test"), each=1)
    splits = data.load("folder", tmp_path)
    assert splits.validation is not None
    with pytest.raises(UserError, match="validation=1: the data has validation images of its own"):
        data.load("folder", tmp_path, validation=1)
    assert (splits.validation.root.name, splits.test.root.name) == ("val", "test")


def test_imagenet_lies_below_its_own_folder(tmp_path):
    write_pictures(tmp_path / "imagenet", each=1)
    splits = data.load("imagenet", tmp_path)
    assert splits.test.root == tmp_path / "imagenet" / "val"
    assert splits.mean == (0.485, 0.456, 0.406)


def test_statistics_come_from_the_pictures(tmp_path):
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
    for n, level in enumerate((51, 153)):
        Image.new("RGB", (30, 20), (level, 0, 255)).save(tmp_path / "train" / "a" / f"{n}.png")
        Image.new("L", (8, 8)).save(tmp_path / "val" / "a" / f"{n}.png")
    splits = data.load("folder", tmp_path)
    assert splits.mean == pytest.approx((0.4, 0, 1))
    assert splits.std == pytest.approx((0.2, 0, 0))


@pytest.mark.parametrize("augment", [None, ResizedCrop()])
def test_workers_change_nothing(root, augment):
    folder = data.load("folder", root).train
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


def test_crops_belong_to_the_image_and_change_with_the_epoch(root):
    folder = data.load("folder", root).train

    def seen(epoch: int, batch: int) -> torch.Tensor:
        loader = FolderLoader(folder, batch, augment=ResizedCrop(), shuffle=False, size=8, workers=0)
        return torch.cat([x for x, _ in loader.epoch(epoch)])

    assert torch.equal(seen(0, 4), seen(0, 15))
    differ = (seen(0, 15) != seen(1, 15)).flatten(1).any(1)
    assert bool(differ.all())


def test_equal_pictures_are_cropped_each_in_its_own_way(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for name in ("train/a/1.png", "train/a/2.png", "train/a/3.png", "val/a/1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / name)
    x, _ = FolderLoader(data.load("folder", tmp_path).train, 3, augment=ResizedCrop(), size=8, workers=0).batch(0, 0)
    assert not any(torch.equal(x[a], x[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_fixed_batches_keep_their_members(root):
    loader = FolderLoader(data.load("folder", root).train, 4, size=4, workers=0, fixed_batches=True)
    first = {loader.index(0, i): loader.batch(0, i) for i in range(4)}
    assert same([first[loader.index(1, i)] for i in range(4)], loader.epoch(1))


def test_the_global_generator_is_left_alone(root):
    folder = data.load("folder", root).train
    before = torch.get_rng_state()
    for workers in (0, 1):
        list(FolderLoader(folder, 4, augment=ResizedCrop(), size=4, workers=workers).epoch(0))
    assert torch.equal(before, torch.get_rng_state())


def test_evaluation_is_resize_and_centre_crop(tmp_path):
    """As everybody does it: shorter side to 256/224 of the size, then the centre."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 128, 3), dtype=np.uint8)
    resized = np.asarray(Image.fromarray(pixels).resize((32, 16), Image.Resampling.BILINEAR))
    expected = resized[1:15, 9:23].transpose(2, 0, 1).astype(float)
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / part / "a" / "x.png")
    x, _ = FolderLoader(data.load("folder", tmp_path).test, 1, size=14, workers=0).batch(0, 0)
    np.testing.assert_allclose(x[0].numpy() * 255, expected, atol=1.01)  # a level of rounding


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 10**6))
def test_crops_lie_in_the_picture_and_keep_their_promise(width, height, seed):
    crop = ResizedCrop()
    left, top, right, bottom = crop.box(width, height, Random(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    w, h = right - left, bottom - top
    if min(w, h) >= 20:  # rounding to pixels is coarser on small ones
        assert 3 / 4 * 0.95 < w / h < 4 / 3 * 1.05
    if min(width, height) >= 100 and 0.5 < width / height < 2:
        assert 0.07 < w * h / (width * height) <= 1


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([1.0, 0.875]))
def test_the_centre_is_a_centred_square(width, height, zoom):
    left, top, right, bottom = centre_box(width, height, zoom)
    assert right - left == pytest.approx(bottom - top) == pytest.approx(zoom * min(width, height))
    assert left == pytest.approx(width - right)
    assert top == pytest.approx(height - bottom)
    assert cut(Image.new("RGB", (width, height)), (left, top, right, bottom), 3).shape == (3, 3, 3)


def test_cut_keeps_channels_rows_and_columns_apart():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    square = cut(Image.fromarray(pixels), (1, 2, 4, 5), 3)
    np.testing.assert_array_equal(square.numpy(), pixels[2:5, 1:4].transpose(2, 0, 1))
    flipped = cut(Image.fromarray(pixels), (1, 2, 4, 5), 3, flip=True)
    np.testing.assert_array_equal(flipped.numpy(), square.numpy()[:, :, ::-1])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "gone"])
def test_a_damaged_picture_is_named_in_one_line(root, damage, workers):
    folder = data.load("folder", root).train
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


@pytest.mark.parametrize(
    ("options", "words"),
    [({"size": 0}, "size=0"), ({"workers": -1}, "workers=-1"), ({"batch": 0}, "batch=0")],
)
def test_bad_options_are_explained(root, options, words):
    with pytest.raises(UserError, match=words):
        FolderLoader(data.load("folder", root).train, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"scale": (0.0, 1.0)}, "scale"), ({"scale": (0.5, 1.5)}, "scale"), ({"ratio": (2.0, 1.0)}, "ratio")],
)
def test_bad_crops_are_explained(options, words):
    with pytest.raises(UserError, match=words):
        ResizedCrop(**options)


def test_what_travels_to_workers_can_travel(root):
    """Where processes are spawned rather than forked, the dataset is pickled."""
    folder = data.load("folder", root).train
    squares = pickle.loads(pickle.dumps(FolderLoader(folder, 4, size=4)._squares(0)))
    assert torch.equal(squares[3][0], FolderLoader(folder, 4, size=4)._squares(0)[3][0])
