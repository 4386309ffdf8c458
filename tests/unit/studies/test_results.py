"""Result files: strict JSON, whole or not at all, under names that are safe as paths."""

import json
import os
import re
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.studies.results import result_file, slug, write_result
from study_helpers import result_json


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_six_significant_digits(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.getbasetemp() / "float.json"
    write_result(path, {"value": value})
    found = json.loads(path.read_text())["value"]
    exact = Decimal(value)
    digit = Decimal(1).scaleb(exact.adjusted() - 5) if exact else Decimal(1)
    assert abs(Decimal(found) - exact) <= digit / 2 * Decimal("1.000001")
    assert len(Decimal(repr(found)).normalize().as_tuple().digits) <= 6


def test_a_file_is_strict_json_with_one_line_per_epoch(tmp_path: Path) -> None:
    value = result_json()
    value["epochs"][0]["train_loss"] = float("nan")
    write_result(tmp_path / "deep" / "r.json", value)
    text = (tmp_path / "deep" / "r.json").read_text()
    found = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert found["epochs"][0]["train_loss"] is None
    assert found["layers"] == value["layers"]
    assert sum('"epoch": ' in row and '"learning_rate"' in row for row in text.splitlines()) == len(value["epochs"])


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_result(tmp_path / "r.json", {"a": 1})

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_result(tmp_path / "r.json", {"a": 2})
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def normal(name: str) -> str:
    return re.sub("[ _-]+", "-", name.lower())


@given(st.text(), st.text())
def test_different_names_become_different_plain_file_names(first: str, second: str) -> None:
    assert re.fullmatch(r"[a-z0-9-]+", slug(first))
    assert (slug(first) == slug(second)) <= (normal(first) == normal(second))


def test_file_names_stay_in_their_folder(tmp_path: Path) -> None:
    assert slug("SGD") == "sgd"
    assert slug("SET ITOP_99") == "set-itop-99"
    for name in ("../../etc/passwd", "/root", "..", "", "a" * 500, "\ud800"):
        assert result_file(tmp_path, name, 0).parent == tmp_path
        assert len(result_file(tmp_path, name, 0).name) < 100


def test_a_file_with_the_same_content_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "study.json"
    write_result(file, {"version": 1, "name": "a"})
    before = file.stat().st_ino
    write_result(file, {"version": 1, "name": "a"})
    assert file.stat().st_ino == before
    write_result(file, {"version": 1, "name": "b"})
    assert json.loads(file.read_text())["name"] == "b"
