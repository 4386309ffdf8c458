"""What happens inside: costs, gradients, and the bounds of the theory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise.measure.gradients import Measurement, measure_gradients
    from equipoise.measure.run import MeasureWatcher, measure_trainer

_HOMES = {
    "Measurement": "gradients",
    "measure_gradients": "gradients",
    "MeasureWatcher": "run",
    "measure_trainer": "run",
}

__all__ = ["MeasureWatcher", "Measurement", "measure_gradients", "measure_trainer"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: the training loop is a lot to import for whoever wants the theory alone."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
