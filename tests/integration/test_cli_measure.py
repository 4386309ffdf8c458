"""`equipoise measure` and `equipoise theory`: output, files, and one line for wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli_helpers import Run, assert_refused, everything
from equipoise.analysis.theory import Setting


@pytest.fixture
def trained(run: Run, recipe: str) -> str:
    assert run("train", recipe, "epochs=3", "--measure", "1", "--out", "here").status == 0
    return "here"


def test_a_run_measured_during_training_and_at_its_end(run: Run, trained: str, tmp_path: Path) -> None:
    before = everything(tmp_path / trained)
    assert [json.loads(line)["epoch"] for line in before["measure.jsonl"].splitlines()] == [1, 2, 3]
    shown = run("measure", trained, "--batches", "4")
    assert (shown.status, shown.err) == (0, "")
    written = json.loads((tmp_path / trained / "measure.json").read_text())
    gradients = written["gradients"]
    assert (written["epoch"], gradients["batches"], gradients["noise"]) == (3, 4, 0.015)
    assert "here, epoch 3, 4 of 6 batches, against noise 0.015 (3 draws)" in shown.out
    assert re.search(r"noise on active weights +on all *$", shown.out, re.MULTILINE)
    for name, key in (("c\\* = Cov.*?", "c_star"), ("gradient norm.*?", "norm"), ("ĉ.*?", "c_hat")):
        number = r"(\d\S*)(?: ± \S+)?"
        found = re.search(rf"^{name}   *{number}(?: +{number})? *$", shown.out, re.MULTILINE)
        assert found, name
        assert float(found.group(1)) == pytest.approx(gradients[key], rel=1e-3)
        if key != "norm":  # which does not depend on the old weights
            assert float(found.group(2)) == pytest.approx(gradients["everywhere"][key], rel=1e-3)
    assert f"± {gradients['deviation']['c_star']:.2g}" in shown.out
    assert (
        "of 4 of 6 batches, and the noise of this sample affects their correlation; --batches 6 avoids it"
        in " ".join(shown.out.split())
    )
    assert "layers.0.weight" in shown.out
    assert "During training, against the weights of one epoch before" in shown.out
    after = everything(tmp_path / trained)
    del after["measure.json"]
    assert after == before


def test_the_same_as_json(run: Run, trained: str, tmp_path: Path) -> None:
    printed = run("measure", trained, "--json", "--best", "--batches", "3", "--noise", "0")
    assert printed.status == 0
    found = json.loads(printed.out)
    assert found == json.loads((tmp_path / trained / "measure.json").read_text())
    assert found["gradients"]["c_star"] == 1
    assert found["cost"]["passes"]["sample_gradients"] == 1437 * found["epoch"]


def test_against_another_checkpoint(run: Run, trained: str, tmp_path: Path) -> None:
    names = sorted(path.stem for path in (tmp_path / trained / "checkpoints").glob("step-*"))
    by_name = run("measure", trained, "--against", names[0], "--json")
    by_file = run("measure", trained, "--against", f"{trained}/checkpoints/{names[0]}.safetensors", "--json")
    first, second = json.loads(by_name.out), json.loads(by_file.out)
    assert first["gradients"] == second["gradients"]
    assert first["gradients"]["noise"] is None
    # the second newest checkpoint is of the epoch before, which the run was measured against
    last = json.loads((tmp_path / trained / "measure.jsonl").read_text().splitlines()[-1])
    assert first["gradients"]["c_star"] == pytest.approx(last["c_star"], rel=1e-9)
    itself = run("measure", trained, "--against", names[-1], "--json")
    assert json.loads(itself.out)["gradients"]["correlation"] == pytest.approx(1)


def test_a_run_without_measurements_during_training(run: Run, recipe: str) -> None:
    run("train", recipe, "--out", "here")
    shown = run("measure", "here")
    assert shown.status == 0
    assert "During training" not in shown.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--batches", "1"], "batches=1: a variance over batches needs at least 2 of them"),
        (["--noise", "-0.1"], "noise=-0.1 must be a standard deviation of at least 0"),
        (["--noise", "nan"], "noise=nan"),
        (["--draws", "0"], "draws=0: the noise is drawn at least once"),
        (["--against", "worst"], "there is no checkpoint worst"),
        (["--against", "here/recipe.yaml"], "is damaged or not a checkpoint"),
    ],
)
def test_wrong_input_is_one_line(run: Run, trained: str, tmp_path: Path, words: list[str], told: str) -> None:
    before = everything(tmp_path)
    assert_refused(run("measure", trained, *words), told)
    assert everything(tmp_path) == before


def test_no_such_run_and_no_checkpoint_yet(run: Run, trained: str, tmp_path: Path) -> None:
    assert_refused(run("measure", "nowhere"), "nowhere is not a run")
    for path in (tmp_path / trained / "checkpoints").iterdir():
        path.unlink()
    assert_refused(run("measure", trained), "here has no valid checkpoint yet")
    assert_refused(run("train", "tiny.yaml", "--measure", "-1", "--out", "there"), "--measure")
    assert not (tmp_path / "there").exists()


def test_a_strange_line_is_named(run: Run, trained: str, tmp_path: Path) -> None:
    (tmp_path / trained / "measure.jsonl").write_text('{"epoch": 1}\n')
    outcome = run("measure", trained)
    assert outcome.status == 2
    assert "measure.jsonl was not written by equipoise" in outcome.err


# Theory


def test_the_numbers_of_the_theorem(run: Run, tmp_path: Path) -> None:
    words = (
        "--L",
        "0.2",
        "--eta",
        "0.1",
        "--c",
        "0.3",
        "--n",
        "64",
        "--N",
        "10000",
        "--steps",
        "5000",
        "--sigma",
        "2",
    )
    shown = run("theory", *words, "--out", "bounds.png")
    assert (shown.status, shown.err) == (0, "")
    setting = Setting(0.2, 0.1, 64, 10_000, 0.3)
    expected = [setting, setting.svrg(), setting.sgd()]
    rows = {
        "nu": [arm.nu for arm in expected],
        "first term": [arm.bound(1, 2, 5000).first for arm in expected],
        "second term": [arm.bound(1, 2, 5000).second for arm in expected],
        "bound": [arm.bound(1, 2, 5000).total for arm in expected],
    }
    for name, values in rows.items():
        line = next(line for line in shown.out.splitlines() if line.startswith(name))
        assert [float(word) for word in line.split()[-3:]] == pytest.approx(values, rel=1e-3)
    assert (tmp_path / "bounds.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_bound(run: Run) -> None:
    shown = run("theory", "--L", "5")
    assert shown.status == 0
    assert "none" in shown.out
    assert "Theorem 1 does not apply" in shown.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--c", "2"], "the coefficient c is 2.0"),
        (["--eta", "0"], "eta is 0.0"),
        (["--L", "-1"], "L is -1.0"),
        (["--n", "0"], "the batch size is 0"),
        (["--N", "-5"], "N -5"),
        (["--n", "100000"], "the batch size is 100000"),
        (["--alpha", "2"], "alpha is 2.0"),
        (["--steps", "0"], "steps=0"),
        (["--gap", "nan"], "gap=nan"),
        (["--sigma", "inf"], "sigma=inf"),
        (["--L", "inf"], "L is inf"),
        (["--L", "1e300"], "too large or too small to compute with"),
        (["--eta", "1e-320", "--alpha", "-inf"], "too large or too small to compute with"),
        (["--n", f"1{'0' * 400}"], "too large or too small to compute with"),
        (["--out", "nowhere/theory.png"], "cannot draw to nowhere/theory.png"),
        (["--out", "theory.docx"], "cannot draw to theory.docx"),
    ],
)
def test_wrong_numbers_are_one_line(run: Run, tmp_path: Path, words: list[str], told: str) -> None:
    assert_refused(run("theory", *words), told)
    assert not list(tmp_path.iterdir())
