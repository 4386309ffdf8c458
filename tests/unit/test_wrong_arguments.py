"""Wrong arguments of the public functions are refused in one line that says what would be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise import runtime
from equipoise.errors import UserError
from equipoise.sparse import describe, freeze, pack, report, unpack


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert str(error.value) == message


WHAT = "; pass an algorithm such as eq.RigL(sparsity=0.9), an attached topology, or boolean masks by parameter name"
MASKS = '; pass boolean tensors by parameter name, such as "features.0.weight"'
SECOND = "pack(model, what): the second argument is a"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (0.9, f"{SECOND} float{WHAT}"),
        ("rigl", f"{SECOND} str{WHAT}"),
        (None, f"{SECOND} NoneType{WHAT}"),
        (eq.SET, f"{SECOND} class, SET{WHAT}"),
        ({"0.weight": [1]}, f"the mask of '0.weight' is a list{MASKS}"),
        ({0: torch.ones(16, 16, dtype=torch.bool)}, f"the mask of 0 is a Tensor{MASKS}"),
    ],
)
def test_what_pack_does_not_take(what: Any, message: str) -> None:
    refused(lambda: pack(net(), what), message)


CALLS: dict[str, Callable[[Any], Any]] = {
    "pack(model, what)": lambda model: pack(model, eq.SET(sparsity=0.5)),
    "unpack(model)": unpack,
    "describe(model)": describe,
    "report(model)": report,
    "freeze(model)": freeze,
    "save(model, path)": lambda model: eq.save(model, "never.safetensors"),
    "load(path, into=model)": lambda model: eq.load("never.safetensors", into=model),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("model", "kind"), [(3, "int"), ({}, "dict"), (nn.Linear, "class, Linear")])
def test_models_that_are_none(call: str, model: Any, kind: str) -> None:
    refused(lambda: CALLS[call](model), f"{call}: the model is a {kind}; pass a torch.nn.Module")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_of_torch_jit_is_not_packed() -> None:
    traced = torch.jit.trace(net(), torch.ones(1, 16))
    for model, kind in ((torch.jit.script(net()), "RecursiveScriptModule"), (traced, "TopLevelTracedModule")):
        told = f"the layers of a {kind} cannot be replaced; pack the nn.Module that it was made of"
        refused(lambda model=model: pack(model, eq.SET(sparsity=0.5)), f"pack(model, what): {told}")


@pytest.mark.parametrize("what", [eq.SET(sparsity=0.5), {"0.weight": torch.ones(16, 16, dtype=torch.bool)}])
def test_models_that_are_wrapped_or_packed(what: Any) -> None:
    message = "pack(model, what): the model is wrapped in DataParallel; pack model.module"
    refused(lambda: pack(nn.DataParallel(net()), what), message)
    packed = pack(net(), eq.SET(sparsity=0.5))
    for model in (packed, freeze(packed), nn.Sequential(packed)):
        refused(
            lambda model=model: pack(model, what),
            "pack(model, what): the model is packed already; load the state_dict of eq.sparse.unpack(model) into the "
            "dense model, and pack that",
        )
    dense = net()
    dense.load_state_dict(unpack(packed)[0])
    assert pack(dense, what) is not None


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (eq.SRSTE(), "SR-STE trains the inactive weights too"),
        (eq.Hydra(), "HYDRA learns scores of all weights"),
        (eq.RigL(growth="corrected"), 'growth="corrected" needs old gradients of inactive weights'),
    ],
)
def test_algorithms_that_need_masked_storage(algorithm: Any, why: str) -> None:
    refused(lambda: pack(net(), algorithm), f"{why}: use masked storage")
    sgd = torch.optim.SGD((packed := pack(net(), eq.SET())).parameters(), lr=0.1)
    refused(lambda: algorithm.attach(packed, sgd, total_steps=100), f"{why}: use masked storage")


@pytest.mark.parametrize("initial_mask", ["nonzeros", "random"])
def test_weights_without_values(initial_mask: Any) -> None:
    algorithm, message = (
        eq.SET(sparsity=0.5, initial_mask=initial_mask),
        '"0.weight" is on the meta device and has no values; call model.to_empty(device="cpu") and load its '
        "state_dict first",
    )
    refused(lambda: pack(net().to("meta"), algorithm), message)
    refused(lambda: pack(net().to("meta"), {"0.weight": torch.ones(16, 16, dtype=torch.bool)}), message)


@pytest.mark.parametrize("load", [eq.load, runtime.load, lambda path: eq.save(net(), path)])
def test_paths_that_are_none(load: Callable[[Any], Any]) -> None:
    told = 'pass the name of a file, such as "net.safetensors"'
    refused(lambda: load(None), f"the path is a NoneType; {told}")
    refused(lambda: load(3), f"the path is a int; {told}")
    refused(lambda: load(Path), f"the path is a class, Path; {told}")


@pytest.mark.parametrize(("pattern", "shown"), [(24, "24"), ([2, 4], "[2, 4]"), (b"2:4", "b'2:4'")])
def test_patterns_that_are_no_text(pattern: Any, shown: str) -> None:
    expected = 'expected "2:4", "transposable 2:4", a block such as "16x1", "butterfly 16x16" or "fan_in"'
    refused(lambda: eq.RigL(sparsity=0.5, pattern=pattern), f"pattern={shown}: {expected}")


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        ("x.onnx", "`equipoise export RUN x.onnx`, or torch.onnx.export of the dense model"),
        ("x.c", "`equipoise export RUN x.c`"),
        ("x.pt", "torch.save"),
        ("x.pth", "torch.save"),
    ],
)
def test_names_of_other_formats(name: str, maker: str, tmp_path: Path) -> None:
    told = f"save writes safetensors: name the file x.safetensors, or write {name} with {maker}"
    refused(lambda: eq.save(net(), tmp_path / name), told)
    assert not any(tmp_path.iterdir())
