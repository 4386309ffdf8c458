"""The small problem against finite differences and enumeration, and the measured averages against the bounds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.analysis.descent import (
    METHODS,
    Phases,
    Trajectory,
    loss_based_coefficient,
    optimal_coefficient,
    trajectories,
)
from equipoise.analysis.theory import Setting
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
def test_coefficients_are_their_definitions(seed: int) -> None:
    now, before = two_points(seed)
    new_losses, old_losses = (PROBLEM.losses(theta)[0].reshape(8, 5).mean(1) for theta in (now, before))
    covariance = np.cov(new_losses, old_losses)
    expected = np.clip(covariance[0, 1] / covariance[1, 1], 0, 1)
    assert loss_based_coefficient(PROBLEM, now, before, 5).item() == pytest.approx(expected)
    new, old = sample_gradients(PROBLEM, now), sample_gradients(PROBLEM, before)
    grid = np.linspace(0, 1, 1001)
    variance = [(new - c * old).var(0).sum() for c in grid]
    best = optimal_coefficient(PROBLEM, PROBLEM.slopes(now), PROBLEM.slopes(before)).item()
    assert best == pytest.approx(grid[int(np.argmin(variance))], abs=1e-3)


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
    """The expectation is exact: every batch drawn with replacement is tried."""
    problem = Phases.random(samples=12, dimensions=3, seed=seed)
    problem = Phases(scale * problem.features, problem.targets)
    agent = Setting(problem.smoothness, step_size, batch_size, 12, c, epoch_length=7, split=split)
    setting = {"agent": agent, "svrg": agent.svrg(), "sgd": agent.sgd()}[arm]
    now, before = (theta[0] for theta in two_points(seed, apart))
    new, old = (sample_gradients(problem, theta[None]) for theta in (now, before))
    corrected = new - setting.coefficient * (old - old.mean(0))
    batches = np.array(list(itertools.product(range(12), repeat=batch_size)))
    after = now - step_size * corrected[batches].mean(1)
    b, phi = setting.b(), setting.phi_by_step()
    for t in range(7):
        energy = problem.losses(after).mean(1) + b[t + 1] * ((after - before) ** 2).sum(1)
        start = problem.losses(now[None]).mean() + b[t] * ((now - before) ** 2).sum()
        noise = (
            setting.noise_weight * (setting.smoothness + 2 * b[t + 1]) * (step_size * problem.sigma) ** 2 / batch_size
        )
        assert energy.mean() <= (start - phi[t] * (new.mean(0) ** 2).sum() + noise) * (1 + 1e-9) + 1e-9


@pytest.fixture(scope="module")
def runs() -> dict[str, Trajectory]:
    return trajectories(epochs=12, repeats=8)


@pytest.mark.parametrize("method", METHODS)
def test_the_bound_is_above_the_measured_average_and_not_idle(runs: dict[str, Trajectory], method: str) -> None:
    run = runs[method]
    assert (run.average <= run.bound).all()
    assert run.average[0] > run.bound[0] / 5
    assert (np.diff(run.first) < 0).all()


@pytest.mark.parametrize("mu", [0.05, 0.4])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_bound_holds_at_other_step_sizes_and_on_other_problems(mu: float, seed: int) -> None:
    for run in trajectories(Phases.random(samples=100, noise=1.0, seed=seed), mu=mu, epochs=3, repeats=4).values():
        assert (run.average <= run.bound).all()


def test_correction_takes_the_noise_off_at_its_price(runs: dict[str, Trajectory]) -> None:
    def last_epoch(run: Trajectory) -> float:
        return float(12 * run.average[-1] - 11 * run.average[-2])

    sgd, svrg, agent, best = (runs[method] for method in METHODS)
    assert last_epoch(svrg) < last_epoch(sgd) / 10
    assert last_epoch(best) < last_epoch(sgd) / 10
    assert last_epoch(svrg) < last_epoch(agent) < last_epoch(sgd)
    assert sgd.sample_gradients[0] == 80 * 10
    assert agent.sample_gradients[0] == svrg.sample_gradients[0] == 200 + 2 * 80 * 10


def test_coefficients_on_the_way(runs: dict[str, Trajectory]) -> None:
    assert (runs["SGD"].coefficient == 0).all()
    assert (runs["SVRG"].coefficient == 1).all()
    agent = runs["AGENT"].coefficient
    assert agent[0] == 0
    assert (agent <= 0.1).all()
    assert agent[-1] > 0.08
    assert runs["AGENT"].average[0] == runs["SGD"].average[0]


def test_second_terms(runs: dict[str, Trajectory]) -> None:
    """SVRG has none; AGENT's noise weight goes from 2 at c = 0 towards 2 (1 - c)^2."""
    assert (runs["SVRG"].second == 0).all()
    assert (np.diff(runs["AGENT"].second[1:]) < 0).all()
    best = runs["optimal c"]
    assert (best.bound <= np.minimum(runs["SGD"].bound, runs["SVRG"].bound) + 1e-15).all()


def test_runs_are_repeatable() -> None:
    one, two = (trajectories(PROBLEM, epochs=2, repeats=3, seed=5)["AGENT"] for _ in range(2))
    np.testing.assert_array_equal(one.average, two.average)
    other = trajectories(PROBLEM, epochs=2, repeats=3, seed=6)["AGENT"]
    assert other.average[-1] != one.average[-1]


def test_wrong_input_is_named() -> None:
    with pytest.raises(UserError, match=r"too large for a bound on SVRG .* try 0\.25"):
        trajectories(mu=0.9)
    with pytest.raises(UserError, match="at least 1"):
        trajectories(epochs=0)
    with pytest.raises(UserError, match="two batches"):
        loss_based_coefficient(replace(PROBLEM), *two_points(0), batch_size=25)
