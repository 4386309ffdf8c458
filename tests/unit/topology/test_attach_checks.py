"""One line for each wrong use of attach, and a warning for what an attached model should not meet."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from equipoise.errors import UserError
from equipoise.sparse import pack
from equipoise.topology import RigL, Static
from topology_helpers import make, perceptron, train


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


WRONG: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "swapped": (
        lambda m: RigL().attach(sgd(m), m, 10),  # type: ignore[arg-type]
        "RigL().attach(model, optimizer): the model and the optimizer are swapped",
    ),
    "class": (
        lambda m: Static().attach(m, torch.optim.SGD),  # type: ignore[arg-type]
        "Static().attach(model, optimizer): SGD is a class; pass an optimizer, such as SGD(model.parameters(), lr=0.1)",
    ),
    "parameters": (
        lambda m: Static().attach(m.parameters(), sgd(m)),  # type: ignore[arg-type]
        "Static().attach(model, optimizer): the model is a generator; pass a torch.nn.Module",
    ),
    "model class": (
        lambda m: Static().attach(nn.Linear, sgd(m)),  # type: ignore[arg-type]
        "Static().attach(model, optimizer): the model is a class, Linear; pass a torch.nn.Module",
    ),
    "scheduler": (
        lambda m: Static().attach(m, torch.optim.lr_scheduler.StepLR(sgd(m), 1)),  # type: ignore[arg-type]
        "Static().attach(model, optimizer): the optimizer is a StepLR",
    ),
    "made before pack": (
        lambda m: Static().attach(pack(m, Static()), sgd(m)),
        "the optimizer has no packed weight; make it from the parameters of the model after pack()",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_one_line_and_change_nothing(case: str) -> None:
    call, message = WRONG[case]
    model = perceptron()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError) as error:
        call(model)
    assert str(error.value) == message
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def warned(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, steps)
    return caught


def test_training_past_the_end_is_warned_about_once() -> None:
    model, optimizer, _ = make("rigl", total=10)
    assert not warned(model, optimizer, range(10))
    (caught,) = warned(model, optimizer, range(10, 14))
    assert str(caught.message) == (
        "step 11 is past total_steps=10, and the topology no longer changes; "
        "attach with the number of steps of the whole training"
    )


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("kind", ["pruned", "parametrized"])
def test_pruning_an_attached_model_is_warned_about_once(kind: str) -> None:
    model, optimizer, topology = make("static")
    copies = copy.deepcopy((model, optimizer, topology))
    assert not warned(model, optimizer, range(2))
    for net, opt, _ in ((model, optimizer, topology), copies):
        if kind == "pruned":
            prune.l1_unstructured(net.last, "weight", 0.5)
        else:
            parametrize.register_parametrization(net.last, "weight", Twice())
        (caught,) = warned(net, opt, range(2, 5))
        assert str(caught.message) == (
            '"last.weight" was pruned or parametrized after attaching, and the topology does not know its zeros; '
            "detach, call torch.nn.utils.prune.remove, and attach Static.from_nonzeros()"
        )


def test_a_pruned_layer_is_refused_before_attaching() -> None:
    model = perceptron()
    prune.l1_unstructured(model.last, "weight", 0.5)
    before = model.last.weight_orig.detach().clone()
    with pytest.raises(UserError) as error:
        Static(sparsity=0.5).attach(model, sgd(model))
    assert str(error.value) == (
        '"last" is pruned by torch.nn.utils.prune; call prune.remove(module, "weight") before attaching, '
        "which makes its zeros permanent"
    )
    assert torch.equal(model.last.weight_orig, before)


def test_the_way_out_of_pruning_that_the_warning_names() -> None:
    model, optimizer, topology = make("static")
    prune.l1_unstructured(model.last, "weight", 30)
    topology.detach()
    prune.remove(model.last, "weight")
    zeros = {name: p == 0 for name, p in model.named_parameters() if p.dim() > 1}
    Static.from_nonzeros().attach(model, optimizer)
    assert not warned(model, optimizer, range(3))
    assert all(torch.equal(model.get_parameter(name) == 0, zero) for name, zero in zeros.items())
