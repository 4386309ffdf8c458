"""Damage files at random and read them with the commands that read such files."""

from __future__ import annotations

import contextlib
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from harness.commands import told, without_training
from harness.tally import Tally

MEMORY = 8 * 2**30  # bytes that a reader may ask for

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


def damage(path: Path, random: Random) -> None:
    """Change bytes of a file."""
    content = path.read_bytes()
    path.unlink()  # it may be a link to another file
    path.write_bytes(mutated(content, random))


@dataclass(frozen=True)
class Kind:
    """Files of one kind.

    Args:
        name: For the page.
        prepare: Writes valid files into a folder.
        files: Lists the files of the folder that are damaged.
        read: Reads the folder with a command that is chosen at random.
        commands: Number of commands to choose from.
        change: Changes a file; by default, its bytes.
        trains: Whether the commands train.
    """

    name: str
    prepare: Callable[[Path], None]
    files: Callable[[Path], list[Path]]
    read: Callable[[Path, Random], None]
    commands: int = 1
    change: Callable[[Path, Random], None] = damage
    trains: bool = False

    @property
    def signed(self) -> bool:
        """Whether the changed files have valid checksums."""
        return self.change is not damage


def try_files(
    kind: Kind,
    folder: Path,
    count: int,
    seed: int,
    tally: Tally,
    first: int = 0,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Change and read `count` files; the folder is restored after each.

    Args:
        kind: The kind of files.
        folder: A new folder, which is removed.
        count: Number of files.
        seed: Seed of all changes.
        tally: Extended.
        first: Number of the first change, so that several processes can share the work.
        note: Called with the name of each input before it is tried.
    """
    work, canary = folder / "work", folder / "canary"
    work.mkdir(parents=True)
    canary.write_text("untouched")
    kind.prepare(work)
    sound = {path: path.read_bytes() for path in work.rglob("*") if path.is_file() and not path.is_symlink()}
    targets = kind.files(work)
    with contextlib.nullcontext() if kind.trains else without_training(), _little_memory():
        for number in range(first, first + count):
            random = Random(f"{kind.name} {seed} {number}")
            path = random.choice(targets)
            name = f"{kind.name} {number} of seed {seed}, {path.relative_to(work)}"
            note(name)
            kind.change(path, random)
            try:
                kind.read(work, random)
            except Exception as error:
                tally.failures.append(f"{name}: {told(error)}")
            tally.inputs[kind.name] += 1
            _restore(work, sound)
    if sorted(path.name for path in folder.iterdir()) != ["canary", "work"] or canary.read_text() != "untouched":
        tally.failures.append(f"{kind.name}: something outside its folder was touched")
    shutil.rmtree(folder)


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """A file that claims to be huge is an error, not the end of the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _restore(work: Path, sound: dict[Path, bytes]) -> None:
    for path in work.rglob("*"):
        if path.is_file() and path not in sound:
            path.unlink()
    for path, content in sound.items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
