"""`equipoise predict`: classes by name, from images as the network saw them in evaluations."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import equipoise
from cli_helpers import Outcome, assert_refused
from data_helpers import CLASSES, write_image_folder
from deploy_helpers import random_network
from equipoise import cli
from equipoise.cli.common import open_run
from equipoise.deploy import Network, read_packed, write_packed
from equipoise.deploy.predict import read_image
from equipoise.training import RunFolder, Trainer, make_recipe
from train_helpers import tiny


def predicted(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Outcome:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["predict", *map(str, words)])
    assert isinstance(stopped.value.code, int)
    return Outcome(stopped.value.code, *capsys.readouterr())


def exported(run: Path, file: Path) -> Path:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["export", str(run), str(file)])
    assert stopped.value.code == 0
    return file


def trained(folder: Path, **changes: object) -> Path:
    raw = tiny(epochs=1, **changes)
    Trainer(make_recipe(raw), RunFolder.create(folder, raw)).run()
    return folder


def test_images_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names from the file, and the very pixels of the evaluation."""
    write_image_folder(tmp_path / "data")
    data = {"name": "folder", "root": str(tmp_path / "data"), "size": 8, "batch": 5, "workers": 0}
    run = trained(tmp_path / "run", data=data, model={"name": "mlp", "hidden": 16, "size": 8})
    file = exported(run, tmp_path / "net.safetensors")
    capsys.readouterr()
    unpacked = read_packed(file)
    assert unpacked.blueprint.classes == CLASSES
    (x, _), *_ = open_run(run).parts.loaders["test"].epoch(0)
    paths = sorted((tmp_path / "data" / "val").rglob("*.*"))
    ours = torch.stack([read_image(path, unpacked.blueprint) for path in paths])
    assert torch.equal(ours, x[: len(paths)])
    capsys.readouterr()  # opening the run may warn
    outcome = predicted(capsys, file, "--top", "3", *paths)
    assert (outcome.status, outcome.err) == (0, "")
    shares = unpacked.model(x).softmax(1)
    for line, path, row in zip(outcome.out.splitlines(), paths, shares, strict=True):
        expected = [f"{CLASSES[i]} {100 * float(row[i]):.1f} %" for i in row.argsort(descending=True)]
        assert line == f"{path}: {', '.join(expected)}"


def test_grey_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = exported(trained(tmp_path / "run"), tmp_path / "net.safetensors")
    capsys.readouterr()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    for name, image in {"grey.png": pixels, "colour.png": np.stack([pixels] * 3, -1)}.items():
        Image.fromarray(image).save(tmp_path / name)
    x = torch.from_numpy(pixels)[None, None].float() * (1 / 255)
    label = int(equipoise.load(file)(x).argmax())
    outcome = predicted(capsys, file, tmp_path / "grey.png", tmp_path / "colour.png")
    assert re.findall(r"\.png: (\d) \d+\.\d %\n", outcome.out) == [str(label)] * 2


def test_a_file_without_names_prints_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network, _ = random_network("mlp")
    assert network.blueprint.classes == ()
    write_packed(network, tmp_path / "net")
    Image.new("L", (30, 20)).save(tmp_path / "x.png")
    assert re.search(r"x\.png: \d \d+\.\d %\n$", predicted(capsys, tmp_path / "net", tmp_path / "x.png").out)


def test_names_are_safe_to_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network, _ = random_network("mlp")
    named = replace(network.blueprint, classes=("\x1b[31m[/b]\n",) * 10)
    write_packed(Network(named, network.state), tmp_path / "net")
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    assert r": \x1b[31m[/b] " in predicted(capsys, tmp_path / "net", tmp_path / "x.png").out


def test_images_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_packed(random_network("mlp")[0], tmp_path / "net")
    (tmp_path / "x.png").write_text("no image")
    assert_refused(predicted(capsys, tmp_path / "net", tmp_path / "x.png"), "x.png cannot be read as an image")
    assert_refused(predicted(capsys, tmp_path / "net", tmp_path / "y.png"), "there is no image y.png in")
    assert_refused(predicted(capsys, tmp_path / "x.png", tmp_path / "x.png"), "not a packed network")
