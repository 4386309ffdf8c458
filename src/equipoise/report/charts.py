"""The data that the page's script draws: lines over time, bars of cost, dots of layer densities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from equipoise.report.words import SCORES
from equipoise.studies.compare import AXES, Spread, cost_of_epoch, curve, spread
from equipoise.studies.results import Epoch, Result, Study

Pick = Callable[[Epoch], float | None]
Chart = dict[str, Any]


def charts_of(study: Study) -> list[Chart]:
    """Every chart that the results of a study have data for."""
    split = next((r.epochs[-1].split for rs in study.results.values() for r in rs), "test")
    accuracy = {label: _score(score) for score, label in SCORES.items()}
    correction = {"c": "c", "ĉ": "c_hat", "weight γc": "weight", "variance left": "variance_left"}
    training = {"loss": "train_loss", "explored": "exploration", "density": "density"}
    measured = {"correlation": "correlation", "c*": "c_star", "ĉ": "c_hat", "variance": "variance"}
    found = [
        _lines(study, f"Accuracy on {split} images", "percent", accuracy),
        _gains(study, "Gain in accuracy at equal epochs, in points", accuracy),
        _bars(study, "Cost", COSTS),
        _lines(study, "Correction", "number", {k: _in("correction", v) for k, v in correction.items()}),
        _lines(study, "Training", "number", {k: _field(v) for k, v in training.items()}),
        _lines(
            study,
            "Gradients, measured along training",
            "number",
            {k: _in("measured", v) for k, v in measured.items()},
        ),
        _bars(study, "Gradients on the final weights", MEASURED),
        _dots(study),
    ]
    return [chart for chart in found if chart is not None]


def _score(score: str) -> Pick:
    return lambda epoch: epoch.scores.get(score)


def _in(part: str, key: str) -> Pick:
    return lambda epoch: getattr(epoch, part).get(key)


def _field(name: str) -> Pick:
    return lambda epoch: getattr(epoch, name)


def _lines(study: Study, title: str, form: str, views: dict[str, Pick]) -> Chart | None:
    """Curves with bands over seeds. A point is [epochs, evaluations, seconds, mean, std or null]."""
    drawn = []
    for label, pick in views.items():
        series = []
        for i, results in enumerate(study.results.values()):
            points = [[*(_short(p.x[axis]) for axis in AXES), *_pair(p.y)] for p in curve(results, pick)]
            if points:
                series.append({"arm": i, "points": points})
        if series:
            drawn.append({"label": label, "series": series})
    return {"kind": "lines", "title": title, "form": form, "views": drawn} if drawn else None


def _gains(study: Study, title: str, views: dict[str, Pick]) -> Chart | None:
    """Differences of pairs of one seed from the arm that each is said to beat, where both have as many epochs.

    An accuracy at one epoch is chosen among many; this shows the others. What others are said to beat is left out.
    """
    arms = list(study.results)
    said: dict[str, str] = {}
    for claim in study.claims:
        # the first that is named, but rather the first arm of the study, which is its baseline
        if claim.metric == "accuracy" and (claim.better not in said or claim.than in arms[:1]):
            said[claim.better] = claim.than
    pairs = {better: than for better, than in said.items() if better not in said.values()}
    drawn: list[Chart] = []
    for label, pick in views.items():
        series: list[Chart] = []
        for i, better in enumerate(arms):
            points = _differences(study.results[better], study.results.get(pairs.get(better, ""), ()), pick)
            if points:
                series.append({"arm": i, "points": points})
        if series:
            drawn.append({"label": label, "series": series})
    seen = {found["arm"] for view in drawn for found in view["series"]}
    names = {i: f"{arms[i]} - {pairs[arms[i]]}" for i in sorted(seen)}
    return {"kind": "lines", "title": title, "form": "points", "names": names, "views": drawn} if drawn else None


def _differences(ours: Sequence[Result], theirs: Sequence[Result], pick: Pick) -> list[list[float | None]]:
    """For each epoch [epoch, null, null, mean, std or null]."""
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
    whole = [(epoch, found) for epoch, found in by_epoch.items() if len(found) == len(pairs)]
    spreads = [(epoch, spread(found)) for epoch, found in sorted(whole)]
    return [[epoch, None, None, *_pair(found)] for epoch, found in spreads if found is not None]


def _pair(found: Spread) -> list[float | None]:
    return [_short(found.mean), _short(found.std)]


def _seconds_an_epoch(result: Result) -> float | None:
    last = result.epochs[-1]
    return None if last.seconds is None else last.seconds / last.epoch


def _gigabytes(result: Result) -> float | None:
    peaks = [epoch.peak_memory for epoch in result.epochs if epoch.peak_memory is not None]
    return max(peaks) / 1e9 if peaks else None


def _measure(key: str) -> Callable[[Result], float | None]:
    return lambda result: result.measured.get(key)


COSTS: dict[str, Callable[[Result], float | None]] = {
    "gradient evaluations of an epoch, SGD = 1": cost_of_epoch,
    "training seconds of an epoch": _seconds_an_epoch,
    "peak memory, GB": _gigabytes,
}
MEASURED = {
    "variance of the mini-batch gradient": _measure("variance"),
    "correlation after noise on the active weights": _measure("correlation"),
    "correlation after noise on all weights, inactive ones too": _measure("correlation everywhere"),
    "best coefficient c*": _measure("c_star"),
}


def _bars(study: Study, title: str, views: dict[str, Callable[[Result], float | None]]) -> Chart | None:
    """For each quantity a bar an arm: [arm, mean, std or null]."""
    groups = []
    for label, pick in views.items():
        rows = []
        for i, results in enumerate(study.results.values()):
            values = [value for result in results if (value := pick(result)) is not None]
            if (found := spread(values)) is not None:
                rows.append([i, *_pair(found)])
        if rows:
            groups.append({"label": label, "rows": rows})
    return {"kind": "bars", "title": title, "groups": groups} if groups else None


def _dots(study: Study) -> Chart | None:
    """Density of each layer; arms whose layers have the same densities share their dots."""
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
    """The mean over seeds."""
    pairs = [result.layers[layer] for result in results if layer in result.layers]
    return _short(sum(active / size for size, active in pairs) / len(pairs)) if pairs else None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
