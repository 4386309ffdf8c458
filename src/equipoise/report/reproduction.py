"""The reproduction page: six claims with effects and verdicts, why the paper saw gains, and all tables, as Markdown."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from equipoise.config import build, parse_yaml, split
from equipoise.errors import UserError
from equipoise.files import write_whole
from equipoise.report.six_claims import Judged, JudgedClaim, judge_claims, paper_claims, paper_effect
from equipoise.report.summary import few_runs, runs_of, summary
from equipoise.report.waterfall import Waterfall, draw, gaps_of
from equipoise.report.words import difference, p_value
from equipoise.scores import SCORES
from equipoise.studies.compare import Spread, spread, spread_of
from equipoise.studies.design import Design, read_design
from equipoise.studies.metrics import IN_PERCENT
from equipoise.studies.reading import read_results
from equipoise.studies.recipe_match import same_recipe
from equipoise.studies.results import Claim, PaperValue, Question, Result, Study
from equipoise.studies.verdict import FEWEST, Verdict, judge

T = TypeVar("T")
TRAIN_IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "svhn": 73_257}
SHARED = "†"  # after the seconds of runs that shared their device
HEAD = """# Reproduction

AGENT corrects each gradient of sparse training with an old one. This page compares six claims of its paper with our
runs. `equipoise study --reproduction FILE` writes it from the files under `results/`; do not edit it by hand.
"""
WORDS = f"""An effect is the difference between the means of two arms over all of their runs, with a 95 % confidence
interval (Welch). A positive difference agrees with the claim. If the claim is that something is lower, the
difference is given in words (2.0 points lower, 5.0 epochs fewer), and a negative interval agrees with it. The
verdicts are:

- *supported*: the difference has the claimed sign and its interval excludes zero;
- *contradicted*: it has the other sign and its interval excludes zero;
- *not supported*: two one-sided tests (TOST, p < 0.05) exclude a difference of 0.5 points (one epoch, 0.05 of a
  correlation): the arms are equal for practical purposes;
- *inconclusive*: none of these, or fewer than {FEWEST} runs of an arm.

"Final accuracy" is the one claim that equal arms support, because the paper says that AGENT maintains *or* improves the
accuracy: it is supported if a one-sided test (p < 0.05) excludes a loss of 0.5 points. This is no evidence of a
gain.

Each claim is judged in its main setting, the first one below with {FEWEST} runs of both arms. Controls are comparisons
that the paper does not make; a control is never the main setting.
"""
METRICS = """Accuracy is the mean over five epochs: of the weights as trained ("plain"), and with recalibrated BatchNorm
statistics. An accuracy is reached when the median of five epochs reaches it. All committed runs of an arm are used."""
WATERFALL = """The path from our baseline, with the learning rate of BSR-Net's own code, to AGENT as published has
four steps, and each changes one thing. Which learning rate the paper's baseline had is not known. In the published
code only AGENT makes a full pass over the training images before it is scored, so only AGENT is scored with fresh
BatchNorm statistics.
"""
LIMITS = """- Data: AVIF compression of quality 95 changed every image but the digits; absolute accuracies may differ.
- Precision: our runs on a GPU train in bf16, the paper in float32.
- Robust accuracy: the committed runs of the study `at` attacked the first 1,000 test images; new runs attack all.
- Schedules: most studies train for fewer epochs than the paper; their sections in the appendix say how many."""
NOT_RUN = """
## Appendix: not run

`equipoise study NAME` runs a study. The columns count what is missing. Seconds are estimates for one H200, from
committed runs of the same model and objective, with or without correction; `?` if there is no such run.
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
    studies = {name: with_results(read_design(name), found.get(name), problems) for name in paper_studies()}
    page.parent.mkdir(parents=True, exist_ok=True)
    gaps = gaps_of(studies.get("published"))
    for gap in gaps:
        write_whole(page.parent / _figure(gap), str(draw(gap, background="#ffffff")).encode())
    write_whole(page, ("\n".join(_page_lines(items, studies, gaps)) + "\n").encode())
    return problems


def _figure(gap: Waterfall) -> str:
    return f"waterfall-{gap.at}.svg"


