"""The command line: its commands, and one line with exit status 2 for wrong input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

import equipoise
from cli_helpers import Run, assert_refused, everything
from equipoise import cli
from equipoise.training import RunFolder, Trainer, read_recipe
from study_helpers import line as epoch_line
from train_helpers import assert_same_runs, held_by_another_process, tiny

# Commands


def test_a_run_from_training_to_curves(run: Run, recipe: str, tmp_path: Path) -> None:
    trained = run("train", recipe, "epochs=3", "topology=rigl", "--out", "here")
    assert trained.status == 0
    assert trained.err == ""
    assert trained.out.count("here epoch ") == 3
    assert re.search(r"test: plain \d+\.\d\d %  bn_recalibrated \d+\.\d\d %  ema \d+\.\d\d %   here\n$", trained.out)
    files = everything(tmp_path / "here")
    assert {"recipe.yaml", "metrics.jsonl", "result.json", "checkpoints/best.safetensors"} <= files.keys()
    saved = yaml.safe_load(files["recipe.yaml"])
    assert (saved["epochs"], saved["topology"]["name"]) == (3, "rigl")

    shown = run("show", "here")
    assert shown.status == 0
    rows = shown.out.splitlines()
    assert rows[0] == "here (test accuracy)"
    assert rows[1].split()[:3] == ["epoch", "lr", "loss"]
    assert [row.split()[0] for row in rows[2:5]] == ["1", "2", "3"]
    assert (tmp_path / "here" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert max(map(len, rows)) <= 80
    assert run("show", "here", "--html").out == f"{shown.out}page: here/report.html\n"
    assert (tmp_path / "here" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")

    scored = run("eval", "here")
    assert scored.status == 0
    result = json.loads(files["result.json"])
    for name, score in result["test"].items():
        (row,) = (line for line in scored.out.splitlines() if line.startswith(name))
        assert f"{100 * score['accuracy']:.2f} %" in row
        assert row.split()[-1] == "360"
    assert "1437" in run("eval", "here", "--split", "train", "--best").out

    finished = run("resume", "here")
    told = "here is finished: 3 epochs; `equipoise resume here epochs=N` trains longer\n"
    assert (finished.status, finished.out) == (0, told)
    unchanged = everything(tmp_path / "here")
    assert {name: unchanged[name] for name in files} == files


def test_runs_get_folders_of_their_own(run: Run, recipe: str, tmp_path: Path) -> None:
    for _ in range(2):
        assert run("train", recipe, "epochs=1", "seed=4").status == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["tiny-seed4", "tiny-seed4-2"]
    assert_same_runs(tmp_path / "runs" / "tiny-seed4", tmp_path / "runs" / "tiny-seed4-2")


def test_runs_started_at_the_same_time_get_different_folders(
    run: Run, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Trainer.__init__

    def late(self: Trainer, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        for path in ("runs/tiny-seed0", "here"):  # another process is faster
            if not (tmp_path / path).exists():
                RunFolder.create(tmp_path / path, {"epochs": 7})

    monkeypatch.setattr(Trainer, "__init__", late)
    outcome = run("train", recipe, "epochs=1")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.endswith("runs/tiny-seed0-2\n")
    assert RunFolder.open(tmp_path / "runs/tiny-seed0").recipe() == {"epochs": 7}
    assert RunFolder.open(tmp_path / "runs/tiny-seed0-2").has_result
    shutil.rmtree(tmp_path / "here")
    assert_refused(run("train", recipe, "epochs=1", "--out", "here"), "here exists and is not empty")
    assert RunFolder.open(tmp_path / "here").recipe() == {"epochs": 7}


def test_a_correction_says_what_it_costs(run: Run, recipe: str) -> None:
    words = ("correction=agent", "correction.mode=recompute")
    trained = run("train", recipe, "epochs=2", *words, "--out", "here")
    assert trained.out.startswith("correction: recompute: 3.33 x the passes of SGD")
    shown = run("show", "here").out.splitlines()
    assert shown[1].split()[-3:] == ["c", "weight", "variance"]
    assert "…" not in "".join(shown)


def test_a_mode_that_was_chosen_by_the_free_memory_is_kept(
    run: Run, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run must not choose again: it would not end bit-identical."""
    for free, mode in ((2**40, "replay"), (1000, "recompute")):
        monkeypatch.setattr("equipoise.correction.cost.available_memory", lambda device, free=free: free)
        assert run("train", recipe, "epochs=1", "correction=agent", "--out", mode).status == 0
        saved = yaml.safe_load((tmp_path / mode / "recipe.yaml").read_text())
        assert saved["correction"] == {"name": "agent", "mode": mode}


