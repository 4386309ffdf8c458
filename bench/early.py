"""What AGENT gains over its baseline at each epoch before the learning rate falls, over all pairs of committed runs.

    python bench/early.py [results]

A pair is one seed of one pipeline. The standard error is over pairs; the lines below are each pair's mean over the
epochs. The last line sets beside it how far two runs of one recipe and one seed are apart: on a GPU kernels are
chosen by timing, so that no two runs are the same to the bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from equipoise.studies.reading import read_results
from equipoise.studies.results import Result

EPOCHS = 25  # in all of these pipelines the learning rate falls later
PAIRS = {
    "set-itop": [("AGENT", "SGD")],
    "rigl-itop": [("AGENT", "SGD")],
    "table1-standard": [("AGENT 99 %", "BSR-Net 99 %"), ("AGENT 90 %", "BSR-Net 90 %")],
}
TWICE = (("fixed-c", "AGENT"), ("gamma", "gamma 0.1"))  # the same recipe
TWICE_EPOCHS = 15
WAYS = ("plain", "bn_recalibrated", "ema")


def points(result: Result, way: str = "plain", epochs: int = EPOCHS) -> np.ndarray:
    return np.array([100 * epoch.scores[way] for epoch in result.epochs[:epochs]])


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "results")
    studies = {study.name: study for study in read_results(folder).studies}
    gains: dict[str, list[np.ndarray]] = {way: [] for way in WAYS}
    names = []
    for name, arms in PAIRS.items():
        for better, than in arms:
            baseline = {result.seed: result for result in studies[name].results[than]}
            for result in studies[name].results[better]:
                names.append(f"{better} - {than}, {name}, seed {result.seed}")
                for way, found in gains.items():
                    found.append(points(result, way) - points(baseline[result.seed], way))
    tables = {way: np.stack(found) for way, found in gains.items()}
    error = len(names) ** -0.5
    print(f"{len(names)} pairs, points, mean ± standard error")
    print(f"| epoch | {' | '.join(WAYS)} | plain above 0 |\n| --- | --- | --- | --- | --- |")
    for epoch in range(EPOCHS):
        columns = [table[:, epoch] for table in tables.values()]
        cells = [f"{each.mean():+.1f} ± {each.std(ddof=1) * error:.1f}" for each in columns]
        print(f"| {epoch + 1} | {' | '.join(cells)} | {(columns[0] > 0).sum()} |")
    columns = [table.mean(1) for table in tables.values()]
    cells = [f"{each.mean():+.2f} ± {each.std(ddof=1) * error:.2f}" for each in columns]
    print(f"| all | {' | '.join(cells)} | {(columns[0] > 0).sum()} |")
    for name, *means in zip(names, *columns, strict=True):
        print(f"| {name} | {' | '.join(f'{mean:+.2f}' for mean in means)} | |")
    one, other = (points(studies[name].results[arm][0], epochs=TWICE_EPOCHS) for name, arm in TWICE)
    apart = one - other
    print(f"one recipe and seed twice: {np.sqrt((apart**2).mean()):.1f} apart (RMS), {abs(apart).max():.1f} at most")


if __name__ == "__main__":
    main()
