"""Which weights are chosen to be sparse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from equipoise.errors import UserError
from equipoise.sparse import pack
from equipoise.topology import Static
from equipoise.topology.selection import select


class Named(nn.Module):
    """Modules under given names; never run."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def network() -> Named:
    return Named(
        stem=nn.Conv2d(3, 8, 3),
        norm=nn.BatchNorm2d(8),
        body=Named(conv=nn.Conv2d(8, 8, 3), fc=nn.Linear(8, 8)),
        head=nn.Linear(8, 2),
    )


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(4, 3),
        nn.Conv1d(4, 3, 3),
        nn.Conv2d(4, 3, 3),
        nn.Conv3d(4, 3, 3),
        nn.ConvTranspose1d(4, 3, 3),
        nn.ConvTranspose2d(4, 3, 3),
        nn.ConvTranspose3d(4, 3, 3),
    ],
    ids=lambda module: type(module).__name__,
)
def test_matrices_and_kernels_are_chosen_and_biases_are_not(module: nn.Module) -> None:
    assert list(select(Named(layer=module))) == ["layer.weight"]
    assert list(select(module)) == ["weight"]  # the module itself as the model


class Scaled(nn.Conv2d):
    """A convolution with a gain, as timm's ScaledStdConv2d."""

    def __init__(self) -> None:
        super().__init__(4, 3, 3)
        self.gain = nn.Parameter(torch.ones(3, 1, 1, 1))
        self.low_rank = nn.Parameter(torch.ones(3, 2))


def test_gains_are_never_chosen() -> None:
    assert list(select(Named(layer=Scaled()))) == ["layer.weight", "layer.low_rank"]
    assert list(select(Named(layer=Scaled()), include="*")) == ["layer.weight", "layer.low_rank"]
    assert list(select(Named(layer=nn.Linear(1, 4)))) == ["layer.weight"]


def test_all_projections_of_attention_are_chosen() -> None:
    packed = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    assert list(select(packed)) == ["in_proj_weight", "out_proj.weight"]
    separate = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True)
    assert list(select(separate)) == ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"]


NORMS_AND_EMBEDDINGS = [
    nn.BatchNorm1d(4),
    nn.BatchNorm2d(4),
    nn.BatchNorm3d(4),
    nn.SyncBatchNorm(4),
    nn.InstanceNorm2d(4, affine=True),
    nn.GroupNorm(2, 4),
    nn.LayerNorm((4, 5)),  # a weight of two dimensions that is no matrix
    nn.RMSNorm((4, 5)),
    nn.Embedding(10, 4),
    nn.EmbeddingBag(10, 4),
]


@pytest.mark.parametrize("module", NORMS_AND_EMBEDDINGS, ids=lambda module: type(module).__name__)
@pytest.mark.parametrize("include", [(), ("*",), (nn.Module,)], ids=["default", "pattern", "type"])
def test_norms_and_embeddings_are_never_chosen(module: nn.Module, include: tuple[str | type[nn.Module], ...]) -> None:
    """rigl-torch makes GroupNorm, LayerNorm and Embedding sparse: it takes whatever has a `weight`."""
    assert list(select(Named(other=module, fc=nn.Linear(4, 3)), include)) == ["fc.weight"]


@pytest.mark.parametrize("embedding_first", [True, False])
def test_a_weight_tied_to_an_embedding_is_not_chosen(embedding_first: bool) -> None:
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10)
    head.weight = embedding.weight
    order = {"embedding": embedding, "head": head} if embedding_first else {"head": head, "embedding": embedding}
    assert list(select(Named(**order, fc=nn.Linear(4, 4)))) == ["fc.weight"]


def test_a_weight_shared_by_two_layers_is_chosen_once() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    assert list(select(Named(first=first, second=second))) == ["first.weight"]


