"""How the sparse layers of a run are stored and computed, for people."""

from __future__ import annotations

from collections import Counter
from typing import Any

from equipoise.storage.packed import PackedWeight
from equipoise.topology import Topology


def describe_layers(topology: Topology) -> dict[str, dict[str, Any]]:
    """Of every sparse layer its size, its active weights, and how it runs."""
    return {
        layer.name: {
            "size": layer.size,
            "active": layer.active,
            "runs": layer.module.how() if isinstance(layer, PackedWeight) else "dense with zeros",
        }
        for layer in topology.layers
    }


def summary(topology: Topology) -> str:
    """In one line: the storage, and how many layers run how."""
    if not topology.layers:
        return "no sparse layer"
    runs = Counter(layer["runs"] for layer in describe_layers(topology).values())
    return f"{topology.storage} storage, {len(topology.layers)} sparse layers: " + ", ".join(
        f"{count} {how}" for how, count in runs.most_common()
    )
