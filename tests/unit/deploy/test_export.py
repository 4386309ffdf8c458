"""Every export format gives back the network of the run, and no file is half-written."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

import equipoise
from deploy_helpers import difference, images, random_network
from equipoise import cli
from equipoise.cli.common import open_run
from equipoise.deploy import export as exporting
from equipoise.deploy import onnx_model
from equipoise.deploy.export import export
from equipoise.errors import UserError
from equipoise.models import MODELS
from equipoise.sparse import pack
from equipoise.training.evaluate import three_ways
from equipoise.training.run_network import network_of
from train_helpers import tiny

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of a small convolutional net on the digits."""
    folder = tmp_path_factory.mktemp("run")
    recipe = tiny(model={"name": "small"}, data={"name": "digits", "batch": 480}, bn_recalibration_batches=1, ema=0.5)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")])
    assert stopped.value.code == 0
    return folder / "run"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def go(*words: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main([str(word) for word in words])
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, *capsys.readouterr()

    return go


@torch.no_grad()
def outputs(run: Path, x: Tensor, best: bool = False) -> dict[str, Tensor]:
    """Logits of the model of a run with each of its three kinds of weights."""
    trainer = open_run(run, best)
    found = {}
    for way in three_ways(trainer.parts.model, trainer.recalibration_images, trainer.parts.ema):
        found[way] = trainer.parts.model.eval()(x)
    return found


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.rand(9, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def test_each_way_and_checkpoint_is_what_the_run_computes(run: Path, x: Tensor, command: Command) -> None:
    seen = []
    for best in (False, True):
        for way, right in outputs(run, x, best).items():
            words = ["--weights", way, "--force", *(["--best"] if best else [])]
            status, out, err = command("export", run, "out.safetensors", *words)
            assert (status, err) == (0, "")
            assert out.startswith("out.safetensors: ")
            torch.testing.assert_close(equipoise.load("out.safetensors")(x), right, rtol=1e-4, atol=1e-5)
            seen.append(right)
    assert not torch.allclose(seen[0], seen[1])
    assert not torch.allclose(seen[1], seen[2])


def test_state_dict_has_the_usual_keys(run: Path, x: Tensor, command: Command, tmp_path: Path) -> None:
    status, out, _ = command("export", run, "weights.safetensors", "--format", "state_dict")
    assert status == 0
    assert "takes images as (x - mean) / std" in out
    model: Any = MODELS["small"](classes=10, channels=1, size=8)
    model.load_state_dict(load_file("weights.safetensors"))
    trained = open_run(run).parts.model
    state = model.state_dict()
    assert state.keys() == trained.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in trained.state_dict().items())
    model.normalize.set(trained.normalize.mean, trained.normalize.std)
    torch.testing.assert_close(model.eval()(x), outputs(run, x)["plain"])
    with pytest.raises(UserError, match="is not a packed network"):
        equipoise.load("weights.safetensors")


def test_onnx_runs_in_onnxruntime(run: Path, x: Tensor, command: Command) -> None:
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    status, _, err = command("export", run, "out.onnx", "--format", "onnx", "--weights", "ema")
    assert (status, err) == (0, "")
    onnx.checker.check_model("out.onnx", full_check=True)
    assert "BatchNormalization" not in {node.op_type for node in onnx.load("out.onnx").graph.node}
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load("out.onnx").graph.initializer}
    zeros = sum(int((array == 0).sum()) for array in stored.values() if array.ndim > 1)
    assert zeros > 0.79 * sum(array.size for array in stored.values() if array.ndim > 1)  # of a run at 80 %
    session = runtime.InferenceSession("out.onnx", providers=["CPUExecutionProvider"])
    right = outputs(run, x)["ema"]
    for count in (9, 1):
        (got,) = session.run(["logits"], {"images": x[:count].numpy()})
        torch.testing.assert_close(torch.from_numpy(got), right[:count], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {"width": 8}),
        pytest.param("vgg_c", {}, marks=pytest.mark.slow),
        pytest.param("wrn_28_4", {}, marks=pytest.mark.slow),
    ],
)
def test_onnx_of_larger_networks(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    network, judge = random_network(name, **options)
    export(network, tmp_path / "out.onnx", "onnx")
    session = runtime.InferenceSession(str(tmp_path / "out.onnx"), providers=["CPUExecutionProvider"])

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(session.run(None, {"images": x.numpy()})[0])

    assert difference(Model(), judge, images(network)) < 1e-5


def test_rounded_values_are_smaller(run: Path, command: Command, tmp_path: Path) -> None:
    sizes = []
    for values in ("float32", "bf16", "int8"):
        assert command("export", run, values, "--values", values)[0] == 0
        sizes.append((tmp_path / values).stat().st_size)
    assert sizes[0] > 1.3 * sizes[1] > 1.5 * sizes[2]


def test_the_suffix_tells_the_format(run: Path, command: Command, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    assert command("export", run, "out.onnx")[0] == 0
    onnx.checker.check_model(onnx.load(tmp_path / "out.onnx"))
    assert command("export", run, "out.safetensors")[0] == 0
    equipoise.load(tmp_path / "out.safetensors")
    refused = {
        ("a.onnx", "--format", "packed"): "a.onnx is the name of a file in the format onnx, not packed",
        ("a.safetensors", "--format", "onnx"): "a.safetensors is the name of a file in the format packed, not onnx",
        ("a.pt",): "the suffix of a.pt tells no format; use .safetensors or .onnx or .c, or name one with --format",
    }
    for words, told in refused.items():
        status, _, err = command("export", run, *words)
        assert (status, err.count("\n")) == (2, 1)
        assert told in err
    assert not (tmp_path / "a.onnx").exists()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_permissions_of_any_file(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        network, model = random_network("mlp")
        for form in ("packed", "state_dict"):
            export(network, tmp_path / form, form)
        equipoise.save(model, tmp_path / "saved")
        (tmp_path / "any").touch()
    finally:
        os.umask(before)
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "any").stat().st_mode}


@pytest.mark.parametrize("dense", [False, True])
def test_a_network_refuses_integers(tmp_path: Path, dense: bool) -> None:
    network, _ = random_network("small")
    export(network, tmp_path / "out")
    loaded = equipoise.load(tmp_path / "out", dense=dense)
    for model in (loaded, copy.deepcopy(loaded)):
        with pytest.raises(UserError, match=r"takes pixels in \[0, 1\] as float32, not uint8; give it images / 255"):
            model(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
        assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


# Requests that are refused


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--values", "int4"], 'no type of values is called "int4"; did you mean "int8"'),
        (["--format", "tflite"], 'no format is called "tflite"; choose from 2:4, c, onnx, packed, state_dict'),
        (["--weights", "best"], 'no weights are called "best"; choose from plain, bn_recalibrated, ema'),
        (["--format", "state_dict", "--values", "bf16"], "--format packed has bf16 values"),
        (["--format", "2:4", "--values", "int8"], "2:4 stores bf16; --format packed has int8 values"),
    ],
)
def test_wrong_words(run: Path, command: Command, tmp_path: Path, words: list[str], told: str) -> None:
    status, out, err = command("export", run, "out", *words)
    assert (status, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_paths_that_cannot_be_written(run: Path, command: Command, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    assert "there exists; --force overwrites it" in command("export", run, "there")[2]
    assert (tmp_path / "there").read_text() == "mine"
    assert "is a folder" in command("export", run, tmp_path)[2]
    assert "there is no folder" in command("export", run, "no/out")[2]
    assert "is not a run" in command("export", tmp_path, "out")[2]
    (tmp_path / "link").symlink_to("nowhere")
    assert "link exists" in command("export", run, "link")[2]
    assert {path.name for path in tmp_path.iterdir()} == {"there", "link"}
    assert command("export", run, "there", "--force")[0] == 0
    equipoise.load("there")


def test_a_run_without_average(run: Path) -> None:
    trainer = open_run(run)
    trainer.parts.ema = None
    with pytest.raises(UserError, match="no averaged weights"):
        network_of(trainer, "ema")


def test_packed_storage_exports_alike(run: Path) -> None:
    trainer = open_run(run)
    masked = network_of(trainer)
    trainer.parts.model = pack(trainer.parts.model, trainer.parts.topology.masks)
    assert not trainer.parts.model.state_dict().keys() & {"classifier.weight"}
    packed = network_of(trainer)
    assert packed.blueprint == masked.blueprint
    assert packed.state.keys() == masked.state.keys()
    assert all(torch.equal(packed.state[name], tensor) for name, tensor in masked.state.items())


def test_exporting_leaves_the_run_as_it_was(run: Path, x: Tensor) -> None:
    trainer = open_run(run)
    before = {key: tensor.clone() for key, tensor in trainer.parts.model.state_dict().items()}
    network_of(trainer, "ema")
    assert trainer.parts.model.training
    assert all(torch.equal(before[key], tensor) for key, tensor in trainer.parts.model.state_dict().items())


@pytest.mark.parametrize("form", ["packed", "state_dict", "onnx"])
def test_a_full_disk_leaves_what_was_there(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(_: Any, path: Path, *__: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    if form == "onnx":
        pytest.importorskip("onnxscript")
    monkeypatch.setattr(exporting, "FORMATS", {form: half})
    (tmp_path / "out").write_text("mine")
    network, _ = random_network("mlp", hidden=4)
    with pytest.raises(UserError, match=r"cannot write to .*out: No space left"):
        export(network, tmp_path / "out", form, force=True)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out", "mine")]


def test_onnx_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_model, "NEEDED", ("onnx_of_nowhere",))
    network, _ = random_network("mlp", hidden=4)
    with pytest.raises(UserError, match=r"ONNX needs onnx_of_nowhere: pip install equipoise\[onnx\]"):
        export(network, tmp_path / "out", "onnx")
    assert not list(tmp_path.iterdir())
