"""Exported C source, compiled with `cc -O2` alone, gives the logits of PyTorch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deploy_helpers import images, random_network
from equipoise.deploy.c_source import c_source
from equipoise.deploy.export import check_request, export
from equipoise.errors import UserError

WARNINGS = ("-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror")


def compiled(source: Path, *options: str) -> Path:
    program = source.with_suffix("")
    subprocess.run(["cc", "-O2", *options, "-o", program, source], check=True)
    return program


def scores(program: Path, x: Tensor) -> Tensor:
    printed = subprocess.run(
        [program], input=x.contiguous().numpy().tobytes(), capture_output=True, check=True
    ).stdout
    return torch.tensor([[float(number) for number in line.split()] for line in printed.decode().splitlines()])


def run(model: nn.Module, x: Tensor, folder: Path, values: str = "float32") -> Tensor:
    source = folder / "net.c"
    source.write_text(c_source(model, x.shape[1:], values))
    return scores(compiled(source, *WARNINGS), x)


@pytest.mark.parametrize("name", ["small", "mlp"])
@pytest.mark.parametrize("values", ["float32", "int8"])
def test_networks_of_the_catalogue(name: str, values: str, tmp_path: Path) -> None:
    network, judge = random_network(name, 0.9)
    export(network, tmp_path / "net.c", "c", values)
    x = images(network, 5)
    expected = judge(x.double())
    error = (scores(compiled(tmp_path / "net.c"), x) - expected).abs().max() / expected.abs().max()
    assert error < {"float32": 1e-5, "int8": 0.05}[values]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg_c", "resnet18", "wrn_28_4"])
def test_large_networks(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    network, judge = random_network(name, 0.99)
    for values, tolerance in (("float32", 1e-5), ("int8", 0.2)):
        source = tmp_path / f"{values}.c"
        export(network, source, "c", values)
        x = images(network, 4)
        expected = judge(x.double())
        assert (scores(compiled(source), x) - expected).abs().max() / expected.abs().max() < tolerance
        constants = int(re.search(r"/\* ([\d,]+) bytes of weights", source.read_text())[1].replace(",", ""))  # type: ignore[index]
        record_property(f"{name}, {values}, bytes of weights", constants)
        if (name, values) == ("vgg_c", "int8"):
            assert constants < 400_000


class Everything(nn.Module):
    """All operations that the C source has, in an order in which few can be merged."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, stride=2, padding=2, dilation=2, groups=4, bias=False)
        self.shortcut = nn.Conv2d(8, 8, 1, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.norm_of_vector = nn.BatchNorm1d(32)
        self.middle = nn.Linear(32, 6)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x * 2 - 0.5))
        x = self.norm(self.grouped(x)) + self.shortcut(x)
        kept = F.max_pool2d(F.relu(x), 3, stride=2, padding=1) / 3
        x = kept + F.avg_pool2d(F.relu(x + 0.25), 3, stride=2, padding=1)
        pooled = F.adaptive_avg_pool2d(x, (2, 2)).flatten(1)
        pooled = F.dropout(F.relu(self.norm_of_vector(pooled)), training=self.training)
        return self.last(F.relu(self.middle(pooled)) + 1)


def sparse(model: nn.Module, density: float = 0.3) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= torch.rand(parameter.shape, generator=generator) < density
    return model


def test_every_operation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = sparse(Everything())
    x = torch.rand(16, 3, 16, 16)
    model.train()(x)  # statistics of the norms
    expected = model.eval()(x)
    np.testing.assert_allclose(run(model, x, tmp_path), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "groups", "density"),
    [
        ((4, 1), (3, 2), (3, 0), (1, 1), 1, 0.02),
        ((2, 3), (1, 3), (0, 2), (2, 1), 2, 0.5),
        ((3, 2), (2, 1), (1, 3), (1, 2), 4, 1.0),
        ((3, 3), (1, 1), (1, 1), (1, 1), 1, 0.0),
    ],
)
def test_convolutions(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    density: float,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    layer = sparse(nn.Conv2d(4, 8, kernel, stride, padding, dilation, groups), density)
    x = torch.randn(2, 4, 9, 11)
    expected = layer(x).flatten(1).detach()
    np.testing.assert_allclose(run(nn.Sequential(layer, nn.Flatten()), x, tmp_path), expected, rtol=1e-4, atol=1e-5)


def test_gaps_longer_than_a_code(tmp_path: Path) -> None:
    layer = nn.Linear(300_000, 1)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0, [0, 255, 256, 70_000, 299_999]] = torch.tensor([1.0, 2, 3, 4, 5])
    x = torch.randn(1, 300_000)
    np.testing.assert_allclose(run(layer, x, tmp_path), layer(x).detach(), rtol=1e-5)


def test_predict_can_be_called_from_another_program(tmp_path: Path) -> None:
    model, x = nn.Linear(3, 2), torch.tensor([[1.0, 2.0, 3.0]])
    caller = """
    void predict(const float *, float *);
    int printf(const char *, ...);
    int main(void) { float x[] = {1, 2, 3}, y[2]; predict(x, y); printf("%.9g %.9g", y[0], y[1]); return 0; }
    """
    (tmp_path / "net.c").write_text(c_source(model, (3,)))
    (tmp_path / "caller.c").write_text(caller)
    subprocess.run(["cc", "-O2", "-DNO_MAIN", "-o", "both", "net.c", "caller.c"], cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "both"], capture_output=True, text=True, check=True).stdout
    np.testing.assert_allclose([float(n) for n in printed.split()], model(x)[0].detach(), rtol=1e-6)


def test_an_incomplete_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.c").write_text(c_source(nn.Linear(3, 2), (3,)))
    program = compiled(tmp_path / "net.c")
    for more in (0, 1, 2, 3, 4, 11):
        ended = subprocess.run([program], input=b"\0" * (12 + more), capture_output=True, check=False)
        assert ended.stdout.count(b"\n") == 1
        assert ended.returncode == (more > 0)
        assert ended.stderr == (b"the last image has %d of 12 bytes\n" % more if more else b"")


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(1)


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 2


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (Softmax(), (3,), "C source has no operation softmax; it has adaptive_avg_pool2d, add, avg_pool2d"),
        (Two(), (3,), "C source has networks with one result"),
        (nn.Identity(), (3,), "C source has networks with one result"),
        (nn.Linear(3, 2), (5, 3), "C source has images and vectors, not values of the shape \\(5, 3\\)"),
        (nn.AdaptiveAvgPool2d(2), (1, 3, 3), "they do not divide"),
    ],
)
def test_other_models_are_refused(model: nn.Module, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        c_source(model, shape)


def test_types_of_values() -> None:
    with pytest.raises(UserError, match="C source stores float32 or int8, not bf16"):
        c_source(nn.Linear(3, 2), (3,), "bf16")
    with pytest.raises(UserError, match="c stores float32 or int8; --format packed has bf16 values"):
        check_request(Path("net.c"), "c", "bf16")
