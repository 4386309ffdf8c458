"""Verdicts on claims: by seed, with runs that diverged or learned nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.studies.compare import values_of
from equipoise.studies.results import Claim, Question, Result, Study
from equipoise.studies.verdict import count_significant, judge, reduction
from study_helpers import result, study

PAIRS = st.tuples(st.floats(0, 1, allow_subnormal=False), st.floats(0, 1, allow_subnormal=False))


def judged(better: list[float], than: list[float], name: str = "accuracy", **options: object) -> object:
    arms = [result("B", i, [0.1, v]) for i, v in enumerate(better)] + [
        result("T", i, [0.1, v]) for i, v in enumerate(than)
    ]
    return judge(study(*arms), Claim("", "B", "T", metric=name, **options))  # type: ignore[arg-type]


@settings(deadline=None)  # the first call imports scipy
@given(st.lists(PAIRS, min_size=1, max_size=5))
def test_a_claim_holds_if_every_seed_agrees_and_in_part_if_the_mean_does(pairs: list[tuple[float, float]]) -> None:
    verdict = judged([a for a, _ in pairs], [b for _, b in pairs])
    gains = [a - b for a, b in pairs]
    if abs(sum(gains)) < 1e-9:
        return
    expected = "holds" if min(gains) > 0 else "holds in part" if sum(gains) > 0 else "does not hold"
    assert verdict.word == expected  # type: ignore[attr-defined]
    assert verdict.gain.mean == pytest.approx(np.mean(gains))  # type: ignore[attr-defined]


def test_the_sign_is_reversed_if_lower_is_better() -> None:
    slow, fast = [0.1] * 9 + [0.5], [0.1] * 4 + [0.5] * 6
    arms = [result("fast", 0, fast), result("slow", 0, slow), result("never", 0, [0.1] * 10)]
    claim = Claim("", "fast", "slow", metric="epochs-to", threshold=0.5)
    verdict = judge(study(*arms), claim)
    assert (verdict.word, verdict.gain.mean, verdict.reduction) == ("holds", 5, 50)  # type: ignore[union-attr]
    assert judge(study(*arms), Claim("", "slow", "fast", metric="epochs-to", threshold=0.5)).word == "does not hold"
    assert judge(study(*arms), Claim("", "slow", "never", metric="epochs-to", threshold=0.5)).word == "holds"
    assert judge(study(*arms), Claim("", "never", "slow", metric="epochs-to", threshold=0.5)).word == "does not hold"
    assert judge(study(*arms), Claim("", "never", "never", metric="epochs-to", threshold=0.5)).word == "does not hold"


def test_significant_claims_hold_with_a_small_p() -> None:
    sure, lucky, alone = ([0.5, 0.51, 0.52], [0.4, 0.41, 0.421]), ([0.5, 0.9], [0.4, 0.41]), ([0.5], [0.1])
    worse = ([0.4, 0.401, 0.4], [0.401, 0.402, 0.401])  # by 0.001, every time
    verdicts = [judged(*sure), judged(*lucky), judged(*alone), judged(*worse, margin=0.002), judged(sure[1], sure[0])]
    assert [v.word for v in verdicts] == ["holds"] * 4 + ["does not hold"]  # type: ignore[attr-defined]
    assert count_significant(verdicts) == 1  # type: ignore[arg-type]
    assert count_significant(verdicts[1:]) == 0  # type: ignore[arg-type]


def test_a_claim_that_was_not_run_has_a_reason() -> None:
    arms = [result("B", 0, [0.1]), result("T", 1, [0.2])]
    for claim, why in (
        (Claim("", "B", "X"), "X has no finished seed"),
        (Claim("", "B", "T"), "B and T have no seed in common"),
        (Claim("", "B", "T", metric="beauty"), "no metric is called beauty"),
        (Claim("", "B", "T", metric="robust"), "B has no robust"),
        (Claim("", "B", "T", at=9), "B has no accuracy at epoch 9"),
        (Claim("", "B", "T", metric="epochs-to"), "B has no epochs-to without a threshold"),
    ):
        verdict = judge(study(*arms), claim)
        assert (verdict.word, verdict.why) == ("not run", why)


def test_only_seeds_that_both_have_are_paired() -> None:
    arms = [result("B", 0, [0.3]), result("B", 1, [0.9]), result("T", 0, [0.2]), result("T", 2, [0.99])]
    verdict = judge(study(*arms), Claim("", "B", "T"))
    assert verdict.word == "holds"
    assert (verdict.gain.count, verdict.better.mean) == (1, 0.3)  # type: ignore[union-attr]
    assert values_of(study(*arms).results["B"], Question()) == {0: 0.3, 1: 0.9}


def test_reduction_is_the_mean_of_the_pairs() -> None:
    assert reduction([10, 30], [20, 40]) == pytest.approx((50 + 25) / 2)
    assert reduction([30], [20]) == pytest.approx(-50)
    assert reduction([30], [math.inf]) is None
    assert reduction([], []) is None


@pytest.mark.parametrize(
    ("better", "word"),
    [
        ([0.498, 0.6], "holds"),  # 0.002 worse, the whole margin, and better
        ([0.497, 0.503], "holds in part"),
        ([0.497, 0.4985], "does not hold"),
    ],
)
def test_with_a_margin_a_small_loss_agrees(better: list[float], word: str) -> None:
    verdict = judged(better, [0.5, 0.5], margin=0.002)
    assert verdict.word == word  # type: ignore[attr-defined]
    assert verdict.gain.mean == pytest.approx(sum(better) / 2 - 0.5)  # type: ignore[attr-defined]


# Runs that diverged


def lost(arm: str, seed: int, accuracies: list[float]) -> Result:
    return replace(result(arm, seed, accuracies), diverged="the loss is nan")


def with_lost(*results: Result) -> Study:
    """A study of the arms B and T, of which some runs diverged."""
    whole = study(*(r for r in results if not r.diverged))
    gone = {arm: tuple(r for r in results if r.diverged and r.arm == arm) for arm in ("B", "T")}
    return replace(whole, diverged={arm: runs for arm, runs in gone.items() if runs})


def test_a_run_that_diverged_is_worse_than_one_that_did_not() -> None:
    found = with_lost(result("B", 0, [0.1, 0.1]), lost("T", 0, [0.9]))
    for metric, threshold in (("accuracy", None), ("epochs-to", 0.05)):
        verdict = judge(found, Claim("", "B", "T", metric=metric, threshold=threshold))
        assert (verdict.word, verdict.why) == ("holds", "T diverged (seed 0)")
        assert (verdict.better, verdict.than, verdict.gain, verdict.p) == (None, None, None, None)
        verdict = judge(found, Claim("", "T", "B", metric=metric, threshold=threshold))
        assert (verdict.word, verdict.why) == ("does not hold", "T diverged (seed 0)")


def test_a_run_that_diverged_later_counts_as_others_do() -> None:
    found = with_lost(result("B", 0, [0.3, 0.4]), lost("T", 0, [0.9]))
    verdict = judge(found, Claim("", "B", "T", at=1))
    assert (verdict.word, verdict.why) == ("does not hold", "")
    assert verdict.gain.mean == pytest.approx(-0.6)  # type: ignore[union-attr]
    assert judge(found, Claim("", "B", "T", at=2)).word == "holds"


def test_numbers_are_of_the_seeds_that_did_not_diverge() -> None:
    found = with_lost(result("B", 0, [0.3]), result("B", 1, [0.5]), result("T", 0, [0.2]), lost("T", 1, []))
    verdict = judge(found, Claim("", "B", "T"))
    assert (verdict.word, verdict.why) == ("holds", "T diverged (seed 1)")
    assert (verdict.better.mean, verdict.than.mean, verdict.gain.count) == (0.3, 0.2, 1)  # type: ignore[union-attr]
    worse = with_lost(result("B", 0, [0.1]), result("B", 1, [0.5]), result("T", 0, [0.2]), lost("T", 1, []))
    assert judge(worse, Claim("", "B", "T")).word == "holds in part"


def test_arms_that_both_diverged_do_not_differ() -> None:
    found = with_lost(lost("B", 0, []), lost("T", 0, []))
    verdict = judge(found, Claim("", "B", "T"))
    assert (verdict.word, verdict.why) == ("does not hold", "B diverged (seed 0); T diverged (seed 0)")


def test_measurements_at_the_end_are_unknown_for_a_run_that_diverged() -> None:
    found = with_lost(replace(result("B", 0, [0.3]), measured={"variance": 1.0}), lost("T", 0, [0.2]))
    assert judge(found, Claim("", "B", "T", metric="variance")).why == "T has no variance"


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
    verdict = judge(found, Claim("", "B", "T"))
    assert (verdict.word, verdict.why) == ("holds", "T learned nothing (seed 1)")
    assert verdict.gain.mean == pytest.approx(0.3)  # type: ignore[union-attr]
    assert judge(found, Claim("", "T", "B")).why == "T learned nothing (seed 1)"
    alone = study(result("B", 0, [0.1, 0.5]), result("T", 0, [0.1, 0.4]), idle)
    assert judge(alone, Claim("", "B", "T")).why == ""  # of a seed that is not compared
