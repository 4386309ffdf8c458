"""Settings of all tests.

Hypothesis has two profiles: `ci` (the default) always draws the same examples, `random` draws new ones in every run.
Choose with `pytest --hypothesis-profile random`.
"""

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile("ci")
