"""The fault harness: kills runs, damages files and feeds wrong input, and writes a page with what it found.

    PYTHONPATH=tests/helpers:tests/faults python -m harness --kills 200 --pairs 20 --inputs 10000 --page PAGE

`make test-faults` runs it at length. `tests/faults/test_harness.py` runs a sample.
"""
