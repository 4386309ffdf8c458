"""The data that the page's script draws: curves over epochs or cost, bars of cost, dots of layer densities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from equipoise.scores import ALL_SCORES
from equipoise.studies.compare import AXES, Spread, cost_per_epoch, curve, spread
from equipoise.studies.results import Epoch, Result, Study

Pick = Callable[[Epoch], float | None]
Number = Callable[[Result], float | None]
Chart = dict[str, Any]


def charts_of(study: Study) -> list[Chart]:
    """Return every chart that a study has data for."""
    split = next((r.epochs[-1].split for rs in study.results.values() for r in rs), "test")
    accuracy = {label: _entry("scores", score) for score, label in ALL_SCORES.items()}
    correction = {"c": "c", "ĉ": "c_hat", "weight γc": "weight", "variance left": "variance_left"}
    training = {"loss": "train_loss", "explored": "exploration", "density": "density"}
    measured = {"correlation": "correlation", "c*": "c_star", "ĉ": "c_hat", "variance": "variance"}
    found = [
        _lines(study, f"Accuracy on {split} images", "percent", accuracy),
        _gains(study, "Gain in accuracy at equal epochs, in points", accuracy),
        _bars(study, "Cost", COSTS),
        _lines(study, "Correction", "number", {k: _entry("correction", v) for k, v in correction.items()}),
        _lines(study, "Training", "number", {k: _field(v) for k, v in training.items()}),
        _lines(study, "Gradients during training", "number", {k: _entry("measured", v) for k, v in measured.items()}),
        _bars(study, "Gradients at the final weights", MEASURED),
        _dots(study),
    ]
    return [chart for chart in found if chart is not None]


def _entry(part: str, key: str) -> Pick:
    return lambda epoch: getattr(epoch, part).get(key)


def _field(name: str) -> Pick:
    return lambda epoch: getattr(epoch, name)


# Curves


def _lines(study: Study, title: str, form: str, views: Mapping[str, Pick]) -> Chart | None:
    """Return curves with bands over seeds. A point is [epochs, evaluations, seconds, mean, std or null]."""
    points = {
        label: [
            [[*(_short(p.x[axis]) for axis in AXES), *_pair(p.y)] for p in curve(results, pick)]
            for results in study.results.values()
        ]
        for label, pick in views.items()
    }
    return _curves({"kind": "lines", "title": title, "form": form}, points)


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
    names = {i: f"{arms[i]} - {pairs[arms[i]]}" for i in drawn}
    return _curves({"kind": "lines", "title": title, "form": "points", "names": names}, points)


def _curves(chart: Chart, points: Mapping[str, Sequence[Sequence[Any]]]) -> Chart | None:
    """Add views to a chart from points by view and arm; `None` if there are no points."""
    views = [
        {"label": label, "series": [{"arm": i, "points": line} for i, line in enumerate(lines) if line]}
        for label, lines in points.items()
        if any(lines)
    ]
    return {**chart, "views": views} if views else None


def _differences(ours: Sequence[Result], theirs: Sequence[Result], pick: Pick) -> list[list[float | None]]:
    """Return [epoch, null, null, mean, std or null] for each epoch that all pairs have."""
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
    return [[epoch, None, None, *_pair(found)] for epoch, found in spreads.items() if found is not None]


def _pair(found: Spread) -> list[float | None]:
    return [_short(found.mean), _short(found.std)]


# Bars


def _seconds_per_epoch(result: Result) -> float | None:
    last = result.epochs[-1]
    return None if last.seconds is None else last.seconds / last.epoch


def _gigabytes(result: Result) -> float | None:
    peaks = [epoch.peak_memory for epoch in result.epochs if epoch.peak_memory is not None]
    return max(peaks) / 1e9 if peaks else None


def _measured(key: str) -> Number:
    return lambda result: result.measured.get(key)


COSTS: dict[str, Number] = {
    "gradient evaluations per epoch, SGD = 1": cost_per_epoch,
    "training seconds per epoch": _seconds_per_epoch,
    "peak memory, GB": _gigabytes,
}
MEASURED: dict[str, Number] = {
    "variance of the mini-batch gradient": _measured("variance"),
    "correlation after noise on the active weights": _measured("correlation"),
    "correlation after noise on all weights, inactive ones too": _measured("correlation everywhere"),
    "best coefficient c*": _measured("c_star"),
}


def _bars(study: Study, title: str, views: Mapping[str, Number]) -> Chart | None:
    """Return one bar per quantity and arm: [arm, mean, std or null]."""
    groups = []
    for label, pick in views.items():
        rows = []
        for i, results in enumerate(study.results.values()):
            found = spread([value for result in results if (value := pick(result)) is not None])
            rows += [] if found is None else [[i, *_pair(found)]]
        groups += [{"label": label, "rows": rows}] if rows else []
    return {"kind": "bars", "title": title, "groups": groups} if groups else None


# Dots


def _dots(study: Study) -> Chart | None:
    """Return the density of each layer. Arms with the same densities share their dots."""
    sizes: dict[str, int] = {}
    for results in study.results.values():
        sizes |= {name: size for result in results for name, (size, _) in result.layers.items()}
    series: list[dict[str, Any]] = []
    for i, results in enumerate(study.results.values()):
        densities = [_density(results, name) for name in sizes]
        same = next((s for s in series if s["densities"] == densities), None)
        if same is not None:
            same["arms"].append(i)
        elif any(density is not None for density in densities):
            series.append({"arms": [i], "densities": densities})
    layers = [[name, size] for name, size in sizes.items()]
    return {"kind": "dots", "title": "Density by layer", "layers": layers, "series": series} if series else None


def _density(results: Sequence[Result], layer: str) -> float | None:
    """Return the mean over seeds."""
    pairs = [result.layers[layer] for result in results if layer in result.layers]
    return _short(sum(active / size for size, active in pairs) / len(pairs)) if pairs else None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
