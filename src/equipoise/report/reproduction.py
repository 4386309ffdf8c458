"""The reproduction page: six claims with effects and verdicts, why the paper saw gains, and all tables, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypeVar

from equipoise.config import build, parse_yaml
from equipoise.errors import UserError
from equipoise.files import write_whole
from equipoise.report.six_claims import JudgedClaim, judge_claims, paper_claims, paper_effect
from equipoise.report.waterfall import PAPER, Waterfall, draw, waterfall
from equipoise.report.words import UNTIMED, difference, p_value, plural
from equipoise.scores import SCORES
from equipoise.studies.compare import Spread, spread, spread_of
from equipoise.studies.design import Design, read_design
from equipoise.studies.metrics import IN_PERCENT
from equipoise.studies.reading import read_results
from equipoise.studies.recipe_match import same_recipe
from equipoise.studies.results import Claim, PaperValue, Question, Result, Study
from equipoise.studies.verdict import FEWEST, Verdict, judge

T = TypeVar("T")
DATA = "CIFAR-10 as AVIF q95"  # next to every figure
HEAD = """# Reproduction

Written by `equipoise study --reproduction FILE` from the files under `results/`; do not edit it by hand.
"""
WORDS = f"""Effects are differences of means over all runs of both arms, with 95 % confidence intervals (Welch).
*Supported*: the difference has the claimed sign and the interval excludes zero. *Contradicted*: it has the other sign
and the interval excludes zero. *Not supported*: a difference of 0.5 points (one epoch, 0.05 of a correlation) is
excluded by two one-sided tests (TOST, p < 0.05). *Inconclusive*: none of these, or fewer than {FEWEST} runs of an arm.
Accuracy is the mean over five epochs. An accuracy is reached when the median of five epochs reaches it. All accuracies:
{DATA}.
"""
CALIBRATION = (
    ("table1-standard", "BSR-Net 99 %"),
    ("table1-standard", "BSR-Net 90 %"),
    ("published", "BSR-Net lr 0.1"),
    ("published-90", "BSR-Net lr 0.1"),
    ("at", "BSR-Net"),
    ("published-at", "BSR-Net lr 0.1"),
    ("published-trades", "BSR-Net"),
)  # arms whose paper values are those of a baseline


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table or figure of the paper.

    Attributes:
        item: Its name.
        claims: What it claims.
        studies: The studies that test it.
        why: Why it was not run or cannot be judged.
    """

    item: str
    claims: str
    studies: Sequence[str]
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """A difference between the paper, its published code and our arms, with the expected effect."""

    what: str
    paper: str
    code: str
    ours: str
    effect: str


def write_page(results: Path, page: Path) -> list[str]:
    """Write the page and its figures, and return a line for each result that could not be used.

    Args:
        results: The folder of all results.
        page: The file of the page; figures are written next to it.
    """
    reading = read_results(results)
    problems = [line for line in reading.problems if "no finished seed of" not in line]  # the page says so
    found: dict[str, Study] = {}
    for study in reading.studies:
        if study.name in found:
            raise UserError(f"{results} holds the study {study.name} twice; remove one of the folders")
        found[study.name] = study
    items = paper_items()
    named = [name for item in items for name in item.studies]
    named += [name for claim in paper_claims() for setting in claim.settings for name, _, _ in setting.sources]
    names = dict.fromkeys([*named, *(name for name, _ in CALIBRATION)])
    studies = {name: with_results(read_design(name), found.get(name), problems) for name in names}
    page.parent.mkdir(parents=True, exist_ok=True)
    gaps = [gap for at in PAPER if (gap := waterfall(studies["published"], at)) is not None]
    for gap in gaps:
        write_whole(page.parent / _figure(gap), str(draw(gap, background="#ffffff")).encode())
    write_whole(page, ("\n".join(_page_lines(items, studies, gaps)) + "\n").encode())
    return problems


def _figure(gap: Waterfall) -> str:
    return f"waterfall-{gap.at}.svg"


def paper_items() -> list[Item]:
    """Return the tables and figures of the paper."""
    return _listed("paper.yaml", Item)


def deviations() -> list[Deviation]:
    """Return the differences between paper, published code and ours."""
    return _listed("deviations.yaml", Deviation)


