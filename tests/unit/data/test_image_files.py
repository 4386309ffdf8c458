"""Decoding and cropping of single image files."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from equipoise.data.image_files import ResizedCrop, centre_box, crop, decode
from equipoise.errors import UserError


def test_16_bit_grey_becomes_8_bit_and_unknown_ranges_are_refused(tmp_path):
    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey).save(tmp_path / "grey.tif")
    for name in ("grey.png", "grey.tif"):
        pixels = np.asarray(decode(tmp_path / name))
        assert pixels.shape == (8, 8, 3)
        np.testing.assert_array_equal(pixels[..., 1], grey // 256)
    for name, values in (("i.tif", grey.astype(np.int32)), ("f.tif", grey.astype(np.float32) / 65535)):
        Image.fromarray(values).save(tmp_path / name)
        with pytest.raises(
            UserError, match=f"{name} cannot be read as an image .*32 bits per pixel of unknown range"
        ):
            decode(tmp_path / name)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 10**6))
def test_random_crops_lie_in_the_image_and_keep_scale_and_ratio(width, height, seed):
    left, top, right, bottom = ResizedCrop().box(width, height, Random(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    w, h = right - left, bottom - top
    if min(w, h) >= 20:  # on small crops, rounding to pixels changes the ratio
        assert 3 / 4 * 0.95 < w / h < 4 / 3 * 1.05
    if min(width, height) >= 100 and 0.5 < width / height < 2:
        assert 0.07 < w * h / (width * height) <= 1


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([1.0, 0.875]))
def test_centre_box_is_a_centred_square(width, height, zoom):
    left, top, right, bottom = centre_box(width, height, zoom)
    assert right - left == pytest.approx(bottom - top) == pytest.approx(zoom * min(width, height))
    assert left == pytest.approx(width - right)
    assert top == pytest.approx(height - bottom)
    assert crop(Image.new("RGB", (width, height)), (left, top, right, bottom), 3).shape == (3, 3, 3)


def test_crop_keeps_the_order_of_channels_rows_and_columns():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    square = crop(Image.fromarray(pixels), (1, 2, 4, 5), 3)
    np.testing.assert_array_equal(square.numpy(), pixels[2:5, 1:4].transpose(2, 0, 1))
    flipped = crop(Image.fromarray(pixels), (1, 2, 4, 5), 3, flip=True)
    np.testing.assert_array_equal(flipped.numpy(), square.numpy()[:, :, ::-1])


@pytest.mark.parametrize(
    ("options", "words"),
    [({"scale": (0.0, 1.0)}, "scale"), ({"scale": (0.5, 1.5)}, "scale"), ({"ratio": (2.0, 1.0)}, "ratio")],
)
def test_wrong_options_are_explained(options, words):
    with pytest.raises(UserError, match=words):
        ResizedCrop(**options)
