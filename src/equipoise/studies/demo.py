"""The demo: dense and sparse training on the digits, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from equipoise.display.figures import draw_arms
from equipoise.display.tables import make_table, number, percent
from equipoise.scores import SCORES
from equipoise.studies.compare import gradient_evaluations
from equipoise.training.recipe import apply_overrides, make_recipe, read_recipe
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


def run_demo(out: Path, console: Console, epochs: int) -> None:
    """Train every arm in a folder of `out`, print a table and draw the curves to demo.png."""
    torch.set_num_threads(1)  # the network is too small to gain from more
    histories, rows = {}, []
    for name, (folder, words) in ARMS.items():
        console.print(f"training {name} ...")
        raw = read_recipe("digits", *[word for word in words if "=" not in word])
        own = apply_overrides(raw, [f"epochs={epochs}", *[word for word in words if "=" in word]])
        trainer = Trainer(make_recipe(own), RunFolder.create(out / folder, own))
        trainer.run()
        histories[name] = trainer.history
        rows.append(_row(name, trainer.history))
    columns = ["", "accuracy", SCORES["ema"], "density", "explored", "variance", "passes", "seconds"]
    console.print(make_table(columns, rows, f"digits, test accuracy after {epochs} epochs"))
    draw_arms(histories, out / "demo.png", "Sparse training on the digits", score="ema")
    console.print(f"curves: {out / 'demo.png'}   each run: equipoise show {out}/NAME")


def _row(name: str, history: list[dict[str, Any]]) -> list[str]:
    last = history[-1]
    left = [line["correction"]["variance_left"] for line in history if "variance_left" in line["correction"]]
    known = [value for value in left if value is not None]
    sgd = history[0]["step"] * len(history)
    return [
        name,
        percent(last["scores"]["plain"]["accuracy"]),
        percent(last["scores"]["ema"]["accuracy"]),
        percent(last["density"], 1),
        percent(last["exploration"], 1),
        number(sum(known) / len(known)) if known else "1",
        f"{gradient_evaluations(last['passes']) / sgd:.2f} x",
        f"{last['seconds']:.1f}",
    ]
