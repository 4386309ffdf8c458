"""Robust accuracy: the exact value for a linear model, monotone counts, and warnings about gradient masking."""

from __future__ import annotations

import sys
import types
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.errors import UserError
from equipoise.objectives import ATTACKS, PGD, GradientMaskingWarning, RobustResult, autoattack, robust_accuracy
from equipoise.objectives.gradient_masking import masking_caution
from equipoise.objectives.norm_ball import NORMS


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(count: int = 200, seed: int = 0, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Images of 16 pixels around one random pattern per class."""
    generator = seeded(seed)
    centres = 0.3 + 0.4 * torch.rand(classes, 16, generator=seeded(99))
    y = torch.randint(classes, (count,), generator=generator)
    noise = 0.12 * torch.randn(count, 16, generator=generator)
    return (centres[y] + noise).clamp(0, 1), y


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    x, y = blobs(512)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


class Scaled(nn.Module):
    """The same decisions with logits so large that the gradient of float32 cross-entropy is zero."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.model(x)


def in_batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


# The number itself


@pytest.mark.parametrize(("norm", "dual"), [("linf", 1), ("l2", 2)])
def test_equals_the_exact_robust_accuracy_of_a_linear_model(norm: str, dual: int) -> None:
    """w·x decides between two classes: the worst perturbation lowers the margin by exactly ε times the dual norm."""
    generator = seeded(3)
    w = torch.randn(16, generator=generator)
    x = 0.3 + 0.4 * torch.rand(300, 16, generator=generator)  # ε-balls stay within the pixel range
    b = -(x @ w).mean()
    y = (x @ w + b > 0).long()
    y[:30] = 1 - y[:30]  # some are misclassified without an attack
    model = nn.Linear(16, 2)
    model.weight.data, model.bias.data = torch.stack([-w, w]) / 2, torch.stack([-b, b]) / 2
    eps = 0.05
    margin = (x @ w + b) * (2 * y - 1)
    attack = PGD(norm, eps, eps / 4, steps=10, start="none", early_exit=True)
    result = robust_accuracy(model, in_batches(x, y, 64), attack, seeded())
    reach = eps * torch.linalg.vector_norm(w, ord=dual)
    assert (margin.abs() - reach).abs().min() > 1e-5  # no image is on the boundary
    assert result.images == 300
    assert result.clean == pytest.approx((margin > 0).double().mean().item())
    assert result.robust == pytest.approx((margin > reach).double().mean().item())


def test_examples_of_a_search_fool_exactly_the_images_it_reports(trained: nn.Module) -> None:
    x, y = blobs(seed=1)
    for norm, eps in (("linf", 0.1), ("l2", 0.4)):
        for early_exit in (False, True):
            attack = PGD(norm, eps, eps / 5, steps=5, restarts=3, early_exit=early_exit)
            examples, correct, fooled = attack.search(trained, x, y, seeded())
            assert torch.equal(trained(examples).argmax(1) != y, fooled)
            assert torch.equal(trained(x).argmax(1) == y, correct)
            assert fooled[~correct].all()
            assert 0 < (fooled & correct).sum() < correct.sum()
            ball = NORMS[norm](x, eps)
            assert torch.allclose(ball.project(examples), examples, atol=1e-6)


def test_images_that_are_not_fooled_are_returned_as_the_last_iterate(trained: nn.Module) -> None:
    x, y = blobs(seed=1)
    attack = PGD(eps=0.1, step_size=0.02, steps=5, start="none")
    examples, _, fooled = attack.search(trained, x, y)
    assert 0 < fooled.sum() < len(x)
    assert torch.equal(examples[~fooled], attack.perturb(trained, x, y)[~fooled])


def test_a_misclassified_image_is_fooled_even_if_the_attack_corrects_it() -> None:
    class WrongAtOnePoint(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            near = 1 - 1000 * (x - 0.5).abs().amax(1)
            return torch.stack([torch.zeros_like(near), near], dim=1)

    x, y = torch.full((3, 4), 0.5), torch.zeros(3, dtype=torch.long)
    attack = PGD(eps=0.1, step_size=1e-6, steps=2)
    assert (WrongAtOnePoint()(attack.perturb(WrongAtOnePoint(), x, y, seeded())).argmax(1) == y).all()
    assert attack.search(WrongAtOnePoint(), x, y, seeded()).fooled.all()


def test_early_exit_changes_the_work_not_the_count(trained: nn.Module) -> None:
    x, y = blobs(seed=1)
    attack = PGD(eps=0.1, step_size=0.02, steps=10, restarts=5)
    seen = [0, 0]
    outcomes = []
    for early_exit in (False, True):

        def count(module: nn.Module, inputs: tuple[Tensor], at: int = int(early_exit)) -> None:
            seen[at] += len(inputs[0])

        handle = trained.register_forward_pre_hook(count)
        outcomes.append(replace(attack, early_exit=early_exit).search(trained, x, y, seeded()))
        handle.remove()
    assert torch.equal(outcomes[0].fooled, outcomes[1].fooled)
    assert seen[0] == len(x) * (1 + 5 * 11)
    assert seen[1] < 0.8 * seen[0]


def test_early_exit_does_not_attack_misclassified_images(trained: nn.Module) -> None:
    x, _ = blobs()
    wrong = (trained(x).argmax(1) + 1) % 4
    seen: list[int] = []
    handle = trained.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    PGD(restarts=3, early_exit=True).search(trained, x, wrong, seeded())
    handle.remove()
    assert seen == [len(x)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    norm=st.sampled_from(["linf", "l2"]),
    loss=st.sampled_from(["ce", "kl", "margin"]),
    steps=st.integers(1, 4),
    restarts=st.integers(1, 2),
    early_exit=st.booleans(),
)
def test_never_above_clean_and_never_raised_by_more_work(seed, norm, loss, steps, restarts, early_exit) -> None:
    """Large steps from random starts overshoot, so the last iterate alone would not satisfy this."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).double()
    x, y = blobs(60, seed)
    batches = in_batches(x.double(), y, 25)
    attack = PGD(norm, 0.3, 0.25, steps, restarts, loss=loss, early_exit=early_exit)

    def result(**changed: int) -> RobustResult:
        return robust_accuracy(model, batches, replace(attack, **changed), seeded(seed), check_masking=False)

    fewer = result()
    assert fewer.robust <= fewer.clean
    assert result(steps=steps + 3).robust <= fewer.robust
    assert result(restarts=restarts + 2).robust <= fewer.robust


def test_progress_and_names(trained: nn.Module) -> None:
    x, y = blobs(50)
    seen: list[RobustResult] = []
    last = robust_accuracy(trained, in_batches(x, y, 20), "pgd10", seeded(), on_progress=seen.append)
    assert [result.images for result in seen] == [20, 40, 50]
    assert seen[-1] == last
    attack = ATTACKS["pgd50x10"]()
    assert (attack.norm, attack.eps, attack.steps, attack.restarts) == ("linf", 8 / 255, 50, 10)
    assert attack.step_size == pytest.approx(2.5 * 8 / 255 / 50)
    assert ATTACKS["l2pgd50x10"]().norm == "l2"
    assert all(ATTACKS.describe().values())
    with pytest.raises(UserError, match='did you mean "pgd20"'):
        robust_accuracy(trained, [(x, y)], "pgd200", seeded())
    with pytest.raises(UserError, match="no images"):
        robust_accuracy(trained, [], "fgsm")


# Gradient masking


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_model_without_masking_raises_no_warning(trained: nn.Module, norm: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = robust_accuracy(trained, [blobs(seed=2)], PGD(norm, 0.1), seeded())
    assert result.caution == ""
    assert result.robust < result.clean


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_saturated_logits_are_caught(trained: nn.Module, norm: str) -> None:
    x, y = blobs(seed=2)
    eps = {"linf": 0.1, "l2": 0.4}[norm]
    masked, attack = Scaled(trained, 1e4), PGD(norm, eps, step_size=eps / 5)
    honest = robust_accuracy(trained, [(x, y)], attack, seeded())
    with pytest.warns(GradientMaskingWarning, match="input gradient of the ce loss is zero"):
        result = robust_accuracy(masked, [(x, y)], attack, seeded())
    assert result.caution
    assert result.clean == honest.clean
    assert result.robust > honest.robust + 0.1  # the overestimate that the warning is about
    # the advice of the warning is good: the margin does not saturate
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advised = robust_accuracy(masked, [(x, y)], replace(attack, loss="margin"), seeded())
    assert advised.robust <= honest.robust + 0.02


def test_uninformative_gradients_are_caught(trained: nn.Module) -> None:
    """A fine sine on every pixel gives large random gradients and does not change the decisions."""

    class Shattered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return trained(x - 1e-4 * (3e4 * x).sin())

    x, y = blobs(seed=2)
    assert "without any bound" in masking_caution(Shattered(), x, y, PGD(eps=0.1))


def test_the_check_draws_nothing_and_ignores_misclassified_images(trained: nn.Module) -> None:
    x, y = blobs(40)
    generator = seeded()
    with_check = robust_accuracy(trained, [(x, y), (x, y)], PGD(eps=0.05), generator)
    state = generator.get_state()
    generator = seeded()
    without = robust_accuracy(trained, [(x, y), (x, y)], PGD(eps=0.05), generator, check_masking=False)
    assert with_check == without
    assert torch.equal(generator.get_state(), state)
    always_wrong = (trained(x).argmax(1) + 1) % 4
    assert masking_caution(Scaled(trained, 1e4), x, always_wrong, PGD()) == ""


# AutoAttack


def test_autoattack_missing_names_the_extra(trained: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    with pytest.raises(UserError, match=r"equipoise\[autoattack\]"):
        autoattack(trained, [blobs(4)])


class FakeAutoAttack:
    """The interface of pyautoattack 0.2 and its side effects."""

    def __init__(self, model, *, attacks=None, device="cpu", eps=0.3, norm="Linf", seed=None, version="standard"):
        self.model, self.arguments = model, (norm, eps, version)
        self.apgd_targeted = types.SimpleNamespace(n_target_classes=9)
        self.fab = types.SimpleNamespace(n_target_classes=9)

    def run_standard_evaluation(self, x, y, /, *, batch_size=250, state_path=None):
        assert self.arguments == ("L2", 0.5, "plus")
        assert not self.model.training
        assert self.apgd_targeted.n_target_classes == self.fab.n_target_classes == 3
        torch.manual_seed(7)
        sys.settrace(None)
        predicted = self.model(x).argmax(1)
        predicted[0] = (y[0] + 1) % 4  # one image is fooled
        return x, predicted


def test_autoattack_is_counted_and_contained(trained: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyautoattack", types.SimpleNamespace(AutoAttack=FakeAutoAttack))
    x, y = blobs(30)
    assert (trained(x).argmax(1) == y)[[0, 10, 20]].all()
    state, tracer = torch.get_rng_state(), lambda *_: None
    before, seen = sys.gettrace(), []
    sys.settrace(tracer)
    try:
        result = autoattack(trained.train(), in_batches(x, y, 10), 0.5, "l2", version="plus", on_progress=seen.append)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert result.images == 30
    assert result.robust == pytest.approx(result.clean - 3 / 30)
    assert len(seen) == 3
    assert torch.equal(torch.get_rng_state(), state)
    assert trained.training
    with pytest.raises(UserError, match="linf"):
        autoattack(trained, [(x, y)], norm="l1")
    with pytest.raises(UserError, match="at least 4 classes"):
        autoattack(nn.Linear(16, 3), [(x, y.clamp_max(2))], 0.5, "l2", version="plus")


def test_autoattack_is_at_least_as_strong(trained: nn.Module) -> None:
    pytest.importorskip("pyautoattack")
    x, y = blobs(30, seed=1)
    x = x.view(30, 1, 4, 4)
    model = nn.Sequential(nn.Flatten(), trained)
    ours = robust_accuracy(model, [(x, y)], PGD(eps=0.1, step_size=0.02, steps=20), seeded())
    theirs = autoattack(model, [(x, y)], eps=0.1)
    assert theirs.clean == ours.clean
    assert theirs.robust <= ours.robust
    assert theirs.robust > 0
