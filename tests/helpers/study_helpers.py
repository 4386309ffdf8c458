"""Small results of studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.studies.results import Epoch, Result, Study, result_file, write_result


def epoch(number: int, accuracy: float | None, **options: Any) -> Epoch:
    """An epoch of ten steps of SGD that took two seconds."""
    steps = 10 * number
    values: dict[str, Any] = {
        "epoch": number,
        "step": steps,
        "scores": {} if accuracy is None else {"plain": accuracy},
        "passes": {"forward": steps, "backward": steps},
        "seconds": 2.0 * number,
        "correction": {},
    }
    return Epoch(**values | options)


def result(arm: str, seed: int, accuracies: Sequence[float], **options: Any) -> Result:
    """A result with these accuracies. `cost` and `slow` are factors of the cost and seconds of SGD."""
    cost, slow = options.pop("cost", 1), options.pop("slow", 1.0)
    epochs = [
        epoch(i, a, passes={"forward": 10 * i * cost, "backward": 10 * i * cost}, seconds=2.0 * i * slow)
        for i, a in enumerate(accuracies, 1)
    ]
    return Result(arm, seed, tuple(epochs), **options)


def study(*results: Result, **options: Any) -> Study:
    by_arm: dict[str, tuple[Result, ...]] = {}
    for found in results:
        by_arm[found.arm] = (*by_arm.get(found.arm, ()), found)
    return Study("s", "S", "", by_arm, **options)


def line(number: int, accuracy: float = 0.5, c: float | None = None) -> dict[str, Any]:
    """A line of metrics as the training loop writes it."""
    steps = 10 * number
    return {
        "epoch": number,
        "step": steps,
        "learning_rate": 0.1,
        "train_loss": 1.0 / number,
        "train_accuracy": accuracy,
        "split": "test",
        "scores": {score: {"loss": 1.0, "accuracy": accuracy} for score in ("plain", "bn_recalibrated", "ema")},
        "density": 0.05,
        "exploration": 0.3,
        "updates": 1,
        "correction": {} if c is None else {"c": c, "weight": 0.1 * c},
        "passes": {"forward": steps, "backward": steps},
        "seconds": 2.0 * number,
        "images_per_second": 100.0,
        "peak_memory": None,
    }


def result_json(arm: str = "SGD", seed: int = 0, shift: float = 0.0, name: str = "s") -> dict[str, Any]:
    lines = [line(i, 0.1 * i + shift + 0.001 * seed, c=0.5 if shift else None) for i in range(1, 7)]
    return {
        "version": 2,
        "study": name,
        "arm": arm,
        "seed": seed,
        "finished": True,
        "recipe": {"model": "small", "epochs": 6, "seed": seed},
        "environment": {"device": "cpu", "torch": "2.13", "date": "2026-11-15"},
        "epochs": lines,
        "result": {"version": 1, "test": {"plain": {"accuracy": 0.6, "loss": 1.0}}},
        "layers": {"fc": {"size": 100, "active": 5}, "head": {"size": 10, "active": 10}},
        "robust": {"plain": {"clean": 0.6, "robust": 0.3, "images": 10}},
        "measured": {
            "variance": 2.0,
            "correlation": 0.7,
            "along": [{"epoch": 2, "correlation": 0.9}],
            "everywhere": {"variance_old": 5.0, "correlation": 0.2},
        },
    }


CLAIM = {"says": "AGENT is better", "better": "AGENT", "than": "SGD", "metric": "accuracy", "at": 3}


def write_study(folder: Path, arms: Sequence[str] = ("SGD", "AGENT"), **asked: Any) -> Path:
    """Write two seeds of every arm; each arm is 0.02 better than the one before."""
    head: Mapping[str, Any] = {"version": 2, "name": "s", "title": "A study", "about": "About.", "claims": [CLAIM]}
    paper = [{"arm": "AGENT", "metric": "accuracy", "at": 3, "value": 0.35}]
    write_result(folder / "study.json", {**head, "arms": {arm: {} for arm in arms}, "paper": paper} | asked)
    for i, arm in enumerate(arms):
        for seed in (0, 1):
            write_result(result_file(folder, arm, seed), result_json(arm, seed, 0.02 * i))
    return folder
