"""Packed models against the dense models they came from, judged in float64."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equipoise import SET
from equipoise.deploy.frozen import freeze, is_frozen
from equipoise.errors import UserError
from equipoise.kernels import library, operators
from equipoise.models.resnet import resnet18
from equipoise.models.vgg import vgg_c
from equipoise.storage.blocked_norm import BlockedBatchNorm
from equipoise.storage.pack import blocked_modules, describe, report, unpack
from equipoise.storage.packed_modules import PackedConv2d, PackedLayer, packed
from equipoise.topology.packing import pack

pytestmark = pytest.mark.skipif(not library.available(), reason=library.reason())


class Residual(nn.Module):
    """Strided and plain residual blocks, as in ResNets, and every form of the common operations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(8)
        self.conv1 = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(12, momentum=None)
        self.conv2 = nn.Conv2d(12, 12, 3, padding=2, dilation=2, groups=3)
        self.bn2 = nn.BatchNorm2d(12, affine=False)
        self.short = nn.Sequential(nn.Conv2d(8, 12, 1, stride=2), nn.BatchNorm2d(12))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        y = self.bn1(self.conv1(x)).relu()
        x = torch.relu(self.bn2(self.conv2(y)) + self.short(x))
        x = F.max_pool2d(x + y, 2)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Strange(nn.Module):
    """Operations without a blocked form between packed layers, and a norm that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, (1, 3), padding=(0, 1))
        self.norm = nn.BatchNorm2d(6)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x))
        x = self.norm(F.gelu(self.b(x)))
        return torch.cat([x, F.avg_pool2d(self.b(x), 1)], 1).mean((2, 3)) * 2


class Untraceable(nn.Module):
    """Control flow that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return x.mean((2, 3)) if float(x.detach().sum()) > -1e9 else x.flatten(1)


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(10, 7, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(7, 6, 1, padding=1), nn.Dropout(0.0),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.BatchNorm1d(9), nn.Linear(9, 4),
    )  # fmt: skip


def sequences() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 5, stride=2, padding=2),
    )  # fmt: skip


IMAGES, SEQUENCES = (3, 13, 11), (3, 13)
MODELS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (plain, IMAGES), (Residual, IMAGES), (Strange, IMAGES), (Untraceable, IMAGES), (sequences, SEQUENCES),
]  # fmt: skip
names = [make.__name__ for make, _ in MODELS]


