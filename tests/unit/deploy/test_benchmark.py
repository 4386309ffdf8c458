"""`equipoise bench`: sizes counted by hand, rivals that take turns, and its output."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import equipoise
from deploy_helpers import forge, random_network
from equipoise import cli
from equipoise.deploy import onnx_model, write_packed
from equipoise.deploy.benchmark import bench, custom_subject, interleaved, packed_subject, using_threads
from equipoise.deploy.benchmark_table import report_lines, size
from equipoise.models import MODELS


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "out.safetensors"
    write_packed(random_network("small")[0], path)
    return path


def test_sizes_are_counted_right(file: Path) -> None:
    report = bench(packed_subject(file), repeats=1, threads=1)
    network, judge = random_network("small")
    weights = [tensor for tensor in network.state.values() if tensor.dim() > 1]
    biases = 32 + 64 + 128 + 10  # of the folded norms and the last layer
    assert report.stored == sum(int((weight != 0).sum()) for weight in weights) + biases
    assert report.parameters == sum(p.numel() for p in judge.parameters())
    assert report.dense_bytes == sum(t.numel() * t.element_size() for t in network.state.values())
    assert report.file_bytes == os.path.getsize(file)
    assert report.layers == 4
    assert report.threads == 1
    assert report.seconds.keys() >= {"equipoise", "PyTorch", "PyTorch channels_last"}
    assert all(time > 0 for pair in report.seconds.values() for time in pair)
    assert report.dense[1] == min(report.seconds[name][1] for name in ("PyTorch", "PyTorch channels_last"))


def test_onnxruntime_takes_part_if_it_is_installed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    assert "onnxruntime" in bench(packed_subject(file), repeats=1).seconds
    monkeypatch.setattr(onnx_model, "NEEDED", ("onnx_of_nowhere",))
    report = bench(packed_subject(file), repeats=1)
    assert "onnxruntime" not in report.seconds
    assert "without onnxruntime: onnx_of_nowhere not installed" in str(list(report_lines(report))[-1])


def test_rivals_take_turns_and_the_median_counts() -> None:
    order: list[str] = []
    clock = 0.0
    takes = {"a": iter([50.0, 1.0, 9.0, 2.0]), "b": iter([50.0, 3.0, 3.0, 8.0])}

    def run(name: str) -> None:
        nonlocal clock
        order.append(name)
        clock += next(takes[name])

    assert interleaved({"a": lambda: run("a"), "b": lambda: run("b")}, 3, lambda: clock) == {"a": 2.0, "b": 3.0}
    assert order == ["a", "b"] * 4


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with using_threads(before + 1) as count:
        assert count == torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_the_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", str(file), "--repeats", "1", "--threads", "1"])
    assert stopped.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert re.search(r"^file +[\d.]+ kB, dense float32 394 kB: 1/1\d\.\d$", out, re.M)
    assert re.search(r"^parameters +5,\d\d\d of 98,\d\d\d stored: \d\.\d\d %$", out, re.M)
    assert re.search(r"^layers +\d of 4 run sparse", out, re.M)
    for rival in ("equipoise", "PyTorch", "PyTorch channels_last"):
        assert re.search(rf"^{rival} +[\d.]+ ms +[\d.]+ × +\d+ images/s +[\d.]+ ×$", out, re.M)


class Custom(nn.Sequential):
    def __init__(self, width: int = 16) -> None:
        super().__init__(nn.Flatten(), nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 3))


def test_a_custom_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is named on the command line, as in recipes."""
    model = Custom(32)
    with torch.no_grad():
        model[1].weight[5:] = 0
    equipoise.save(model, tmp_path / "net.safetensors")
    report = bench(custom_subject(tmp_path / "net.safetensors", Custom(32), (3, 2, 2)), repeats=1, threads=1)
    assert (report.parameters, report.layers) == (12 * 32 + 32 + 32 * 3 + 3, 2)
    assert report.stored == 12 * 5 + 32 + 32 * 3 + 3
    monkeypatch.setitem(MODELS, f"{__name__}:Custom", Custom)
    words = [f"model={__name__}:Custom", "model.width=32", "--shape", "3x2x2", "--repeats", "1"]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", str(tmp_path / "net.safetensors"), *words])
    assert stopped.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert re.search(r"^parameters +191 of 515 stored", out, re.M)
    assert re.search(r"^PyTorch +[\d.]+ ms", out, re.M)


CUSTOM = f"model={__name__}:Custom"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "equipoise bench net.safetensors model=package.nets:Net --shape 3x32x32"),
        ([CUSTOM], "a custom model needs both, such as `model=package.nets:Net --shape 3x32x32`"),
        ([CUSTOM, "--shape", "3x2"], "the model does not take an input of (3, 2)"),
        ([CUSTOM, "--shape", "3,2,2"], "--shape 3,2,2: expected the shape of one input, such as 3x32x32"),
        ([CUSTOM, "--shape", "12", "model.widht=3"], 'model: no option is called "widht"; did you mean "width"?'),
        ([CUSTOM, "--shape", "12", "model.width=3"], "does not fit this model"),
    ],
)
def test_a_custom_model_that_does_not_fit(
    tmp_path: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    equipoise.save(Custom(), tmp_path / "net.safetensors")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", str(tmp_path / "net.safetensors"), *words])
    MODELS.pop(f"{__name__}:Custom", None)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing"], "there is no file"),
        (["{}", "--repeats", "0"], "repeats"),
        (["{}", "--threads", "99999999999"], "threads"),
    ],
)
def test_wrong_input(file: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *(word.format(file) for word in words)])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err


def test_a_newer_file(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newer = forge(file, tmp_path / "newer", header={"version": 2})
    with pytest.raises(SystemExit):
        cli.main(["bench", str(newer)])
    assert "is of version 2; this equipoise reads version 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (614_247, "614 kB"), (45_300_000, "45.3 MB")]
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert size(count) == text