def test_include_and_exclude_take_patterns_and_types() -> None:
    model = network()
    every = ["stem.weight", "body.conv.weight", "body.fc.weight", "head.weight"]
    assert list(select(model)) == every
    assert list(select(model, include=["body.*"])) == every[1:3]
    assert list(select(model, include=["head"])) == ["head.weight"]
    assert list(select(model, include=["head.weight"])) == ["head.weight"]
    assert list(select(model, include=[nn.Conv2d])) == [every[0], every[1]]
    assert list(select(model, exclude=[nn.Conv2d, "head"])) == ["body.fc.weight"]
    assert list(select(model, include=[nn.Linear], exclude=["body.*"])) == ["head.weight"]


def test_include_reaches_types_that_are_not_sparse_by_default() -> None:
    model = Named(rnn=nn.GRU(4, 6), fc=nn.Linear(6, 2))
    assert list(select(model)) == ["fc.weight"]
    assert list(select(model, include=["rnn"])) == ["rnn.weight_ih_l0", "rnn.weight_hh_l0"]


def test_first_and_last_may_stay_dense() -> None:
    names = list(select(network(), dense_first=True, dense_last=True))
    assert names == ["body.conv.weight", "body.fc.weight"]
    with pytest.raises(UserError, match="no weight of the model is chosen"):
        select(nn.Linear(4, 3), dense_first=True, dense_last=True)


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("wrong", ["boody.*", "norm", "stem.bias"])
def test_a_pattern_that_matches_nothing_is_refused(option: str, wrong: str) -> None:
    chosen: dict[str, Any] = {option: [wrong]}
    with pytest.raises(UserError, match=rf'"{wrong}" matches no weight.*stem\.weight') as error:
        select(network(), **chosen)
    assert "\n" not in str(error.value)


def test_a_model_without_shapes_is_refused() -> None:
    with pytest.raises(UserError, match="lazy layers"):
        select(nn.Sequential(nn.LazyLinear(4)))


def test_frozen_and_empty_weights_are_left_alone() -> None:
    model = network()
    model.get_parameter("stem.weight").requires_grad_(False)
    assert list(select(model)) == ["body.conv.weight", "body.fc.weight", "head.weight"]
    with pytest.warns(UserWarning, match="zero-element"):
        empty = nn.Linear(0, 4)
    assert list(select(Named(empty=empty, fc=nn.Linear(4, 4)))) == ["fc.weight"]


def test_names_are_the_users_own_inside_wrappers() -> None:
    model = network()
    compiled: Any = torch.compile(model, backend="eager")
    for wrapped in (compiled, nn.DataParallel(model), nn.DataParallel(compiled)):
        assert {name: id(w) for name, w in select(wrapped).items()} == {n: id(w) for n, w in select(model).items()}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_is_refused_by_name_unless_excluded() -> None:
    with torch.no_grad():  # else it cannot be copied, and so not packed
        old = nn.utils.weight_norm(nn.Linear(4, 4))
    model = Named(body=Named(fc=old), head=nn.Linear(4, 2))
    with pytest.raises(UserError, match=r'"body.fc" has weight_norm.* exclude="body.fc"') as error:
        Static(sparsity=0.5).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r'"body.fc" has weight_norm'):
        pack(model, Static(sparsity=0.5))
    assert list(select(model, exclude="body.fc")) == ["head.weight"]
    nn.utils.remove_weight_norm(old)
    assert list(select(model)) == ["body.fc.weight", "head.weight"]


def test_parametrized_weights_stay_dense_and_are_named_in_one_warning(recwarn: pytest.WarningsRecorder) -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3))
    model = Named(body=Named(fc=normed, conv=spectral), head=nn.Linear(4, 2))
    topology = Static(sparsity=0.5).attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(topology.masks) == ["head.weight"]
    (warning,) = recwarn.list
    assert '"body.fc.weight", "body.conv.weight"' in str(warning.message)
    assert warning.filename == __file__
    recwarn.clear()
    select(model, exclude="body.*")
    assert list(select(model, include=nn.Conv2d)) == ["body.conv.parametrizations.weight.original"]  # as asked for
    assert not recwarn.list
    with pytest.raises(UserError, match="has weight_norm"):
        select(model, include=nn.Linear)