def test_recipes_are_laid_over_one_another(run: Run, recipe: str, tmp_path: Path) -> None:
    (tmp_path / "over.yaml").write_text("topology: {sparsity: 0.5}")
    assert run("train", recipe, "over.yaml", "agent", "epochs=1", "--out", "here").status == 0
    saved = yaml.safe_load((tmp_path / "here" / "recipe.yaml").read_text())
    assert saved["topology"] == {"name": "set", "sparsity": 0.5, "every": 4}
    assert saved["correction"]["name"] == "agent"


def test_list_shows_everything_that_can_be_chosen(run: Run) -> None:
    out = run("list").out
    for kind in (
        "recipes",
        "models",
        "topologies",
        "objectives",
        "corrections",
        "optimizers",
        "schedules",
        "patterns",
        "data",
        "studies",
    ):
        assert f"{kind}\n" in out
    for name in ("digits", "vgg_c", "rigl", "at", "agent", "sgdw", "cosine", "cifar100", "rigl-itop", "epochs-to"):
        (line, *_) = (line for line in out.splitlines() if line.split()[:1] == [name])
        assert len(line.split()) > 3  # a name and a sentence
    only = run("list", "optimizers").out.splitlines()
    assert [line.split()[0] for line in only] == ["optimizers", "sgd", "sgdw", "adam", "adamw"]
    for name in ("n:m", "block", "fan_in"):
        assert any(line.split()[0] == name for line in run("list", "patterns").out.splitlines())


def test_list_shows_the_options_of_a_name(run: Run) -> None:
    lines = run("list", "rigl").out.splitlines()
    assert lines[0].startswith("topologies: rigl  RigL (Evci et al. 2020)")
    assert any(
        re.match(r"  drop_end: float = 0\.0 +This fraction at the end of the updates\.$", line) for line in lines
    )
    both = run("list", "sgd").out
    assert "corrections: sgd" in both
    assert "optimizers: sgd" in both
    assert "validation: int = 0" in run("list", "cifar10").out


def test_recipe_prints_one_to_copy(run: Run, tmp_path: Path) -> None:
    printed = run("recipe", "digits", "agent", "topology=set", "epochs=1")
    assert printed.status == 0
    (tmp_path / "mine.yaml").write_text(printed.out)
    assert yaml.safe_load(printed.out)["topology"]["name"] == "set"
    assert run("train", "mine.yaml", "data.batch=720", "--out", "here").status == 0
    assert run("recipe", "--keys").out.startswith("# The keys of a recipe\n")


def test_the_version(run: Run) -> None:
    assert run("--version") == (0, f"equipoise {equipoise.__version__}\n", "")


def test_show_lists_the_runs_of_a_folder(run: Run, recipe: str, tmp_path: Path) -> None:
    assert run("train", recipe, "epochs=1").status == 0
    in_progress(tmp_path / "runs" / "study" / "other", 1)
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "recipe.yaml").write_text("epochs: [")
    shown = run("show", "runs")
    assert (shown.status, shown.err) == (0, "")
    rows = {line.split()[0]: line.split() for line in shown.out.splitlines()[2:]}
    accuracy = json.loads((tmp_path / "runs/tiny-seed0/metrics.jsonl").read_text())["scores"]["plain"]["accuracy"]
    done = ["tiny-seed0", "mlp", "digits", "set", "sgd", "1/1", f"{100 * accuracy:.2f}", "%", "finished"]
    assert rows["tiny-seed0"][:9] == done
    assert rows["study/other"][5:9] == ["1/2", "50.00", "%", "unfinished"]
    assert rows["broken"][1] == "damaged:"


# Longer training


