"""Settings of all tests.

Hypothesis has two profiles: `ci` (the default) always draws the same examples, `random` draws new ones in every run.
Choose with `pytest --hypothesis-profile random`.
"""

import os
from pathlib import Path

# Before torch is imported: one thread in the test processes and in those that they start, because sums differ in
# rounding between numbers of threads, and because two processes are faster than two threads in one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from equipoise.storage.choice import Choice
from equipoise.storage.packed_modules import PackedLayer

HELPERS = Path(__file__).parent / "helpers"
pytest.register_assert_rewrite(*(file.stem for file in HELPERS.glob("*.py")))  # failures show both sides
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def sparse_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave fixed costs out of the choice of a kernel: they would let the small layers of most tests run dense."""
    monkeypatch.setattr(PackedLayer, "estimate_dense", lambda layer, size: layer.dense_alone(size[0]))
    monkeypatch.setattr(Choice, "pays", lambda choice, images, positions, padding: choice.time * padding <= 1)
