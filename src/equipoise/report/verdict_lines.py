"""The verdicts of a study for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from equipoise.report.html_tables import in_words
from equipoise.report.words import difference, p_value, value_of
from equipoise.studies.reading import read_results
from equipoise.studies.results import Claim
from equipoise.studies.verdict import Verdict, judge


def verdict_lines(folder: Path) -> Iterator[str]:
    """Yield one line per claim of the study in a folder of results."""
    for study in read_results(folder).studies:
        for claim in study.claims:
            verdict = judge(study, claim)
            yield f"{verdict.word}: {claim.says} ({'; '.join(_evidence(claim, verdict))})"


def _evidence(claim: Claim, verdict: Verdict) -> Iterator[str]:
    if verdict.better is not None and verdict.than is not None:
        yield f"{claim.better} {value_of(claim.metric, verdict.better)}"
        yield f"{claim.than} {value_of(claim.metric, verdict.than)}"
        yield difference(claim.metric, verdict.gain, verdict.effect)
        if verdict.effect is not None:
            yield f"p = {p_value(verdict.effect.p)}".replace("= <", "<")
        yield f"{' and '.join(map(str, dict.fromkeys((verdict.better.count, verdict.than.count))))} runs"
        yield in_words(claim)
    if verdict.why:
        yield verdict.why
