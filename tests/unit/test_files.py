"""Atomic writes: temporary files that nobody can foresee, and files that are created once."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from equipoise.files import open_to_append, remove_leftovers, write_new, write_whole, written_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_temporary_file_is_new_and_has_another_name_every_time(tmp_path: Path) -> None:
    seen = set()
    for _ in range(3):
        with written_whole(tmp_path / "a") as temporary:
            assert temporary.read_bytes() == b""
            seen.add(temporary.name)
    assert len(seen) == 3


def test_a_temporary_file_is_never_one_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside").write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (tmp_path / ".a.guessed.tmp").symlink_to(tmp_path / "outside")
    for write in (write_whole, write_new):
        with pytest.raises(FileExistsError):
            write(tmp_path / "a", b"new")
    assert (tmp_path / "outside").read_text() == "precious"


@pytest.mark.parametrize("write", [write_whole, write_new])
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_permissions_are_those_of_the_umask(tmp_path: Path, write: Any, mask: int) -> None:
    before = os.umask(mask)
    try:
        write(tmp_path / "a", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~mask


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("precious")
    (tmp_path / "a").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic links"):
        open_to_append(tmp_path / "a")
    write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert (tmp_path / "outside").read_text() == "precious"


def test_old_leftovers_are_removed_and_files_of_others_stay(tmp_path: Path) -> None:
    for name in (".a.1.tmp", ".a.2.tmp", ".b.1.tmp", "notes.tmp"):
        (tmp_path / name).write_text("half")
    os.utime(tmp_path / ".a.1.tmp", (0, 0))
    write_whole(tmp_path / "a", b"x")
    assert names(tmp_path) == [".a.2.tmp", ".b.1.tmp", "a", "notes.tmp"]
    remove_leftovers(tmp_path / "a")
    assert names(tmp_path) == [".b.1.tmp", "a", "notes.tmp"]


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_is_created_by_one_of_many(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr("os.link", no_links)

    def create(content: bytes) -> bool:
        try:
            write_new(tmp_path / "a", content)
        except FileExistsError:
            return False
        return True

    contents = [bytes([65 + i]) * 1000 for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        created = list(pool.map(create, contents))
    assert sum(created) == 1
    assert (tmp_path / "a").read_bytes() == contents[created.index(True)]
    assert names(tmp_path) == ["a"]