def sparse(model: nn.Module, density: float) -> dict[str, Tensor]:
    """Masks for all weights of two or more dimensions, applied; running statistics moved off their start."""
    layers = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d))]
    masks = {f"{n}.weight": torch.rand_like(model.get_submodule(n).weight) < density for n in layers}  # type: ignore[arg-type]
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name).mul_(mask)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("running_mean"):
                buffer.normal_()
    return masks


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of active weights by the usual names."""
    model.zero_grad()
    out = model(x)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weight).sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name.replace(".values", ".weight")] = parameter.grad
    return out.detach(), found


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("images", [2, 17])
@pytest.mark.parametrize(("make", "shape"), MODELS, ids=names)
def test_same_function_same_gradients_same_statistics(
    make: Callable[[], nn.Module], shape: tuple[int, ...], images: int, density: float
) -> None:
    torch.manual_seed(1)
    model = make()
    masks = sparse(model, density)
    mine, exact = pack(model, masks), copy.deepcopy(model).double()
    x = torch.randn(images, *shape)
    for training in (True, False):
        mine.train(training)
        exact.train(training)
        out, grads = gradients(mine, x)
        exact_out, exact_grads = gradients(exact, x.double())
        torch.testing.assert_close(out.double(), exact_out, rtol=1e-3, atol=1e-4)
        assert grads.keys() == exact_grads.keys()
        for name, grad in grads.items():
            wanted = exact_grads[name][masks[name]] if name in masks else exact_grads[name]
            torch.testing.assert_close(
                grad.double(), wanted, rtol=1e-2, atol=2e-3 * (1 + float(wanted.abs().max())) if wanted.numel() else 0
            )
    state, _ = unpack(mine)
    for name, buffer in exact.named_buffers():
        torch.testing.assert_close(state[name].double(), buffer.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("make", "shape"), MODELS, ids=names)
def test_round_trip_is_exact(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = make()
    masks = sparse(model, 0.3)
    mine = pack(model, masks)
    state, back = unpack(mine)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert back.keys() == masks.keys()
    assert all(torch.equal(back[name], mask) for name, mask in masks.items())
    make().load_state_dict(state)


@pytest.mark.parametrize("make", [vgg_c, resnet18])
def test_real_networks_stay_blocked_throughout(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    mine = pack(model, sparse(model, 0.02))
    assert blocked_modules(mine) == [""]
    assert set(describe(mine).values()) == {"sparse"}
    assert is_frozen(freeze(mine))
    x = torch.rand(16, 3, 32, 32)
    mine(x)
    calls = []
    monkeypatch.setattr("equipoise.kernels.blocked._copy", lambda *_, to_blocked: calls.append(to_blocked))
    mine(x)
    assert calls == [True, False]  # into the layout once, and out of it once


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("make", "shape"), MODELS, ids=names)
def test_frozen_model_is_the_model_in_eval_mode(
    make: Callable[[], nn.Module], shape: tuple[int, ...], density: float
) -> None:
    torch.manual_seed(2)
    model = make().eval()
    frozen, exact = freeze(pack(model, sparse(model, density))), copy.deepcopy(model).double()
    for images in (0, 1, 3, 8, 37, 64, 200):  # the last: more than go through it together
        x = torch.randn(images, *shape)
        torch.testing.assert_close(frozen(x).double(), exact(x.double()), rtol=1e-3, atol=1e-4)
    larger = torch.randn(2, *shape[:-1], shape[-1] + 2) if make is not plain else x
    torch.testing.assert_close(frozen(larger).double(), exact(larger.double()), rtol=1e-3, atol=1e-4)


def test_frozen_models_can_be_copied() -> None:
    model = Residual().eval()
    frozen = freeze(pack(model, sparse(model, 0.3)))
    x = torch.randn(3, *IMAGES)
    wanted = frozen(x)
    assert is_frozen(frozen)
    assert torch.equal(copy.deepcopy(frozen)(x), wanted)


def test_packed_models_can_be_copied_saved_and_loaded() -> None:
    torch.manual_seed(0)
    model = plain()
    mine = pack(model, sparse(model, 0.3))
    x = torch.randn(4, *IMAGES)
    wanted = mine(x)
    assert torch.equal(copy.deepcopy(mine).train()(x), wanted)
    file = io.BytesIO()
    torch.save(mine.state_dict(), file)
    file.seek(0)
    other = plain()
    theirs = pack(other, sparse(other, 0.5))  # another number of active weights
    theirs.load_state_dict(torch.load(file))
    assert torch.equal(theirs(x), mine(x))


class Hoarder(nn.Module):
    """State that the forward does not use, does not save, or uses in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.head, self.body = nn.Linear(3, 3), nn.Linear(6, 4), nn.Sequential(nn.Conv2d(3, 6, 3))
        self.body.register_buffer("shift", torch.tensor(0.5), persistent=False)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.register_buffer("kept", torch.tensor(3.0))
        self.plain = torch.tensor(4.0)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        x = self.body(x) * self.scale + self.plain
        x += self.body.shift
        return self.head(tripled(x.relu()).mean((2, 3))) * factor


def tripled(x: Tensor) -> Tensor:
    return 3 * x


