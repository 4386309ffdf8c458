"""Bars of costs and dots of layer densities: tables with a small drawing in each row, which need no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from equipoise.report.markup import Markup, tag
from equipoise.report.words import value_of
from equipoise.studies.compare import cost_per_epoch, spread
from equipoise.studies.results import Result, Study

COLOURS = 7  # classes a0 to a6 of the style sheet
Number = Callable[[Result], float | None]


class RowChart(NamedTuple):
    """A title and its tables."""

    title: str
    tables: list[Markup]


def row_charts_of(study: Study) -> list[RowChart]:
    """Return every chart that a study has data for."""
    found = [
        RowChart("Cost", _bars(study, COSTS)),
        RowChart("Gradients at the final weights", _bars(study, MEASURED)),
        RowChart("Density by layer", _dots(study)),
    ]
    return [chart for chart in found if chart.tables]


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


def _bars(study: Study, views: Mapping[str, Number]) -> list[Markup]:
    """Return a table per quantity with a bar for each arm, as long as its mean, and a line over its deviation."""
    tables = []
    for label, pick in views.items():
        found = {
            (i, arm): spread([value for result in results if (value := pick(result)) is not None])
            for i, (arm, results) in enumerate(study.results.items())
        }
        known = {key: each for key, each in found.items() if each is not None and math.isfinite(each.mean)}
        most = max([each.mean + (each.std or 0) for each in known.values()], default=0) or 1
        rows = []
        for (i, arm), each in known.items():
            low, high = (100 * max(0, each.mean + sign * (each.std or 0)) / most for sign in (-1, 1))
            bar = tag("rect", width=f"{100 * max(0, each.mean) / most:.2f}%", height=12, rx=2)
            whisker = tag("line", x1=f"{low:.2f}%", x2=f"{high:.2f}%", y1=6, y2=6) if each.std else ""
            drawing = tag("svg", bar, whisker, class_=_colour(i), aria_hidden="true")
            rows.append(tag("tr", tag("th", arm, scope="row"), tag("td", drawing), tag("td", value_of("", each))))
        tables += [tag("table", tag("caption", label), tag("tbody", rows))] if rows else []
    return tables


# Dots


def _dots(study: Study) -> list[Markup]:
    """Return a table with the density of each layer on a logarithmic axis, averaged over seeds."""
    sizes: dict[str, int] = {}
    for results in study.results.values():
        sizes |= {name: size for result in results for name, (size, _) in result.layers.items()}
    groups: dict[tuple[float | None, ...], list[int]] = {}  # arms by their densities, as precise as a dot shows them
    for i, results in enumerate(study.results.values()):
        groups.setdefault(tuple(_density(results, name) for name in sizes), []).append(i)
    groups.pop((None,) * len(sizes), None)
    known = [density for densities in groups for density in densities if density]
    if not known:
        return []
    decades = min(-1, math.floor(math.log10(min(known)) + 1e-9))  # of the left end

    def position(density: float) -> str:
        return f"{100 * (1 - math.log10(density) / decades):.2f}%"

    ticks = [10.0**power for power in range(decades, 1)]
    grid = [tag("line", x1=position(tick), x2=position(tick), y1=0, y2=18) for tick in ticks]
    labels = [tag("text", f"{100 * tick:g} %", x=position(tick), y=12, text_anchor="middle") for tick in ticks]
    arms = list(study.results)
    names = {
        densities: "all arms" if len(groups) == 1 else ", ".join(arms[i] for i in group)
        for densities, group in groups.items()
    }
    after = [list(groups)[i:] for i in range(1, len(groups) + 1)]
    rows = []
    for k, (layer, size) in enumerate(sizes.items()):
        marks = [
            tag(
                "circle",
                tag("title", f"{names[densities]}: {100 * density:g} %"),
                class_=_colour(group[0]),
                cx=position(density),
                cy=9,
                r=min(10, 4 + 3 * [other[k] for other in later].count(density)),  # so that no dot hides another
            )
            for (densities, group), later in zip(groups.items(), after, strict=True)
            if (density := densities[k])
        ]
        drawing = tag("svg", grid, marks)
        rows.append(tag("tr", tag("th", layer, scope="row"), tag("td", drawing), tag("td", f"{size:,}")))
    head = tag("tr", tag("th", "layer"), tag("th", tag("svg", labels)), tag("th", "weights"))
    legend = [
        tag("span", tag("i", class_=f"key {_colour(group[0])}"), names[densities])
        for densities, group in groups.items()
    ]
    return [tag("table", tag("thead", head), tag("tbody", rows)), tag("div", legend, class_="legend")]


def _density(results: Sequence[Result], layer: str) -> float | None:
    pairs = [result.layers[layer] for result in results if layer in result.layers]
    return float(f"{sum(active / size for size, active in pairs) / len(pairs):.2g}") if pairs else None


def _colour(arm: int) -> str:
    return f"a{arm % COLOURS}" + (" second" if arm >= COLOURS else "")
