"""The paper's six claims, and the split of its gap."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.stats import t, ttest_ind

from equipoise.report.six_claims import judge_claims, paper_claims
from equipoise.report.summary import summary
from equipoise.report.waterfall import HIGH_RATE, LOW_RATE, PUBLISHED, RAW, draw, waterfall
from equipoise.studies.design import read_design
from equipoise.studies.results import Claim, Result, Study
from study_helpers import result, study

EARLY = "Accuracy early in training"


def test_every_source_is_a_study_that_can_answer() -> None:
    claims = paper_claims()
    assert len(claims) == 6
    for claim in claims:
        for setting in claim.settings:
            for name, better, than in setting.sources:
                asked = setting.claim(better, than, "plain")
                assert isinstance(asked, Claim)
                design = read_design(name)
                replace(design, claims=(*design.claims, asked))  # checks arms and metric


def test_the_papers_effects_are_those_of_its_numbers() -> None:
    """Differences of the paper's values in the study files, where they have them."""
    checked = 0
    for claim in paper_claims():
        for setting in claim.settings:
            if setting.paper is None or setting.metric != "window-accuracy" or setting.at is None:
                continue
            for name, better, than in setting.sources:
                values = {
                    v.arm: v.value for v in read_design(name).paper if v.at == setting.at and v.metric == "accuracy"
                }
                if better in values and than in values:
                    assert setting.paper == pytest.approx(values[better] - values[than], abs=1e-6), setting.name
                    checked += 1
    assert checked >= 6


def runs(arm: str, values: list[float], first: int = 0) -> list[Result]:
    return [result(arm, seed, [0.1] * 15 + [value] * 5) for seed, value in enumerate(values, first)]


def test_replicates_of_two_studies_are_pooled() -> None:
    one = study(*runs("AGENT 99 %", [0.71, 0.72]), *runs("BSR-Net 99 %", [0.70, 0.71]))
    two = study(*runs("AGENT 99 %", [0.73, 0.74]), *runs("BSR-Net 99 %", [0.69, 0.68]))
    (early,) = [
        c for c in judge_claims({"table1-standard": one, "table1-standard-200": two}) if c.claim.name == EARLY
    ]
    expected = ttest_ind([0.71, 0.72, 0.73, 0.74], [0.70, 0.71, 0.69, 0.68], equal_var=False)
    effect = early.main.plain.effect
    assert effect is not None
    assert effect.p == pytest.approx(expected.pvalue)
    assert (early.main.runs, early.main.plain.word) == ("4 and 4", "supported")
    assert early.evidence.endswith(", 4 and 4 runs; the paper: +9.20 points")


def test_the_main_setting_has_enough_runs() -> None:
    few = study(*runs("AGENT", [0.7]), *runs("BSR-Net lr 0.04", [0.6]))
    many = study(*runs("AGENT", [0.70, 0.71, 0.72]), *runs("SGD", [0.70, 0.71, 0.72]))
    (early,) = [c for c in judge_claims({"published": few, "set-itop": many}) if c.claim.name == EARLY]
    assert early.main.setting.name.startswith("SET-ITOP")
    assert early.main.plain.word == "inconclusive"


def test_a_control_is_never_the_main_setting() -> None:
    dense, sparse = (
        [
            replace(result(arm, seed, [0.5]), measured={"correlation": 0.4 + noise, **everywhere(noise)})
            for seed, noise in enumerate((-0.01, 0.0, 0.01))
        ]
        for arm, everywhere in (
            ("dense", lambda noise: {"correlation everywhere": 0.4 + noise}),
            ("RigL 95 %", lambda noise: {"correlation everywhere": 0.1 + noise}),
        )
    )
    judged = judge_claims({"sparsity-digits": study(*dense, *sparse)})[-1]
    assert judged.main.setting.metric == "correlation-everywhere"
    assert judged.main.plain.word == "supported"
    assert judged.caveat.startswith("control, correlation, digits")
    assert judged.caveat.endswith("not supported")  # equal correlations


# The summary


