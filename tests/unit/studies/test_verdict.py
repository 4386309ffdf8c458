"""Verdicts on claims, with runs that diverged or learned nothing, against scipy's tests."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_ind

from equipoise.studies.results import Claim, Result, Study
from equipoise.studies.verdict import Verdict, judge, judge_pooled
from study_helpers import result, study


def judged(better: list[float], than: list[float], name: str = "accuracy", **options: Any) -> Verdict:
    arms = [result("B", i, [0.1, v]) for i, v in enumerate(better)]
    arms += [result("T", i, [0.1, v]) for i, v in enumerate(than)]
    return judge(study(*arms), Claim("", "B", "T", metric=name, **options))


@settings(deadline=None)  # the first call imports scipy
@given(st.integers(0, 2**32 - 1), st.integers(3, 6), st.integers(3, 6), st.floats(-0.02, 0.02), st.floats(1e-3, 0.01))
def test_the_word_is_that_of_the_tests_of_scipy(seed: int, n: int, m: int, gain: float, noise: float) -> None:
    rng = np.random.default_rng(seed)
    better, than = (rng.normal(0.5 + g, noise, k).tolist() for g, k in ((gain, n), (0.0, m)))
    sure = ttest_ind(better, than, equal_var=False).pvalue < 0.05
    within = max(
        ttest_ind(np.add(better, 0.005), than, equal_var=False, alternative="greater").pvalue,
        ttest_ind(np.subtract(better, 0.005), than, equal_var=False, alternative="less").pvalue,
    )
    above = np.mean(better) > np.mean(than)
    expected = "not supported" if within < 0.05 else "inconclusive"
    if sure:
        expected = "supported" if above else "contradicted"
    assert judged(better, than).word == expected
    loss = ttest_ind(np.add(better, 0.005), than, equal_var=False, alternative="greater").pvalue
    assert (judged(better, than, margin=0.005).word == "supported") == (loss < 0.05)


def test_few_runs_or_a_large_p_are_inconclusive() -> None:
    few = judged([0.9, 0.901], [0.1, 0.101])
    assert (few.word, few.why) == ("inconclusive", "fewer than 3 runs of an arm")
    assert few.gain == pytest.approx(0.8)
    assert judged([0.9], [0.1]).effect is None
    noisy = judged([0.5, 0.6, 0.7], [0.45, 0.55, 0.65])
    assert (noisy.word, noisy.why) == ("inconclusive", "")
    assert judged([0.50, 0.51, 0.52], [0.40, 0.41, 0.42]).word == "supported"
    assert judged([0.40, 0.41, 0.42], [0.50, 0.51, 0.52]).word == "contradicted"
    assert judged([0.501, 0.5, 0.499], [0.5, 0.501, 0.499]).word == "not supported"


def test_the_sign_is_reversed_if_lower_is_better() -> None:
    fast = [result("fast", i, [0.1] * (3 + i) + [0.5] * 9) for i in range(3)]
    slow = [result("slow", i, [0.1] * (13 + i) + [0.5] * 9) for i in range(3)]
    never = [result("never", i, [0.1] * 10) for i in range(3)]
    found = study(*fast, *slow, *never)
    asked: dict[str, Any] = {"metric": "epochs-to", "threshold": 0.5}
    verdict = judge(found, Claim("", "fast", "slow", **asked))
    assert (verdict.word, verdict.gain) == ("supported", 10)
    assert judge(found, Claim("", "slow", "fast", **asked)).word == "contradicted"
    verdict = judge(found, Claim("", "fast", "never", **asked))
    assert (verdict.word, verdict.gain) == ("inconclusive", None)
    assert verdict.why == "never never got there in 3 of 3 runs"


def test_a_claim_that_was_not_tested_has_a_reason() -> None:
    arms = [result("B", 0, [0.1]), result("T", 1, [0.2])]
    for claim, why in (
        (Claim("", "B", "X"), "X has no finished seed"),
        (Claim("", "B", "T", metric="beauty"), "no metric is called beauty"),
        (Claim("", "B", "T", metric="robust"), "B has no robust"),
        (Claim("", "B", "T", at=9), "B has no accuracy at epoch 9"),
        (Claim("", "B", "T", metric="epochs-to"), "B has no epochs-to without a threshold"),
    ):
        verdict = judge(study(*arms), claim)
        assert (verdict.word, verdict.why) == ("not tested", why)


def test_all_runs_of_both_arms_are_used() -> None:
    arms = [result("B", i, [v]) for i, v in enumerate((0.5, 0.51, 0.52, 0.53))]
    arms += [result("T", i, [v]) for i, v in enumerate((0.4, 0.41, 0.42), 7)]
    verdict = judge(study(*arms), Claim("", "B", "T"))
    assert verdict.gain == pytest.approx(0.515 - 0.41)
    assert (verdict.better.count, verdict.than.count) == (4, 3)  # type: ignore[union-attr]
    pooled = judge_pooled([(study(*arms[::2]), Claim("", "B", "T")), (study(*arms[1::2]), Claim("", "B", "T"))])
    assert pooled.effect.p == pytest.approx(verdict.effect.p)  # type: ignore[union-attr]
    assert pooled.word == verdict.word == "supported"


# Runs that diverged


def lost(arm: str, seed: int, accuracies: list[float]) -> Result:
    return replace(result(arm, seed, accuracies), diverged="the loss is nan")


def with_lost(*results: Result) -> Study:
    """A study of the arms B and T, of which some runs diverged."""
    whole = study(*(r for r in results if not r.diverged))
    gone = {arm: tuple(r for r in results if r.diverged and r.arm == arm) for arm in ("B", "T")}
    return replace(whole, diverged={arm: runs for arm, runs in gone.items() if runs})


def test_a_run_that_diverged_leaves_the_claim_open() -> None:
    """Its metric is unknown, so the mean over the other runs would flatter its arm."""
    kept = [result("B", i, [0.50 + 0.01 * i]) for i in range(4)] + [
        result("T", i, [0.40 + 0.01 * i]) for i in range(3)
    ]
    assert judge(with_lost(*kept), Claim("", "B", "T")).word == "supported"
    verdict = judge(with_lost(*kept, lost("T", 3, [])), Claim("", "B", "T"))
    assert (verdict.word, verdict.why) == ("inconclusive", "T diverged (seed 3)")
    assert (verdict.better.count, verdict.than.count) == (4, 3)  # type: ignore[union-attr]
    verdict = judge(with_lost(*kept[:4], lost("T", 0, [])), Claim("", "B", "T"))
    assert (verdict.word, verdict.gain, verdict.than) == ("inconclusive", None, None)


def test_a_run_that_diverged_later_counts_as_others_do() -> None:
    runs = [result("B", i, [0.3 + 0.01 * i, 0.4]) for i in range(3)] + [
        lost("T", i, [0.9 + 0.01 * i]) for i in range(3)
    ]
    verdict = judge(with_lost(*runs), Claim("", "B", "T", at=1))
    assert (verdict.word, verdict.why) == ("contradicted", "")
    assert judge(with_lost(*runs), Claim("", "B", "T", at=2)).word == "inconclusive"


def test_measurements_at_the_end_are_unknown_for_a_run_that_diverged() -> None:
    found = with_lost(replace(result("B", 0, [0.3]), measured={"variance": 1.0}), lost("T", 0, [0.2]))
    assert judge(found, Claim("", "B", "T", metric="variance")).why == "T has no finished seed"


# Runs that learned nothing


def with_losses(of: Result, losses: list[float | None]) -> Result:
    epochs = [replace(epoch, train_loss=loss) for epoch, loss in zip(of.epochs, losses, strict=True)]
    return replace(of, epochs=tuple(epochs))


@pytest.mark.parametrize(
    ("losses", "stuck"),
    [
        ([2.3036, 2.3031, 2.3034, 2.3035, 2.3034], True),
        ([1.5, 1.2, 1.1, 2.4, 2.4], True),
        ([2.3, 2.29, 2.29, 2.28, 2.27], False),
        ([2.3, 2.3, 2.3, 2.3], False),  # too early to say
        ([0.0] * 5, False),
        ([None] * 5, False),
    ],
)
def test_a_run_whose_loss_does_not_fall_learned_nothing(losses: list[float | None], stuck: bool) -> None:
    assert with_losses(result("T", 0, [0.1] * len(losses)), losses).stuck is stuck


def test_a_verdict_says_which_arm_learned_nothing() -> None:
    idle = with_losses(result("T", 1, [0.1] * 5), [2.3] * 5)
    found = study(result("B", 0, [0.1, 0.5]), result("B", 1, [0.1, 0.6]), result("T", 0, [0.1, 0.4]), idle)
    assert judge(found, Claim("", "B", "T")).why.startswith("T learned nothing (seed 1)")
    assert judge(found, Claim("", "T", "B")).why.startswith("T learned nothing (seed 1)")
