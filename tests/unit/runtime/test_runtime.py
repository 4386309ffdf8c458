"""The runtime gives the scores of `equipoise.load` without torch, and refuses wrong files and images in one line."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise
from deploy_helpers import forge, images, random_network, read
from equipoise.deploy import Blueprint, Network, write_packed
from equipoise.deploy.coding import encode
from equipoise.deploy.graph import read_graph
from equipoise.deploy.packed_file import write_file
from equipoise.errors import UserError
from equipoise.kernels import library
from equipoise.runtime import load
from equipoise.runtime.packed_arrays import KEY, VERSION

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runtime") / "small.safetensors"
    network, _ = random_network("small")
    blueprint = network.blueprint
    named = Blueprint(blueprint.model, {}, blueprint.input_shape, blueprint.mean, blueprint.std, tuple("abcdefghij"))
    write_packed(Network(named, network.state), path)
    return path


# The same scores


def error(path: Path, network: Network, judge: nn.Module, count: int) -> float:
    """Largest difference from the float64 model, relative to its largest score."""
    x = images(network, count)
    with torch.no_grad():
        right = judge(x.double()).numpy()
    scores = load(path, threads=2)(x.numpy())
    assert scores.dtype == np.float32
    return float(np.abs(scores - right).max() / np.abs(right).max())


NETWORKS = [
    pytest.param("small", {}),
    pytest.param("mlp", {}),
    pytest.param("resnet18", {"width": 16}),
    pytest.param("resnet50", {"width": 8}, marks=pytest.mark.slow),
    pytest.param("wrn_28_4", {}, marks=pytest.mark.slow),
    pytest.param("vgg_c", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "options"), NETWORKS)
def test_scores_are_those_of_the_model(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    network, judge = random_network(name, **options)
    write_packed(network, tmp_path / "net.safetensors")
    for count in (1, 7, 8, 40):
        assert error(tmp_path / "net.safetensors", network, judge, count) < 1e-5
    x = images(network, 9)
    with torch.no_grad():
        loaded = equipoise.load(tmp_path / "net.safetensors")(x).numpy()
    scores = load(tmp_path / "net.safetensors")(x.numpy())
    np.testing.assert_allclose(scores, loaded, rtol=0, atol=1e-5 * np.abs(loaded).max())
    assert load(tmp_path / "net.safetensors")(x.numpy()[:0]).shape == (0, 10)


def test_bf16_activations(tmp_path: Path) -> None:
    network, _ = random_network("resnet18", width=16)
    path = tmp_path / "net.safetensors"
    write_packed(network, path)
    x = images(network, 40)
    with torch.no_grad():
        right = equipoise.load(path, dense=True)(x).numpy()
        loaded = equipoise.load(path, precision="bf16")(x).numpy()
    net = load(path, precision="bf16")
    for scores in (net(x.numpy()), loaded):
        np.testing.assert_allclose(scores, right, rtol=0, atol=0.03 * np.abs(right).max())
    assert not np.array_equal(net(x.numpy()), load(path)(x.numpy()))
    assert np.array_equal(net(x.numpy()[:16]), load(path)(x.numpy()[:16]))
    for loader in (load, equipoise.load):
        with pytest.raises(UserError, match="precision"):
            loader(path, precision="half")
    with pytest.raises(UserError, match="precision"):
        equipoise.load(path, dense=True, precision="half")


@pytest.mark.parametrize("values", ["bf16", "int8"])
def test_rounded_values_are_read_as_by_load(values: str, tmp_path: Path) -> None:
    network, _ = random_network("small")
    write_packed(network, tmp_path / "net.safetensors", values)
    x = images(network, 9)
    with torch.no_grad():
        right = equipoise.load(tmp_path / "net.safetensors", dense=True)(x).numpy()
    np.testing.assert_allclose(load(tmp_path / "net.safetensors")(x.numpy()), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 20])
def test_every_function(count: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Residual(), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.BatchNorm2d(8),
        nn.AvgPool2d(3, 2, 1), nn.Conv2d(8, 6, (4, 1), (3, 2), (3, 0)), nn.MaxPool2d((2, 1), 1, dilation=(1, 1)),
        nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.Flatten(), nn.Linear(6 * 1 * 3, 4), nn.ReLU(),
    ).eval()  # fmt: skip
    x = torch.rand(count, 3, 17, 19)
    size = model[:10](x).shape[1]
    model[10] = nn.Linear(size, 4)
    with torch.no_grad():
        right = model(x).numpy()
    np.testing.assert_allclose(load(custom_file(model, x, tmp_path))(x.numpy()), right, rtol=1e-4, atol=1e-6)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(8, 8, 3, stride=2, padding=2, dilation=2, groups=4, bias=False)
        self.shortcut = nn.Conv2d(8, 8, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.grouped(x) + self.shortcut(x * 2 - 0.5))


def custom_file(model: nn.Module, x: Tensor, folder: Path) -> Path:
    """A packed file of a model that is not in the catalogue."""
    graph = read_graph(model, x.shape[1:])
    tensors = dict(graph.constants)
    for name, tensor in graph.weights.items():
        coded = {f"{name}/{part}": t for part, t in encode(tensor).items()} if tensor.dim() > 1 else {name: tensor}
        tensors |= coded
    header = {"version": VERSION, "network": {"input_shape": list(x.shape[1:])}, "program": graph.calls.plain()}
    write_file(folder / "custom.safetensors", KEY, header, {n: t.detach().clone() for n, t in tensors.items()})
    return folder / "custom.safetensors"


def test_blocks_and_bitmaps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, groups=2), nn.Flatten(), nn.Linear(256, 8)
    )
    with torch.no_grad():
        model[0].weight *= torch.rand(8, 3, 3, 3) < 0.6
        model[2].weight *= (torch.rand(4, 2, 3, 3) < 0.2).repeat_interleave(4, 0).repeat_interleave(2, 1)
        model[4].weight *= (torch.rand(2, 32) < 0.3).repeat_interleave(4, 0).repeat_interleave(8, 1)
    x = torch.rand(9, 3, 8, 8)
    path = custom_file(model.eval(), x, tmp_path)
    assert {name.rpartition("/")[2] for name in read(path)[1]} >= {"bitmap", "block"}
    with torch.no_grad():
        np.testing.assert_allclose(load(path)(x.numpy()), model(x).numpy(), rtol=1e-4, atol=1e-6)


def test_shape_and_classes(small: Path) -> None:
    net = load(small)
    assert net.input_shape == (1, 8, 8)
    assert net.classes == tuple("abcdefghij")


# Without torch

WITHOUT_TORCH = """
import json, sys, time
begin = time.perf_counter()
from equipoise.runtime import load
seconds = time.perf_counter() - begin
import numpy as np
from equipoise.kernels import build
if sys.argv[3] == "alone":
    build.SYSTEM_OPENMP = "libmissing.so"
    assert build.openmp_runtime() is None
