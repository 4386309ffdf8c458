"""Damage files at random and read them with the commands that read such files."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from harness.commands import told, without_training

TOKENS = [
    *(b"", b"\0", b"\xff" * 8, b"NaN", b"Infinity", b"null", b"-1", b"1e999", b"9" * 30, b"../../x", b"/etc/passwd"),
    *(b"{", b"[", b'"', b"&a *a", b"!!python/name:os.system", b"\x80\x04cos\nsystem\n", b"\xf0\x9f", b"\n", b": "),
]


def mutated(content: bytes, random: Random) -> bytes:
    """Make one to three changes: bits and bytes flipped, pieces cut, doubled, moved or inserted, the end cut off."""
    for _ in range(random.choice((1, 1, 2, 3))):
        start, length = random.randint(0, len(content)), random.choice((1, 1, 2, 4, 16, 200))
        end = min(len(content), start + length)
        head, piece, tail = content[:start], content[start:end], content[end:]
        kind = random.randrange(7)
        if kind == 0 and piece:
            piece = bytes([piece[0] ^ (1 << random.randrange(8))]) + piece[1:]
        elif kind == 1:
            piece = random.randbytes(len(piece))
        elif kind == 2:
            piece = b""
        elif kind == 3:
            piece *= random.choice((2, 3, 50))
        elif kind == 4:
            piece = random.choice(TOKENS)
        elif kind == 5:
            other = random.randint(0, len(content))
            piece = content[other : other + length]
        elif random.random() < 0.5:
            tail = b""
        content = head + piece + tail
    return content


@dataclass(frozen=True)
class Kind:
    """Files of one kind.

    Args:
        name: For the page.
        prepare: Writes valid files into a folder.
        files: Lists the files of the folder that are damaged.
        read: Reads the folder with a command that is chosen at random.
        commands: Number of commands to choose from.
    """

    name: str
    prepare: Callable[[Path], None]
    files: Callable[[Path], list[Path]]
    read: Callable[[Path, Random], None]
    commands: int = 1


@dataclass
class Tally:
    """Numbers of inputs by kind, and the failures."""

    inputs: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def try_files(kind: Kind, folder: Path, count: int, seed: int, tally: Tally) -> None:
    """Damage and read `count` files; the folder is restored after each."""
    work, canary = folder / "work", folder / "canary"
    work.mkdir(parents=True)
    canary.write_text("untouched")
    kind.prepare(work)
    sound = {path: path.read_bytes() for path in work.rglob("*") if path.is_file() and not path.is_symlink()}
    targets = kind.files(work)
    with without_training():
        for number in range(count):
            random = Random(f"{kind.name} {seed} {number}")
            path = random.choice(targets)
            path.unlink()  # it may be a link to another file
            path.write_bytes(mutated(sound[path], random))
            try:
                kind.read(work, random)
            except Exception as error:
                name = f"{kind.name} {number} of seed {seed}, {path.relative_to(work)}"
                tally.failures.append(f"{name}: {told(error)}")
            tally.inputs[kind.name] += 1
            _restore(work, sound)
    if sorted(path.name for path in folder.iterdir()) != ["canary", "work"] or canary.read_text() != "untouched":
        tally.failures.append(f"{kind.name}: something outside its folder was touched")
    shutil.rmtree(folder)


def _restore(work: Path, sound: dict[Path, bytes]) -> None:
    for path in work.rglob("*"):
        if path.is_file() and path not in sound:
            path.unlink()
    for path, content in sound.items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
