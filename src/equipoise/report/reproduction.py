"""The page that sets results beside the paper: every table and figure, its claims, the numbers, a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from equipoise.config import build, parse_yaml
from equipoise.errors import UserError
from equipoise.files import write_whole
from equipoise.studies.compare import Spread, spread, values_of
from equipoise.studies.design import Design, read_design, same_recipe
from equipoise.studies.metrics import SHARES
from equipoise.studies.reading import read_results
from equipoise.studies.results import Claim, PaperValue, Result, Study
from equipoise.studies.verdict import LEVEL, Verdict, judge, surely

CONTROL = "Control"  # how claims begin that are not the paper's but tests of its fairness
UNTIMED = "Seconds are left out where runs shared the device or did not tell their start-up apart"
HEAD = """# Reproduction

Written by `equipoise study --reproduction FILE` from the files under `results/`; not edited by hand.

For every table and figure of the paper: what it claims, the study that checks it, and what came of it. *Holds*: every
seed agrees with every claim that was run, and half of them at least were run. *Holds in part*: some claims hold, or
only in the mean over seeds, or few were run. *Not run*: no result is there. Claims that begin with "Control" are
not the paper's: they ask whether the gain is due to something simpler, and do not count in the verdicts of the first
table, which says how many of them hold. A claim that holds in every seed may do so by chance, with two seeds in one
of four cases: p is that of the paired t-test. Our numbers are mean ± standard deviation (seeds). The final accuracy
is *maintained* where it is lower by 0.2 points at most, the largest loss for which the paper uses the word (73.6 and
73.4 % in its Table 3, 73.1 and 72.9 % in Table 7).
"""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table or figure of the paper.

    only: words (a|b) of which its claims have one. why: why it was not run. remark: to be read with the verdict.
    """

    item: str
    claims: str
    studies: Sequence[str]
    only: str = ""
    why: str = ""
    remark: str = ""


def write_page(results: Path, page: Path) -> list[str]:
    """Read the results there are and write the whole page anew. What could not be used, a line each."""
    reading = read_results(results)
    problems = [line for line in reading.problems if "no finished seed of" not in line]  # which the page says
    found: dict[str, Study] = {}
    for study in reading.studies:
        if study.name in found:
            raise UserError(f"{results} holds the study {study.name} twice; leave one of the folders")
        found[study.name] = study
    items = paper_items()
    names = dict.fromkeys(name for item in items for name in item.studies)
    studies = {name: with_results(read_design(name), found.get(name), problems) for name in names}
    page.parent.mkdir(parents=True, exist_ok=True)
    write_whole(page, ("\n".join(page_lines(items, studies)) + "\n").encode())
    return problems


def paper_items() -> list[Item]:
    text = (resources.files("equipoise.report") / "paper.yaml").read_text(encoding="utf-8")
    return [build(Item, entry, f"paper.yaml[{i}]") for i, entry in enumerate(parse_yaml(text, "paper.yaml"))]


def with_results(design: Design, found: Study | None, problems: list[str]) -> Study:
    """A study with the claims and numbers of its file as it is now, and what was found of its arms."""

    def of_its_recipe(results: Sequence[Result]) -> tuple[Result, ...]:
        kept = []
        for result in results:
            if not result.recipe or same_recipe(design.raw(result.arm, result.seed), result.recipe):
                kept.append(result)
            else:
                problems.append(f"{design.name}, {result.arm}, seed {result.seed}: left out: of another recipe")
        return tuple(kept)

    own = found or Study(design.name, "", "", {})
    results = {arm: of_its_recipe(own.results.get(arm, ())) for arm in design.every_arm}
    lost = {arm: of_its_recipe(own.diverged.get(arm, ())) for arm in design.every_arm}
    diverged = {arm: of for arm, of in lost.items() if of}
    asked = (tuple(design.claims), tuple(design.paper))
    budgets = design.asked()["budgets"]
    return Study(design.name, design.title, design.about, results, *asked, diverged=diverged, budgets=budgets)


def page_lines(items: Sequence[Item], studies: dict[str, Study]) -> Iterator[str]:
    yield HEAD
    rows = [[i.item, i.claims, ", ".join(_link(name) for name in i.studies), summary(i, studies)] for i in items]
    yield from table(["", "claims", "studies", "verdict"], rows)
    for study in studies.values():
        yield from section(study)


def summary(item: Item, studies: dict[str, Study]) -> str:
    """The verdict on a table or figure: over all claims about it that could be judged."""
    verdicts = [
        judge(studies[name], claim) for name in item.studies for claim in studies[name].claims if _about(item, claim)
    ]
    judged = [verdict for verdict in verdicts if verdict.word != "not run"]
    if not verdicts and any(_ran(studies[name]) for name in item.studies):
        return f"no claim to judge{_because(item)}"
    if not judged:
        return f"not run{_why_not(item)}"
    words = [verdict.word for verdict in judged]
    holding = words.count("holds")
    # a claim or two of many that were not run is a part
    word = "holds" if holding == len(words) and 2 * len(judged) >= len(verdicts) else "holds in part"
    if not holding and "holds in part" not in words:
        word = "does not hold"
    seeds = ", one seed" if all(verdict.seeds == 1 for verdict in judged) else ""
    seeds = seeds or (f", {surely(judged) or 'none'} with p < {LEVEL}" if holding else "")
    left = f", {len(verdicts) - len(judged)} not run" if len(judged) < len(verdicts) else ""
    remark = f"; {item.remark}" if item.remark else ""
    return f"**{word}** ({holding} of {len(judged)} claims hold{seeds}{left}){_controls(item, studies)}{remark}"


