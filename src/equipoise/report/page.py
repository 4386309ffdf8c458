"""One self-contained HTML page: verdicts, charts and tables, readable without scripts and network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from equipoise.errors import UserError
from equipoise.files import write_whole
from equipoise.report.charts import Chart, charts_of, costs_of
from equipoise.report.html_tables import arms_table, badge_of, claim_item, comparison_table, paper_table, tallies
from equipoise.report.markup import Markup, embedded_json, join, raw, tag
from equipoise.report.reproduction import paper_studies
from equipoise.report.row_charts import row_charts_of
from equipoise.report.six_claims import JudgedClaim, judge_claims
from equipoise.report.summary import summary
from equipoise.report.waterfall import draw, gaps_of
from equipoise.report.words import UNTIMED, plural
from equipoise.studies.metrics import WINDOW
from equipoise.studies.reading import read_results
from equipoise.studies.results import Reading, Result, Study
from equipoise.studies.verdict import FEWEST, judge

STYLES = ("vendor/uPlot.min.css", "report.css")
SCRIPTS = ("vendor/uPlot.iife.min.js", "report.js")


def write_report(folder: Path, out: Path) -> Reading:
    """Read a folder of results or of a run, see `read_results`, and write its page to `out`.

    Raises:
        UserError: If there is nothing to report, or `out` cannot be written.
    """
    reading = read_results(folder)
    if not reading.studies:
        others = f" (and {plural(len(reading.problems) - 1, 'other problem')})" if len(reading.problems) > 1 else ""
        raise UserError(f"nothing to report: {reading.problems[-1]}{others}")
    page = make_page(reading, folder.resolve().name or "results")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, page.encode("utf-8", "replace"))  # a name may hold an unpaired surrogate
    except OSError as error:
        raise UserError(f"cannot write the report to {out}: {error.strerror}") from None
    return reading


def make_page(reading: Reading, name: str) -> str:
    """Return the HTML of what was read; `name` is the title of a page with several studies."""
    charts = [charts_of(study) for study in reading.studies]
    package = resources.files("equipoise.report")
    styles, scripts = (
        [(package / file).read_text(encoding="utf-8") for file in files] for files in (STYLES, SCRIPTS)
    )
    title = reading.studies[0].title if len(reading.studies) == 1 else name.capitalize()
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(styles, scripts)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · equipoise"),
        [raw("style", style) for style in styles],
    )
    sections = [_study(i, study, charts[i], len(reading.studies) == 1) for i, study in enumerate(reading.studies)]
    claims, links = _claims(reading.studies), _links(reading.studies)
    six = _six_claims(reading.studies)
    body = tag(
        "body",
        _masthead(reading, title),
        tag(
            "main",
            [six, links, *sections, claims] if six else [links, claims, *sections],
            _problems(reading.problems),
            _method(),
        ),
        embedded_json([_data(study, charts[i]) for i, study in enumerate(reading.studies)], "data"),
        [raw("script", script) for script in scripts],
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _data(study: Study, charts: Sequence[Chart]) -> dict[str, Any]:
    return {"arms": [*study.results], "costs": costs_of(study), "charts": charts}


def _policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Allow nothing but the styles and scripts of the page itself."""

    def sources(texts: Sequence[str]) -> str:
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return f"default-src 'none'; style-src {sources(styles)}; script-src {sources(scripts)}"


def _masthead(reading: Reading, title: str) -> Markup:
    studies = reading.studies
    runs = sum(len(results) for study in studies for results in study.results.values())
    facts = [plural(len(studies), "study", "studies")] if len(studies) != 1 else []
    facts += [plural(runs, "run")]
    facts += [f"{plural(len(reading.problems), 'note')} on missing or unusable results"] if reading.problems else []
    facts += _environments([r for study in studies for results in study.results.values() for r in results])
    return tag(
        "header",
        tag("p", "equipoise", class_="mark"),
        tag("button", "Dark or light", id="theme", type="button", hidden=True),
        tag("h1", title),
        tag("p", " · ".join(facts), class_="facts"),
    )


