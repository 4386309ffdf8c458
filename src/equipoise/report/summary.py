"""What was found and what was tried, in six points, for the reproduction page and the HTML report."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.report.html_tables import SIGNS
from equipoise.report.six_claims import Judged, JudgedClaim, paper_effect
from equipoise.report.waterfall import PAPER, Waterfall
from equipoise.report.words import difference, plural
from equipoise.studies.results import Result, Study
from equipoise.studies.verdict import FEWEST


def summary(studies: Sequence[Study], judged: Sequence[JudgedClaim], gap: Waterfall | None) -> list[str]:
    """Summarise the studies that were run.

    Args:
        studies: The studies; those without runs are ignored.
        judged: The six claims, in their order.
        gap: The split of the paper's gap in epochs 16 to 20; `None` if the study `published` was not run.
    """
    early, _, final, svrg, *_ = judged
    return [
        _verdicts(judged),
        f"AGENT against its baseline, early in training: {_found(early.main, recalibrated=True)}.",
        f"AGENT against its baseline, at the end: {_found(final.main)}{_equal(final.main)}. SVRG against the plain "
        f"gradient: {_found(svrg.main)}.",
        _explained(gap),
        _limited(studies, gap),
        _tried(studies),
    ]


def runs_of(studies: Sequence[Study]) -> list[Result]:
    """Return all runs of studies, those that diverged included."""
    return [run for s in studies for runs in (*s.results.values(), *s.diverged.values()) for run in runs]


def few_runs(studies: Sequence[Study]) -> str:
    """Count the arms that have too few runs for a verdict: `62 of 71 arms have fewer than 3 runs`."""
    counts = [len(results) for study in studies for results in study.results.values() if results]
    few = sum(count < FEWEST for count in counts)
    return f"{few} of {plural(len(counts), 'arm')} {'has' if few == 1 else 'have'} fewer than {FEWEST} runs"


def _tried(studies: Sequence[Study]) -> str:
    ran = [study for study in studies if runs_of([study])]
    images = " and ".join(dict.fromkeys(study.images for study in ran if study.images))
    spent = sum(run.spent or 0.0 for run in runs_of(ran))
    tried = f"{plural(len(runs_of(ran)), 'run')} of {plural(len(ran), 'study', 'studies')}"
    return f"Tried: {tried}{f' on {images}' if images else ''}, in {spent:,.0f} seconds of training."


def _verdicts(judged: Sequence[JudgedClaim]) -> str:
    words: dict[str, list[str]] = {word: [] for word in SIGNS}
    for claim in judged:
        words.setdefault(claim.main.plain.word, []).append(claim.claim.name)
    parts = [f"{len(names)} {word} ({'; '.join(names)})" for word, names in words.items() if names]
    return f"Of the paper's six claims, judged in their main settings: {', '.join(parts)}."


def _found(main: Judged, recalibrated: bool = False) -> str:
    if main.plain.word == "not tested":
        return "not tested"
    second, text = main.recalibrated, main.effect
    if recalibrated and second is not None:
        text += f" ({main.difference_of(second, interval=False)} with recalibrated BatchNorm)"
    paper = f" (the paper: {paper_effect(main.setting)})" if main.setting.paper is not None else ""
    return f"{text} in {main.setting.name}, {main.runs} runs{paper}"


def _equal(main: Judged) -> str:
    """Say what a supported claim that an accuracy is maintained means, if there is no clear gain."""
    effect = main.plain.effect
    if main.plain.word != "supported" or not main.setting.margin or effect is None or effect.interval()[0] > 0:
        return ""
    return "; the accuracy is maintained, which supports the claim, but not improved"


def _explained(gap: Waterfall | None) -> str:
    if gap is None:
        return "The study published is not among these results, so the paper's gains are not explained."
    low, high = PAPER[gap.at]
    theirs = f"{difference('accuracy', high - low)} in epochs {gap.at - 4} to {gap.at}"
    steps = "; ".join(
        f"{step.name}, {difference('accuracy', step.gain)}{' (p < 0.05)' if step.is_clear else ''}"
        for step in gap.steps
    )
    return f"The paper's gap is {theirs}. The steps from our baseline to the published code: {steps}."


def _limited(studies: Sequence[Study], gap: Waterfall | None) -> str:
    few = few_runs(studies)
    if gap is None:
        return f"Limits: {few}."
    above = gap.start - PAPER[gap.at][0]
    side = f"{difference('accuracy', abs(above)).lstrip('+')} {'above' if above >= 0 else 'below'}"
    return f"Limits: our baseline is {side} the paper's, which is not explained; {few}."
