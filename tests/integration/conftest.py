"""Fixtures of the tests of the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from cli_helpers import Outcome, Run
from equipoise import cli
from train_helpers import tiny


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def go(*words: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["equipoise", *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return Outcome(stopped.value.code, out, err)

    return go


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A small recipe in the folder of `run`."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny()))
    return "tiny.yaml"