def _links(studies: Sequence[Study]) -> Markup:
    """Return links to the studies; empty for a single one."""
    links = [tag("li", tag("a", study.title, href=f"#study-{i}")) for i, study in enumerate(studies)]
    return tag("nav", tag("ol", links), aria_label="Studies") if len(links) > 1 else Markup("")


def _environments(results: Sequence[Result]) -> list[str]:
    """Name each device, version and date once."""
    found: dict[str, None] = {}
    for result in results:
        environment = result.environment
        found |= dict.fromkeys(str(environment[key]) for key in ("device",) if environment.get(key))
        found |= dict.fromkeys(f"{key} {environment[key]}" for key in ("torch", "equipoise") if environment.get(key))
    untimed = any(result.epochs and result.epochs[-1].seconds is None for result in results)
    days = sorted({str(r.environment["date"]) for r in results if r.environment.get("date")})
    span = [" to ".join(dict.fromkeys((days[0], days[-1])))] if days else []
    return [*found, *span, *([UNTIMED.lower()] if untimed else [])]


def _six_claims(studies: Sequence[Study]) -> Markup:
    """Return the summary, the paper's six claims and the waterfall; empty if no claim was tested."""
    by_name = {study.name: study for study in studies}
    judged = judge_claims(by_name)
    if all(claim.main.plain.word == "not tested" for claim in judged):
        return Markup("")
    gaps = gaps_of(by_name.get("published"))
    about_paper = [by_name[name] for name in paper_studies() if name in by_name]
    sentences = [tag("li", sentence) for sentence in summary(about_paper, judged, next(iter(gaps), None))]
    items = [
        tag(
            "li",
            badge_of(claim.main.plain.word),
            tag("div", tag("p", claim.claim.says, class_="says"), tag("p", _main_evidence(claim), class_="evidence")),
            class_="claim",
        )
        for claim in judged
    ]
    images = f" {by_name['published'].images}." if gaps and by_name["published"].images else ""
    figures = [join([tag("p", f"{gap.sentence} {gap.conclusion}{images}"), draw(gap)]) for gap in gaps]
    return join(
        [
            tag("section", tag("h2", "Summary"), tag("ul", sentences, class_="summary"), id="summary"),
            tag(
                "section",
                tag("h2", "Six claims of the paper"),
                tallies([claim.main.plain for claim in judged]),
                tag("ol", items, class_="claims"),
                id="six-claims",
            ),
            tag("section", tag("h2", "Why the paper saw gains"), figures, id="gains") if figures else "",
        ]
    )


def _main_evidence(claim: JudgedClaim) -> str:
    """Return the numbers of the main setting, the images, and why there is no verdict."""
    main = claim.main
    return " · ".join(filter(None, (claim.evidence, main.images, main.plain.why, claim.caveat)))


def _claims(studies: Sequence[Study]) -> Markup:
    """Return all claims by study, the paper's and then our controls, which are not counted."""
    groups, verdicts = [], []
    for i, study in enumerate(studies):
        judged = [(claim, judge(study, claim)) for claim in study.claims]
        verdicts += [verdict for claim, verdict in judged if not claim.is_control]
        heading = tag("h3", tag("a", study.title, href=f"#study-{i}")) if len(studies) > 1 else ""
        lists: list[str] = []
        for title, controls in (("", False), ("Controls", True)):
            items = [claim_item(claim, verdict) for claim, verdict in judged if claim.is_control == controls]
            lists += [tag("h4", title) if title else "", tag("ol", items, class_="claims")] if items else []
        groups += [join([heading, *lists])] if judged else []
    return tag("section", tag("h2", "Claims"), tallies(verdicts), groups, id="claims") if groups else Markup("")


