"""Claims with their verdicts, comparisons at equal cost, and the paper's numbers beside ours, as HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from equipoise.report.markup import Markup, join, table, tag
from equipoise.report.words import SCORES, UNKNOWN, chance, gain_of, number, plural, value_of
from equipoise.studies.compare import (
    AXES,
    Axis,
    Reached,
    Spread,
    at_equal,
    budgets,
    cost_of_epoch,
    paired_p,
    position,
    spread,
    values_of,
)
from equipoise.studies.metrics import LOWER_IS_BETTER, METRICS
from equipoise.studies.results import Claim, PaperValue, Result, Study
from equipoise.studies.verdict import LEVEL, Verdict, judge, surely

SIGNS = {"holds": "✓", "holds in part": "≈", "does not hold": "✗", "not run": "·"}
Cell = Callable[[Sequence[Result]], str]  # of an arm
BROKEN_OFF = "†"
EQUAL: dict[Axis, str] = {"epochs": "epochs", "evaluations": "gradient evaluations", "seconds": "time"}


# Claims


def verdicts_of(study: Study) -> list[tuple[Claim, Verdict]]:
    return [(claim, judge(study, claim)) for claim in study.claims]


def summary(verdicts: Sequence[Verdict]) -> Markup:
    """How many claims have which verdict."""
    count: Counter[str] = Counter(verdict.word for verdict in verdicts)
    sure = f", {surely(verdicts) or 'none'} with p\xa0<\xa0{LEVEL}" if count["holds"] else ""
    boxes = [
        tag(
            "li",
            tag("b", str(count[word])),
            tag("span", f"{sign} {word}{sure if word == 'holds' else ''}"),
            class_=f"{_class(word)} tally",
        )
        for word, sign in SIGNS.items()
    ]
    return tag("ul", boxes, class_="tallies")


def claim_item(claim: Claim, verdict: Verdict) -> Markup:
    """A verdict, the sentence it is about, and the numbers behind it."""
    badge = tag("span", f"{SIGNS[verdict.word]} {verdict.word}", class_=f"badge {_class(verdict.word)}")
    says = tag("p", claim.says, class_="says")
    return tag("li", badge, tag("div", says, tag("p", _evidence(claim, verdict), class_="evidence")), class_="claim")


def _class(word: str) -> str:
    return word.replace(" ", "-")


def _evidence(claim: Claim, verdict: Verdict) -> Markup:
    if verdict.word == "not run" or verdict.gain is None:
        return join([verdict.why])  # or all seeds of one of them diverged
    parts: list[str] = [
        join([claim.better, " ", tag("b", value_of(claim.metric, verdict.better))]),
        join([claim.than, " ", tag("b", value_of(claim.metric, verdict.than))]),
        _difference(claim, verdict.gain),
    ]
    if verdict.reduction is not None:
        parts.append(f"reduction {number(verdict.reduction, 1)} %")
    parts += [f"p = {chance(verdict.p)}".replace("= <", "<")] if verdict.p is not None else []
    parts += [plural(verdict.gain.count, "seed"), about(claim), *filter(None, [verdict.why])]
    return join([item for part in parts for item in (part, Markup(' <span class="dot">·</span> '))][:-1])


def _difference(claim: Claim, gain: Spread) -> str:
    """`+0.35 points`, or `0.50 points less` where less is better."""
    text = gain_of(claim.metric, gain)
    if claim.metric not in LOWER_IS_BETTER or text == UNKNOWN:
        return text
    return f"{text.lstrip('+−')} {'less' if gain.mean > 0 else 'more'}" if gain.mean else "no difference"


def about(asked: Claim | PaperValue) -> str:
    """The metric and where it is looked at, in words."""
    metric = asked.metric if isinstance(asked, Claim) else asked.what
    words = [metric if metric != "epochs-to" else f"epochs to {number(100 * (asked.threshold or 0))} %"]
    words += [f"epoch {asked.at}"] if asked.at is not None else []
    words += [SCORES.get(asked.score, asked.score)] if asked.score != "plain" else []
    if isinstance(asked, Claim) and asked.margin:
        words.append(f"up to {gain_of(metric, Spread(asked.margin, None, 1)).lstrip('+')} worse counts as maintained")
    return ", ".join(words)


# Comparisons


def comparison_table(study: Study) -> Markup:
    """Accuracy at equal epochs, gradient evaluations and, where known, time; and how arms differ from the first."""
    axes = [axis for axis in AXES if budgets(study, axis)]
    reached = {axis: at_equal(study, axis) for axis in axes}
    arms = [arm for arm, results in study.results.items() if results and arm not in study.budgets]
    baseline = arms[0] if arms else "none"
    rows = []
    for arm in arms:
        row = [arm]
        for axis in axes:
            row.append(_accuracy_at(reached[axis][arm]))
            row.append(UNKNOWN if arm == baseline else _against(reached[axis], arm, baseline))
        rows.append(row)
    columns = [""]
    for axis in axes:
        columns += [f"equal {EQUAL[axis]}: {_budget(study, axis)}", "difference (p)"]
    note = (
        f"; {BROKEN_OFF} in the middle of its schedule" if any(BROKEN_OFF in cell for r in rows for cell in r) else ""
    )
    title = f"Accuracy in percent at equal cost, plain weights, and the difference from {baseline}"
    return table(columns, rows, title + note)


def _accuracy_at(reached: dict[int, Reached]) -> str:
    text = value_of("accuracy", spread([found.accuracy for found in reached.values()]), unit=False)
    return text if all(found.whole for found in reached.values()) else f"{text} {BROKEN_OFF}"


def _against(reached: dict[str, dict[int, Reached]], arm: str, baseline: str) -> str:
    """The difference from the first arm, over the seeds that both have, and the p of the paired test."""
    seeds = sorted(set(reached[arm]) & set(reached[baseline]))
    if not all(reached[arm][seed].comparable(reached[baseline][seed]) for seed in seeds):
        return UNKNOWN
    ours, theirs = ([reached[name][seed].accuracy for seed in seeds] for name in (arm, baseline))
    gain = spread([a - b for a, b in zip(ours, theirs, strict=True)])
    p = paired_p(ours, theirs)
    return gain_of("accuracy", gain, unit=False) + ("" if p is None else f" ({chance(p)})")


def _budget(study: Study, axis: Axis) -> str:
    found = spread(list(budgets(study, axis).values()))
    if found is None:
        return "not known"
    unit = {"epochs": "", "evaluations": " epochs of SGD", "seconds": " s"}[axis]
    seeds = {result.seed for results in study.results.values() for result in results}
    of = f", {plural(found.count, 'seed')}" if found.count < len(seeds) else ""
    return f"{number(found.mean)}{unit}{of}"


def arms_table(study: Study) -> Markup:
    """What each arm ended with and what it cost; a column that no arm has anything for is left out."""
    columns: dict[str, Cell] = {
        "seeds": lambda results: str(len(results)),
        "epochs": lambda results: number(max((r.epochs[-1].epoch for r in results), default=None)),
        **{f"test, {label}": _metric("test", score) for score, label in SCORES.items()},
        "clean": _metric("clean"),
        **{f"robust, {label}": _metric("robust", score) for score, label in SCORES.items()},
        "noise over 5 epochs": _metric("stability"),
        "noise, averaged": _metric("stability", "ema"),
        "cost of an epoch": lambda rs: value_of(
            "cost", spread([c for r in rs if (c := cost_of_epoch(r)) is not None])
        ),
        "cost in all": lambda rs: value_of("cost", spread([c for r in rs if (c := _total(r)) is not None])),
        "seconds": _seconds,
    }
    arms = [arm for arm, results in study.results.items() if results or arm in study.diverged]
    cells = {name: [cell(study.results[arm]) for arm in arms] for name, cell in columns.items()}
    cells["diverged"] = [_seeds(study.diverged.get(arm, ())) for arm in arms]
    shown = {name: column for name, column in cells.items() if any(text != UNKNOWN for text in column)}
    rows = [[arm, *(column[i] for column in shown.values())] for i, arm in enumerate(arms)]
    return table(["", *shown], rows, "Final accuracies in percent, noise and cost")


def _seconds(results: Sequence[Result]) -> str:
    """With the number of seeds where some have none that count."""
    known = [seconds for result in results if (seconds := result.epochs[-1].seconds) is not None]
    text = value_of("cost", spread(known))
    return text if len(known) in (0, len(results)) else f"{text} ({len(known)} of {len(results)})"


def _total(result: Result) -> float | None:
    return position(result.epochs[-1], "evaluations")


def _seeds(results: Sequence[Result]) -> str:
    return f"seed {', '.join(str(result.seed) for result in results)}" if results else UNKNOWN


def _metric(name: str, score: str = "plain") -> Cell:
    return lambda results: value_of(name, spread(list(values_of(results, name, score=score).values())), unit=False)


def paper_table(study: Study) -> Markup | None:
    """The paper's numbers beside ours."""
    if not study.paper:
        return None
    rows = []
    for value in study.paper:
        ours = None
        if value.what in METRICS:
            results: Sequence[Result] = study.results.get(value.arm, ())
            ours = spread(list(values_of(results, value.what, value.at, value.score, value.threshold).values()))
        paper = spread([value.value])
        difference = None if ours is None else spread([ours.mean - value.value])
        row = [value.arm, about(value), value_of(value.what, paper), value_of(value.what, ours)]
        rows.append([*row, gain_of(value.what, difference)])
    return table(["", "what", "paper", "ours", "difference"], rows, "Beside the paper")
