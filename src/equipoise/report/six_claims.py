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
        paper: The paper's effect in the unit of the metric; `None` if it gives no such number.
        paper_says: The paper's effect in words, if it gives no such number.
        lower: Whether the claim is that an arm is lower, so that the difference is given as that of the lower arm.
        control: Whether the setting is ours, not the paper's. A control is never the main setting of a claim.
    """

    name: str
    sources: Sequence[Sequence[str]]
    margin: float = 0.0
    paper: float | None = None
    paper_says: str = ""
    lower: bool = False
    control: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sources or any(len(source) != 3 for source in self.sources):
            raise UserError(f"{self.name}: a source is a study, the arm that is said to be better, and the other arm")

    def claim(self, better: str, than: str, score: str) -> Claim:
        options = {"metric": self.metric, "at": self.at, "threshold": self.threshold, "score": score}
        return Claim(self.name, better, than, self.margin, **options)  # type: ignore[arg-type]


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
        recalibrated: The verdict with recalibrated BatchNorm; `None` for metrics without scores.
        images: What the images of its studies are; empty if unknown.
    """

    setting: Setting
    plain: Verdict
    recalibrated: Verdict | None
    images: str = ""

    @property
    def effect(self) -> str:
        """The difference on plain scores with its interval, worded by its sign."""
        return self.difference_of(self.plain)

    def difference_of(self, verdict: Verdict, interval: bool = True) -> str:
        """Format the difference of a verdict on this setting."""
        effect = verdict.effect if interval else None
        return difference(self.setting.metric, verdict.gain, effect, self.setting.lower)

    @property
    def runs(self) -> str:
        """The number of runs of the two arms: `3 and 2`."""
        sides = (self.plain.better, self.plain.than)
        return " and ".join(str(0 if side is None else side.count) for side in sides)


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with all of its settings.

    The main setting is the first one that was tested with enough runs and is no control.
    """

    claim: PaperClaim
    settings: tuple[Judged, ...]

    @property
    def main(self) -> Judged:
        tested = [each for each in self.settings if each.plain.word != "not tested" and not each.setting.control]
        enough = [each for each in tested if min(map(int, each.runs.split(" and "))) >= FEWEST]
        return next(iter(enough or tested), self.settings[0])

    @property
    def caveat(self) -> str:
        """The first control whose verdict differs from the main setting, in one line; empty if there is none."""
        tested = [each for each in self.settings if each.setting.control and each.plain.word != "not tested"]
        other = next((each for each in tested if each.plain.word != self.main.plain.word), None)
        return f"control, {other.setting.name}: {other.effect}, {other.plain.word}" if other else ""

    @property
    def evidence(self) -> str:
        """The numbers of the main setting, in one line; empty if the claim was not tested."""
        main = self.main
        if main.plain.word == "not tested":
            return ""
        paper = paper_effect(main.setting)
        return f"{main.setting.name}: {main.effect}, {main.runs} runs{f'; the paper: {paper}' if paper else ''}"


def paper_effect(setting: Setting) -> str:
    """Format the paper's effect, as a number if it gives one."""
    return (
        setting.paper_says
        if setting.paper is None
        else difference(setting.metric, setting.paper, None, setting.lower)
    )


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
    known = [(study, b, t) for name, b, t in setting.sources if (study := studies.get(name)) is not None]

    def verdict(score: str) -> Verdict:
        if not known:
            return Verdict("not tested", f"{plural(len(setting.sources), 'study', 'studies')} without results")
        return judge_pooled([(study, setting.claim(b, t, score)) for study, b, t in known])

    images = next((study.images for study, _, _ in known if study.images), "")
    return Judged(setting, verdict("plain"), verdict("bn_recalibrated") if by_score else None, images)
