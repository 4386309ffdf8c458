"""The paper's six claims, each judged in several settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from equipoise.config import build, parse_yaml
from equipoise.errors import UserError
from equipoise.report.words import difference, plural
from equipoise.studies.metrics import BY_EPOCH
from equipoise.studies.results import Claim, Question, Study
from equipoise.studies.verdict import FEWEST, Verdict, judge_pooled


@dataclass(frozen=True, kw_only=True)
class Setting(Question):
    """A setting in which a claim is tested.

    Attributes:
        name: The setting in words.
        sources: Study, arm that is said to be better, and the other arm. Several sources are replicates.
        margin: The largest loss that counts as maintained, for a claim that nothing is lost.
        paper: The paper's effect in the unit of the metric; `None` if it gives no number.
    """

    name: str
    sources: Sequence[Sequence[str]]
    margin: float = 0.0
    paper: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sources or any(len(source) != 3 for source in self.sources):
            raise UserError(f"{self.name}: a source is a study, the arm that is said to be better, and the other arm")

    def claim(self, better: str, than: str, score: str) -> Claim:
        asked = {"metric": self.metric, "at": self.at, "threshold": self.threshold, "score": score}
        return Claim(self.name, better, than, self.margin, **asked)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class PaperClaim:
    """One of the six claims of the paper."""

    name: str
    says: str
    settings: Sequence[Setting]


@dataclass(frozen=True)
class Judged:
    """A setting with its verdicts.

    Attributes:
        plain: The verdict on plain scores.
        recalibrated: That with recalibrated BatchNorm; `None` for metrics without scores.
    """

    setting: Setting
    plain: Verdict
    recalibrated: Verdict | None

    @property
    def runs(self) -> str:
        """The number of runs of the two arms: `3 and 2`."""
        sides = (self.plain.better, self.plain.than)
        return " and ".join(str(0 if side is None else side.count) for side in sides)


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with all of its settings; the first tested one with enough runs is the main setting."""

    claim: PaperClaim
    settings: tuple[Judged, ...]

    @property
    def main(self) -> Judged:
        tested = [each for each in self.settings if each.plain.word != "not tested"]
        enough = [each for each in tested if min(map(int, each.runs.split(" and "))) >= FEWEST]
        return next(iter(enough or tested), self.settings[0])

    @property
    def sentence(self) -> str:
        """Say what was found, in one sentence."""
        main, verdict = self.main, self.main.plain
        if verdict.word == "not tested":
            return f"{self.claim.name}: not tested."
        found = difference(main.setting.metric, verdict.gain, verdict.effect)
        paper = paper_effect(main.setting)
        theirs = f"; the paper has {paper}" if paper else ""
        return f"{self.claim.name}: {verdict.word} ({main.setting.name}: {found}, {main.runs} runs{theirs})."


def paper_effect(setting: Setting) -> str:
    """Format the paper's effect; empty if it gives no number."""
    return "" if setting.paper is None else difference(setting.metric, setting.paper)


def paper_claims() -> list[PaperClaim]:
    """Return the six claims of the paper."""
    text = (resources.files("equipoise.report") / "six_claims.yaml").read_text(encoding="utf-8")
    entries = enumerate(parse_yaml(text, "six_claims.yaml"))
    return [build(PaperClaim, entry, f"six_claims.yaml[{i}]") for i, entry in entries]


def judge_claims(studies: Mapping[str, Study]) -> list[JudgedClaim]:
    """Judge the six claims on the studies that were run, by name."""
    return [JudgedClaim(claim, tuple(_judge(s, studies) for s in claim.settings)) for claim in paper_claims()]


def _judge(setting: Setting, studies: Mapping[str, Study]) -> Judged:
    by_score = setting.metric in (*BY_EPOCH, "epochs-to")

    def verdict(score: str) -> Verdict:
        known = [(study, b, t) for name, b, t in setting.sources if (study := studies.get(name)) is not None]
        if not known:
            return Verdict("not tested", f"{plural(len(setting.sources), 'study', 'studies')} without results")
        return judge_pooled([(study, setting.claim(b, t, score)) for study, b, t in known])

    return Judged(setting, verdict("plain"), verdict("bn_recalibrated") if by_score else None)
