"""Every topology x correction x optimizer x objective, as small recipes."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

BASE: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": 16},
    "data": {"name": "digits", "batch": 479, "augment": {"pad": 2}},  # three equal batches
    "schedule": {"name": "cosine"},
    "storage": "masked",
    "precision": "float32",
    "epochs": 2,
    "ema": 0.9,
    "bn_recalibration_batches": 1,
}
SPARSE = {"sparsity": 0.8, "every": 3}
BSR = {"name": "bsr-net", "sparsity": 0.8, "distribution": "uniform"}
PARTS: dict[str, dict[str, Any]] = {
    "topology": {
        "dense": "dense",
        "static": {"name": "static", "sparsity": 0.8},
        **{name: {"name": name, **SPARSE} for name in ("set", "rigl", "snfs", "mest", "gmp", "granet")},
        "rigl-itop": {"name": "rigl-itop", **SPARSE},
        "bsr-net": BSR,
        "bsr-net every 4": {**BSR, "rewire_every": 4},
    },
    "correction": {
        "sgd": "sgd",
        **{mode: {"name": "agent", "mode": mode} for mode in ("recompute", "replay")},
        "running": {"name": "agent", "mode": "running", "step_fraction": 0.5},
        "gradient": {"name": "svrg", "mode": "running", "coefficient": {"name": "gradient", "per_layer": True}},
        "pays": {"name": "svrg", "when": "pays"},
        **{name: name for name in ("alpha-svrg", "mvr", "agent-mvr", "saga")},
    },
    "optimizer": {
        "sgd": {"name": "sgd", "lr": 0.05},
        "sgdw": {"name": "sgdw", "lr": 0.05},
        "adam": {"name": "adam", "lr": 1e-3},
        "adamw, two groups": {"name": "adamw", "lr": 1e-3, "decay_all": False},
    },
    "objective": {
        "standard": "standard",
        "at": {"name": "at", "steps": 2, "clean_fraction": 0.3},
        **{name: {"name": name, "steps": 2} for name in ("trades", "mart", "mixed")},
    },
}
Case = tuple[str, ...]  # a name for each of PARTS


def recipe_of(case: Case) -> dict[str, Any]:
    return BASE | {part: PARTS[part][name] for part, name in zip(PARTS, case, strict=True)}


def _is_valid(case: Case) -> bool:
    """An attack makes its batches at their step, so their gradients cannot be replayed."""
    _, correction, _, objective = case
    return correction != "replay" or objective == "standard"


ALL: list[Case] = [case for case in product(*PARTS.values()) if _is_valid(case)]


def pairwise() -> list[Case]:
    """Few cases such that every two choices that go together occur together in one of them."""
    missing = {pair for case in ALL for pair in _pairs(case)}
    chosen = []
    for new in (6, 5, 4, 3, 2, 1):  # pairs that a case must add
        for case in ALL:
            found = missing & _pairs(case)
            if len(found) >= new:
                missing -= found
                chosen.append(case)
    return chosen


def _pairs(case: Case) -> set[tuple[tuple[int, str], ...]]:
    return set(combinations(enumerate(case), 2))
