"""The gain of AGENT over its baseline at each epoch before the learning rate falls, over all pairs of committed runs.

    python bench/early.py [results]

A pair is one seed of one pipeline. The standard error is over pairs. The lines below the table give each pair's mean
over the epochs. The last line gives the distance between two runs of one recipe and seed, for comparison: on a GPU,
kernels are chosen by timing, so that no two runs are equal to the bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from equipoise.scores import SCORES
from equipoise.studies.reading import read_results
from equipoise.studies.results import Result

EPOCHS = 25  # the learning rate falls later in all of these pipelines
PAIRS = {
    "set-itop": [("AGENT", "SGD")],
    "rigl-itop": [("AGENT", "SGD")],
    "table1-standard": [("AGENT 99 %", "BSR-Net 99 %"), ("AGENT 90 %", "BSR-Net 90 %")],
}
SAME_RECIPE = (("fixed-c", "AGENT"), ("gamma", "gamma 0.1"))
SAME_RECIPE_EPOCHS = 15


def points(result: Result, score: str = "plain", epochs: int = EPOCHS) -> np.ndarray:
    return np.array([100 * epoch.scores[score] for epoch in result.epochs[:epochs]])


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "results")
    studies = {study.name: study for study in read_results(folder).studies}
    gains: dict[str, list[np.ndarray]] = {score: [] for score in SCORES}
    names = []
    for name, arms in PAIRS.items():
        for better, than in arms:
            baseline = {result.seed: result for result in studies[name].results[than]}
            for result in studies[name].results[better]:
                names.append(f"{better} - {than}, {name}, seed {result.seed}")
                for score, found in gains.items():
                    found.append(points(result, score) - points(baseline[result.seed], score))
    tables = [np.stack(found) for found in gains.values()]
    error = len(names) ** -0.5

    def row(label: str, columns: list[np.ndarray], digits: int) -> str:
        cells = [f"{c.mean():+.{digits}f} ± {c.std(ddof=1) * error:.{digits}f}" for c in columns]
        return f"| {label} | {' | '.join(cells)} | {(columns[0] > 0).sum()} |"

    print(f"{len(names)} pairs, points, mean ± standard error")
    print(f"| epoch | {' | '.join(SCORES.values())} | plain above 0 |\n| --- | --- | --- | --- | --- |")
    for epoch in range(EPOCHS):
        print(row(str(epoch + 1), [table[:, epoch] for table in tables], 1))
    means = [table.mean(1) for table in tables]
    print(row("all", means, 2))
    for name, *of_pair in zip(names, *means, strict=True):
        print(f"| {name} | {' | '.join(f'{mean:+.2f}' for mean in of_pair)} | |")
    one, other = (points(studies[name].results[arm][0], epochs=SAME_RECIPE_EPOCHS) for name, arm in SAME_RECIPE)
    apart = one - other
    rms = np.sqrt((apart**2).mean())
    print(f"one recipe and seed twice: {rms:.1f} points apart (RMS), {abs(apart).max():.1f} at most")


if __name__ == "__main__":
    main()
