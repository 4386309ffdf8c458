"""A sample of the sanitizer runs (`make test-faults`), and that the sanitizers would report."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.sanitizers import address_sanitizer, missing, reports, sanitize, thread_sanitizer

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.mark.timeout(900)
def test_a_sample_of_calls_under_all_sanitizers(tmp_path: Path) -> None:
    tally = sanitize(calls=15, runs=2, seed=0, folder=tmp_path)
    assert tally.failures == []
    assert sum(tally.calls.values()) == 17
    assert any("refused" in kind for kind in tally.calls)
    assert any("computed" in kind for kind in tally.calls)


@pytest.mark.slow
def test_a_sample_of_calls_in_wide_vectors(tmp_path: Path) -> None:
    assert sanitize(calls=200, runs=5, seed=1, folder=tmp_path).failures == []


@pytest.mark.slow
def test_a_kernel_that_leaves_its_memory_is_reported(tmp_path: Path) -> None:
    done = address_sanitizer(0, 0, tmp_path, "canary")
    assert done.returncode
    assert any("heap-buffer-overflow" in line for line in reports(done))


@pytest.mark.slow
def test_a_data_race_is_reported(tmp_path: Path) -> None:
    done = thread_sanitizer(0, 0, tmp_path, "canary")
    assert done.returncode == 66
    assert any("data race" in line for line in reports(done))