net = load(sys.argv[1], threads=2)
np.save(sys.argv[2], net(np.load(sys.argv[2])))
assert ("gomp" in open("/proc/self/maps").read()) == (sys.argv[3] == "system")
unwanted = [name for name in ("torch", "safetensors", "yaml", "scipy") if name in sys.modules]
print(json.dumps({"unwanted": unwanted, "threads": load(sys.argv[1]).threads, "seconds": seconds}))
"""


@pytest.mark.parametrize("openmp", ["system", "alone"])
def test_with_numpy_alone(
    openmp: str, small: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """In an interpreter that has no other package than numpy."""
    packages = Path(np.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (packages / name).exists():
            (tmp_path / name).symlink_to(packages / name)
    x = np.random.default_rng(0).random((40, 1, 8, 8), dtype=np.float32)
    np.save(tmp_path / "images.npy", x)
    paths = os.pathsep.join([str(tmp_path), str(Path(equipoise.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-S", "-c", WITHOUT_TORCH, str(small), str(tmp_path / "images.npy"), openmp],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert not report["unwanted"]
    assert report["threads"] == 1 or openmp == "system"
    record_property("import seconds", report["seconds"])
    with torch.no_grad():
        right = equipoise.load(small)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "images.npy"), right, rtol=0, atol=1e-5 * np.abs(right).max())


# Refused


def refused(told: str, work: Callable[[], Any]) -> None:
    with pytest.raises(UserError) as caught:
        work()
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (np.zeros((1, 1, 8, 8), np.uint8), "not uint8; give it images / 255"),
        (np.zeros((1, 1, 8, 8), bool), "not bool"),
        (np.zeros((1, 1, 8, 8)), "not float64; use .astype(numpy.float32)"),
        (np.zeros((1, 8, 8), np.float32), "images of (n, 1, 8, 8), not (1, 8, 8)"),
        (np.zeros((1, 1, 8, 9), np.float32), "images of (n, 1, 8, 8), not (1, 1, 8, 9)"),
        (np.zeros((1, 64), np.float32), "images of (n, 1, 8, 8)"),
        (np.zeros((), np.float32), "images of (n, 1, 8, 8)"),
        ([[[[0.0]]]], "takes a numpy array, not list"),
    ],
)
def test_wrong_images(wrong: Any, told: str, small: Path) -> None:
    net = load(small)
    refused(told, lambda: net(wrong))


def test_images_with_other_strides(small: Path) -> None:
    x = np.random.default_rng(0).random((20, 8, 8, 1), dtype=np.float32).transpose(0, 3, 2, 1)[::-1]
    net = load(small)
    np.testing.assert_array_equal(net(x), net(np.ascontiguousarray(x)))
    np.testing.assert_array_equal(net(x[:2]), net(np.ascontiguousarray(x[:2])))


def test_files_that_are_none(small: Path, tmp_path: Path) -> None:
    refused("there is no file", lambda: load(tmp_path / "nothing"))
    refused("there is no file", lambda: load(tmp_path))
    refused("no program for the runtime", lambda: load(forge(small, tmp_path / "old", header={"program": None})))
    refused("export it again", lambda: load(tmp_path / "old"))
    assert equipoise.load(tmp_path / "old") is not None
    refused("of version 2", lambda: load(forge(small, tmp_path / "new", header={"version": 2})))
    whole = small.read_bytes()
    for content in (b"", b"hello", whole[:7], whole[:100], whole[: len(whole) // 2], whole[:-1], whole + b"\0"):
        (tmp_path / "bad").write_bytes(content)
        refused("damaged or not a packed network", lambda: load(tmp_path / "bad"))


def test_a_file_of_save_is_not_called_damaged(tmp_path: Path) -> None:
    equipoise.save(nn.Linear(3, 2), tmp_path / "net.safetensors")
    with pytest.raises(UserError) as caught:
        load(tmp_path / "net.safetensors")
    assert str(caught.value) == (
        f"{tmp_path / 'net.safetensors'} has the weights of a custom model, without a program: equipoise.load("
        '"net.safetensors", into=model) loads it, and `equipoise export RUN FILE.safetensors` writes a file for the '
        "runtime"
    )


@pytest.mark.parametrize("threads", [0, -1, 1025, 10**5, 10**9, True, 2.0, "a"])
def test_numbers_of_threads_that_openmp_cannot_start(threads: Any, small: Path) -> None:
    refused(f"threads={threads!r} must be a whole number from 1 to 1024", lambda: load(small, threads=threads))


def test_a_number_of_threads_that_is_too_long_to_print(small: Path) -> None:
    refused("must be a whole number from 1 to 1024", lambda: load(small, threads=10**5000))


def test_every_flipped_bit_is_found(small: Path, tmp_path: Path) -> None:
    good, chance = small.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(good[:8], "little")
    for i in range(300):
        data = bytearray(good)
        data[chance.randrange(len(data) if i % 2 else header)] ^= 1 << chance.randrange(8)
        if i % 10 == 0:
            at = chance.randrange(len(data))
            data[at:at] = chance.randbytes(4)
        (tmp_path / "bad").write_bytes(data)
        refused("", lambda: load(tmp_path / "bad"))


WEIGHT = "features.4.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t[f"{WEIGHT}/gaps"][:-1].fill_(254), f'"{WEIGHT}": it has a value at index'),
        (lambda t: t.update({f"{WEIGHT}/gaps": t[f"{WEIGHT}/gaps"].to(torch.int8)}), "uint8 or uint16"),
        (lambda t: t.update({f"{WEIGHT}/values": t[f"{WEIGHT}/values"][:-1].clone()}), "indices for"),
        (lambda t: t[f"{WEIGHT}/values"].fill_(torch.inf), "not finite"),
        (lambda t: t["classifier.bias"].fill_(torch.nan), "not finite"),
        (lambda t: t["program/0/scale"].fill_(torch.nan), "not finite"),
        (lambda t: t.update({"classifier.bias": torch.ones(9)}), "the network needs [10]"),
        (lambda t: t.pop(f"{WEIGHT}/gaps"), "for 18432 weights"),
        (lambda t: t.pop(f"{WEIGHT}/values"), "no tensor"),
        (lambda t: t.pop("classifier.bias"), 'no tensor "classifier.bias"'),
        (lambda t: t.update({"classifier.bias": torch.ones(10).double()}), "of another type"),
    ],
)
def test_hostile_tensors(change: Callable[[Tensors], Any], told: str, small: Path, tmp_path: Path) -> None:
    refused(told, lambda: load(forge(small, tmp_path / "out", change)))


HUGE = 10**9


@pytest.mark.parametrize(
    ("number", "fields", "told"),
    [
        (1, {"function": "system"}, "expected one of convolve"),
        (1, {"inputs": [1]}, "there is no value 1"),
        (1, {"inputs": [-2]}, "there is no value -2"),
        (1, {"inputs": [0, 0]}, "convolve has 1 inputs"),
        (1, {"shapes": [[1, 8, 9]]}, "does not give"),
        (1, {"shape": [32, 8, 9]}, "does not give"),
        (1, {"shape": [HUGE, HUGE, HUGE]}, "no value has the shape"),
        (1, {"shape": [2**23, 8, 1]}, "does not give"),
        (1, {"shape": [32, 8]}, "no value has the shape"),
        (1, {"window": {"kernel": [3, 3], "padding": [HUGE, HUGE]}}, "windows of more than"),
        (1, {"window": {"kernel": [0, 3]}}, "no window has this geometry"),
        (1, {"window": {"kernel": [3]}}, "rows and columns"),
        (1, {"window": {"kernel": [3, 3], "stride": [1000, 1], "padding": [1, 1]}}, "strides above"),
        (1, {"window": None}, "a convolution has a window"),
        (1, {"window": {"kernel": [1025, 1], "padding": [512, 0]}}, "windows of more than"),
        (1, {"weight": "classifier.weight"}, "classifier.weight"),
        (1, {"weight": "other"}, 'no tensor "other/values"'),
        (1, {"more": 1}, 'no option is called "more"'),
        (1, {"relu": "yes"}, "true or false"),
    ],
)
def test_hostile_calls(number: int, fields: dict[str, Any], told: str, small: Path, tmp_path: Path) -> None:
    program = read(small)[0]["program"]
    program["calls"][number] |= fields
    refused(told, lambda: load(forge(small, tmp_path / "out", header={"program": program})))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"result": 99}, "there is no call 99"),
        ({"result": -1}, "there is no call -1"),
        ({"image": [1, 8]}, "no value has the shape"),
        ({"image": [1, 16, 16]}, "it reads [1, 16, 16] as [1, 8, 8]"),
        ({"calls": []}, "there is no call"),
        ({"calls": 3}, "expected a list"),
    ],
)
def test_hostile_programs(fields: dict[str, Any], told: str, small: Path, tmp_path: Path) -> None:
    program = read(small)[0]["program"] | fields
    refused(told, lambda: load(forge(small, tmp_path / "out", header={"program": program})))


def test_more_classes_than_scores(small: Path, tmp_path: Path) -> None:
    network = read(small)[0]["network"]
    for count in (11, 10**6):
        path = forge(small, tmp_path / "out", header={"network": network | {"classes": ["x"] * count}})
        refused(f"there are {count} names of classes for 10 scores", lambda path=path: load(path))
    fewer = forge(small, tmp_path / "out", header={"network": network | {"classes": ["x"] * 9}})
    assert len(load(fewer).classes) == 9


def test_buffers_that_would_exhaust_memory(tmp_path: Path) -> None:
    """Padding makes 128 channels of 2049x2049 numbers out of one pixel: 2 GB."""
    calls = {
        "image": [1, 1, 1],
        "calls": [
            {"function": "convolve", "inputs": [-1], "shapes": [[1, 1, 1]], "shape": [128, 1, 1],
             "window": {"kernel": [1, 1]}, "weight": "a"},
            {"function": "convolve", "inputs": [0], "shapes": [[128, 1, 1]], "shape": [1, 17, 17],
             "window": {"kernel": [1024, 1024], "stride": [64, 64], "padding": [1024, 1024]}, "weight": "b"},
        ],
        "result": 1,
    }  # fmt: skip
    tensors = {"a/values": torch.ones(128), "b/values": torch.ones(1), "b/gaps": torch.zeros(1, dtype=torch.uint8)}
    header = {"version": VERSION, "network": {"input_shape": [1, 1, 1]}, "program": calls}
    write_file(tmp_path / "huge", KEY, header, tensors)
    refused("more than", lambda: load(tmp_path / "huge"))


def test_forged_programs_load_or_are_refused(small: Path, tmp_path: Path) -> None:
    """A changed character of the program raises a UserError or gives a network that runs."""
    old, chance, loaded = read(small)[0], random.Random(1), 0
    x = np.zeros((9, 1, 8, 8), np.float32)
    for _ in range(200):
        text = list(json.dumps(old["program"]))
        text[chance.randrange(len(text))] = chr(chance.randrange(32, 127))
        try:
            program = json.loads("".join(text))
        except ValueError:
            continue
        try:
            net = load(forge(small, tmp_path / "out", header={"program": program}))
        except UserError:
            continue
        loaded += 1
        assert len(net(x)) == 9
    assert loaded
