"""The reproduction page: every table and figure of the paper, its claims, our numbers, and a verdict, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from equipoise.config import build, parse_yaml
from equipoise.errors import UserError
from equipoise.files import write_whole
from equipoise.report.words import UNTIMED
from equipoise.scores import SCORES
from equipoise.studies.compare import Spread, spread, spread_of
from equipoise.studies.design import Design, read_design
from equipoise.studies.metrics import IN_PERCENT
from equipoise.studies.reading import read_results
from equipoise.studies.recipe_match import same_recipe
from equipoise.studies.results import Claim, PaperValue, Question, Result, Study
from equipoise.studies.verdict import LEVEL, Verdict, count_significant, judge

CONTROL = "Control"  # the first word of claims that are ours, not the paper's
HEAD = """# Reproduction

Written by `equipoise study --reproduction FILE` from the files under `results/`; do not edit it by hand.

The first table lists every table and figure of the paper with its claim, the studies that test it, and a verdict.
*Holds*: every seed agrees with every claim that was run, and at least half of the claims were run. *Holds in part*:
only some claims hold, or a claim holds only in the mean over seeds, or fewer than half were run. *Not run*: there is
no result. Claims that begin with "Control" are ours, not the paper's: they ask whether something simpler explains the
gain. They do not count in the verdicts of the first table, which gives the number of controls that hold. If two arms
do not differ, a claim about them still holds in both of two seeds in one case of four; p is that of the paired
t-test. Our numbers are mean ± standard deviation (number of seeds). The final accuracy is *maintained* if it is lower
by at most 0.2 points, the largest loss for which the paper uses the word (73.6 and 73.4 % in its Table 3, 73.1 and
72.9 % in its Table 7).
"""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table or figure of the paper.

    Attributes:
        item: Its name.
        claims: What it claims.
        studies: The studies that test it.
        only: The claims of these studies that count contain one of these phrases, separated by `|`.
        why: Why it was not run or cannot be judged.
        remark: To be read with the verdict.
    """

    item: str
    claims: str
    studies: Sequence[str]
    only: str = ""
    why: str = ""
    remark: str = ""

    def selects(self, claim: Claim) -> bool:
        """Whether a claim contains one of the phrases in `only`."""
        return any(phrase in claim.says for phrase in self.only.split("|"))


def write_page(results: Path, page: Path) -> list[str]:
    """Write the page from the folder of all results, and return a line for each file that could not be used."""
    reading = read_results(results)
    problems = [line for line in reading.problems if "no finished seed of" not in line]  # the page says so
    found: dict[str, Study] = {}
    for study in reading.studies:
        if study.name in found:
            raise UserError(f"{results} holds the study {study.name} twice; remove one of the folders")
        found[study.name] = study
    items = paper_items()
    names = dict.fromkeys(name for item in items for name in item.studies)
    studies = {name: with_results(read_design(name), found.get(name), problems) for name in names}
    page.parent.mkdir(parents=True, exist_ok=True)
    write_whole(page, ("\n".join(_page_lines(items, studies)) + "\n").encode())
    return problems


def paper_items() -> list[Item]:
    """Return the tables and figures of the paper."""
    text = (resources.files("equipoise.report") / "paper.yaml").read_text(encoding="utf-8")
    return [build(Item, entry, f"paper.yaml[{i}]") for i, entry in enumerate(parse_yaml(text, "paper.yaml"))]


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


def _page_lines(items: Sequence[Item], studies: Mapping[str, Study]) -> Iterator[str]:
    yield HEAD
    rows = [
        [i.item, i.claims, ", ".join(f"[{name}](#{name})" for name in i.studies), summary(i, studies)] for i in items
    ]
    yield from _table(["", "claims", "studies", "verdict"], rows)
    for study in studies.values():
        yield from _section(study)


def summary(item: Item, studies: Mapping[str, Study]) -> str:
    """Return the verdict on a table or figure, over all claims about it that could be judged."""
    asked = [(studies[name], claim) for name in item.studies for claim in studies[name].claims]
    verdicts = [judge(s, claim) for s, claim in asked if item.selects(claim) and not claim.says.startswith(CONTROL)]
    judged = [verdict for verdict in verdicts if verdict.word != "not run"]
    if not verdicts and any(_ran(studies[name]) for name in item.studies):
        return f"no claim to judge{f': {item.why}' if item.why else ''}"
    if not judged:
        return f"not run: {item.why or 'it needs hours on a GPU; the study can be run'}"
    words = [verdict.word for verdict in judged]
    holding = words.count("holds")
    # if most claims were not run, those that hold are only a part
    word = "holds" if holding == len(words) and 2 * len(judged) >= len(verdicts) else "holds in part"
    if not holding and "holds in part" not in words:
        word = "does not hold"
    seeds = ", one seed" if all(verdict.seeds == 1 for verdict in judged) else ""
    seeds = seeds or (f", {count_significant(judged) or 'none'} with p < {LEVEL}" if holding else "")
    left = f", {len(verdicts) - len(judged)} not run" if len(judged) < len(verdicts) else ""
    remark = f"; {item.remark}" if item.remark else ""
    return f"**{word}** ({holding} of {len(judged)} claims hold{seeds}{left}){_controls(item, asked)}{remark}"


def _controls(item: Item, asked: Sequence[tuple[Study, Claim]]) -> str:
    """Count the controls that hold: those that the item selects, or all of its studies if it selects none."""
    controls = [(study, claim) for study, claim in asked if claim.says.startswith(CONTROL)]
    selected = [(study, claim) for study, claim in controls if item.only and item.selects(claim)]
    words = [word for study, claim in selected or controls if (word := judge(study, claim).word) != "not run"]
    return f", {words.count('holds')} of {len(words)} controls" if words else ""


def _ran(study: Study) -> bool:
    return any(study.results.values()) or bool(study.diverged)


# One study


def _section(study: Study) -> Iterator[str]:
    """Yield what a study is about, where it ran, its claims, and its numbers next to the paper's."""
    yield f"\n## {study.name}\n\n{study.title}. {study.about}\n\n{_provenance(study)}"
    if _ran(study):
        if study.claims:
            rows = [_claim_row(claim, judge(study, claim)) for claim in study.claims]
            yield from ["", *_table(["claim", "said to be better", "than", "p", "verdict"], rows)]
        yield from ["", *_table(["arm", "seeds", *SCORES.values(), "seconds"], _arm_rows(study))]
    if study.paper:
        rows = [_paper_row(study, value) for value in study.paper]
        fold = [] if _ran(study) else ["", "<details><summary>The paper's numbers</summary>"]
        yield from [*fold, "", *_table(["arm", "number", "paper", "ours"], rows)]
        yield from ["", "</details>"] if fold else []


def _provenance(study: Study) -> str:
    """Say on what a study ran, and which arms did not run, diverged or learned nothing."""
    runs = [run for results in (*study.results.values(), *study.diverged.values()) for run in results]
    if not runs:
        return f"Not run: `equipoise study {study.name}`."
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
    p = "" if verdict.p is None else f"{verdict.p:.2g}"
    word = f"{verdict.word}: {verdict.why}" if verdict.why else verdict.word
    return [claim.says, shown(verdict.better, claim.metric), shown(verdict.than, claim.metric), p, word]


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
