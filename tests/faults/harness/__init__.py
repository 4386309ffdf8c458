"""The fault harness: kills runs, damages files, feeds wrong input and runs threads and processes at the same time.

    PYTHONPATH=tests/helpers:tests/faults python -m harness --kills 1000 --inputs 20000 --concurrent 500 --page PAGE

`make test-faults` runs it at length. `--minutes 3` runs a part of it. `tests/faults/test_harness.py` runs a sample.
"""
