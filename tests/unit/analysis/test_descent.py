"""The small problem against finite differences and enumeration, and measured averages against the bounds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.analysis.descent import METHODS, Phases, Trajectory, loss_based_coefficient, trajectories
from equipoise.analysis.theory import Setting, setting_of_theorem
from equipoise.errors import UserError

PROBLEM = Phases.random(samples=40, dimensions=3)
seeds = st.integers(0, 10_000)


def two_points(seed: int, apart: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    before = 2 * rng.standard_normal((1, 3))
    return before + apart * rng.standard_normal((1, 3)), before


def sample_gradients(problem: Phases, theta: np.ndarray) -> np.ndarray:
    """Every sample's gradient by central differences."""
    h = 1e-6
    steps = h * np.eye(theta.shape[1])
    return np.stack([(problem.losses(theta + e) - problem.losses(theta - e))[0] / (2 * h) for e in steps], axis=1)


@given(seeds)
def test_slopes_give_the_gradients_and_sigma_and_l_bound_them(seed: int) -> None:
    now, before = two_points(seed)
    by_difference = sample_gradients(PROBLEM, now)
    gradients = PROBLEM.slopes(now)[0][:, None] * PROBLEM.features
    np.testing.assert_allclose(gradients, by_difference, atol=1e-8)
    np.testing.assert_allclose(PROBLEM.mean_gradient(PROBLEM.slopes(now))[0], by_difference.mean(0), atol=1e-8)
    assert np.linalg.norm(by_difference, axis=1).max() <= PROBLEM.sigma + 1e-8
    change = np.linalg.norm(by_difference - sample_gradients(PROBLEM, before), axis=1).max()
    assert change <= PROBLEM.smoothness * np.linalg.norm(now - before) + 1e-8


@given(seeds)
def test_the_coefficient_is_its_definition(seed: int) -> None:
    now, before = two_points(seed)
    new_losses, old_losses = (PROBLEM.losses(theta)[0].reshape(8, 5).mean(1) for theta in (now, before))
    covariance = np.cov(new_losses, old_losses)
    expected = np.clip(covariance[0, 1] / covariance[1, 1], 0, 1)
    assert loss_based_coefficient(PROBLEM, now, before, 5).item() == pytest.approx(expected)


@pytest.mark.parametrize("batch_size", [1, 2])
@given(
    seed=seeds,
    scale=st.floats(0.3, 3),
    apart=st.floats(0.01, 3),
    c=st.floats(0, 1),
    split=st.floats(0.1, 10),
    step_size=st.floats(0.01, 0.6),
    arm=st.sampled_from(["agent", "svrg", "sgd"]),
)
def test_one_step_keeps_lemma_3_over_all_batches(
    batch_size: int, seed: int, scale: float, apart: float, c: float, split: float, step_size: float, arm: str
) -> None:
    """The expectation is exact, over all batches that can be drawn with replacement."""
    problem = Phases.random(samples=12, dimensions=3, seed=seed)
    problem = Phases(scale * problem.features, problem.targets)
    agent = Setting(problem.smoothness, step_size, batch_size, 12, c, epoch_length=7, split=split)
    setting = {"agent": agent, "svrg": agent.svrg(), "sgd": agent.sgd()}[arm]
    now, before = (theta[0] for theta in two_points(seed, apart))
    new, old = (sample_gradients(problem, theta[None]) for theta in (now, before))
    corrected = new - setting.coefficient * (old - old.mean(0))
    batches = np.array(list(itertools.product(range(12), repeat=batch_size)))
    after = now - step_size * corrected[batches].mean(1)
    growth = (
        1 + step_size * setting.zeta + 2 * setting.drift_weight * (step_size * setting.smoothness) ** 2 / batch_size
    )
    b = [0.0]
    for _ in range(7):
        b.insert(0, b[0] * growth + setting.drift_weight * step_size**2 * setting.smoothness**3 / batch_size)
    for t in range(7):
        phi = step_size * (1 - b[t + 1] / setting.zeta - step_size * setting.smoothness - 2 * step_size * b[t + 1])
        energy = problem.losses(after).mean(1) + b[t + 1] * ((after - before) ** 2).sum(1)
        start = problem.losses(now[None]).mean() + b[t] * ((now - before) ** 2).sum()
        noise = (
            setting.noise_weight * (setting.smoothness + 2 * b[t + 1]) * (step_size * problem.sigma) ** 2 / batch_size
        )
        assert energy.mean() <= (start - phi * (new.mean(0) ** 2).sum() + noise) * (1 + 1e-9) + 1e-9


