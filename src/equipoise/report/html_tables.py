"""Claims with their verdicts, comparisons at equal cost, and the paper's numbers next to ours, as HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from equipoise.report.markup import Markup, join, table, tag
from equipoise.report.words import UNKNOWN, difference, gain_of, number, p_value, plural, value_of
from equipoise.scores import ALL_SCORES, SCORES
from equipoise.studies.compare import (
    AXES,
    Axis,
    Reached,
    Spread,
    at_equal,
    budgets,
    cost_per_epoch,
    position,
    spread,
    spread_of,
)
from equipoise.studies.inference import welch
from equipoise.studies.metrics import METRICS, WINDOW
from equipoise.studies.results import Claim, Question, Result, Study
from equipoise.studies.verdict import Verdict

SIGNS = {"supported": "✓", "contradicted": "✗", "not supported": "=", "inconclusive": "?", "not tested": "·"}
Cell = Callable[[Sequence[Result]], str]  # of an arm
UNFINISHED = "†"
EQUAL: dict[Axis, str] = {"epochs": "epochs", "evaluations": "gradient evaluations", "seconds": "time"}
UNITS: dict[Axis, str] = {"epochs": "", "evaluations": " epochs of SGD", "seconds": " s"}


# Claims


def tallies(verdicts: Sequence[Verdict]) -> Markup:
    """Return the number of claims with each verdict."""
    count: Counter[str] = Counter(verdict.word for verdict in verdicts)
    boxes = [
        tag("li", tag("b", str(count[word])), tag("span", f"{sign} {word}"), class_=f"{_class(word)} tally")
        for word, sign in SIGNS.items()
    ]
    return tag("ul", boxes, class_="tallies")


def claim_item(claim: Claim, verdict: Verdict) -> Markup:
    """Return a list item with the verdict, the claim and the numbers."""
    badge = badge_of(verdict.word)
    says = tag("p", claim.says, class_="says")
    return tag("li", badge, tag("div", says, tag("p", _evidence(claim, verdict), class_="evidence")), class_="claim")


def badge_of(word: str) -> Markup:
    """Return a verdict with its sign and colour."""
    return tag("span", f"{SIGNS[word]} {word}", class_=f"badge {_class(word)}")


def _class(word: str) -> str:
    return word.replace(" ", "-")


def _evidence(claim: Claim, verdict: Verdict) -> Markup:
    if verdict.better is None or verdict.than is None:  # not tested, or every run of an arm diverged
        return join([verdict.why])
    parts: list[str] = [
        join([claim.better, " ", tag("b", value_of(claim.metric, verdict.better))]),
        join([claim.than, " ", tag("b", value_of(claim.metric, verdict.than))]),
        difference(claim.metric, verdict.gain, verdict.effect),
    ]
    parts += [f"p = {p_value(verdict.effect.p)}".replace("= <", "<")] if verdict.effect is not None else []
    counts = dict.fromkeys((verdict.better.count, verdict.than.count))
    parts += [f"{' and '.join(map(str, counts))} runs", in_words(claim), *filter(None, [verdict.why])]
    return join([item for part in parts for item in (part, Markup(' <span class="dot">·</span> '))][:-1])


def in_words(question: Question) -> str:
    """Describe a question: `accuracy, epoch 20, ema`."""
    metric = question.metric
    words = [metric if metric != "epochs-to" else f"epochs to {number(100 * (question.threshold or 0))} %"]
    words += [f"epoch {question.at}"] if question.at is not None else []
    words += [ALL_SCORES.get(question.score, question.score)] if question.score != "plain" else []
    if isinstance(question, Claim) and question.margin:
        words.append(
            f"up to {gain_of(metric, Spread(question.margin, None, 1)).lstrip('+')} worse counts as maintained"
        )
    return ", ".join(words)


# Comparisons


def comparison_table(study: Study) -> Markup:
    """Return accuracy at equal epochs, gradient evaluations and time, and differences from the first arm."""
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
    marked = any(UNFINISHED in cell for row in rows for cell in row)
    note = f"; {UNFINISHED} in the middle of its schedule" if marked else ""
    title = f"Accuracy in percent at equal cost, plain weights, and the difference from {baseline}"
    return table(columns, rows, title + note)


def _accuracy_at(reached: dict[int, Reached]) -> str:
    text = value_of("accuracy", spread([found.accuracy for found in reached.values()]), unit=False)
    return text if all(found.share == 1 for found in reached.values()) else f"{text} {UNFINISHED}"


def _against(reached: dict[str, dict[int, Reached]], arm: str, baseline: str) -> str:
    """Format the difference from the first arm over the seeds that both have, with the p of Welch's test."""
    seeds = sorted(set(reached[arm]) & set(reached[baseline]))
    if not all(reached[arm][seed].is_comparable(reached[baseline][seed]) for seed in seeds):
        return UNKNOWN
    ours, theirs = ([reached[name][seed].accuracy for seed in seeds] for name in (arm, baseline))
    gain = spread([a - b for a, b in zip(ours, theirs, strict=True)])
    effect = welch(ours, theirs)
    return gain_of("accuracy", gain, unit=False) + ("" if effect is None else f" ({p_value(effect.p)})")