def paper_studies() -> list[str]:
    """Return the names of the studies about the paper."""
    named = [name for item in paper_items() for name in item.studies]
    named += [name for claim in paper_claims() for setting in claim.settings for name, _, _ in setting.sources]
    return [*dict.fromkeys([*named, *(name for name, _ in CALIBRATION)])]


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
    questions = (tuple(design.claims), tuple(design.paper))
    budgets = design.to_json()["budgets"]
    more = {"diverged": diverged, "budgets": budgets, "images": read.images}
    return Study(design.name, design.title, design.about, results, *questions, **more)


# The report


def _page_lines(items: Sequence[Item], studies: Mapping[str, Study], gaps: Sequence[Waterfall]) -> Iterator[str]:
    judged = judge_claims(studies)
    yield HEAD
    yield "> **Summary**\n>"
    yield from (f"> - {sentence}" for sentence in summary([*studies.values()], judged, next(iter(gaps), None)))
    yield "\n## Six claims\n"
    rows = [[c.claim.name, f"**{c.main.plain.word}**", *_claim_cells(c.main), c.caveat] for c in judged]
    columns = ["claim", "verdict", "effect", "main setting", "runs", "images", "the paper", "control that differs"]
    yield from _table(columns, rows)
    yield f"\n{WORDS}"
    yield f"\n## Primary metrics\n\n{METRICS}"
    for claim in judged:
        yield from _settings(claim)
    yield "\n## Deviations\n"
    rows = [[d.what, d.paper, d.code, d.ours, d.effect] for d in deviations()]
    yield from _table(["", "paper", "published code", "ours", "expected effect on the gain of AGENT"], rows)
    yield from _calibration(studies)
    yield from _gains(gaps, studies["published"].images)
    yield from _limits([*studies.values()])
    yield from _appendix(items, studies)


def _claim_cells(main: Judged) -> list[str]:
    if main.plain.word == "not tested":
        return ["", "", "", "", paper_effect(main.setting)]
    return [main.effect, main.setting.name, main.runs, main.images, paper_effect(main.setting)]


def _settings(judged: JudgedClaim) -> Iterator[str]:
    """Yield a claim with its settings, plain scores next to recalibrated ones, then its controls."""
    yield f"\n### {judged.claim.name}\n\n{judged.claim.says}"
    for title, controls in (("setting", False), ("control", True)):
        rows = []
        for each in (each for each in judged.settings if each.setting.control == controls):
            second = each.recalibrated
            other = "" if second is None else each.difference_of(second)
            other += f" ({second.word})" if second is not None and second.word != each.plain.word else ""
            word = f"{each.plain.word}{f': {each.plain.why}' if each.plain.why else ''}"
            rows.append(
                [each.setting.name, each.images, each.effect, other, each.runs, paper_effect(each.setting), word]
            )
        if rows:
            columns = [title, "images", "plain", "BN recalibrated", "runs", "the paper", "verdict"]
            yield from ["", *_table(columns, rows)]


def _gains(gaps: Sequence[Waterfall], images: str) -> Iterator[str]:
    """Yield the split of the paper's gap into steps between our arms."""
    yield "\n## Why the paper saw gains\n"
    if not gaps:
        yield "The study `published` has not been run, so the paper's gains are not explained here."
        return
    yield WATERFALL
    for gap in gaps:
        words = " ".join(filter(None, (gap.sentence, gap.conclusion, f"{images}." if images else "")))
        yield f"{words}\n\n![{gap.sentence}]({_figure(gap)})\n"
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
    yield "\n## Baseline calibration\n\nThe paper's baselines, without AGENT, next to ours.\n"
    rows = []
    for name, arm in CALIBRATION:
        study = studies[name]
        for value in study.paper:
            if value.arm == arm and value.metric == "accuracy" and study.results[arm]:
                window = Question(metric="window-accuracy", at=value.at)
                ours = [spread_of(study.results[arm], question) for question in (value, window)]
                paper = shown(Spread(value.value, None, 1), "accuracy", count=False)
                shown_ours = [shown(o, "accuracy") for o in ours]
                rows.append([f"{name}, {arm}", study.images, str(value.at or "end"), paper, *shown_ours])
    yield from _table(["study, arm", "images", "epoch", "paper", "ours", "ours, mean of five epochs"], rows)