def _listed(file: str, cls: type[T]) -> list[T]:
    text = (resources.files("equipoise.report") / file).read_text(encoding="utf-8")
    return [build(cls, entry, f"{file}[{i}]") for i, entry in enumerate(parse_yaml(text, file))]


def with_results(design: Design, found: Study | None, problems: list[str]) -> Study:
    """Return a study with the claims of its file as it is now, and those results that are of its recipes.

    Each result of another recipe adds a line to `problems`.
    """

    def matching(results: Iterable[Result]) -> tuple[Result, ...]:
        kept = []
        for result in results:
            if not result.recipe or same_recipe(design.raw(result.arm, result.seed), result.recipe):
                kept.append(result)
            else:
                problems.append(f"{design.name}, {result.arm}, seed {result.seed}: left out: of another recipe")
        return tuple(kept)

    read = found or Study(design.name, "", "", {})
    results = {arm: matching(read.results.get(arm, ())) for arm in design.every_arm}
    diverged = {arm: lost for arm in design.every_arm if (lost := matching(read.diverged.get(arm, ())))}
    asked = (tuple(design.claims), tuple(design.paper))
    budgets = design.asked()["budgets"]
    return Study(design.name, design.title, design.about, results, *asked, diverged=diverged, budgets=budgets)


# The report


def _page_lines(items: Sequence[Item], studies: Mapping[str, Study], gaps: Sequence[Waterfall]) -> Iterator[str]:
    judged = judge_claims(studies)
    yield HEAD
    yield from _summary(judged, studies)
    yield f"\n## Six claims\n\n{WORDS}"
    rows = [[c.claim.name, *_claim_cells(c)] for c in judged]
    yield from _table(["claim", "setting", "effect", "runs", "the paper", "verdict"], rows)
    for claim in judged:
        yield from _settings(claim)
    yield from _gains(gaps)
    yield from _calibration(studies)
    yield "\n## Deviations\n"
    rows = [[d.what, d.paper, d.code, d.ours, d.effect] for d in deviations()]
    yield from _table(["", "paper", "published code", "ours", "expected effect on the gain of AGENT"], rows)
    yield from _limits(studies)
    yield from _appendix(items, studies)


def _summary(judged: Sequence[JudgedClaim], studies: Mapping[str, Study]) -> Iterator[str]:
    runs = _runs(studies)
    tried = [name for name, study in studies.items() if _ran(study)]
    yield f"> **Summary.** {plural(len(runs), 'run')} of {plural(len(tried), 'study', 'studies')}, {DATA} and digits."
    yield ">"
    yield from (f"> - {claim.sentence}" for claim in judged)


def _claim_cells(judged: JudgedClaim) -> list[str]:
    main, verdict = judged.main, judged.main.plain
    if verdict.word == "not tested":
        return ["", "", "", paper_effect(main.setting), f"**{verdict.word}**"]
    effect = difference(main.setting.metric, verdict.gain, verdict.effect)
    return [main.setting.name, effect, main.runs, paper_effect(main.setting), f"**{verdict.word}**"]


def _settings(judged: JudgedClaim) -> Iterator[str]:
    """Yield a claim with its settings, plain scores next to recalibrated ones."""
    yield f"\n### {judged.claim.name}\n\n{judged.claim.says}\n"
    rows = []
    for each in judged.settings:
        metric, second = each.setting.metric, each.recalibrated
        plain = difference(metric, each.plain.gain, each.plain.effect)
        other = "" if second is None else difference(metric, second.gain, second.effect)
        other += f" ({second.word})" if second is not None and second.word != each.plain.word else ""
        word = f"{each.plain.word}{f': {each.plain.why}' if each.plain.why else ''}"
        rows.append([each.setting.name, plain, other, each.runs, paper_effect(each.setting), word])
    yield from _table(["setting", "plain", "BN recalibrated", "runs", "the paper", "verdict"], rows)


