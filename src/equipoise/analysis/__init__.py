"""Analysis of a model: FLOPs, gradient statistics, and the convergence bounds of the theory."""

from equipoise.analysis.gradient_statistics import Measurement, measure_gradients

__all__ = ["Measurement", "measure_gradients"]