def _limits(studies: Sequence[Study]) -> Iterator[str]:
    spent: dict[str, float] = defaultdict(float)
    for run in runs_of(studies):
        spent[str(run.environment.get("device"))] += run.spent or 0.0
    devices = ", ".join(f"{seconds:,.0f} on {device}" for device, seconds in spent.items())
    yield "\n## Limits\n"
    yield f"- Seeds: {few_runs(studies)}; comparisons of these are inconclusive."
    yield LIMITS
    total = f"{sum(spent.values()):,.0f}"
    yield f"- Cost: {total} seconds of training, start-up included ({devices}); runs that shared a device count each."


# The appendix


def _appendix(items: Sequence[Item], studies: Mapping[str, Study]) -> Iterator[str]:
    yield "\n## Appendix: tables and figures of the paper\n"
    rows = []
    for item in items:
        if links := ", ".join(f"[{name}](#{name})" for name in item.studies if _ran(studies[name])):
            rows.append([item.item, item.claims, links, item.why])
    yield from _table(["", "claims", "studies", "remarks"], rows)
    yield NOT_RUN
    rates = seconds_per_image(runs_of([*studies.values()]))
    rows = []
    for study in studies.values():
        if cost := missing_cost(study, rates):
            shows = [item for item in items if study.name in item.studies]
            why = "; ".join(dict.fromkeys(item.why for item in shows if item.why and not _ran(study)))
            rows.append([study.name, study.title, ", ".join(item.item for item in shows), *cost, why])
    rows += [["", item.claims, item.item, "", "", "", item.why] for item in items if not item.studies]
    yield from _table(["study", "", "in the paper", "runs", "epochs", "seconds", "remarks"], rows)
    for study in studies.values():
        if _ran(study):
            yield from _section(study)


def _ran(study: Study) -> bool:
    return bool(runs_of([study]))


def missing_cost(study: Study, rates: Mapping[tuple[str, ...], float]) -> list[str]:
    """Return runs, epochs and seconds that a study still needs; empty if nothing is missing, `?` if unknown."""
    design = read_design(study.name)
    runs, epochs, seconds = 0, 0, 0.0
    for arm in design.every_arm:
        found = {run.seed for run in (*study.results[arm], *study.diverged.get(arm, ()))}
        missing = [seed for seed in design.seeds if seed not in found]
        if missing:
            recipe = design.raw(arm, missing[0])
            each = int(recipe.get("epochs", 0))
            runs += len(missing)
            epochs += len(missing) * each
            seconds += len(missing) * each * rates.get(_kind(recipe), math.nan) * _images(recipe)
    return [f"{runs:,}", f"{epochs:,}", "?" if math.isnan(seconds) else f"{seconds:,.0f}"] if runs else []


def seconds_per_image(runs: Iterable[Result]) -> dict[tuple[str, ...], float]:
    """Return the median training time per image and epoch on a GPU, by model, objective and kind of correction."""
    found: dict[tuple[str, ...], list[float]] = {}
    for run in runs:
        if run.spent and run.epochs and run.recipe and run.environment.get("device") != "cpu" and _images(run.recipe):
            rate = run.spent / run.epochs[-1].epoch / _images(run.recipe)
            found.setdefault(_kind(run.recipe), []).append(rate)
    return {kind: float(np.median(rates)) for kind, rates in found.items()}