def _budget(study: Study, axis: Axis) -> str:
    found = budgets(study, axis)
    seeds = {result.seed for results in study.results.values() for result in results}
    of = f", {plural(len(found), 'seed')}" if len(found) < len(seeds) else ""
    return f"{number(sum(found.values()) / len(found))}{UNITS[axis]}{of}"


def arms_table(study: Study) -> Markup:
    """Return final accuracies, noise and cost by arm, without columns that are empty."""
    columns: dict[str, Cell] = {
        "seeds": lambda results: str(len(results)),
        "epochs": lambda results: number(max((r.epochs[-1].epoch for r in results), default=None)),
        **{f"test, {label}": _metric("test", score) for score, label in SCORES.items()},
        "clean": _metric("clean"),
        **{f"robust, {label}": _metric("robust", score) for score, label in SCORES.items()},
        f"noise over {WINDOW} epochs": _metric("stability"),
        "noise, ema": _metric("stability", "ema"),
        "cost per epoch": _mean_cost(cost_per_epoch),
        "total cost": _mean_cost(lambda result: position(result.epochs[-1], "evaluations")),
        "seconds": _seconds,
    }
    arms = [arm for arm, results in study.results.items() if results or arm in study.diverged]
    cells = {name: [cell(study.results[arm]) for arm in arms] for name, cell in columns.items()}
    cells["diverged"] = [_seeds(study.diverged.get(arm, ())) for arm in arms]
    shown = {name: column for name, column in cells.items() if any(text != UNKNOWN for text in column)}
    rows = [[arm, *(column[i] for column in shown.values())] for i, arm in enumerate(arms)]
    return table(["", *shown], rows, "Final accuracies in percent, noise and cost")


def _metric(name: str, score: str = "plain") -> Cell:
    question = Question(metric=name, score=score)
    return lambda results: value_of(name, spread_of(results, question), unit=False)


def _mean_cost(cost: Callable[[Result], float | None]) -> Cell:
    return lambda results: value_of("cost", spread([c for r in results if (c := cost(r)) is not None]))


def _seconds(results: Sequence[Result]) -> str:
    """Format the training time, with the number of seeds if it is known for some only."""
    known = [seconds for result in results if (seconds := result.epochs[-1].seconds) is not None]
    text = value_of("cost", spread(known))
    return text if len(known) in (0, len(results)) else f"{text} ({len(known)} of {len(results)})"


def _seeds(results: Sequence[Result]) -> str:
    return f"seed {', '.join(str(result.seed) for result in results)}" if results else UNKNOWN


def paper_table(study: Study) -> Markup:
    """Return the paper's numbers next to ours; empty if the study has none."""
    rows = []
    for value in study.paper:
        ours = spread_of(study.results.get(value.arm, ()), value) if value.metric in METRICS else None
        difference = None if ours is None else spread([ours.mean - value.value])
        row = [
            value.arm,
            in_words(value),
            value_of(value.metric, spread([value.value])),
            value_of(value.metric, ours),
        ]
        rows.append([*row, gain_of(value.metric, difference)])
    return table(["", "what", "paper", "ours", "difference"], rows, "Compared with the paper") if rows else Markup("")
