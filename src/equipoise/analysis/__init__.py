"""What happens inside a model: FLOPs, gradient statistics, and the bounds of the theory."""

from equipoise.analysis.gradients import Measurement, measure_gradients

__all__ = ["Measurement", "measure_gradients"]