def pickled(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied: nn.Module = torch.load(file, weights_only=False)
    return copied


COPIES = [copy.deepcopy, pickled, saved]


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize(("make", "shape"), [*MODELS, (Hoarder, IMAGES)], ids=[*names, "Hoarder"])
def test_copies_of_packed_models_are_the_same_models(
    make: Callable[[], nn.Module], shape: tuple[int, ...], copied: Callable[[nn.Module], nn.Module]
) -> None:
    torch.manual_seed(3)
    model, x = make(), torch.randn(5, *shape)
    mine = pack(model, sparse(model, 0.3))
    next(mine.children()).eval()
    theirs = copied(copied(mine))
    assert blocked_modules(theirs) == blocked_modules(mine)
    assert [type(module).__name__ for module in theirs.modules()] == [type(m).__name__ for m in mine.modules()]
    assert [module.training for module in theirs.modules()] == [module.training for module in mine.modules()]
    assert list(theirs.state_dict()) == list(mine.state_dict())
    assert [name for name, _ in theirs.named_parameters()] == [name for name, _ in mine.named_parameters()]
    (out, grads), (wanted, wanted_grads) = gradients(theirs, x), gradients(mine, x)
    assert torch.equal(out, wanted)
    assert grads.keys() == wanted_grads.keys()
    assert all(torch.equal(grads[name], grad) for name, grad in wanted_grads.items())
    assert describe(theirs) == describe(mine)


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize(("make", "shape"), [*MODELS, (Hoarder, IMAGES)], ids=[*names, "Hoarder"])
def test_copies_of_frozen_models_are_the_same_models(
    make: Callable[[], nn.Module], shape: tuple[int, ...], copied: Callable[[nn.Module], nn.Module]
) -> None:
    torch.manual_seed(3)
    model, x = make(), torch.randn(5, *shape)
    frozen = freeze(pack(model, sparse(model, 0.3)))
    theirs = copied(copied(frozen))
    assert is_frozen(theirs) is is_frozen(frozen)
    assert torch.equal(theirs(x), frozen(x))
    assert torch.equal(freeze(theirs)(x), frozen(x))


def test_the_parameter_is_the_active_weights() -> None:
    model = plain()
    masks = sparse(model, 0.1)
    mine = pack(model, masks)
    sizes = {name: p.numel() for name, p in mine.named_parameters() if name.endswith("values")}
    assert sizes == {name.replace("weight", "values"): int(mask.sum()) for name, mask in masks.items()}
    gradients(mine, torch.randn(2, *IMAGES))
    assert all(p.grad is None or p.grad.shape == p.shape for p in mine.parameters())


def test_rewiring_changes_the_function() -> None:
    layer = packed(nn.Conv2d(4, 5, 3), torch.rand(5, 4, 3, 3) < 0.2)
    assert isinstance(layer, PackedConv2d)
    x = torch.randn(2, 4, 6, 6)
    layer(x)
    for count in (layer.values.numel(), 7):
        index = torch.randperm(180)[:count].sort().values
        layer.rewire(index, torch.randn(count))
        torch.testing.assert_close(layer(x), F.conv2d(x, layer.weight, layer.bias))
    with pytest.raises(UserError, match="ascending"):
        layer.rewire(torch.tensor([3, 2]), torch.zeros(2))


def test_a_dense_layer_runs_dense_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    layers = [nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    model = nn.Sequential(
        *copy.deepcopy(layers), *copy.deepcopy(layers), *copy.deepcopy(layers), nn.Conv2d(64, 64, 1)
    )
    densities = {"0.weight": 0.01, "3.weight": 1.0, "6.weight": 0.01, "9.weight": 0.05}
    masks = {name: torch.rand(model.get_parameter(name).shape) < density for name, density in densities.items()}
    mine = pack(model, masks, report=True)
    assert blocked_modules(mine) == [""]
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["module", "shape", "sparsity", "runs"]
    assert table[2].split()[:4] == ["3", "64x64x3x3", "0.00", "%"]
    assert [line.split("  ")[-1] for line in table[1:]] == list(describe(mine).values())
    slow = "dense: the dense kernel is faster at this density"
    assert describe(mine) == {"0": "sparse", "3": slow, "6": "sparse", "9": "sparse"}
    x = torch.randn(16, 64, 5, 5)
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name).mul_(mask)
    torch.testing.assert_close(mine(x), model(x), rtol=1e-4, atol=1e-4)


class Reader(nn.Module):
    """Weights that an algorithm leaves dense, next to norms and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.position = nn.Parameter(torch.randn(1, 4, 16))
        self.rnn = nn.LSTM(16, 16)
        self.norm = nn.LayerNorm((4, 16))
        self.gate = nn.Conv2d(4, 4, 1)
        self.gate.gain = nn.Parameter(torch.ones(4, 1, 1, 1))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.attention = nn.MultiheadAttention(16, 2, add_bias_kv=True)
        self.value = nn.Linear(16, 1)
        self.out = nn.Linear(16, 20)
        self.out.weight = self.tokens.weight


@pytest.mark.filterwarnings("ignore:parametrized weights")
def test_the_table_has_the_layers_that_are_not_packed_with_the_reason() -> None:
    model = Reader()
    with torch.no_grad():
        model.value.weight[:, :4] = 0
    mine = pack(model, SET(sparsity=0.5, exclude=("value", "gate")))
    rows = [row.split(maxsplit=1)[0] + row[row.index("%") + 1 :] for row in report(mine).splitlines()[1:]]
    assert rows == [
        "position  dense: no mask",
        'tokens  dense: its weight is also that of "out"',
        "rnn  dense: LSTM layers are not packed",
        "gate  dense: no mask",
        "spectral  dense: a parametrization computes its weight",
        f"attention.out_proj  {describe(mine)['attention.out_proj']}",
        f"attention.in_proj  {describe(mine)['attention.in_proj']}",
        "value  dense: no mask",
        'out  dense: its weight is also that of "tokens"',
    ]
    table = {row.split()[0]: row.split()[1:4] for row in report(mine).splitlines()}
    assert table["rnn"] == ["2", "weights", "0.00"]
    assert table["value"] == ["1x16", "25.00", "%"]


def test_a_table_of_a_single_layer() -> None:
    assert report(nn.Linear(3, 3)).splitlines()[1] == "weight    3x3    0.00 %  dense: no mask"


@pytest.mark.parametrize(("density", "images", "blocked"), [(0.02, 16, True), (0.02, 1, False), (0.6, 16, False)])
def test_a_network_whose_dense_kernels_are_faster_runs_dense(
    density: float, images: int, blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense weights, or a single image, which the blocked layout would pad to sixteen."""
    model = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(3)))
    masks = sparse(model, density)
    mine, x = pack(model, masks), torch.randn(images, 64, 4, 4)
    wanted = model(x)
    torch.testing.assert_close(mine(x), wanted, rtol=1e-4, atol=1e-4)
    calls: list[object] = []
    kernel = operators._run_conv
    monkeypatch.setattr(operators, "_run_conv", lambda *args, **kwargs: (calls.append(1), kernel(*args, **kwargs)))
    mine(x)
    assert bool(calls) is blocked