def _study(index: int, study: Study, charts: Sequence[Chart], alone: bool) -> Markup:
    """Return the charts and tables of a study. `alone`: whether the page has its title already."""
    figures = [
        tag(
            "figure",
            tag("figcaption", _caption(chart["title"], study), tag("span", chart["finding"])),
            tag("div", class_="drawing", role="img", tabindex=0),
            class_="chart lines",
            data_study=index,
            data_chart=i,
        )
        for i, chart in enumerate(charts)
    ]
    rows = [
        tag("figure", tag("figcaption", _caption(chart.title, study)), chart.tables, class_="chart rows")
        for chart in row_charts_of(study)
    ]
    return tag(
        "section",
        tag("h2", "Curves and tables" if alone else study.title),
        tag("p", study.about, class_="about") if study.about else "",
        tag("p", f"In the paper: {', '.join(study.shows)}", class_="about") if study.shows else "",
        tag("noscript", tag("p", "The curves need JavaScript; the tables below hold their numbers."))
        if figures
        else "",
        tag("div", figures, rows, class_="charts single" if len(study.results) == 1 else "charts"),
        tag("ul", [tag("li", line) for line in failed], class_="problems") if (failed := _failed(study)) else "",
        comparison_table(study) if len(study.results) > 1 else "",
        arms_table(study),
        paper_table(study),
        _settings(study),
        id=f"study-{index}",
        class_="study",
    )


def _caption(title: str, study: Study) -> str:
    """Name the images after the title of a chart."""
    return f"{title} · {study.images}" if study.images else title


def _failed(study: Study) -> list[str]:
    diverged = [f"{r.arm}, seed {r.seed}: diverged, {r.diverged}" for lost in study.diverged.values() for r in lost]
    return diverged + [f"{r.arm}, seed {r.seed}: learned nothing, its loss did not fall" for r in study.stuck]


def _settings(study: Study) -> Markup:
    """Return the recipe of the first arm, and the differences of the others."""
    first = [(arm, results[0]) for arm, results in study.results.items() if results]
    if not first:
        return Markup("")
    texts = []
    for i, (arm, result) in enumerate(first):
        own = result.recipe if not i else {k: v for k, v in result.recipe.items() if first[0][1].recipe.get(k) != v}
        texts.append(join([tag("h4", arm), tag("pre", json.dumps(own, indent=1, ensure_ascii=False, default=str))]))
    summary_line = tag("summary", "Settings: the recipe of the first arm, and the differences of the others")
    return tag("details", summary_line, texts)


def _problems(problems: Sequence[str]) -> Markup:
    if not problems:
        return Markup("")
    items = tag("ul", [tag("li", line) for line in problems], class_="problems")
    return tag("section", tag("h2", "Missing and unusable results"), items, id="problems")


def _method() -> Markup:
    notes = {
        "Verdicts": "Supported: the difference has the claimed sign and p < 0.05 in Welch's test over all runs of "
        "both arms. Contradicted: it has the other sign and p < 0.05. Not supported: a difference of 0.5 points (of "
        "one epoch, of 0.05 in a correlation) is excluded by two one-sided tests. Inconclusive: none of these, or "
        f"fewer than {FEWEST} runs of an arm. Controls are questions of ours and are not counted.",
        "Numbers": "Mean ± standard deviation over seeds (n − 1). Bands in the charts show the same. Curves that "
        "nearly cover each other are drawn in turn, as dashes.",
        "Gradient evaluations": "(forward + 2·backward + 2·attack) / 3 passes, so that one epoch of SGD counts 1.",
        "Equal cost": "For each seed, the total cost of the cheapest arm. An arm is scored by a run that ends within "
        "10 % of it. If there is none, it is scored at the epoch that ends nearest to it (†), where its learning "
        "rate may still be high, and compared only with arms that are as far in their schedules. Nothing is "
        "interpolated. "
        "Seconds are training time, without evaluation and start-up.",
        "Noise": f"Standard deviation of the accuracy about its linear trend within {WINDOW} consecutive epochs, "
        "averaged over all such windows in which the learning rate does not fall by half or more.",
        "Scores": "plain: the weights as trained. BN recalibrated: with BatchNorm statistics recomputed from "
        "training images. ema: the exponential moving average of the weights, with recomputed statistics.",
    }
    items = [join([tag("dt", name), tag("dd", text)]) for name, text in notes.items()]
    return tag("section", tag("h2", "How to read this page"), tag("dl", items), id="method")
