"""The demo: dense and sparse training on the digits, in about a minute."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from equipoise.display.figures import Metrics, draw_arms
from equipoise.display.tables import make_table, percent
from equipoise.studies.compare import gradient_evaluations, spread
from equipoise.training.build_recipe import make_recipe
from equipoise.training.recipe_files import apply_overrides, read_recipe
from equipoise.training.run_folder import RunFolder
from equipoise.training.trainer import Trainer

AGENT = ["topology=set", "correction=agent", "correction.mode=replay"]
ARMS: dict[str, tuple[str, list[str]]] = {  # the folder of each arm, and its overlays and overrides
    "dense": ("dense", ["topology=dense"]),
    "static": ("static", ["topology=static"]),
    "SET": ("set", ["topology=set"]),
    "RigL": ("rigl", ["topology=rigl"]),
    "SET + AGENT": ("set-agent", AGENT),
    "SET + AGENT c*": ("set-agent-c", [*AGENT, "correction.coefficient=gradient", "correction.gamma=1"]),
    "fast": ("fast", ["fast"]),
}


def run_demo(out: Path, console: Console, epochs: int, seeds: int) -> None:
    """Train every arm with several seeds in folders of `out`, print a table and draw accuracy and time to demo.png."""
    torch.set_num_threads(1)  # the network is too small to gain from more
    arms: dict[str, list[Metrics]] = {}
    images = 0
    for name, (folder, words) in ARMS.items():
        console.print(f"training {name}, {seeds} seed{'s' * (seeds > 1)} ...")
        raw = read_recipe("digits", *[word for word in words if "=" not in word])
        own = apply_overrides(raw, [f"epochs={epochs}", *[word for word in words if "=" in word]])
        arms[name] = []
        for seed in range(seeds):
            recipe = {**own, "seed": seed}
            trainer = Trainer(make_recipe(recipe), RunFolder.create(out / f"{folder}-seed{seed}", recipe))
            images = trainer.run()["test"]["plain"]["images"]
            arms[name].append(trainer.history)
    columns = ["", "accuracy", "density", "explored", "variance", "passes", "seconds"]
    title = f"digits, test accuracy after {epochs} epochs, mean and deviation of {seeds} seeds"
    console.print(make_table(columns, [_row(name, runs) for name, runs in arms.items()], title))
    sentence = finding(arms, images)
    draw_arms(arms, out / "demo.png", sentence)
    console.print(sentence)
    console.print(f"figure: {out / 'demo.png'}   each run: equipoise show {out}/NAME-seed0")


def finding(arms: Mapping[str, Sequence[Metrics]], images: int) -> str:
    """Compare the means of the sparse arms with the dense one, and with the share of one image."""
    means = {name: statistics.mean(_accuracies(runs)) for name, runs in arms.items()}
    apart = max(abs(mean - means["dense"]) for name, mean in means.items() if name != "dense")
    density = max(runs[0][-1]["density"] for name, runs in arms.items() if name != "dense")
    seeds = len(arms["dense"])
    return (
        f"With {percent(density, 0)} of the weights, means end within {100 * apart:.1f} points of dense\n"
        f"({seeds} seed{'s' * (seeds > 1)}; one of {images} test images is {100 / images:.1f} points)"
    )


def _accuracies(runs: Sequence[Metrics]) -> list[float]:
    return [metrics[-1]["scores"]["plain"]["accuracy"] for metrics in runs]


def _row(name: str, runs: Sequence[Metrics]) -> list[str]:
    last = runs[0][-1]
    found = spread(_accuracies(runs))
    assert found is not None
    deviation = "" if found.std is None else f" ± {100 * found.std:.1f}"
    left = [line["correction"].get("variance_left") for metrics in runs for line in metrics]
    known = [value for value in left if value is not None]
    sgd = runs[0][0]["step"] * len(runs[0])
    return [
        name,
        f"{100 * found.mean:.1f}{deviation} %",
        percent(last["density"], 1),
        percent(statistics.mean(metrics[-1]["exploration"] for metrics in runs), 1),
        percent(statistics.mean(known), 0) if known else "100 %",
        f"{gradient_evaluations(last['passes']) / sgd:.2f} x",
        f"{statistics.median(metrics[-1]['seconds'] for metrics in runs):.1f}",
    ]
