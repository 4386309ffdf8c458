"""Coded weights: gaps against a plain loop, values against rounding by hand."""

from __future__ import annotations

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
from equipoise.runtime.gaps import decode_gaps, encode_gaps


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
