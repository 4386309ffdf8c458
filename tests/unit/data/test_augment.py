"""Crops, shifts and flips against a slow oracle, one image at a time."""

from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.ndimage import affine_transform
from scipy.stats import ks_2samp

from equipoise.data.augment import Augment, Moves, move
from equipoise.data.image_files import ResizedCrop
from equipoise.errors import UserError


def oracle(image: np.ndarray, offset: tuple[int, int], flip: bool, reflect: bool) -> np.ndarray:
    """Pad with numpy, cut out the window, mirror it."""
    _, height, width = image.shape
    pad = max(map(abs, offset))
    border = ((0, 0), (pad, pad), (pad, pad))
    padded = np.pad(image, border, mode="reflect") if reflect else np.pad(image, border)
    top, left = pad + offset[0], pad + offset[1]
    window = padded[:, top : top + height, left : left + width]
    return window[:, :, ::-1] if flip else window


@given(st.data(), st.booleans(), st.integers(1, 3), st.integers(2, 7), st.integers(2, 7), st.integers(1, 5))
def test_move_is_pad_crop_flip(data, reflect, channels, height, width, count):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    # Reflection is limited by the size of the image, zero padding is not.
    reach = min(height, width) - 1 if reflect else 9
    images = rng.integers(0, 256, (count, channels, height, width), dtype=np.uint8)
    offsets = rng.integers(-reach, reach + 1, (count, 2))
    flips = rng.random(count) < 0.5
    moved = move(torch.from_numpy(images), Moves(torch.from_numpy(offsets), torch.from_numpy(flips)), reflect=reflect)
    assert moved.dtype == torch.uint8
    for n in range(count):
        expected = oracle(images[n], tuple(offsets[n].tolist()), bool(flips[n]), reflect)
        np.testing.assert_array_equal(moved[n].numpy(), expected)


@given(
    st.integers(0, 4),
    st.sampled_from(["reflect", "zero"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 0.3]),
)
def test_draws_stay_in_reach_and_repeat(pad, mode, crop, flip, shift):
    augment = Augment(pad, mode, crop, flip, 0.0 if crop else shift)
    offsets, flips = augment.draw(400, 10, 20, seed=1, epoch=2)
    reach = (pad, pad) if crop else (round(shift * 10), round(shift * 20))
    for column, most in zip(offsets.T.tolist(), reach, strict=True):
        assert set(column) == set(range(-most, most + 1))  # 400 draws hit all of at most 13 values
    assert (set(flips.tolist()) == {True, False}) is flip
    again = augment.draw(400, 10, 20, seed=1, epoch=2)
    assert torch.equal(again.offsets, offsets)
    assert torch.equal(again.flips, flips)


def test_draws_are_uniform():
    offsets, flips = Augment(pad=4).draw(50_000, 32, 32, seed=0, epoch=0)
    joint = torch.bincount((offsets[:, 0] + 4) * 9 + offsets[:, 1] + 4, minlength=81).double()
    expected = 50_000 / 81
    chi_square = float(((joint - expected) ** 2 / expected).sum())
    assert chi_square < 80 + 5 * (2 * 80) ** 0.5  # mean + 5 standard deviations
    assert abs(float(flips.double().mean()) - 0.5) < 5 * 0.5 / 50_000**0.5


def test_epochs_and_seeds_give_different_draws():
    augment = Augment()
    first = augment.draw(100, 32, 32, seed=0, epoch=0)
    for other in (augment.draw(100, 32, 32, seed=0, epoch=1), augment.draw(100, 32, 32, seed=1, epoch=0)):
        assert not torch.equal(first.offsets, other.offsets)
        assert not torch.equal(first.flips, other.flips)
    without_flips = Augment(flip=False).draw(100, 32, 32, seed=0, epoch=0)
    assert torch.equal(first.offsets, without_flips.offsets)


def test_shift_reaches_the_whole_fraction():
    assert Augment(crop=False, shift=0.1).reach(32, 28) == (3, 2)
    assert Augment(crop=False, shift=0.29).reach(100, 100) == (29, 29)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pad": -1}, "pad=-1"),
        ({"pad": 1.5}, "pad=1.5"),
        ({"pad": True}, "pad=True"),
        ({"mode": "reflct"}, 'did you mean "reflect"'),
        ({"crop": False, "shift": 1.0}, "shift=1.0"),
        ({"crop": False, "shift": -0.1}, "shift=-0.1"),
        ({"crop": False, "shift": float("nan")}, "shift=nan"),
        ({"shift": 0.1}, "crop=False"),
        ({"fractional": True}, "fractional is about a shift"),
        ({"crop": False, "resized": 1.5}, "resized=1.5"),
        ({"crop": False, "resized": True}, "resized=True"),
        ({"resized": 0.08}, "neither cropped nor shifted; set crop=False"),
    ],
)
def test_wrong_options_are_explained(options, words):
    with pytest.raises(UserError, match=words):
        Augment(**options)


def test_reflection_beyond_the_image_is_explained():
    with pytest.raises(UserError, match="4x9 cannot be reflect-padded by 4"):
        Augment(pad=4).check_size(4, 9)
    Augment(pad=4, mode="zero").check_size(4, 9)
    Augment(pad=4).check_size(5, 9)


