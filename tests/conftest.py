"""Settings of all tests.

Hypothesis has two profiles: `ci` (the default) always draws the same examples, `random` draws new ones in every run.
Choose with `pytest --hypothesis-profile random`.
"""

from pathlib import Path

import pytest
from hypothesis import settings

HELPERS = Path(__file__).parent / "helpers"
pytest.register_assert_rewrite(*(file.stem for file in HELPERS.glob("*.py")))  # failures show both sides
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile("ci")