SAME_AT_ANY_LENGTH = ["schedule=constant", "topology.until=1.0", "topology.drop_decay=constant", "topology.every=5"]


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_finished_run_is_extended(run: Run, recipe: str, tmp_path: Path, epochs: int) -> None:
    """If no schedule depends on the length, it ends bit-equal to a run of that length."""
    assert run("train", recipe, *SAME_AT_ANY_LENGTH, "epochs=3", "--out", "whole").status == 0
    assert run("train", recipe, *SAME_AT_ANY_LENGTH, f"epochs={epochs}", "--out", "here").status == 0
    extended = run("resume", "here", "epochs=3")
    assert (extended.status, extended.err) == (0, "")
    assert extended.out.startswith(
        "epochs: 2 -> 3; from epoch 3 on, learning rate, topology updates and coefficients follow the schedules of a "
        "run of 3 epochs\n"
        if epochs == 2
        else "here is finished: 3 epochs"
    )
    assert_same_runs(tmp_path / "whole", tmp_path / "here")
    assert yaml.safe_load((tmp_path / "here" / "recipe.yaml").read_text())["epochs"] == 3


def test_a_run_that_another_process_trains_is_extended_after_it(
    run: Run, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("train", recipe, "epochs=1", "--out", "here")
    with ExitStack() as other:
        other.enter_context(held_by_another_process(tmp_path / "here"))
        monkeypatch.setattr("time.sleep", lambda seconds: other.close())
        extended = run("resume", "here", "epochs=2")
    assert extended.status == 0
    assert extended.out.startswith("here is being trained by another process; waiting for it to end\nepochs: 1 -> 2;")


def test_what_cannot_be_changed_in_a_run_is_left_alone(run: Run, recipe: str, tmp_path: Path) -> None:
    run("train", recipe, "epochs=2", "--out", "here")
    before = everything(tmp_path / "here")
    assert_refused(run("resume", "here", "epochs=1"), "epochs=1: here has trained 2 epochs already")
    other = run("resume", "here", "topology.sparsity=0.5", "epochs=3")
    assert_refused(other, "topology.sparsity was 0.8 and is now 0.5")
    assert_refused(run("resume", "here", "epochs=x"), "expected a whole number")
    assert everything(tmp_path / "here") == before


def test_without_words_there_is_help(run: Run) -> None:
    assert run() == run("--help")
    status, out, err = run()
    assert (status, err) == (0, "")
    for command in ("demo", "train", "resume", "eval", "list", "show"):
        assert command in out
    assert run("train", "--help").status == 0


def test_the_demo_fits_in_80_columns(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a perceptron, which trains faster than the network of the demo."""
    faster = {"model": {"name": "mlp", "hidden": 64}}
    monkeypatch.setattr("equipoise.studies.demo.read_recipe", lambda *sources: read_recipe(*sources) | faster)
    outcome = run("demo", "--epochs", "2", "--seeds", "2", "--out", "demo")
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in outcome.out
    start = lines.index("digits, test accuracy after 2 epochs, mean and deviation of 2 seeds")
    header, rows = lines[start + 1], lines[start + 2 : start + 9]
    assert header.split() == ["accuracy", "density", "explored", "variance", "passes", "seconds"]
    assert [re.split(r"  +", row)[0] for row in rows] == [
        *("dense", "static", "SET", "RigL"),
        *("SET + AGENT", "SET + AGENT c*", "fast"),
    ]
    assert "5.0 %" in rows[1]
    ends = [json.loads((tmp_path / "demo" / f"set-seed{k}" / "result.json").read_text()) for k in (0, 1)]
    a, b = (100 * end["test"]["plain"]["accuracy"] for end in ends)
    assert f"{(a + b) / 2:.1f} ± {abs(a - b) / 2**0.5:.1f} %" in rows[2]
    assert "one of 360 test images is 0.3 points" in lines[start + 10]
    assert (tmp_path / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    folders = {path.name.removesuffix("-seed1") for path in (tmp_path / "demo").glob("*-seed1")}
    assert folders == {"dense", "fast", "rigl", "set", "set-agent", "set-agent-c", "static"}
    assert run("show", "demo/set-agent-seed0").status == 0


def test_names_are_shown_as_they_are(run: Run, recipe: str) -> None:
    """Not interpreted as markup, emoji or mathematics."""
    for name in ("[/b] :smile: $\\foo$ ü€", "[red]x_y^z"):
        path = f"runs/{name}"
        trained = run("train", recipe, "epochs=1", "--out", path)
        assert trained.status == 0
        assert trained.out.endswith(f"   {path}\n")
        shown = run("show", path)
        assert shown.status == 0
        assert f"{path} (test accuracy)" in shown.out


# A run in progress


def in_progress(folder: Path, epochs: int) -> RunFolder:
    """A run as on the disk during training: no result, perhaps no checkpoint, half a line."""
    made = RunFolder.create(folder, tiny())
    scores = {"plain": {"loss": 1.0, "accuracy": 0.5}, "bn_recalibrated": {"loss": 1.0, "accuracy": 0.5}}
    for epoch in range(1, epochs + 1):
        made.append(
            {"epoch": epoch, "learning_rate": 0.1, "train_loss": 1.0, "split": "test", "scores": scores}
            | {"density": 0.2, "exploration": 0.3, "correction": {}, "images_per_second": 10.0}
        )
    with open(made.metrics_file, "a") as file:
        file.write('{"epoch": 99, "trai')
    return made


@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_show_works_on_a_run_in_progress(run: Run, tmp_path: Path, epochs: int) -> None:
    in_progress(tmp_path / "here", epochs)
    before = everything(tmp_path / "here")
    shown = run("show", "here")
    assert (shown.status, shown.err) == (0, "")
    if epochs == 0:
        assert shown.out == "here has no finished epoch yet\n"
    else:
        assert len(shown.out.splitlines()) == 2 + epochs + 1
    after = everything(tmp_path / "here")
    assert {name: after[name] for name in before} == before


def test_eval_changes_nothing_in_the_folder(run: Run, recipe: str, tmp_path: Path) -> None:
    """Also if the metrics are ahead of the checkpoints."""
    run("train", recipe, "epochs=2", "--out", "here")
    with open(tmp_path / "here" / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 3}\n{"epoch": 4, "tr')
    (tmp_path / "here" / "result.json").unlink()
    before = everything(tmp_path / "here")
    assert run("eval", "here").status == 0
    assert everything(tmp_path / "here") == before


def test_a_run_that_another_process_trains_is_not_resumed(run: Run, recipe: str, tmp_path: Path) -> None:
    run("train", recipe, "epochs=1", "--out", "here")
    with open(tmp_path / "here" / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 2}\n')
    before = everything(tmp_path / "here")
    with held_by_another_process(tmp_path / "here"):
        assert_refused(run("resume", "here"), "here is being trained by another process")
        assert run("eval", "here").status == 0
    assert everything(tmp_path / "here") == before


def test_a_run_is_not_resumed_with_another_seed(run: Run, recipe: str, tmp_path: Path) -> None:
    run("train", recipe, "epochs=1", "--out", "here")
    saved = tmp_path / "here" / "recipe.yaml"
    saved.write_text(saved.read_text() + "seed: 5\n")
    before = everything(tmp_path / "here")
    assert_refused(run("resume", "here"), "seed was 0 and is now 5; restore it, or train a new run")
    assert everything(tmp_path / "here") == before


def test_a_run_that_was_killed_before_its_result_gets_one(run: Run, recipe: str, tmp_path: Path) -> None:
    run("train", recipe, "epochs=1", "--out", "here")
    result = tmp_path / "here" / "result.json"
    before = result.read_bytes()
    result.unlink()
    assert run("resume", "here").status == 0
    assert result.read_bytes() == before


def test_a_damaged_checkpoint_is_a_warning_in_one_line(run: Run, recipe: str, tmp_path: Path) -> None:
    run("train", recipe, "epochs=2", "--out", "here")
    newest = max((tmp_path / "here" / "checkpoints").glob("step-*"))
    newest.write_bytes(newest.read_bytes()[:-3])
    outcome = run("eval", "here")
    assert outcome.status == 0
    assert outcome.err.startswith("equipoise: warning: here/checkpoints/step-000000012.safetensors is damaged")
    assert outcome.err.count("\n") == 1


# Wrong input


WRONG: dict[str, tuple[list[str], str]] = {
    "command": (["trian"], "No such command"),
    "option": (["train", "tiny.yaml", "--ot", "x"], "No such option"),
    "missing argument": (["train"], "Missing argument"),
    "missing run": (["eval"], "Missing argument"),
    "extra argument": (["show", "a", "b"], "unexpected extra argument"),
    "recipe": (["train", "digitz"], 'no recipe is called "digitz"'),
    "recipe file": (["train", "nowhere.yaml"], "cannot read the recipe nowhere.yaml"),
    "recipe name too long": (["train", "x" * 5000], "no recipe is called"),
    "overlay": (["train", "tiny.yaml", "epochs"], 'no recipe is called "epochs"'),
    "key": (["train", "tiny.yaml", "epocs=3"], 'no option is called "epocs"; did you mean "epochs"?'),
    "dashes": (["train", "tiny.yaml", "--epochs", "5"], "Keys of a recipe have no dashes: epochs=5."),
    "dashes and equals": (["train", "tiny.yaml", "--lr=0.1"], "Keys of a recipe have no dashes: optimizer.lr=0.1."),
    "dashes in resume": (["resume", "x", "--epochs", "5"], "Keys of a recipe have no dashes: epochs=5."),
    "option of a part": (["train", "tiny.yaml", "lr=0.1"], '"lr" is not a key of a recipe; write optimizer.lr'),
    "option of parts": (["train", "tiny.yaml", "steps=1"], "write objective.steps or checkpoint.steps"),
    "value": (["train", "tiny.yaml", "epochs=many"], "epochs='many': expected a whole number"),
    "sparsity": (["train", "tiny.yaml", "topology.sparsity=1.2"], "topology: sparsity=1.2"),
    "several lines": (["train", "tiny.yaml", "topology=a\nb\n\nc"], "no topology is called"),
    "yaml": (["train", "tiny.yaml", "topology=[1"], "not valid YAML"),
    "size": (["train", "tiny.yaml", "model.size=16"], "does not take images of 1x8x8"),
    "padding": (["train", "tiny.yaml", "data.augment.pad=9"], "cannot be reflect-padded by 9"),
    "data": (["train", "tiny.yaml", "data=cifar10", "data.root=nowhere"], "CIFAR-10: no data_batch_1 in"),
    "device": (["train", "tiny.yaml", "device=cuda:77"], "device=cuda:77"),
    "number of epochs": (["demo", "--epochs", "0"], "epochs"),
    "run": (["show", "nowhere"], "nowhere is not a run: it has no recipe.yaml"),
    "run to resume": (["resume", "nowhere"], "nowhere is not a run"),
    "run to score": (["eval", "nowhere"], "nowhere is not a run"),
    "run of a name too long": (["show", "x" * 5000], "is not a run"),
    "kind": (["list", "modles"], 'nothing is called "modles"; did you mean "models"?'),
    "entry": (["list", "riggl"], 'nothing is called "riggl"; did you mean "rigl"?'),
    "no recipe": (["recipe"], "name a recipe, such as `equipoise recipe digits`"),
    "folder below a file": (["train", "tiny.yaml", "--out", "tiny.yaml/x"], "tiny.yaml/x"),
    "folder of a name too long": (["train", "tiny.yaml", "--out", "x" * 5000], "File name too long"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line_and_leaves_nothing_behind(case: str, run: Run, recipe: str, tmp_path: Path) -> None:
    words, told = WRONG[case]
    before = sorted(tmp_path.rglob("*"))
    assert_refused(run(*words), told)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", ["train", "demo"])
def test_an_existing_folder_is_never_clobbered(command: str, run: Run, recipe: str, tmp_path: Path) -> None:
    words = ["train", recipe] if command == "train" else ["demo", "--epochs", "1"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = everything(tmp_path)
    assert_refused(run(*words, "--out", "full"), "full exists")
    assert_refused(run(*words, "--out", "file"), "file exists")
    assert everything(tmp_path) == before


def test_without_tensorboard_nothing_is_left_behind(
    run: Run, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert_refused(run("train", recipe, "--out", "here", "--tensorboard"), "TensorBoard is not installed")
    assert not (tmp_path / "here").exists()


def test_a_table_that_does_not_fit_in_memory_leaves_nothing_behind(
    run: Run, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.correction.cost.available_memory", lambda device: 1000)
    outcome = run("train", recipe, "correction=agent", "correction.mode=replay", "--out", "here")
    assert_refused(outcome, "replay needs")
    assert not (tmp_path / "here").exists()


def test_runs_that_cannot_be_scored(run: Run, recipe: str, tmp_path: Path) -> None:
    in_progress(tmp_path / "fresh", 1)
    assert_refused(run("eval", "fresh"), "fresh has no valid checkpoint yet")
    assert_refused(run("eval", "fresh", "--best"), "there is no checkpoint")
    run("train", recipe, "epochs=1", "--out", "here")
    assert_refused(run("eval", "here", "--split", "validation"), 'no split is called "validation"')
    (tmp_path / "here" / "recipe.yaml").write_text(yaml.safe_dump(tiny(model={"name": "mlp", "hidden": 17})))
    assert_refused(run("eval", "here"), "the checkpoint does not fit the recipe: model.hidden was 16 and is now 17")
    (tmp_path / "here" / "recipe.yaml").write_text(yaml.safe_dump(tiny(optimizer="adam")))
    assert_refused(run("resume", "here"), "optimizer was SGDOptions and is now AdamOptions")
    (tmp_path / "here" / "recipe.yaml").write_text("epochs: [")
    for command in ("eval", "resume"):
        assert_refused(run(command, "here"), "not valid YAML")


@pytest.mark.parametrize(
    "line",
    [
        {"epoch": 1},
        {"epoch": 1, "scores": 3, "split": 1},
        {"epoch": 1, "correction": []},
        {**epoch_line(1, 0.5), "density": "x"},
    ],
)
def test_metrics_that_are_not_ours_are_told(run: Run, tmp_path: Path, line: dict[str, Any]) -> None:
    RunFolder.create(tmp_path / "here", tiny()).append(line)
    assert_refused(run("show", "here"), "metrics.jsonl was not written by equipoise")


def test_a_diverging_run_is_one_line(run: Run, recipe: str, tmp_path: Path) -> None:
    outcome = run("train", recipe, "optimizer.lr=1e30", "--out", "here")
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
    assert re.search(r"the loss is not finite at batch \d of epoch 1", outcome.err)
    assert (tmp_path / "here" / "recipe.yaml").exists()


@pytest.mark.parametrize(
    ("error", "status", "lines"),
    [(OSError(28, "No space left on device"), 2, 1), (KeyboardInterrupt(), 130, 0), (BrokenPipeError(), 0, 0)],
)
def test_what_happens_from_outside(
    error: BaseException, status: int, lines: int, run: Run, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("equipoise.training.trainer.Trainer.run", fail)
    outcome = run("train", recipe, "--out", "here")
    assert outcome.status in (status, 1 if isinstance(error, BrokenPipeError) else status)
    assert len(outcome.err.strip().splitlines()) == lines


def test_a_bug_is_not_disguised_as_wrong_input(run: Run, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.training.trainer.Trainer.run", lambda self: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["equipoise", "train", recipe, "--out", "here"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


# As a program


def program(code: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def test_python_m_equipoise(tmp_path: Path) -> None:
    """Also if the terminal has ASCII characters only."""
    listed = program(["-m", "equipoise", "list", "topologies"], PYTHONIOENCODING="ascii", COLUMNS="40")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "rigl" in listed.stdout
    refused = program(["-m", "equipoise", "show", str(tmp_path / "\udcff\n[/b]")])
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert refused.stdout == ""


def test_importing_the_package_needs_torch_numpy_and_safetensors_only() -> None:
    code = (
        "import sys, torch, numpy, safetensors.torch; before = set(sys.modules); import equipoise; equipoise.RigL; "
    )
    code += "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    loaded = set(program(["-c", code]).stdout.split()) - set(sys.stdlib_module_names)
    assert loaded <= {"equipoise", "torch", "numpy", "safetensors"}


@pytest.mark.slow
def test_a_terminal_is_told_what_a_run_waits_for(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**tiny(), "epochs": 1}))
    done = program(
        ["-m", "equipoise", "train", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "run")], FORCE_COLOR="1"
    )
    assert done.returncode == 0
    assert done.stdout.index("loading PyTorch ...") < done.stdout.index("preparing data and model ...")


def test_help_imports_no_training() -> None:
    code = "import sys; from equipoise import cli\ntry: cli.main(['--help'])\nfinally: print(*sys.modules)"
    modules = program(["-c", code]).stdout.splitlines()[-1].split()
    assert "equipoise.cli" in modules
    assert not {"equipoise.training", "equipoise.studies", "equipoise.report", "matplotlib", "yaml"} & set(modules)