def _controls(item: Item, studies: dict[str, Study]) -> str:
    """How many of the controls in its studies hold, of those with its words if there are any."""
    asked = [(studies[name], c) for name in item.studies for c in studies[name].claims if c.says.startswith(CONTROL)]
    own = [pair for pair in asked if item.only and any(word in pair[1].says for word in item.only.split("|"))]
    words = [word for study, claim in own or asked if (word := judge(study, claim).word) != "not run"]
    return f", {words.count('holds')} of {len(words)} controls" if words else ""


def _ran(study: Study) -> bool:
    return any(study.results.values()) or bool(study.diverged)


def _about(item: Item, claim: Claim) -> bool:
    return any(word in claim.says for word in item.only.split("|")) and not claim.says.startswith(CONTROL)


def _because(item: Item) -> str:
    return f": {item.why}" if item.why else ""


def _why_not(item: Item) -> str:
    return _because(item) or ": hours of a GPU that were not spent; the study is there to run"


def _link(name: str) -> str:
    return f"[{name}](#{name})"


# One study


def section(study: Study) -> Iterator[str]:
    """What a study is about, on what it was run, its claims and its numbers beside the paper's."""
    yield f"\n## {study.name}\n\n{study.title}. {study.about}\n\n{_provenance(study)}"
    if _ran(study):
        if study.claims:
            verdicts = [(claim, judge(study, claim)) for claim in study.claims]
            rows = [_claim_row(claim, verdict) for claim, verdict in verdicts]
            yield ""
            yield from table(["claim", "said to be better", "than", "p", "verdict"], rows)
        yield ""
        yield from table(["arm", "seeds", "plain", "BatchNorm re-estimated", "ema", "seconds"], _arm_rows(study))
    if study.paper:
        rows = [_paper_row(study, value) for value in study.paper]
        fold = [] if _ran(study) else ["", "<details><summary>The paper's numbers</summary>"]
        yield from [*fold, "", *table(["arm", "number", "paper", "ours"], rows)]
        yield from ["", "</details>"] if fold else []


def _commit(told: str) -> str:
    name, _, changes = told.partition("+")
    return f"commit {name[:10]}" + (" with changes" if changes else "")


def _provenance(study: Study) -> str:
    """On what it ran, and what of it did not."""
    seen = {
        f"{e.get('device')}, torch {e.get('torch')}, {e.get('date')}, {_commit(str(e.get('commit')))}"
        for results in (*study.results.values(), *study.diverged.values())
        for e in (result.environment for result in results)
    }
    if not seen:
        return f"Not run: `equipoise study {study.name}`."
    ran = {*study.diverged, *(arm for arm, results in study.results.items() if results)}
    missing = [arm for arm in study.results if arm not in ran and arm not in study.budgets]
    diverged = [f"{arm}, seed {r.seed}: {r.diverged}" for arm, lost in study.diverged.items() for r in lost]
    stuck = [f"{result.arm}, seed {result.seed}" for result in study.stuck]
    untimed = any(result.epochs[-1].seconds is None for results in study.results.values() for result in results)
    return (
        f"Run on {'; '.join(sorted(seen))}."
        + (f" {UNTIMED}." if untimed else "")
        + (f" Not run: {', '.join(missing)}." if missing else "")
        + (f" Diverged: {'; '.join(diverged)}." if diverged else "")
        + (f" Learned nothing: {'; '.join(stuck)}." if stuck else "")
    )


def _claim_row(claim: Claim, verdict: Verdict) -> list[str]:
    p = "" if verdict.p is None else f"{verdict.p:.2g}"
    word = f"{verdict.word}: {verdict.why}" if verdict.why else verdict.word
    return [claim.says, shown(verdict.better, claim.metric), shown(verdict.than, claim.metric), p, word]


def _arm_rows(study: Study) -> Iterator[list[str]]:
    """The last epoch of every arm, scored three ways, and the seconds of training."""
    for arm, results in study.results.items():
        lost = [str(result.seed) for result in study.diverged.get(arm, ())]
        if lost:
            yield [arm, ", ".join(lost), "diverged", "", "", ""]
        if not results:
            continue
        ways = [
            spread([*values_of(results, "accuracy", score=w).values()]) for w in ("plain", "bn_recalibrated", "ema")
        ]
        seconds = spread([s for result in results if (s := result.epochs[-1].seconds) is not None])
        time = "" if seconds is None else f"{seconds.mean:.0f} ({seconds.count})"
        yield [arm, ", ".join(str(r.seed) for r in results), *(shown(score, "accuracy") for score in ways), time]


def _paper_row(study: Study, value: PaperValue) -> list[str]:
    found = values_of(study.results[value.arm], value.what, value.at, value.score, value.threshold)
    name = value.what if value.at is None else f"{value.what}, epoch {value.at}"
    paper = shown(Spread(value.value, None, 1), value.what, count=False)
    nothing = "diverged" if value.arm in study.diverged else "not run"
    return [value.arm, name, paper, shown(spread([*found.values()]), value.what) or nothing]


def shown(found: Spread | None, metric: str, count: bool = True) -> str:
    """A number with its deviation over seeds; shares in percent, others as they are."""
    if found is None:
        return ""
    scale, unit = (100, " %") if metric in SHARES or metric == "stability" else (1, "")

    def digits(value: float) -> str:
        return f"{scale * value:.1f}" if unit and metric != "stability" else f"{scale * value:.{3 if unit else 4}g}"

    deviation = "" if found.std is None else f" ± {digits(found.std)}"
    text = "never" if found.never == found.count else f"{digits(found.mean)}{deviation}{unit}"
    if 0 < found.never < found.count:
        text += f", never in {found.never}"
    return text + (f" ({found.count})" if count else "")


def table(columns: Sequence[str], rows: Any) -> Iterator[str]:
    """A table in Markdown."""
    for row in [columns, ["---"] * len(columns), *rows]:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"
