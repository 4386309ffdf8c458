"""The data of the curves that the page's script draws, over epochs or cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from equipoise.report.words import gain_of, value_of
from equipoise.scores import ALL_SCORES
from equipoise.studies.compare import AXES, Spread, curve, spread
from equipoise.studies.results import Epoch, Result, Study

Pick = Callable[[Epoch], float | None]
Chart = dict[str, Any]
COEFFICIENTS = {"c": "c", "ĉ": "c_hat", "weight γc": "weight"}
WEIGHTS = {"explored": "exploration", "active": "density"}
MEASURED = {"correlation": "correlation", "c*": "c_star", "ĉ": "c_hat", "variance": "variance"}


def costs_of(study: Study) -> list[dict[int, list[float | None]]]:
    """Return the gradient evaluations and the seconds of each arm by epoch, averaged over seeds."""
    lines = [curve(results, lambda epoch: epoch.epoch) for results in study.results.values()]
    return [{round(p.y.mean): [_short(p.x[axis]) for axis in AXES[1:]] for p in line} for line in lines]


def charts_of(study: Study) -> list[Chart]:
    """Return the curves that a study has data for.

    A chart has a title, a finding, the form of its numbers (`percent`, `points` or `number`; after `log` with a
    logarithmic axis), and views, of which the page shows one at a time.
    """
    split = next((r.epochs[-1].split for rs in study.results.values() for r in rs), "test")
    accuracy = {label: _entry("scores", score) for score, label in ALL_SCORES.items()}
    coefficients = {label: _entry("correction", key) for label, key in COEFFICIENTS.items()}
    variance = {"variance left": _entry("correction", "variance_left")}
    measured = {label: _entry("measured", key) for label, key in MEASURED.items()}
    found = [
        _lines(study, f"Accuracy on {split} images", "percent", accuracy),
        _gains(study, "Gain in accuracy at equal epochs, in points", accuracy),
        _lines(study, "Weight of the correction", "number", coefficients),
        _lines(study, "Variance left by the correction", "log percent", variance),
        _lines(study, "Training loss", "log number", {"loss": _field("train_loss")}),
        _lines(study, "Active and explored weights", "percent", {name: _field(key) for name, key in WEIGHTS.items()}),
        _lines(study, "Gradients during training", "number", measured),
    ]
    return [chart for chart in found if chart is not None]


def _entry(part: str, key: str) -> Pick:
    return lambda epoch: getattr(epoch, part).get(key)


def _field(name: str) -> Pick:
    return lambda epoch: getattr(epoch, name)


def _lines(study: Study, title: str, form: str, views: Mapping[str, Pick]) -> Chart | None:
    """Return curves with bands over seeds. A point is [epoch, mean, std or null]."""
    points = {
        label: [
            [[_short(p.x["epochs"]), *_pair(p.y)] for p in curve(results, pick)] for results in study.results.values()
        ]
        for label, pick in views.items()
    }
    return _curves({"title": title, "form": form}, points, dict(enumerate(study.results)))


def _gains(study: Study, title: str, views: Mapping[str, Pick]) -> Chart | None:
    """Return the difference of each arm from the arm that it is said to beat, at all epochs, paired by seed.

    A claim is about one epoch of many; the chart shows the others. An arm that others are said to beat is left out,
    and so are pairs with different numbers of epochs.
    """
    arms = list(study.results)
    said: dict[str, str] = {}
    for claim in study.claims:
        # the first claim about an arm counts, but one against the study's baseline, its first arm, takes precedence
        if claim.metric == "accuracy" and (claim.better not in said or claim.than in arms[:1]):
            said[claim.better] = claim.than
    pairs = {better: than for better, than in said.items() if better not in said.values()}
    points = {
        label: [_differences(study.results[arm], study.results.get(pairs.get(arm, ""), ()), pick) for arm in arms]
        for label, pick in views.items()
    }
    drawn = [i for i in range(len(arms)) if any(found[i] for found in points.values())]
    names = {i: f"{arms[i]} − {pairs[arms[i]]}" for i in drawn}
    return _curves({"title": title, "form": "points", "names": names}, points, names)


def _curves(chart: Chart, points: Mapping[str, Sequence[Sequence[Any]]], names: Mapping[int, str]) -> Chart | None:
    """Add views, from points by view and arm, and the finding to a chart; `None` if there are no points."""
    views = [
        {"label": label, "series": [{"arm": i, "points": line} for i, line in enumerate(lines) if line]}
        for label, lines in points.items()
        if any(lines)
    ]
    return {**chart, "finding": _finding(views[0], chart["form"], names), "views": views} if views else None


def _finding(view: Mapping[str, Any], form: str, names: Mapping[int, str]) -> str:
    """Return the last values of a view: of one or two curves both, of more the lowest and the highest."""
    ends = [(mean, std, names[line["arm"]]) for line in view["series"] for _, mean, std in line["points"][-1:]]
    if len(ends) > 2:
        ends = [min(ends), max(ends)]
    forms = {"number": partial(value_of, ""), "points": partial(gain_of, "accuracy")}
    write = forms.get(form.removeprefix("log "), partial(value_of, "accuracy"))
    texts = [f"{write(Spread(mean, std or None, 1))} ({name})" for mean, std, name in ends]
    return f"{view['label']}, at the end: {(' to ' if len(view['series']) > 2 else ', ').join(texts)}"


def _differences(ours: Sequence[Result], theirs: Sequence[Result], pick: Pick) -> list[list[float | None]]:
    """Return [epoch, mean, std or null] for each epoch that all pairs have."""
    others = {result.seed: result for result in theirs}
    pairs = [(result, others[result.seed]) for result in ours if result.seed in others]
    if not pairs or any(a.epochs[-1].epoch != b.epochs[-1].epoch for a, b in pairs):
        return []
    by_epoch: dict[int, list[float]] = {}
    for result, other in pairs:
        values = {epoch.epoch: pick(epoch) for epoch in other.epochs}
        for epoch in result.epochs:
            a, b = pick(epoch), values.get(epoch.epoch)
            if a is not None and b is not None:
                by_epoch.setdefault(epoch.epoch, []).append(a - b)
    spreads = {epoch: spread(found) for epoch, found in sorted(by_epoch.items()) if len(found) == len(pairs)}
    return [[epoch, *_pair(found)] for epoch, found in spreads.items() if found is not None]


def _pair(found: Spread) -> list[float | None]:
    return [_short(found.mean), _short(found.std)]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
