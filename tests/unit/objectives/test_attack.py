"""PGD against Foolbox, bounds in exact arithmetic, and a model that is left unchanged."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.errors import UserError
from equipoise.objectives.attack import PGD, fgsm
from equipoise.objectives.norm_ball import L2Ball, LinfBall


def convnet(dtype: torch.dtype = torch.float64, classes: int = 5, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(6 * 16, classes),
        )
    return model.to(dtype)


def images(count: int = 8, dtype: torch.dtype = torch.float64, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 2, 4, 4, generator=generator, dtype=torch.float64)
    x[0, 0, 0], x[0, 1, 0] = 0.0, 1.0  # pixels at both ends of the range
    return x.to(dtype), torch.randint(5, (count,), generator=generator)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Foolbox as the oracle


def foolbox_examples(attack: PGD, model: nn.Module, x: Tensor, y: Tensor, start: Tensor | None) -> Tensor:
    foolbox = pytest.importorskip("foolbox")
    kind = {"linf": foolbox.attacks.LinfPGD, "l2": foolbox.attacks.L2PGD}[attack.norm]
    peer = kind(abs_stepsize=attack.step_size, steps=attack.steps, random_start=start is not None)
    if start is not None:
        peer.get_random_start = lambda x0, epsilon: type(x0)(start)
    wrapped = foolbox.PyTorchModel(model.eval(), bounds=(0, 1), device="cpu")
    return peer.run(wrapped, x, foolbox.criteria.Misclassification(y), epsilon=attack.eps)


@pytest.mark.parametrize(("norm", "eps", "step_size"), [("linf", 0.1, 0.02), ("l2", 0.7, 0.15)])
@pytest.mark.parametrize("random_start", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_examples_equal_foolbox(norm, eps, step_size, random_start, dtype) -> None:
    model, (x, y) = convnet(dtype), images(dtype=dtype)
    attack = PGD(norm, eps, step_size, steps=20, start="uniform" if random_start else "none")
    start = None
    if random_start:
        ball = {"linf": LinfBall, "l2": L2Ball}[norm](x, eps)
        start = ball.around(ball.uniform(seeded()))
    ours = attack.perturb(model, x, y, seeded() if random_start else None)
    theirs = foolbox_examples(attack, model, x, y, start)
    assert (ours - theirs).abs().max() < 1e-6
    assert (ours - x).abs().max() > eps / 10


def test_fgsm_equals_foolbox() -> None:
    foolbox = pytest.importorskip("foolbox")
    model, (x, y) = convnet(), images()
    peer = foolbox.attacks.LinfFastGradientAttack()
    wrapped = foolbox.PyTorchModel(model.eval(), bounds=(0, 1), device="cpu")
    theirs = peer.run(wrapped, x, foolbox.criteria.Misclassification(y), epsilon=0.05)
    assert (fgsm(eps=0.05).perturb(model, x, y) - theirs).abs().max() < 1e-6


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_uniform_starts_fill_the_ball(norm: str) -> None:
    # in 4 dimensions, away from the pixel bounds: linf coordinates are uniform, l2 lengths have P(r < t) = t⁴
    x = torch.full((4000, 4), 0.5, dtype=torch.float64)
    noise = {"linf": LinfBall, "l2": L2Ball}[norm](x, 0.2).uniform(seeded()) / 0.2
    sample = (noise[:, 0] + 1) / 2 if norm == "linf" else noise.norm(dim=1) ** 4
    grid = torch.linspace(0, 1, len(sample), dtype=torch.float64)
    assert (sample.sort().values - grid).abs().max() < 1.63 / len(sample) ** 0.5  # Kolmogorov, 1 %
    assert noise.mean(0).abs().max() < 0.05


def test_margin_gradient_points_from_the_label_to_its_best_rival() -> None:
    weight = torch.tensor([[1.0, 2.0, -3.0], [0.5, -1.0, 4.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
    model = nn.Linear(3, 3, bias=False).double()
    model.weight.data = weight
    x = torch.tensor([[0.2, 0.3, 0.4]], dtype=torch.float64)  # logits −0.4, 1.4, 8.1
    for label, rival in ((0, 2), (1, 2), (2, 1)):
        _, gradient = PGD(loss="margin").gradient(model, x, torch.tensor([label]), x)
        assert torch.equal(gradient[0], weight[rival] - weight[label])


# Bounds


@st.composite
def situations(draw: st.DrawFn) -> tuple[PGD, Tensor]:
    norm = draw(st.sampled_from(["linf", "l2"]))
    eps = draw(st.one_of(st.just(0.0), st.just(8 / 255), st.floats(1e-6, 1.0 if norm == "linf" else 5.0)))
    loss = draw(st.sampled_from(["ce", "kl", "margin"]))
    attack = PGD(
        norm,
        eps,
        step_size=draw(st.floats(1e-5, 2.0)),
        steps=draw(st.integers(1, 4)),
        restarts=draw(st.integers(1, 2)),
        start=draw(st.sampled_from(["uniform", "normal"] + ["none"] * (loss != "kl"))),
        loss=loss,
        early_exit=draw(st.booleans()),
    )
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    pixel = st.one_of(st.sampled_from([0.0, 1.0, 1e-30]), st.floats(0, 1))
    pixels = draw(st.lists(pixel, min_size=12, max_size=12))
    return attack, torch.tensor(pixels, dtype=torch.float64).reshape(3, 4).to(dtype)


@settings(max_examples=300, deadline=None)
@given(situation=situations(), seed=st.integers(0, 9))
def test_never_leaves_the_ball_or_the_pixel_range(situation: tuple[PGD, Tensor], seed: int) -> None:
    attack, x = situation
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(x.dtype)
    example = attack.perturb(model, x, torch.tensor([0, 1, 2]), seeded(seed))
    assert example.dtype == x.dtype
    for clean_row, row in zip(x.tolist(), example.tolist(), strict=True):
        change = [Fraction(b) - Fraction(a) for a, b in zip(clean_row, row, strict=True)]
        assert all(0 <= pixel <= 1 for pixel in row)
        if attack.norm == "linf":
            assert max(map(abs, change)) <= Fraction(attack.eps)
        else:
            assert sum(c * c for c in change) <= Fraction(attack.eps) ** 2


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_whole_ball_is_used(norm: str) -> None:
    """The safety margin of the bounds is a few rounding errors."""
    x = torch.full((2, 1000), 0.5)
    model = nn.Linear(1000, 2)
    example = PGD(norm, 0.3, 0.1, steps=9, start="none").perturb(model, x, torch.tensor([0, 1]))
    order = float("inf") if norm == "linf" else 2
    reached = torch.linalg.vector_norm((example - x).double(), ord=order, dim=1)
    assert reached.min() > 0.3 * (1 - 1e-5)


def test_small_steps_move_16_bit_images() -> None:
    """2.5·ε/50 is less than half the spacing of bfloat16 near 1: rounded at every step, no pixel would move."""
    x = torch.full((1, 64), 0.9, dtype=torch.bfloat16)
    model = nn.Linear(64, 2).bfloat16()
    model.weight.data[0], model.weight.data[1] = 0.1, -0.1  # different rows, so that every pixel has a gradient
    example = PGD(step_size=2.5 * 8 / 255 / 50, steps=50, start="none").perturb(model, x, torch.tensor([0]))
    assert ((example - x).abs() > 0.02).all()


def test_broken_gradients_do_not_reach_the_image() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x.sum(1) * float("nan"), x.sum(1)], dim=1)

    x = torch.rand(3, 4)
    for norm in ("linf", "l2"):
        assert torch.equal(PGD(norm, 0.1, start="none").perturb(Broken(), x, torch.zeros(3).long()), x)


def test_l2_steps_have_full_length_under_a_vanishing_gradient() -> None:
    model = nn.Linear(4, 2, bias=False)
    model.weight.data.mul_(1e-30)  # its square is zero in float32
    x = torch.full((1, 4), 0.5)
    example = PGD("l2", 0.2, 0.1, steps=1, start="none").perturb(model, x, torch.tensor([0]))
    assert torch.linalg.vector_norm(example - x).item() == pytest.approx(0.1, rel=1e-5)


# No side effects


@pytest.mark.parametrize("early_exit", [False, True])
def test_the_model_and_the_global_rng_are_left_unchanged(early_exit: bool) -> None:
    model, (x, y) = convnet(), images()
    model.train()
    model[1].eval()  # a frozen BatchNorm in a training model
    model[5].bias.requires_grad_(False)
    model[0].weight.grad = torch.full_like(model[0].weight, 3.0)
    flags = [module.training for module in model.modules()]
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    clean, random_state = x.clone(), torch.get_rng_state()

    example = PGD(early_exit=early_exit, restarts=2 if early_exit else 1).perturb(model, x, y, seeded())

    assert not example.requires_grad
    assert torch.equal(x, clean)
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model.modules()] == flags
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.full_like(model[0].weight, 3.0))
    assert all(parameter.grad is None for parameter in list(model.parameters())[1:])


def test_the_model_is_restored_after_an_error() -> None:
    class Failing(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            raise RuntimeError("boom")

    model = Failing(4, 2)
    with pytest.raises(RuntimeError, match="boom"):
        PGD().perturb(model, torch.rand(2, 4), torch.tensor([0, 1]), seeded())
    assert model.training
    assert model.weight.requires_grad


def test_the_model_is_attacked_in_eval_mode() -> None:
    model, (x, y) = convnet(), images()
    in_train = PGD().perturb(model.train(), x, y, seeded())
    assert torch.equal(in_train, PGD().perturb(model.eval(), x, y, seeded()))


class Watched(torch.autograd.Function):
    """x @ w.T that records which gradients autograd requests."""

    asked: ClassVar[list[tuple[bool, ...]]] = []

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x @ w.T

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        Watched.asked.append(ctx.needs_input_grad)
        return gradient @ ctx.saved_tensors[0], None


def test_one_pass_per_step_and_no_weight_gradient() -> None:
    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return Watched.apply(input, self.weight)

    Watched.asked.clear()
    PGD(steps=7).perturb(Layer(4, 3), torch.rand(2, 4), torch.tensor([0, 1]), seeded())
    assert Watched.asked == [(True, False)] * 7
    assert PGD(steps=7, restarts=3).passes == 21


def test_works_inside_no_grad() -> None:
    model, (x, y) = convnet(), images()
    with torch.no_grad():
        inside = PGD().perturb(model, x, y, seeded())
    assert torch.equal(inside, PGD().perturb(model, x, y, seeded()))


@pytest.mark.parametrize(("norm", "loss"), [("linf", "ce"), ("l2", "ce"), ("linf", "kl"), ("linf", "margin")])
def test_no_step_synchronises_with_the_host(norm: str, loss: str) -> None:
    """Tensors on the meta device hold no values, so reading one, as a synchronisation does, raises."""
    model, (x, y) = convnet().to("meta"), images()
    example = PGD(norm, loss=loss).perturb(model, x.to("meta"), y.to("meta"), seeded())
    assert example.shape == x.shape
    with pytest.raises((RuntimeError, NotImplementedError)):
        PGD(early_exit=True).perturb(model, x.to("meta"), y.to("meta"), seeded())


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_no_step_synchronises_with_the_host_on_a_gpu(norm: str) -> None:
    model, (x, y) = convnet(torch.float32).cuda(), images(dtype=torch.float32)
    x, y, generator = x.cuda(), y.cuda(), torch.Generator("cuda").manual_seed(0)
    attack = PGD(norm, 0.5)
    attack.perturb(model, x, y, generator)
    torch.cuda.set_sync_debug_mode("error")
    try:
        example = attack.perturb(model, x, y, generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.equal(example, x)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_replays_in_a_cuda_graph(norm: str) -> None:
    model, (x, y) = convnet(torch.float32).cuda(), images(dtype=torch.float32)
    x, y, generator = x.cuda(), y.cuda(), torch.Generator("cuda").manual_seed(0)
    attack = PGD(norm, 0.5, start="none")
    expected = attack.perturb(model, x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attack.perturb(model, x, y)
    graph.replay()
    torch.testing.assert_close(captured, expected, atol=1e-6, rtol=0)
    random_graph = torch.cuda.CUDAGraph()
    random_graph.register_generator_state(generator)
    with torch.cuda.graph(random_graph):
        drawn = replace(attack, start="uniform").perturb(model, x, y, generator)
    random_graph.replay()
    first = drawn.clone()
    random_graph.replay()
    assert not torch.equal(first, drawn)


def test_a_compiled_model_can_be_attacked() -> None:
    model, (x, y) = convnet(), images()
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(PGD().perturb(compiled, x, y, seeded()), PGD().perturb(model, x, y, seeded()))
    assert compiled.training
    assert model.training


# Errors


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"norm": "l1"}, 'no norm is called "l1"'),
        ({"loss": "hinge"}, 'no attack loss is called "hinge"'),
        ({"start": "gauss"}, 'start must be "uniform"'),
        ({"eps": -0.1}, "eps must be"),
        ({"eps": float("nan")}, "eps must be"),
        ({"eps": 8}, "8/255"),
        ({"step_size": 0.0}, "step_size must be"),
        ({"steps": 0}, "at least 1"),
        ({"restarts": 0}, "at least 1"),
        ({"loss": "kl", "start": "none"}, "no gradient at the image itself"),
    ],
)
def test_wrong_settings_are_named(settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        PGD(**settings)


def test_wrong_inputs_are_named() -> None:
    model, (x, y) = convnet(), images()
    for wrong_x, wrong_y, generator, words in (
        (x * 2 - 1, y, seeded(), "normalisation inside the model"),
        (x * float("nan"), y, seeded(), "must be pixels"),
        ((x * 255).byte(), y, seeded(), "floating point"),
        (x, y[:3], seeded(), "one integer"),
        (x, y.double(), seeded(), "int64"),
        (x[:0], y[:0], seeded(), "a batch of images"),
        (x, y, None, "pass a torch"),
    ):
        for method in (PGD().perturb, PGD().search):
            with pytest.raises(UserError, match=words):
                method(model, wrong_x, wrong_y, generator)


def test_a_model_without_input_gradient_is_named() -> None:
    class Steps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.one_hot((x.sum(1) > 2).long(), 2).float()

    with pytest.raises(UserError, match="no gradient with respect to its input"):
        PGD().perturb(Steps(), torch.rand(3, 4), torch.zeros(3).long(), seeded())
