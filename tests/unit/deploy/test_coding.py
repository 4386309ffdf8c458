"""Coded weights: gaps against a plain loop, values against rounding by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from equipoise.deploy.coding import decode, encode
from equipoise.errors import UserError
from equipoise.runtime.indices import decode_gaps, encode_gaps


def walked(codes: np.ndarray[Any, Any]) -> list[int]:
    """The indices, found by walking along the weight as the format says."""
    skip, at, indices = int(np.iinfo(codes.dtype).max), 0, []
    for code in codes.tolist():
        at += code
        if code != skip:
            indices.append(at)
            at += 1
    return indices


@given(st.sets(st.one_of(st.integers(0, 2000), st.integers(0, 300_000)), max_size=60))
def test_gaps_lead_back_to_their_indices(indices: set[int]) -> None:
    index = np.array(sorted(indices), dtype=np.int64)
    codes = encode_gaps(index)
    assert walked(codes) == index.tolist()
    np.testing.assert_array_equal(decode_gaps(codes), index)


@pytest.mark.parametrize(
    ("indices", "kind", "count"),
    [
        ([0, 1, 2], np.uint8, 3),
        ([254], np.uint8, 1),
        ([255], np.uint8, 2),  # an escape and a zero; as small as one uint16
        ([510], np.uint16, 1),
        ([65535], np.uint16, 2),
        ([300 * i for i in range(1, 9)], np.uint8, 16),
        ([600 * i for i in range(1, 9)], np.uint16, 8),
        ([], np.uint8, 0),
    ],
)
def test_the_smaller_type_is_taken(indices: list[int], kind: type, count: int) -> None:
    codes = encode_gaps(np.array(indices, dtype=np.int64))
    assert (codes.dtype, len(codes)) == (np.dtype(kind), count)


@given(arrays.arrays(np.uint8, st.integers(0, 50), elements=st.sampled_from([0, 1, 7, 254, 255])))
def test_any_codes_give_ascending_indices_or_are_refused(codes: np.ndarray[Any, Any]) -> None:
    if len(codes) and codes[-1] == 255:
        with pytest.raises(UserError, match="end without a value"):
            decode_gaps(codes)
    else:
        assert decode_gaps(codes).tolist() == walked(codes)


def sparse_weight(shape: tuple[int, ...], density: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    return weight * (torch.rand(shape, generator=generator) < density)


shapes = st.sampled_from([(4, 3, 3, 3), (7, 11), (1, 600), (5, 2, 3)])
densities = st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0])


@given(shapes, densities, st.integers(0, 99))
def test_float32_comes_back_exactly(shape: tuple[int, ...], density: float, seed: int) -> None:
    weight = sparse_weight(shape, density, seed)
    assert torch.equal(decode(encode(weight), shape), weight)


@given(shapes, densities, st.integers(0, 99))
def test_bf16_is_rounded_to_the_nearest(shape: tuple[int, ...], density: float, seed: int) -> None:
    weight = sparse_weight(shape, density, seed)
    bits = weight.numpy().view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16) << np.uint64(16)).astype(
        np.uint32
    )
    np.testing.assert_array_equal(decode(encode(weight, "bf16"), shape).numpy(), rounded.view(np.float32))


@given(shapes, densities, st.integers(0, 99))
def test_int8_is_rounded_by_row(shape: tuple[int, ...], density: float, seed: int) -> None:
    weight = sparse_weight(shape, density, seed)
    rows = weight.numpy().astype(np.float64).reshape(shape[0], -1)
    scale = np.abs(rows).max(1, keepdims=True) / 127
    parts = encode(weight, "int8")
    got = decode(parts, shape).numpy().astype(np.float64).reshape(rows.shape)
    assert (np.abs(got - rows) <= scale * 0.501).all()  # half a step, and rounding of float32
    np.testing.assert_allclose(np.abs(got).max(1), np.abs(rows).max(1), rtol=1e-6)
    assert parts["values"].dtype is torch.int8
    if "gaps" in parts:
        assert (parts["values"] != 0).all()  # values rounded to zero are not stored


def test_a_full_weight_has_no_gaps_and_a_sparse_one_few_bytes() -> None:
    full = encode(sparse_weight((64, 64), 1.0, 0))
    assert set(full) == {"values"}
    sparse = encode(sparse_weight((512, 512, 3, 3), 0.01, 0))
    active = sparse["values"].numel()
    assert sparse["gaps"].nbytes < 1.15 * active
    assert sparse["values"].nbytes == 4 * active


def structured_weight(pattern: str, density: float, shape: tuple[int, ...] = (64, 32, 3, 3)) -> Tensor:
    """A weight with a random mask of a pattern, which is cut out block by block."""
    weight, (outputs, inputs) = sparse_weight(shape, 1.0, 0).numpy(), shape[:2]
    rng = np.random.default_rng(0)
    if ":" in pattern:
        for o, g, *k in itertools.product(range(outputs), range(inputs // 4), range(3), range(3)):
            weight[(o, 4 * g + rng.permutation(4)[:2], *k)] = 0
        return torch.from_numpy(weight)
    rows, columns = map(int, pattern.split("x"))
    for o, i, *k in itertools.product(range(0, outputs, rows), range(0, inputs, columns), range(3), range(3)):
        if rng.random() >= density:
            weight[(slice(o, o + rows), slice(i, i + columns), *k)] = 0
    return torch.from_numpy(weight)


@pytest.mark.parametrize("values", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("pattern", ["2:4", "16x1", "4x4", "32x32", "2x8"])
def test_patterns_come_back_exactly(pattern: str, values: str) -> None:
    weight = structured_weight(pattern, 0.1)
    parts = encode(weight, values)
    plain = decode(encode(weight, values, gaps_only=True), tuple(weight.shape))
    assert torch.equal(decode(parts, tuple(weight.shape)), plain)
    assert values != "float32" or torch.equal(plain, weight)


def test_two_of_four_take_nine_sixteenths_of_dense_in_bf16() -> None:
    weight = structured_weight("2:4", 0.5)
    parts = encode(weight, "bf16")
    assert sum(part.nbytes for part in parts.values()) == weight.numel() * 2 * 9 // 16
    assert set(parts) == {"values", "bitmap"}


@pytest.mark.parametrize(("pattern", "block"), [("16x1", [16, 1]), ("4x4", [4, 4]), ("32x32", [32, 32])])
def test_blocks_have_nearly_no_index(pattern: str, block: list[int]) -> None:
    """At most one byte for each block of weights."""
    weight = structured_weight(pattern, 0.1)
    active = int((weight != 0).sum())
    parts = encode(weight, "bf16")
    assert parts["block"].tolist() == block
    assert parts["values"].numel() == active
    assert sum(part.nbytes for part in parts.values()) <= active * 2 + active // np.prod(block) + 8


def test_an_unstructured_weight_has_no_blocks_and_a_block_keeps_its_zeros() -> None:
    assert "block" not in encode(sparse_weight((64, 64), 0.1, 0))
    weight = structured_weight("16x1", 0.1)
    row, column = (int(at[0]) for at in np.nonzero(weight[:, :, 0, 0].numpy()))
    weight[row, column, 0, 0] = 0  # a trained weight may become exactly zero
    parts = encode(weight)
    assert parts["block"].tolist() == [16, 1]
    assert torch.equal(decode(parts, tuple(weight.shape)), weight)


BITMAP = {"values": torch.tensor([1.0, 2.0]), "bitmap": torch.tensor([0b00010100], dtype=torch.uint8)}
BLOCKS = {"values": torch.tensor([1.0, 2.0]), "gaps": torch.tensor([1], dtype=torch.uint8),
          "block": torch.tensor([2, 1], dtype=torch.int32)}  # fmt: skip


@pytest.mark.parametrize(
    ("good", "change", "told"),
    [
        (BITMAP, {"bitmap": torch.tensor([1, 1], dtype=torch.uint8)}, "its bitmap must have 1 bytes for 6 blocks"),
        (BITMAP, {"bitmap": torch.tensor([20], dtype=torch.int8)}, "its bitmap must have 1 bytes"),
        (BITMAP, {"bitmap": torch.tensor([16], dtype=torch.uint8)}, "1 indices for 2 values"),
        (BITMAP, {"gaps": torch.tensor([3, 1], dtype=torch.uint8)}, "either gaps or a bitmap"),
        (BLOCKS, {"gaps": None}, "either gaps or a bitmap"),
        (BLOCKS, {"block": torch.tensor([2, 2], dtype=torch.int32)}, "blocks of 2x2 in a weight of 2 outputs and 3"),
        (BLOCKS, {"block": torch.tensor([0, 1], dtype=torch.int32)}, "two int32"),
        (BLOCKS, {"block": torch.tensor([2, 1])}, "two int32"),
        (BLOCKS, {"gaps": torch.tensor([3], dtype=torch.uint8)}, "index 3 of 3"),
        (BLOCKS, {"values": torch.ones(3)}, "1 indices for 3 values"),
    ],
)
def test_indices_that_do_not_fit_are_refused(
    good: dict[str, Tensor], change: dict[str, Tensor | None], told: str
) -> None:
    expected = [[0, 0, 0], [1, 0, 2]] if good is BITMAP else [[0, 1, 0], [0, 2, 0]]
    assert decode(good, (2, 3)).tolist() == expected
    parts = {name: tensor for name, tensor in {**good, **change}.items() if tensor is not None}
    with pytest.raises(UserError, match=told):
        decode(parts, (2, 3))


GOOD = {"values": torch.tensor([1.0, 2.0]), "gaps": torch.tensor([3, 1], dtype=torch.uint8)}  # indices 3 and 5 of 6


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gaps": torch.tensor([3, 2], dtype=torch.uint8)}, "index 6 of 6"),
        ({"gaps": torch.tensor([3], dtype=torch.uint8)}, "1 indices for 2 values"),
        ({"gaps": torch.tensor([3, -1], dtype=torch.int8)}, "uint8 or uint16"),
        ({"gaps": torch.tensor([3, 1], dtype=torch.int64)}, "uint8 or uint16"),
        ({"gaps": torch.tensor([[3, 1]], dtype=torch.uint8)}, "uint8 or uint16"),
        ({"gaps": torch.tensor([3, 1, 255], dtype=torch.uint8)}, "end without a value"),
        ({"gaps": None}, "2 values for 6 weights"),
        ({"values": torch.tensor([1.0, 2.0]).double()}, "float32, bf16 or int8"),
        ({"values": torch.tensor([1.0, 2.0]).half()}, "float32, bf16 or int8"),
        ({"values": torch.tensor([[1.0], [2.0]])}, "float32, bf16 or int8"),
        ({"values": None}, "float32, bf16 or int8"),
        ({"values": torch.tensor([1.0, float("nan")])}, "not finite"),
        ({"values": torch.tensor([1, 2], dtype=torch.int8)}, "have a scale"),
        ({"scale": torch.ones(2)}, "have a scale"),
        ({"values": torch.tensor([1, 2], dtype=torch.int8), "scale": torch.ones(3)}, "2 output channels"),
        ({"values": torch.tensor([1, 2], dtype=torch.int8), "scale": torch.tensor([1.0, torch.inf])}, "not finite"),
        ({"more": torch.ones(1)}, "float32, bf16 or int8"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Tensor | None], told: str) -> None:
    assert decode(GOOD, (2, 3)).tolist() == [[0, 0, 0], [1, 0, 2]]
    parts = {name: tensor for name, tensor in {**GOOD, **change}.items() if tensor is not None}
    with pytest.raises(UserError, match=told):
        decode(parts, (2, 3))


def test_unknown_types_of_values_are_refused() -> None:
    with pytest.raises(UserError, match='no type of values is called "int4"; did you mean "int8"'):
        encode(torch.ones(2, 2), "int4")
