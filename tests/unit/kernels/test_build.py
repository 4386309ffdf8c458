"""Finding and compiling the kernel library, with and without a compiler, and under AddressSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.kernels import build

TESTS = Path(__file__).parents[1]
needs_compiler = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
REPORT = "from equipoise.kernels import library; print(library.available(), library.reason())"


def python(code: str, **environment: str) -> str:
    """The output of a new interpreter."""
    source = str(Path(build.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": source, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_switched_off() -> None:
    assert python(REPORT, EQUIPOISE_KERNELS="off") == "False switched off by EQUIPOISE_KERNELS=off"


def test_without_a_compiler_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "installed", lambda: None)
    monkeypatch.delenv("EQUIPOISE_KERNELS", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.Unavailable, match="no C compiler found"):
        build.find()
    monkeypatch.setenv("CC", str(tmp_path / "missing"))
    with pytest.raises(build.Unavailable, match="does not run") as raised:
        build.find()
    assert "\n" not in str(raised.value)


@needs_compiler
@pytest.mark.slow
def test_compiled_once_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path))
    monkeypatch.setenv("EQUIPOISE_CFLAGS", "-O1")  # quicker, and another key than the one in use
    library = build.compiled()
    stamp = library.stat().st_mtime_ns
    assert library.parent == tmp_path / "equipoise"
    assert build.compiled() == library
    assert library.stat().st_mtime_ns == stamp
    monkeypatch.setenv("EQUIPOISE_CFLAGS", "--no-such-flag")
    with pytest.raises(build.Unavailable, match="could not build"):
        build.compiled()
    assert list(library.parent.iterdir()) == [library]


def test_a_library_of_another_version_is_not_used(tmp_path: Path) -> None:
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    source = tmp_path / "old.c"
    source.write_text("int eq_abi(void) { return -1; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "old.so"), str(source)], check=True)
    assert "another version" in python(REPORT, EQUIPOISE_KERNELS=str(tmp_path / "old.so"))


@needs_compiler
def test_an_extension_that_another_version_left_is_replaced(tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text("int eq_abi(void) { return -1; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "old.so"), str(source)], check=True)
    left = f"from pathlib import Path; from equipoise.kernels import build; old = Path('{tmp_path}/old.so')"
    assert python(f"{left}; build.installed = lambda: old; {REPORT}") == "True"


def test_importing_the_package_loads_no_kernels() -> None:
    code = "import equipoise; from equipoise.kernels import library; print(library._find.cache_info().currsize)"
    assert python(code) == "0"


@pytest.mark.slow
@needs_compiler
def test_kernels_stay_within_their_memory(tmp_path: Path) -> None:
    """The kernel tests again on a library built with AddressSanitizer and UndefinedBehaviorSanitizer."""
    found = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(path).is_absolute() for path in found):
        pytest.skip("gcc has no sanitizers here")
    # Without clones: their resolvers run before the sanitizer is ready.
    flags = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -DEQ_NO_CLONES -mavx2 -mfma"
    environment = {
        **os.environ,
        "EQUIPOISE_CACHE": str(tmp_path),
        "EQUIPOISE_CFLAGS": flags,
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",
        "EQUIPOISE_HUGE_PAGES": "off",
        "OMP_NUM_THREADS": "2",
    }
    files = [str(TESTS / name) for name in ("kernels/test_operators.py", "storage/test_pack.py")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not fork and not workers",
        *files,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=TESTS.parents[1])
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