def _kind(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    correction = split(recipe.get("correction", "none"), "correction")[0]
    parts = [split(recipe.get(key, default), key)[0] for key, default in (("model", ""), ("objective", "standard"))]
    return (*parts, "none" if correction in ("none", "sgd") else "corrected")


def _images(recipe: Mapping[str, Any]) -> float:
    """Return the number of training images of a recipe; 0 if unknown."""
    return float(TRAIN_IMAGES.get(split(recipe.get("data", "digits"), "data")[0], 0))


def _section(study: Study) -> Iterator[str]:
    """Yield what a study is about, where it ran, and, folded, its claims and its numbers next to the paper's."""
    yield f"\n## {study.name}\n\n{study.title}. {study.about}\n\n{_provenance(study)}"
    tables: dict[str, tuple[list[str], list[list[str]]]] = {}
    for title, controls in (("claim", False), ("control", True)):
        rows = [_claim_row(claim, judge(study, claim)) for claim in study.claims if claim.is_control == controls]
        tables[title] = ([title, "first arm", "second arm", "first against second", "verdict"], rows)
    tables["arm"] = (["arm", "seeds", *SCORES.values(), "seconds"], [*_arm_rows(study)])
    rows = [_paper_row(study, value) for value in study.paper]
    tables["paper value"] = (["arm", "number", "paper", "ours"], rows)
    counts = [f"{len(rows)} {name}{'s' * (len(rows) > 1)}" for name, (_, rows) in tables.items() if rows]
    yield f'\n<details markdown="1">\n<summary>{", ".join(counts)}</summary>'
    for columns, rows in tables.values():
        if rows:
            yield from ["", *_table(columns, rows)]
    yield "\n</details>"


def _provenance(study: Study) -> str:
    """Say on what a study ran, and which arms did not run, diverged or learned nothing."""
    runs = [run for results in (*study.results.values(), *study.diverged.values()) for run in results]
    missing = [a for a, found in study.results.items() if not found and a not in {*study.diverged, *study.budgets}]
    diverged = [f"{arm}, seed {run.seed}: {run.diverged}" for arm, lost in study.diverged.items() for run in lost]
    stuck = [f"{run.arm}, seed {run.seed}" for run in study.stuck]
    shared = any(_shared(run) for run in runs)
    return (
        (f"Images: {study.images}. " if study.images else "")
        + f"Run on {'; '.join(sorted({_environment(run) for run in runs}))}."
        + " Seconds are those of one run, start-up included"
        + (f"; {SHARED} the device ran other jobs at the same time." if shared else ".")
        + (f" Not run: {', '.join(missing)}." if missing else "")
        + (f" Diverged: {'; '.join(diverged)}." if diverged else "")
        + (f" Learned nothing: {'; '.join(stuck)}." if stuck else "")
    )


def _shared(run: Result) -> bool:
    return float(run.environment.get("jobs_on_device") or 1) > 1


def _environment(run: Result) -> str:
    found = run.environment
    commit, _, changes = str(found.get("commit") or "unknown").partition("+")
    code = f"commit {commit[:10]}" + (" with changes" if changes else "")
    return f"{found.get('device')}, torch {found.get('torch')}, {found.get('date')}, {code}"


def _claim_row(claim: Claim, verdict: Verdict) -> list[str]:
    word = f"{verdict.word}: {verdict.why}" if verdict.why else verdict.word
    gain = "" if verdict.gain is None else difference(claim.metric, verdict.gain, verdict.effect)
    sides = {claim.better: verdict.better, claim.than: verdict.than}
    arms = [f"{arm}: {shown(found, claim.metric)}" if found else arm for arm, found in sides.items()]
    return [claim.says, *arms, gain, word]


def _arm_rows(study: Study) -> Iterator[list[str]]:
    """Yield the scores of the last epoch of every arm, and its training time."""
    for arm, results in study.results.items():
        if lost := [str(result.seed) for result in study.diverged.get(arm, ())]:
            yield [arm, ", ".join(lost), "diverged", "", "", ""]
        if results:
            scores = [shown(spread_of(results, Question(score=score)), "accuracy") for score in SCORES]
            seconds = spread([result.spent for result in results if result.spent is not None])
            mark = SHARED if any(_shared(result) for result in results) else ""
            time = "" if seconds is None else f"{seconds.mean:.0f}{mark}"
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
        text = f"{scale * value:.1f}" if unit and metric != "stability" else f"{scale * value:.{3 if unit else 4}g}"
        return text.replace("-", "−")

    deviation = "" if found.std is None else f" ± {digits(found.std)}"
    text = "never" if found.never == found.count else f"{digits(found.mean)}{deviation}{unit}"
    if 0 < found.never < found.count:
        text += f", never in {found.never}"
    return text + (f" ({found.count})" if count else "")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in [columns, ["---"] * len(columns), *rows]:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
