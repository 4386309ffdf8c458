"""The demo: dense and sparse on the digits, in a minute."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from equipoise.display.figures import draw_arms
from equipoise.display.tables import make_table, number, percent
from equipoise.training.recipe import apply_overrides, make_recipe, read_recipe
from equipoise.training.run_folder import RunFolder
from equipoise.training.trainer import Trainer

ARMS: dict[str, list[str]] = {
    "dense": ["topology=dense"],
    "static": ["topology=static"],
    "SET": ["topology=set"],
    "RigL": ["topology=rigl"],
    "SET + AGENT": ["topology=set", "correction=agent", "correction.mode=replay"],
    "SET + AGENT c*": [  # c from the gradients
        "topology=set",
        "correction=agent",
        "correction.mode=replay",
        "correction.coefficient=gradient",
        "correction.gamma=1",
    ],
}


def run_demo(out: Path, console: Console, epochs: int | None = None) -> dict[str, dict[str, Any]]:
    """Train the arms one after the other, print their table and draw their curves."""
    torch.set_num_threads(1)  # the net is too small for more; several would wait for each other
    raw = read_recipe("digits")
    if epochs is not None:
        raw["epochs"] = epochs
    histories, rows = {}, []
    for name, overrides in ARMS.items():
        console.print(f"training {name} ...")
        own = apply_overrides(raw, overrides)
        trainer = Trainer(make_recipe(own), RunFolder.create(out / _folder(name), own))
        trainer.run()
        histories[name] = trainer.history
        rows.append(_row(name, trainer.history))
    columns = ["", "accuracy", "ema", "density", "explored", "variance", "passes", "seconds"]
    console.print(make_table(columns, rows, f"digits, test accuracy after {raw['epochs']} epochs"))
    draw_arms(histories, out / "demo.png", "Sparse training on the digits", score="ema")
    console.print(f"curves: {out / 'demo.png'}   each run: equipoise show {out}/NAME")
    return {name: history[-1] for name, history in histories.items()}


def _folder(name: str) -> str:
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def _row(name: str, history: list[dict[str, Any]]) -> list[str]:
    last = history[-1]
    left = [line["correction"].get("variance_left") for line in history]
    measured = [value for value in left if value is not None]
    plain = history[0]["step"] * len(history)
    return [
        name,
        percent(last["scores"]["plain"]["accuracy"]),
        percent(last["scores"]["ema"]["accuracy"]),
        percent(last["density"], 1),
        percent(last["exploration"], 1),
        number(sum(measured) / len(measured)) if measured else "1",
        f"{(last['passes']['forward'] + 2 * last['passes']['backward']) / (3 * plain):.2f} x",
        f"{last['seconds']:.1f}",
    ]