@pytest.fixture(scope="module")
def runs() -> dict[str, Trajectory]:
    return trajectories(epochs=12, repeats=8)


@pytest.mark.parametrize("method", METHODS)
def test_the_bound_is_above_the_measured_average_and_within_a_factor_of_five(
    runs: dict[str, Trajectory], method: str
) -> None:
    run = runs[method]
    assert (run.average <= run.bound).all()
    assert run.average[0] > run.bound[0] / 5
    assert (np.diff(run.bound) < 0).all()


@pytest.mark.parametrize("mu", [0.05, 0.4])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_bound_holds_at_other_step_sizes_and_on_other_problems(mu: float, seed: int) -> None:
    for run in trajectories(Phases.random(samples=100, noise=1.0, seed=seed), mu=mu, epochs=3, repeats=4).values():
        assert (run.average <= run.bound).all()


def test_correction_reduces_the_noise_at_its_cost(runs: dict[str, Trajectory]) -> None:
    def last_epoch(run: Trajectory) -> float:
        return float(12 * run.average[-1] - 11 * run.average[-2])

    sgd, svrg, agent = (runs[method] for method in METHODS)
    assert last_epoch(svrg) < last_epoch(sgd) / 10
    assert last_epoch(svrg) < last_epoch(agent) < last_epoch(sgd)
    assert sgd.sample_gradients[0] == 80 * 10
    assert agent.sample_gradients[0] == svrg.sample_gradients[0] == 200 + 2 * 80 * 10


def test_agent_starts_as_sgd(runs: dict[str, Trajectory]) -> None:
    """There is no estimate of c before the second epoch."""
    assert runs["AGENT"].average[0] == runs["SGD"].average[0]


def test_bounds_are_those_of_the_theory(runs: dict[str, Trajectory]) -> None:
    """AGENT's bound is between those at c = 0 and c = gamma with the phi of gamma."""
    problem = Phases.random()
    start = np.random.default_rng(0).standard_normal((1, 5))
    gap, sigma = float(problem.losses(start).mean()), problem.sigma
    setting = setting_of_theorem(0.25, problem.smoothness, 10, 200, 0.1)

    def bound(arm: Setting) -> np.ndarray:
        return np.array([arm.bound(gap, sigma, int(steps)).total for steps in runs["SGD"].steps])

    np.testing.assert_allclose(runs["SGD"].bound, bound(setting.sgd()))
    np.testing.assert_allclose(runs["SVRG"].bound, bound(setting.svrg()))
    agent = runs["AGENT"].bound
    assert (agent > bound(setting)).all()
    without = setting.at(0.0)
    largest = setting.bound(gap, sigma, 1).second * without.noise_weight / setting.noise_weight
    first = setting.bound(gap, sigma, 1).first / runs["AGENT"].steps
    assert (agent <= first + largest * (1 + 1e-9)).all()
    assert (np.diff((agent - first)[1:]) < 0).all()


def test_runs_are_repeatable() -> None:
    one, two = (trajectories(PROBLEM, epochs=2, repeats=3, seed=5)["AGENT"] for _ in range(2))
    np.testing.assert_array_equal(one.average, two.average)
    other = trajectories(PROBLEM, epochs=2, repeats=3, seed=6)["AGENT"]
    assert other.average[-1] != one.average[-1]


def test_wrong_input_is_named() -> None:
    with pytest.raises(UserError, match=r"too large for a bound on SVRG .* use 0\.25"):
        trajectories(mu=0.9)
    with pytest.raises(UserError, match="at least 1"):
        trajectories(epochs=0)
    with pytest.raises(UserError, match="two batches"):
        loss_based_coefficient(replace(PROBLEM), *two_points(0), batch_size=25)
