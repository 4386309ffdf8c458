"""Packed files load to the same function, are small, and are refused with one line if anything is wrong."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import equipoise
from deploy_helpers import MEAN, STD, difference, forge, images, random_network, read
from equipoise.deploy import Blueprint, Network, loading, write_packed
from equipoise.deploy.frozen import is_frozen
from equipoise.errors import UserError
from equipoise.kernels.steps import Buffers
from equipoise.sparse import available, describe

needs_kernels = pytest.mark.skipif(not available(), reason="no CPU kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


@pytest.fixture(scope="module")
def small(folder: Path) -> Path:
    """A file of a convolutional net with norms."""
    write_packed(random_network("small")[0], folder / "small.safetensors")
    return folder / "small.safetensors"


# The same function


NETWORKS: list[tuple[str, dict[str, Any]]] = [
    ("small", {}),
    ("mlp", {}),
    ("vgg_c", {}),
    ("resnet18", {"width": 16}),
    ("resnet50", {"width": 8}),
    ("wrn_28_4", {}),
]


@pytest.mark.parametrize(
    ("name", "options"),
    [*NETWORKS[:4], *(pytest.param(*network, marks=pytest.mark.slow) for network in NETWORKS[4:])],
)
def test_a_loaded_file_is_the_model_it_was_written_from(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    network, judge = random_network(name, **options)
    path = tmp_path / "out.safetensors"
    write_packed(network, path)
    x = images(network, 9)
    model = equipoise.load(path)
    assert not model.training
    for batch in (x, x[:1]):
        assert difference(model, judge, batch) < 2e-6
    assert model(x[:0]).shape == (0, 10)
    assert difference(equipoise.load(path, dense=True), judge, x) < 2e-6


@pytest.mark.parametrize(("values", "least", "most"), [("bf16", 1e-5, 0.01), ("int8", 1e-5, 0.02)])
@pytest.mark.parametrize("name", ["small", "vgg_c"])
def test_rounded_values_change_little(name: str, values: str, least: float, most: float, tmp_path: Path) -> None:
    network, judge = random_network(name)
    write_packed(network, tmp_path / "out.safetensors", values)
    assert least < difference(equipoise.load(tmp_path / "out.safetensors"), judge, images(network)) < most


def rounded(weight: np.ndarray[Any, Any], values: str) -> np.ndarray[Any, Any]:
    """A matrix in another type and back, by the definition of the type."""
    if values == "float32":
        return weight
    if values == "int8":
        scale = np.abs(weight).max(1, keepdims=True) / 127
        return np.rint(weight / np.where(scale > 0, scale, 1)) * scale
    mantissa, exponent = np.frexp(weight)  # bf16 has 8 bits of mantissa; rint goes to even
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


@pytest.mark.parametrize("values", ["float32", "bf16", "int8"])
def test_a_perceptron_is_what_numpy_makes_of_the_rounded_weights(values: str, tmp_path: Path) -> None:
    network, _ = random_network("mlp", sparsity=0.8)
    write_packed(network, tmp_path / "out.safetensors", values)
    x = images(network, 5)
    h = (x.double().numpy().reshape(5, -1) - MEAN) / STD
    for layer in (0, 2, 4):
        weight = network.state[f"layers.{layer}.weight"].double().numpy()
        h = h @ rounded(weight, values).T + network.state[f"layers.{layer}.bias"].double().numpy()
        h = np.maximum(h, 0) if layer < 4 else h
    np.testing.assert_allclose(equipoise.load(tmp_path / "out.safetensors")(x).numpy(), h, rtol=1e-4, atol=1e-5)


@needs_kernels
def test_sparse_networks_run_on_the_kernels_and_dense_ones_do_not(tmp_path: Path, small: Path) -> None:
    assert is_frozen(equipoise.load(small))
    assert not is_frozen(equipoise.load(small, dense=True))
    for sparsity in (0.05, 0.6):  # small layers are sparse all the same, dense ones between them
        network, judge = random_network("resnet18", sparsity, width=48)
        write_packed(network, tmp_path / "dense.safetensors")
        model = equipoise.load(tmp_path / "dense.safetensors")
        assert {type(module) for module in model.modules()} >= {nn.Conv2d, nn.Linear}
        assert not describe(model)
        assert difference(model, judge, images(network)) < 2e-6


@needs_kernels
def test_a_loaded_network_runs_in_one_call_of_the_library(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, compute, calls = equipoise.load(small), Buffers.compute, []
    monkeypatch.setattr(Buffers, "compute", lambda *given: calls.append(1) or compute(*given))
    for _ in range(3):
        model(torch.rand(1, 1, 8, 8))
    assert len(calls) >= 3


def test_without_kernels_it_runs_dense(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available", lambda: False)
    network, judge = random_network("small")
    model = equipoise.load(small)
    assert not is_frozen(model)
    assert difference(model, judge, images(network)) < 2e-6


def test_options_and_dead_networks(tmp_path: Path) -> None:
    network, judge = random_network("resnet18", width=8, classes=7, bias=False)
    write_packed(network, tmp_path / "narrow.safetensors")
    assert difference(equipoise.load(tmp_path / "narrow.safetensors"), judge, images(network)) < 2e-6
    network, _ = random_network("mlp", hidden=3)
    dead = {name: torch.zeros_like(t) if t.dim() > 1 else t for name, t in network.state.items()}
    write_packed(Network(network.blueprint, dead), tmp_path / "dead.safetensors")
    with torch.no_grad():
        out = equipoise.load(tmp_path / "dead.safetensors")(images(network, 2))
    torch.testing.assert_close(out, dead["layers.4.bias"].expand(2, -1))


def test_the_same_network_makes_the_same_bytes(tmp_path: Path) -> None:
    network, _ = random_network("small")
    for name in ("a", "b"):
        write_packed(network, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# Small


@pytest.mark.parametrize(("values", "ratio"), [("float32", 60), ("bf16", 90), ("int8", 110)])
def test_vgg_c_at_99_percent_is_small(values: str, ratio: float, tmp_path: Path) -> None:
    network, _ = random_network("vgg_c", sparsity=0.99)
    dense = 4 * sum(tensor.numel() for tensor in network.state.values() if tensor.is_floating_point())
    assert dense > 45e6
    write_packed(network, tmp_path / "out.safetensors", values)
    size = os.path.getsize(tmp_path / "out.safetensors")
    assert size <= dense / 40  # the goal for float32
    assert size <= dense / ratio


# Networks that cannot be written


def test_wrong_networks_are_refused(tmp_path: Path) -> None:
    network, _ = random_network("mlp")
    blueprint, state, out = network.blueprint, dict(network.state), tmp_path / "out"

    def refused(told: str, wrong: Network) -> None:
        with pytest.raises(UserError, match=told):
            write_packed(wrong, out)
        assert not out.exists()

    name = "layers.0.weight"
    refused("not finite", Network(blueprint, state | {name: state[name] * torch.nan}))
    refused(name, Network(blueprint, {key: t for key, t in state.items() if key != name}))
    refused("do not fit", Network(blueprint, state | {"more": torch.ones(2)}))
    refused(name, Network(blueprint, state | {name: state[name][:5]}))
    refused('no model is called "mpl"; did you mean', Network(Blueprint("mpl", {}, (1,), (), ()), state))


# Files that cannot be read


def assert_refused(path: Path, told: str) -> None:
    with pytest.raises(UserError) as caught:
        equipoise.load(path)
    assert told in str(caught.value)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path, small: Path) -> None:
    assert_refused(tmp_path / "nothing", "there is no file")
    assert_refused(tmp_path, "is a folder, not the file of a packed network")
    assert_refused(tmp_path, "`equipoise export RUN FILE.safetensors` writes one")
    with pytest.raises(UserError, match=r"is a folder.*equipoise\.save\(model, "):
        equipoise.load(tmp_path, into=torch.nn.Linear(2, 2))
    (tmp_path / "net.onnx").write_bytes(b"\x08\x08\x12\x07pytorch\x1a\x05")
    assert_refused(tmp_path / "net.onnx", "is named like an ONNX model")
    assert_refused(tmp_path / "net.onnx", "`equipoise export RUN FILE.safetensors` writes one")
    (tmp_path / "text").write_text("hello")
    assert_refused(tmp_path / "text", "damaged or not a packed network")
    assert_refused(tmp_path / "text", "`equipoise export RUN text` writes one")
    (tmp_path / "empty").touch()
    assert_refused(tmp_path / "empty", "damaged or not a packed network")
    (tmp_path / "pickle").write_bytes(b"\x80\x02cos\nsystem\nq\x00X\x04\x00\x00\x00exitq\x01\x85q\x02R.")
    assert_refused(tmp_path / "pickle", "damaged or not a packed network")
    whole = small.read_bytes()
    for length in (7, 8, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "short").write_bytes(whole[:length])
        assert_refused(tmp_path / "short", "damaged")
    (tmp_path / "long").write_bytes(whole + b"\0")
    assert_refused(tmp_path / "long", "damaged")


def test_other_safetensors_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "plain")
    assert_refused(tmp_path / "plain", "is not a packed network; `equipoise export RUN")
    save_file({"a": torch.ones(2)}, tmp_path / "bare", metadata={"equipoise": "[" * 100_000})
    assert_refused(tmp_path / "bare", "header is not JSON with a version")


@pytest.mark.parametrize("version", [2, 10, 0])
def test_another_version(version: int, tmp_path: Path, small: Path) -> None:
    assert_refused(
        forge(small, tmp_path / "out", header={"version": version}), f"of version {version}; this equipoise"
    )


def test_a_forged_copy_is_good_if_nothing_is_changed(tmp_path: Path, small: Path) -> None:
    assert forge(small, tmp_path / "out").read_bytes() == small.read_bytes()


HUGE = {"classes": 10**9}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "os.system"}, 'no model is called "os.system"'),
        ({"model": "__class__"}, 'no model is called "__class__"'),
        ({"model": ["small"]}, "network.model="),
        ({"options": HUGE}, "more than the"),
        ({"options": {"classes": 10**18}}, f"model.classes={10**18}: small cannot be built that large"),
        ({"options": {"size": 10**12}}, f"model.size={10**12}: small cannot be built that large"),
        ({"options": {"classes": -1}}, "classes=-1"),
        ({"options": {"classes": 11}}, "its bitmap must have 704 bytes for 5632 blocks"),
        ({"options": {"depth": 3}}, 'no option is called "depth"'),
        ({"options": {"size": 10**6}}, "more than the"),
        ({"options": None}, "options"),
        ({"input_shape": [1, 10**9, 10**9]}, "no image has the shape"),
        ({"input_shape": [1, 4096, 4096]}, "no image has the shape"),
        ({"input_shape": [1, -8, 8]}, "no image has the shape"),
        ({"input_shape": [1, -8, -8]}, "no image has the shape"),
        ({"input_shape": [1, 9, 80]}, "does not take an input"),
        ({"input_shape": []}, "does not take an input"),
        ({"input_shape": "abc"}, "expected a list"),
        ({"classes": ["x"] * 10**6}, "there are 1000000 names of classes for 10 scores"),
        ({"classes": ["x"] * 11}, "there are 11 names of classes for 10 scores"),
        ({"mean": [0.0, 0.0]}, "mean has 2 numbers"),
        ({"std": [0.0]}, "std=[0.0]"),
        ({"std": [float("nan")]}, "std"),
        ({"more": 1}, 'no option is called "more"'),
    ],
)
def test_hostile_descriptions(changes: dict[str, Any], told: str, tmp_path: Path, small: Path) -> None:
    network = read(small)[0]["network"]
    assert_refused(forge(small, tmp_path / "out", header={"network": network | changes}), told)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ({"version": "1"}, "header is not JSON with a version"),
        ({"network": []}, "expected keys and values"),
        ({"network": {}}, "is missing"),
        ({"folded": {}}, "the weights are not those of small"),
        ({"folded": [1]}, "expected keys and values"),
        ({"folded": {"a": 1}}, "folded.a=1"),
        ({"folded": {"features.0": "features.0"}}, "no BatchNorm"),
        ({"code": "print()"}, 'no option is called "code"'),
    ],
)
def test_hostile_headers(header: dict[str, Any], told: str, tmp_path: Path, small: Path) -> None:
    assert_refused(forge(small, tmp_path / "out", header=header), told)


WEIGHT = "features.4.weight"
Tensors = dict[str, Tensor]


def shifted(tensors: Tensors) -> None:
    """Move the last index beyond the end of the weight."""
    gaps = tensors[f"{WEIGHT}/gaps"]
    gaps[:-1] = 254


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (shifted, f'"{WEIGHT}": it has a value at index'),
        (lambda t: t.update({f"{WEIGHT}/gaps": t[f"{WEIGHT}/gaps"].to(torch.int8)}), "uint8 or uint16"),
        (lambda t: t.update({f"{WEIGHT}/values": t[f"{WEIGHT}/values"].double()}), "float32, bf16 or int8"),
        (lambda t: t.update({f"{WEIGHT}/values": t[f"{WEIGHT}/values"][:-1].clone()}), "indices for"),
        (lambda t: t[f"{WEIGHT}/values"].fill_(torch.inf), "not finite"),
        (lambda t: t.pop(f"{WEIGHT}/gaps"), "weights"),
        (lambda t: t.pop(f"{WEIGHT}/values"), "values"),
        (lambda t: t.update({"other.weight/values": torch.ones(2)}), 'no weight "other.weight"'),
        (lambda t: t.update({"classifier.bias/values": torch.ones(10)}), 'no weight "classifier.bias"'),
        (lambda t: t.update({"more": torch.ones(2)}), "not those of small"),
        (lambda t: t.pop("classifier.bias"), 'not those of small: "classifier.bias"'),
        (lambda t: t.update({"classifier.bias": torch.ones(9)}), '"classifier.bias" is (9,); small has (10,)'),
        (lambda t: t.update({"classifier.bias": torch.ones(10).half()}), "finite float32"),
        (lambda t: t["classifier.bias"].fill_(torch.nan), "finite float32"),
    ],
)
def test_hostile_tensors(change: Callable[[Tensors], Any], told: str, tmp_path: Path, small: Path) -> None:
    assert_refused(forge(small, tmp_path / "out", change), told)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    network, _ = random_network("mlp", hidden=4)
    path = tmp_path / "good"
    write_packed(network, path)
    good, chance = path.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(good[:8], "little")
    for i in range(400):
        data = bytearray(good)
        for _ in range(chance.choice([1, 1, 2, 8])):
            data[chance.randrange(len(data) if i % 2 else header)] ^= 1 << chance.randrange(8)
        if i % 10 == 0:
            at = chance.randrange(len(data))
            data[at:at] = chance.randbytes(4)
        if bytes(data) == good:
            continue
        (tmp_path / "bad").write_bytes(data)
        assert_refused(tmp_path / "bad", "")


def test_files_with_a_fitting_checksum_load_or_are_refused(tmp_path: Path) -> None:
    """A forged file raises a UserError or gives a model that runs."""
    network, _ = random_network("mlp", hidden=4)
    path, x, chance = tmp_path / "good", images(network), random.Random(1)
    write_packed(network, path, "int8")
    old = read(path)[0]
    loaded = 0
    for i in range(200):

        def change(tensors: Tensors) -> None:
            tensor = tensors[chance.choice(sorted(tensors))].view(torch.uint8)
            tensor[chance.randrange(len(tensor))] = chance.randrange(256)

        text = list(json.dumps(old))
        text[chance.randrange(len(text))] = chr(chance.randrange(32, 127))
        try:
            header = {} if i % 2 else json.loads("".join(text))
        except ValueError:
            continue
        out = forge(path, tmp_path / "out", change if i % 2 else lambda _: None, header)
        try:
            model = equipoise.load(out)
        except UserError:
            continue
        loaded += 1
        assert model(x).shape == (3, 10)
    assert 20 < loaded < 180