def test_move_compiles_to_one_graph_with_equal_results():
    """One graph without breaks has no synchronisation with the host."""
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    moves = Augment(pad=2).draw(4, 8, 8, seed=0, epoch=0)
    for reflect in (True, False):
        whole = torch.compile(move, backend="eager", fullgraph=True)
        assert torch.equal(whole(images, moves, reflect=reflect), move(images, moves, reflect=reflect))


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(2, 7), st.integers(2, 7))
def test_fractional_shifts_are_those_of_scipy(seed, channels, height, width):
    """Keras shifts with `scipy.ndimage.affine_transform(order=1, mode="nearest")`, then flips."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (3, channels, height, width), dtype=np.uint8)
    offsets = rng.uniform(-1.5 * height, 1.5 * height, (3, 2)).astype(np.float32)
    flips = rng.random(3) < 0.5
    moved = move(torch.from_numpy(images), Moves(torch.from_numpy(offsets), torch.from_numpy(flips)), reflect=False)
    assert moved.dtype == torch.float32
    for n in range(3):
        for channel in range(channels):
            pixels = images[n, channel].astype(np.float64)
            expected = affine_transform(pixels, np.eye(2), offsets[n].astype(float), order=1, mode="nearest")
            expected = expected[:, ::-1] if flips[n] else expected
            np.testing.assert_allclose(moved[n, channel].numpy(), expected, atol=2e-2)  # of 255


def test_fractional_draws_are_uniform_within_the_shift():
    offsets, _ = Augment(crop=False, shift=0.1, fractional=True).draw(50_000, 32, 20, seed=0, epoch=0)
    for column, most in zip(offsets.double().T, (3.2, 2.0), strict=True):
        assert -most <= float(column.min()) < -0.99 * most
        assert 0.99 * most < float(column.max()) <= most
        assert abs(float(column.mean())) < 5 * most / 3**0.5 / 50_000**0.5
        assert float(column.var()) == pytest.approx(most**2 / 3, rel=0.03)


def test_fractional_moves_compile_to_one_graph():
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    moves = Augment(crop=False, shift=0.2, fractional=True).draw(4, 8, 8, seed=0, epoch=0)
    whole = torch.compile(move, backend="eager", fullgraph=True)
    assert torch.equal(whole(images, moves, reflect=False), move(images, moves, reflect=False))


# Resized parts


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
def test_parts_are_resized_as_torch_and_pillow_do(seed, channels, height, width):
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.integers(0, 256, (3, channels, height, width), dtype=np.uint8))
    highs, wides = rng.integers(1, height + 1, 3), rng.integers(1, width + 1, 3)
    tops, lefts = rng.integers(0, height - highs + 1), rng.integers(0, width - wides + 1)
    flips = torch.from_numpy(rng.random(3) < 0.5)
    parts = torch.from_numpy(np.stack([tops, lefts, highs, wides], 1)).float()
    moved = move(images, Moves(parts, flips), reflect=False)
    for n in range(3):
        part = images[n, :, tops[n] : tops[n] + highs[n], lefts[n] : lefts[n] + wides[n]]
        expected = F.interpolate(part[None].float(), (height, width), mode="bilinear", align_corners=False)[0]
        expected = expected.flip(-1) if flips[n] else expected
        torch.testing.assert_close(moved[n], expected, atol=1e-3, rtol=0)
        box = (int(lefts[n]), int(tops[n]), int(lefts[n] + wides[n]), int(tops[n] + highs[n]))
        pillow = Image.fromarray(images[n, 0].numpy()).crop(box).resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(pillow).astype(float)
        np.testing.assert_allclose(moved[n, 0].numpy(), pixels[:, ::-1] if flips[n] else pixels, atol=1.01)  # of 255


def test_drawn_parts_have_the_distribution_of_single_draws():
    """`ResizedCrop` draws one box at a time, with Python's random numbers."""
    count = 20_000
    parts = Augment(crop=False, resized=0.08).draw(count, 32, 32, seed=0, epoch=0).offsets.double()
    rng, crop = Random(0), ResizedCrop()
    boxes = torch.tensor([crop.box(32, 32, rng) for _ in range(count)], dtype=torch.float64)
    left, top, right, bottom = boxes.T
    single = torch.stack([top, left, bottom - top, right - left], 1)
    assert torch.equal(parts, parts.round())
    assert (parts[:, :2] >= 0).all()
    assert (parts[:, :2] + parts[:, 2:] <= 32).all()
    both = [(*boxes.T, boxes[:, 2] * boxes[:, 3]) for boxes in (parts, single)]  # with the area
    for ours, theirs in zip(*both, strict=True):
        assert ks_2samp(ours.numpy(), theirs.numpy()).statistic < 0.02  # p of about 0.0007


def test_a_long_image_has_its_largest_centred_part():
    parts = Augment(crop=False, resized=1.0).draw(5, 4, 40, seed=0, epoch=0).offsets
    assert parts.tolist() == [[0, 17, 4, 5]] * 5


def test_resized_parts_compile_to_one_graph_and_repeat():
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    augment = Augment(crop=False, resized=0.08)
    moves = augment.draw(4, 8, 8, seed=0, epoch=0)
    assert torch.equal(moves.offsets, augment.draw(4, 8, 8, seed=0, epoch=0).offsets)
    assert not torch.equal(moves.offsets, augment.draw(4, 8, 8, seed=0, epoch=1).offsets)
    whole = torch.compile(move, backend="eager", fullgraph=True)
    assert torch.equal(whole(images, moves, reflect=False), move(images, moves, reflect=False))