def _gains(gaps: Sequence[Waterfall]) -> Iterator[str]:
    """Yield the split of the paper's gap into steps between our arms."""
    yield "\n## Why the paper saw gains\n"
    if not gaps:
        yield "The study `published` has not been run, so the paper's gains are not explained here."
    for gap in gaps:
        yield f"{gap.sentence} {DATA}.\n\n![{gap.sentence}]({_figure(gap)})\n"
        rows = [
            [
                step.name,
                difference("accuracy", step.gain, step.effect),
                "" if step.effect is None else p_value(step.effect.p),
            ]
            for step in gap.steps
        ]
        yield from [*_table(["step", "effect", "p"], rows), ""]


def _calibration(studies: Mapping[str, Study]) -> Iterator[str]:
    """Yield the paper's baselines next to ours, before any gain."""
    yield f"\n## Baseline calibration\n\nThe baselines without AGENT, before any gain is compared. {DATA}.\n"
    rows = []
    for name, arm in CALIBRATION:
        for value in studies[name].paper:
            if value.arm == arm and value.metric == "accuracy" and studies[name].results[arm]:
                window = Question(metric="window-accuracy", at=value.at)
                ours = [spread_of(studies[name].results[arm], asked) for asked in (value, window)]
                paper = shown(Spread(value.value, None, 1), "accuracy", count=False)
                rows.append([f"{name}, {arm}", str(value.at or "end"), paper, *(shown(o, "accuracy") for o in ours)])
    yield from _table(["study, arm", "epoch", "paper", "ours", "ours, mean of five epochs"], rows)


def _limits(studies: Mapping[str, Study]) -> Iterator[str]:
    runs = _runs(studies)
    seeds = [len(results) for study in studies.values() for results in study.results.values() if results]
    spent = sum(run.spent for run in runs if run.spent is not None)
    few = sum(count < FEWEST for count in seeds)
    yield "\n## Limits\n"
    yield f"- Seeds: {few} of {len(seeds)} arms have fewer than {FEWEST} runs; comparisons of these are inconclusive."
    yield "- Data: every image went through AVIF compression of quality 95, so absolute accuracies may differ."
    yield "- Precision: runs on a GPU train in bf16, those of the paper in float32."
    yield "- Schedules: most studies have fewer epochs than the paper; the sections of the appendix say how many."
    yield f"- Cost: {spent:,.0f} seconds of training, start-up included; runs that shared a device count each."


def _runs(studies: Mapping[str, Study]) -> list[Result]:
    return [run for s in studies.values() for runs in (*s.results.values(), *s.diverged.values()) for run in runs]


# The appendix


def _appendix(items: Sequence[Item], studies: Mapping[str, Study]) -> Iterator[str]:
    yield "\n## Appendix: tables and figures of the paper\n"
    rows = []
    for item in items:
        links = ", ".join(f"[{name}](#{name})" if _ran(studies[name]) else name for name in item.studies)
        rows.append([item.item, item.claims, links, _state(item, studies)])
    yield from _table(["", "claims", "studies", "state"], rows)
    yield "\n## Appendix: not run\n\nEach study runs with `equipoise study NAME`.\n"
    rows = [[study.name, study.title, _missing(study)] for study in studies.values() if _missing(study)]
    yield from _table(["study", "", "missing"], rows)
    for study in studies.values():
        if _ran(study):
            yield from _section(study)


def _state(item: Item, studies: Mapping[str, Study]) -> str:
    ran = sum(_ran(studies[name]) for name in item.studies)
    if not ran:
        return f"not run: {item.why}" if item.why else "not run"
    return f"{ran} of {plural(len(item.studies), 'study', 'studies')} run{f': {item.why}' if item.why else ''}"


def _missing(study: Study) -> str:
    """Say what of a study was not run, with its cost in runs and epochs; empty if nothing is missing."""
    design = read_design(study.name)
    arms = [arm for arm, found in study.results.items() if not found and arm not in study.diverged]
    if not arms:
        return ""
    epochs = sum(int(design.raw(arm, design.seeds[0]).get("epochs", 0)) for arm in arms) * len(design.seeds)
    runs = plural(len(design.seeds) * len(arms), "run")
    return f"{len(arms)} of {plural(len(study.results), 'arm')}: {runs}, {epochs:,} epochs"


def _ran(study: Study) -> bool:
    return any(study.results.values()) or bool(study.diverged)


