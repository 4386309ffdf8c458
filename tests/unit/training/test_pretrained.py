"""Runs that start from the weights of a file: every kind of file, both storages, and files that do not fit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import equipoise as eq
from deploy_helpers import difference, images, random_network
from equipoise.deploy.blueprint import Network
from equipoise.deploy.packed_file import write_packed
from equipoise.errors import UserError
from equipoise.models import MODELS
from equipoise.storage.pack import unpack
from equipoise.training import Trainer, make_recipe
from equipoise.training.pretrained import load_weights
from train_helpers import assert_same_state, tiny


@pytest.fixture(scope="module")
def network() -> Network:
    """A convolutional net with BatchNorm, 95 % of whose weights are zero."""
    return random_network("small")[0]


def write(kind: str, network: Network, folder: Path) -> Path:
    state = dict(network.state)
    path = folder / ("net.safetensors" if kind in ("safetensors", "saved", "exported") else "net.pt")
    match kind:
        case "pt":
            torch.save(state, path)
        case "lightning":
            torch.save({"state_dict": state, "epoch": 3}, path)
        case "safetensors":
            save_file(state, path)
        case "saved":
            eq.save(network.build(), path)
        case "exported":
            write_packed(network, path)
    return path


def run_of(path: Path, storage: str = "masked", **changes: Any) -> Trainer:
    topology = {"name": "static", "distribution": "nonzeros"}
    recipe = tiny(model="small", topology=topology, weights=str(path), storage=storage, epochs=1, **changes)
    return Trainer(make_recipe(recipe))


def sparse_weights(trainer: Trainer) -> dict[str, Tensor]:
    return {layer.name: layer.weight.reshape(layer.mask().shape).clone() for layer in trainer.parts.topology.layers}


@pytest.mark.parametrize(
    ("kind", "storage"),
    [
        ("pt", "masked"),
        ("pt", "packed"),
        ("lightning", "masked"),
        ("safetensors", "packed"),
        ("saved", "packed"),
        ("exported", "masked"),
        ("exported", "packed"),
    ],
)
def test_zeros_of_the_file_stay_zero(kind: str, storage: str, network: Network, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = run_of(write(kind, network, tmp_path), storage)
    assert trainer.parts.topology.storage == storage
    start = sparse_weights(trainer)
    for name, weight in start.items():
        assert torch.equal(weight != 0, network.state[name] != 0)
        if kind != "exported":  # its norms are folded into the weights
            assert torch.equal(weight, network.state[name])
    trainer.run_epoch()
    for name, weight in sparse_weights(trainer).items():
        assert torch.equal(weight != 0, start[name] != 0)
        assert not torch.equal(weight, start[name])


@pytest.mark.parametrize("kind", ["pt", "saved", "exported"])
def test_the_model_computes_what_the_file_does(kind: str, network: Network, tmp_path: Path) -> None:
    trainer = run_of(write(kind, network, tmp_path), data={"name": "digits", "batch": 240, "normalize": False})
    judge: Any = random_network("small")[1]
    if kind != "exported":  # a state_dict has no normalisation of the input: it belongs to the data
        judge.normalize.set([0.0], [1.0])
    assert difference(trainer.parts.model.eval(), judge, images(network)) < 1e-5


def test_an_exported_net_with_biases(tmp_path: Path) -> None:
    """VGG-C: biases in its convolutions, and norms that are not folded."""
    network, judge = random_network("vgg_c")
    model = MODELS["vgg_c"]()
    load_weights(model, write("exported", network, tmp_path))
    assert difference(model.eval(), judge, images(network)) < 1e-5


def test_a_run_resumed_in_another_folder_finds_its_file(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("pt", network, tmp_path)
    monkeypatch.chdir(tmp_path)
    first = run_of(Path("net.pt"), "packed")
    first.run_epoch()
    raw = first.raw
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    second = Trainer(make_recipe(raw))
    second.load_state_dict(first.state_dict())
    assert_same_state(first.state_dict(), second.state_dict())


class Trap:
    """Its pickle makes a folder when it is read by `pickle`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def test_reading_executes_nothing(network: Network, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    torch.save({**network.state, "trap": Trap(trap)}, tmp_path / "net.pt")
    with pytest.raises(UserError, match="holds more than tensors, or is damaged") as error:
        run_of(tmp_path / "net.pt")
    assert "\n" not in str(error.value)
    assert not trap.exists()


def changed(network: Network, **changes: Any) -> dict[str, Any]:
    state = {**network.state, **changes}
    return {name: value for name, value in state.items() if value is not None}


def first(network: Network) -> str:
    return next(name for name, tensor in network.state.items() if tensor.dim() == 4)


WRONG: dict[str, tuple[Callable[[Network], Any], str]] = {
    "missing": (lambda n: changed(n, **{first(n): None}), 'the model has "{}" and the file has not'),
    "unknown": (
        lambda n: changed(n, **{"head.weight": torch.ones(1)}),
        'file has "head.weight" and the model has not',
    ),
    "shape": (lambda n: changed(n, **{first(n): torch.ones(2, 3)}), '"{}" has the shape (2, 3) in the file and ('),
    "nan": (
        lambda n: changed(n, **{first(n): n.state[first(n)] * torch.nan}),
        '"{}" has numbers that are not finite',
    ),
    "list": (lambda n: [1, 2], "is not a state_dict: names and tensors; save model.state_dict()"),
    "model": (lambda n: nn.Linear(2, 2), "holds more than tensors, or is damaged; save model.state_dict()"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_does_not_fit_is_refused_in_one_line(case: str, network: Network, tmp_path: Path) -> None:
    content, message = WRONG[case]
    torch.save(content(network), tmp_path / "net.pt")
    with pytest.raises(UserError) as error:
        run_of(tmp_path / "net.pt")
    assert str(error.value).startswith("weights: ")
    assert message.format(first(network)) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["net.pt", "net.safetensors", "none.pt", "folder.pt"])
def test_a_file_that_is_no_file_of_weights(name: str, tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_bytes(b"nonsense" * 20)
    (tmp_path / "net.safetensors").write_bytes(b"nonsense" * 20)
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(UserError) as error:
        run_of(tmp_path / name)
    assert str(error.value).startswith("weights: ")
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_an_exported_network_of_another_model(tmp_path: Path) -> None:
    path = write("exported", random_network("mlp")[0], tmp_path)
    with pytest.raises(UserError, match=r'weights: .*the model has ".*" and the file has not'):
        run_of(path)


def test_a_dense_run_takes_weights_too(network: Network, tmp_path: Path) -> None:
    recipe = tiny(model="small", topology="dense", weights=str(write("pt", network, tmp_path)))
    state, _ = unpack(Trainer(make_recipe(recipe)).parts.model)
    assert all(torch.equal(tensor, network.state[name]) for name, tensor in state.items())
