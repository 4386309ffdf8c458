"""The commit that a result records."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from equipoise.studies.record import commit


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout that holds package/study/record.py and a file outside the package."""
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    file = tmp_path / "package/study/record.py"
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\n")
    (tmp_path / "notes").write_text("a\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "One")
    return file


def test_the_commit_of_the_checkout(file: Path, tmp_path: Path) -> None:
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit(file) == head
    (tmp_path / "notes").write_text("b\n")
    (file.parent / "new.py").write_text("")
    assert commit(file) == head, "files outside the package and untracked files are not its code"
    (tmp_path / "package/other.py").write_text("")
    git(tmp_path, "add", "package/other.py")
    assert commit(file) == f"{head}+changes"
    git(tmp_path, "commit", "-qm", "Two", "package")
    assert commit(file) == git(tmp_path, "rev-parse", "HEAD") != head
    file.write_text("x = 2\n")
    assert commit(file) == f"{git(tmp_path, 'rev-parse', 'HEAD')}+changes"


def test_code_installed_in_the_checkout_of_another_project_has_no_commit(file: Path, tmp_path: Path) -> None:
    installed = tmp_path / ".venv/lib/equipoise/study/record.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("x = 1\n")
    assert commit(installed) is None


def test_no_checkout_and_the_variable_git_commit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit(Path("/nowhere/at/all.py")) is None
    monkeypatch.setenv("GIT_COMMIT", "abc")
    assert commit(file) == "abc"