def test_the_summary_has_six_sentences_with_the_numbers_of_the_main_settings() -> None:
    one = study(*runs("AGENT 99 %", [0.70, 0.71, 0.72]), *runs("BSR-Net 99 %", [0.60, 0.61, 0.62]))
    studies = {"table1-standard": one, "published": published()}
    sentences = summary([*studies.values()], judge_claims(studies), waterfall(published(), 20))
    assert len(sentences) == 6
    assert "settings: 1 supported (Accuracy early in training)" in sentences[0]  # supported ones first
    assert "early in training: +10.00 points, 95 % CI" in sentences[1]
    assert "(the paper: +9.20 points)" in sentences[1]
    assert "at the end: not tested" in sentences[2]
    assert "scored one step after a raw pass, +4.07 points (p < 0.05); " in sentences[3]
    assert sentences[3].endswith("the correction itself, −0.50 points.")
    assert "our baseline is 1.40 points above the paper's" in sentences[4]
    assert sentences[4].endswith("0 of 6 arms have fewer than 3 runs.")
    assert sentences[5].startswith("Tried: 18 runs of 2 studies")


def test_a_claim_that_an_arm_is_lower_is_told_as_the_difference_of_that_arm() -> None:
    one = study(*runs("SGD", [0.84, 0.85, 0.86]), *runs("SVRG", [0.81, 0.82, 0.83]))
    judged = judge_claims({"set-itop": one})[3]
    assert judged.main.plain.word == "supported"
    low, high = ttest_ind([81, 82, 83], [84, 85, 86], equal_var=False).confidence_interval()
    told = f"3.00 points lower, 95 % CI {low:.2f} to {high:.2f}".replace("-", "−")
    assert judged.main.effect == told
    assert (
        f"SVRG against the plain gradient: {told} in SET-ITOP"
        in summary([one], judge_claims({"set-itop": one}), None)[2]
    )


# The waterfall


def with_published_score(of: Result, accuracy: float) -> Result:
    return replace(of, epochs=tuple(replace(e, scores={**e.scores, "as_published": accuracy}) for e in of.epochs))


def published() -> Study:
    arms = []
    for arm, plain, scored in (
        (HIGH_RATE, 0.62, 0.66),
        (LOW_RATE, 0.65, 0.69),
        (RAW, 0.66, 0.70),
        (PUBLISHED, 0.67, 0.695),
    ):
        for seed, noise in enumerate((-0.01, 0.0, 0.01)):
            (run,) = runs(arm, [plain + noise], seed)
            arms.append(with_published_score(run, scored + noise * (1 + 0.1 * seed)))
    return study(*arms)


def test_the_steps_of_the_waterfall_add_up() -> None:
    found = waterfall(published(), 20)
    assert found is not None
    assert [100 * step.gain for step in found.steps] == pytest.approx([3, 4 + 0.2 / 3, 1, -0.5])
    assert 100 * found.start == pytest.approx(62)
    assert 100 * found.end == pytest.approx(69.5 + 0.2 / 3)
    assert (
        "the steps add up to +7.6 points (62.0 to 69.6 %), the paper's gap is +9.2 (60.6 to 69.8 %)" in found.sentence
    )
    assert "1.6 points remain unexplained" in found.sentence
    # paired differences of 4 to 4.2 points are clear; means that differ by 3 points with a deviation of 1 are too
    assert found.conclusion == (
        "Learning rate 0.1 to 0.04; scored one step after a raw pass: p < 0.05. "
        "10 % of the raw gradient; the correction itself: not significant."
    )


def test_a_score_is_compared_with_the_other_score_of_the_same_runs() -> None:
    found = waterfall(published(), 20)
    assert found is not None
    scoring = found.steps[1].effect
    assert scoring is not None
    differences = np.array([0.04, 0.04, 0.042])
    error = differences.std(ddof=1) / np.sqrt(3)
    assert scoring.p == pytest.approx(2 * t.sf(differences.mean() / error, 2), rel=1e-6)


def test_without_an_arm_there_is_no_waterfall() -> None:
    whole = published()
    for arm in (HIGH_RATE, LOW_RATE, RAW, PUBLISHED):
        assert waterfall(replace(whole, results={**whole.results, arm: ()}), 20) is None
    assert waterfall(whole, 40) is None


def test_the_drawing_is_sound_xml_with_a_bar_for_every_number() -> None:
    found = waterfall(published(), 20)
    assert found is not None
    svg = ElementTree.fromstring(draw(found))
    bars = svg.findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) == 8
    assert all(float(bar.get("width", "0")) > 0 for bar in bars)
    texts = [text.text for text in svg.findall("{http://www.w3.org/2000/svg}text")]
    assert {"60.6 %", "62.0 %", "+3.0", "+4.1", "+1.0", "−0.5", "69.6 %", "69.8 %"} <= set(texts)
    assert texts[0] == "Epochs 16 to 20: −0.5 of +7.6 points are the correction's"
    assert "bars begin at 59 %" in texts[1]
    assert not re.search(r"style|script", draw(found))