def _section(study: Study) -> Iterator[str]:
    """Yield what a study is about, where it ran, its claims, and its numbers next to the paper's."""
    yield f"\n## {study.name}\n\n{study.title}. {study.about}\n\n{_provenance(study)}"
    for title, controls in (("claim", False), ("control", True)):
        rows = [_claim_row(claim, judge(study, claim)) for claim in study.claims if claim.is_control == controls]
        if rows:
            yield from ["", *_table([title, "said to be better", "than", "difference", "verdict"], rows)]
    yield from ["", *_table(["arm", "seeds", *SCORES.values(), "seconds"], _arm_rows(study))]
    if study.paper:
        rows = [_paper_row(study, value) for value in study.paper]
        yield from ["", *_table(["arm", "number", "paper", "ours"], rows)]


def _provenance(study: Study) -> str:
    """Say on what a study ran, and which arms did not run, diverged or learned nothing."""
    runs = [run for results in (*study.results.values(), *study.diverged.values()) for run in results]
    missing = [a for a, found in study.results.items() if not found and a not in {*study.diverged, *study.budgets}]
    diverged = [f"{arm}, seed {run.seed}: {run.diverged}" for arm, lost in study.diverged.items() for run in lost]
    stuck = [f"{run.arm}, seed {run.seed}" for run in study.stuck]
    untimed = any(run.epochs[-1].seconds is None for run in runs if not run.diverged)
    return (
        f"Run on {'; '.join(sorted({_environment(run) for run in runs}))}."
        + (f" {UNTIMED}." if untimed else "")
        + (f" Not run: {', '.join(missing)}." if missing else "")
        + (f" Diverged: {'; '.join(diverged)}." if diverged else "")
        + (f" Learned nothing: {'; '.join(stuck)}." if stuck else "")
    )


def _environment(run: Result) -> str:
    found = run.environment
    commit, _, changes = str(found.get("commit")).partition("+")
    code = f"commit {commit[:10]}" + (" with changes" if changes else "")
    return f"{found.get('device')}, torch {found.get('torch')}, {found.get('date')}, {code}"


def _claim_row(claim: Claim, verdict: Verdict) -> list[str]:
    word = f"{verdict.word}: {verdict.why}" if verdict.why else verdict.word
    gain = "" if verdict.gain is None else difference(claim.metric, verdict.gain, verdict.effect)
    return [claim.says, shown(verdict.better, claim.metric), shown(verdict.than, claim.metric), gain, word]


def _arm_rows(study: Study) -> Iterator[list[str]]:
    """Yield the scores of the last epoch of every arm, and its training time."""
    for arm, results in study.results.items():
        if lost := [str(result.seed) for result in study.diverged.get(arm, ())]:
            yield [arm, ", ".join(lost), "diverged", "", "", ""]
        if results:
            scores = [shown(spread_of(results, Question(score=score)), "accuracy") for score in SCORES]
            seconds = spread([s for result in results if (s := result.epochs[-1].seconds) is not None])
            time = "" if seconds is None else f"{seconds.mean:.0f} ({seconds.count})"
            yield [arm, ", ".join(str(r.seed) for r in results), *scores, time]


def _paper_row(study: Study, value: PaperValue) -> list[str]:
    name = value.metric if value.at is None else f"{value.metric}, epoch {value.at}"
    name += "" if value.score == "plain" else f", {value.score}"
    paper = shown(Spread(value.value, None, 1), value.metric, count=False)
    ours = shown(spread_of(study.results[value.arm], value), value.metric)
    return [value.arm, name, paper, ours or ("diverged" if value.arm in study.diverged else "not run")]


def shown(found: Spread | None, metric: str, count: bool = True) -> str:
    """Format a number with its deviation and the number of seeds: `62.0 ± 2.8 % (2)`."""
    if found is None:
        return ""
    scale, unit = (100, " %") if metric in IN_PERCENT else (1, "")

    def digits(value: float) -> str:
        return f"{scale * value:.1f}" if unit and metric != "stability" else f"{scale * value:.{3 if unit else 4}g}"

    deviation = "" if found.std is None else f" ± {digits(found.std)}"
    text = "never" if found.never == found.count else f"{digits(found.mean)}{deviation}{unit}"
    if 0 < found.never < found.count:
        text += f", never in {found.never}"
    return text + (f" ({found.count})" if count else "")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in [columns, ["---"] * len(columns), *rows]:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
