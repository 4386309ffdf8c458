"""A summary of how the sparse layers of a run are stored and computed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from equipoise.storage.packed import PackedWeight
from equipoise.topology import Topology


def describe_layers(topology: Topology) -> dict[str, dict[str, Any]]:
    """Return the size, the number of active weights and the implementation of every sparse layer, by name."""
    return {
        layer.name: {
            "size": layer.size,
            "active": layer.active,
            "runs": layer.module.how() if isinstance(layer, PackedWeight) else "dense with zeros",
        }
        for layer in topology.layers
    }


def summary(topology: Topology) -> str:
    """Describe the storage and the implementations of the layers in one line."""
    if not topology.layers:
        return "no sparse layer"
    runs = Counter(layer["runs"] for layer in describe_layers(topology).values())
    return f"{topology.storage} storage, {len(topology.layers)} sparse layers: " + ", ".join(
        f"{count} {how}" for how, count in runs.most_common()
    )
