"""`equipoise eval RUN --attack`: clean and robust accuracy of a run by score."""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from equipoise.cli import main
from equipoise.errors import UserError
from equipoise.objectives import PGD, GradientMaskingWarning, RobustResult, robust_accuracy
from equipoise.seeds import derive
from equipoise.studies import robust
from equipoise.studies.robust import JUDGES, first, make_judge, robust_table
from equipoise.training.build_recipe import make_recipe
from equipoise.training.recipe_files import apply_overrides, read_recipe
from equipoise.training.run_folder import RunFolder
from equipoise.training.trainer import Trainer

SCORES = ["plain", "bn_recalibrated", "ema"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """One epoch of AT; its EMA lags far behind its weights, so that the three scores differ."""
    overrides = ["epochs=1", "objective.steps=2", "ema=0.8", "bn_recalibration_batches=2", "optimizer.lr=0.02"]
    recipe = make_recipe(apply_overrides(read_recipe("digits-bsr-at"), overrides))
    trainer = Trainer(recipe)
    trainer.folder = RunFolder.create(tmp_path_factory.mktemp("runs") / "run", trainer.raw)
    trainer.run()
    return trainer


class Outcome(NamedTuple):
    status: int | str | None
    out: str
    err: str


class CommandLine:
    def __init__(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._run, self._capsys = str(run), capsys

    def __call__(self, *words: str) -> Outcome:
        showwarning = warnings.showwarning
        try:
            with pytest.raises(SystemExit) as stop, warnings.catch_warnings():
                main(["eval", self._run, *words])
        finally:
            warnings.showwarning = showwarning
        return Outcome(stop.value.code, *self._capsys.readouterr())


@pytest.fixture
def evaluate(trained: Trainer, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    assert trained.folder is not None
    return CommandLine(trained.folder.path, capsys)


class Row(NamedTuple):
    clean: float
    robust: float
    images: int


def rows_of(out: str) -> dict[str, Row]:
    """The numbers of the table, by score."""
    found = re.findall(r"^(\w+) +([\d.]+) % +([\d.]+) %(?: !)? +(\d+)$", out, re.MULTILINE)
    return {score: Row(float(clean), float(under), int(images)) for score, clean, under, images in found}


# the table


@pytest.mark.slow
def test_the_table_has_clean_and_robust_accuracy_by_score(evaluate: CommandLine) -> None:
    outcome = evaluate("--attack", "pgd50x10", "--images", "30")
    assert (outcome.status, outcome.err) == (0, "")
    rows = rows_of(outcome.out)
    assert list(rows) == SCORES
    assert all(row.images == 30 for row in rows.values())
    assert all(0 < row.robust <= row.clean <= 100 for row in rows.values())
    assert "epoch 1, test, pgd50x10 within L∞ 8/255" in outcome.out
    assert not outcome.out.startswith("\n")  # without a terminal there is no bar and no line for it


def test_the_numbers_are_those_of_the_library(trained: Trainer, evaluate: CommandLine) -> None:
    """On batches of 100 images on the CPU, with starts from the run's seed; clean ones are those of `eval`."""
    found = rows_of(evaluate("--attack", "pgd10", "--eps", "0.1").out)
    x, y = next(iter(trained.parts.loaders["test"].epoch(0)))
    generator = torch.Generator().manual_seed(derive(trained.recipe.seed, "evaluation"))
    batches = zip(x.split(100), y.split(100), strict=True)
    plain = robust_accuracy(trained.parts.model, batches, PGD(eps=0.1, early_exit=True), generator)
    assert found["plain"] == (round(100 * plain.clean, 2), round(100 * plain.robust, 2), 360)
    for name, score in trained.evaluate("test").items():
        assert found[name].clean == pytest.approx(100 * score.accuracy, abs=0.005)
    assert len({row.clean for row in found.values()}) > 1  # the scores do differ


@pytest.mark.slow
def test_a_larger_radius_lowers_robust_accuracy_and_radius_0_leaves_clean_accuracy(evaluate: CommandLine) -> None:
    words = ["--attack", "pgd50x10", "--images", "8", "--eps"]
    tables = [rows_of(evaluate(*words, eps).out) for eps in ("0", "0.2", "1")]
    for score in SCORES:
        none, some, all_ = (table[score] for table in tables)
        assert none.robust == none.clean == some.clean == all_.clean
        assert some.robust < none.robust
        assert all_.robust == 0


def test_the_model_is_left_as_it_was(trained: Trainer) -> None:
    before = {name: value.clone() for name, value in trained.parts.model.state_dict().items()}
    robust_table(trained, "test", "fgsm", None, 20, "", Console(file=io.StringIO()))
    assert all(torch.equal(value, before[name]) for name, value in trained.parts.model.state_dict().items())


def test_a_limit_above_the_number_of_images_attacks_all_of_them(evaluate: CommandLine) -> None:
    assert rows_of(evaluate("--attack", "fgsm", "--images", "100000").out)["plain"].images == 360
    assert rows_of(evaluate("--attack", "fgsm", "--split", "train", "--images", "120").out)["plain"].images == 120


def test_batches_are_cut_to_the_first_images(trained: Trainer) -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in (0, 5, 10):
            yield torch.arange(start, start + 5), torch.arange(start, start + 5)

    for images, at_once in ((15, 100), (7, 2), (5, 5), (1, 3), (12, 4)):
        cut = list(first(images, batches(), at_once))
        assert torch.cat([x for x, _ in cut]).tolist() == list(range(images))
        assert all(0 < len(x) <= at_once and torch.equal(x, y) for x, y in cut)


# progress and cautions


def test_a_bar_for_every_score_moves_with_the_images(trained: Trainer) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    robust_table(trained, "test", "fgsm", None, 250, "", console)
    for score in SCORES:
        assert f"fgsm, {score}" in screen.getvalue()
    assert "100%" in screen.getvalue()


def test_progress_is_the_share_of_the_images(trained: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[tuple[str, float]] = []

    class Watched(Progress):
        def update(self, task_id, **fields) -> None:  # type: ignore[no-untyped-def]
            super().update(task_id, **fields)
            task = self.tasks[task_id]
            moves.append((task.description, task.percentage))

    monkeypatch.setattr(robust, "Bar", Watched)
    robust_table(trained, "test", "fgsm", None, 250, "", Console(file=io.StringIO(), force_terminal=True))
    assert moves == [(f"fgsm, {score}", share) for score in SCORES for share in (40.0, 80.0, 100.0)]


class Saturated(nn.Module):
    """Logits so large that cross-entropy has no gradient in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return 1e5 * self.model(x)


def test_masked_gradients_are_marked_and_explained(trained: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained.parts, "model", Saturated(trained.parts.model))
    screen = io.StringIO()
    monkeypatch.setattr(trained.parts, "ema", None)
    console = Console(file=screen, width=100)
    with pytest.warns(GradientMaskingWarning, match="input gradient of the ce loss is zero"):
        console.print(robust_table(trained, "test", "pgd10", None, 100, "", console))
    assert screen.getvalue().count(" % !") == 2
    assert list(rows_of(screen.getvalue())) == SCORES[:2]


# wrong words


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--attack", "pgd5"], 'no attack is called "pgd5"; did you mean "pgd50x10"?'),
        (["--attack", "autoatack"], 'did you mean "autoattack"?'),
        (["--attack", "pgd50x10", "--eps", "8"], "8 levels of 255 are eps=8/255"),
        (["--attack", "autoattack", "--eps", "8"], "8 levels of 255 are eps=8/255"),
        (["--attack", "autoattack", "--eps", "0"], "a radius above 0"),
        (["--attack", "pgd20", "--eps", "-1"], "--eps"),
        (["--attack", "pgd20", "--eps", "nan"], "eps"),
        (["--attack", "pgd20", "--eps", "eight"], "--eps"),
        (["--attack", "pgd20", "--images", "-3"], "--images"),
        (["--attack", "pgd20", "--split", "tset"], 'no split is called "tset"; choose from train, test'),
        (["--eps", "0.1"], "need an attack, such as --attack pgd50x10"),
        (["--images", "10"], "need an attack, such as --attack pgd50x10"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_are_one_line(evaluate: CommandLine, words: list[str], told: str) -> None:
    status, out, err = evaluate(*words)
    assert status == 2
    assert told in err
    assert err.count("\n") == 1
    assert out == ""


def test_autoattack_that_is_not_installed_is_one_line(evaluate: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    status, out, err = evaluate("--attack", "autoattack")
    assert (status, out) == (2, "")
    assert err == 'equipoise: AutoAttack needs the package pyautoattack: pip install "equipoise[autoattack]"\n'


# judges


@pytest.mark.parametrize(
    ("name", "eps", "radius"),
    [
        ("pgd50x10", None, "L∞ 8/255"),
        ("pgd20", 0.1, "L∞ 0.1"),
        ("pgd20", 4 / 255, "L∞ 4/255"),
        ("pgd10", 0.0, "L∞ 0"),
        ("l2pgd50x10", None, "L2 128/255"),
        ("autoattack", None, "L∞ 8/255"),
        ("autoattack", 0.3, "L∞ 0.3"),
    ],
)
def test_the_radius_is_shown_as_people_write_it(name: str, eps: float | None, radius: str) -> None:
    assert make_judge(name, eps).radius == radius


def test_autoattack_gets_the_radius_and_a_seed_it_can_take(trained: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, str, int]] = []

    def stand_in(model, batches, eps, norm, seed, on_progress):  # type: ignore[no-untyped-def]
        seen.append((eps, norm, seed))
        on_progress(RobustResult(0.5, 0.25, sum(len(y) for _, y in batches)))
        return RobustResult(0.5, 0.25, 20)

    monkeypatch.setattr(robust, "autoattack", stand_in)
    monkeypatch.setattr(robust, "JUDGES", {"autoattack": stand_in})
    robust_table(trained, "test", "autoattack", 0.1, 20, "", Console(file=io.StringIO()))
    assert len(seen) == 3
    assert len(set(seen)) == 1  # the same for every score
    eps, norm, seed = seen[0]
    assert (eps, norm) == (0.1, "linf")
    assert 0 <= seed < 2**32


def test_every_judge_is_described() -> None:
    assert set(JUDGES) == {"fgsm", "pgd10", "pgd20", "pgd50x10", "l2pgd50x10", "margin50x10", "autoattack"}
    assert all(JUDGES.describe().values())
    with pytest.raises(UserError, match="no attack is called"):
        make_judge("pgd")