def test_linear_takes_any_leading_dimensions() -> None:
    layer = packed(nn.Linear(6, 4), torch.rand(4, 6) < 0.4)
    assert isinstance(layer, PackedLayer)
    x = torch.randn(2, 3, 5, 6)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_without_kernels_a_packed_model_runs_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_find", lambda: "no C compiler found")
    model = plain()
    mine = pack(model, sparse(model, 0.3))
    x = torch.randn(4, *IMAGES)
    torch.testing.assert_close(mine(x), model(x))
    assert set(describe(mine).values()) == {"dense: no C compiler found"}


def test_shared_state_of_a_norm_moves_with_its_model() -> None:
    model = plain()
    mine = pack(model, sparse(model, 0.3))
    norms = [module for module in mine.modules() if isinstance(module, BlockedBatchNorm)]
    assert norms
    for norm in norms:
        norm.reset_running_stats()
        norm.weight.data.fill_(3.0)
    state, _ = unpack(mine)
    assert float(state["1.weight"].min()) == 3.0


@pytest.mark.parametrize(
    ("name", "mask", "message"),
    [
        ("nowhere.weight", torch.ones(2, 2).bool(), "no layer"),
        ("0.weight", torch.ones(2, 2).bool(), "shape"),
        ("0.weight", torch.ones(10, 3, 3, 3), "boolean"),
        ("1.weight", torch.ones(10).bool(), "cannot pack"),
        ("0.bias", torch.ones(10).bool(), "cannot pack"),
    ],
)
def test_wrong_masks_are_refused(name: str, mask: Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pack(plain(), {name: mask})


def test_wrong_types_are_refused() -> None:
    with pytest.raises(UserError, match="float32 on cpu"):
        pack(plain().double(), {"0.weight": torch.ones(10, 3, 3, 3).bool()})


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_an_algorithm_refuses_before_the_model_is_copied() -> None:
    """torch cannot copy a layer with the old weight_norm and raises an error of many lines."""
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 4))
    with pytest.raises(UserError, match=r'^"0" has weight_norm'):
        pack(model, SET(sparsity=0.9))
