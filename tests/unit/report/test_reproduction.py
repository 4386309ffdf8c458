"""The page that compares results with the paper."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_ind

from equipoise.errors import UserError
from equipoise.report.reproduction import (
    deviations,
    missing_cost,
    paper_items,
    seconds_per_image,
    shown,
    with_results,
    write_page,
)
from equipoise.report.six_claims import paper_claims
from equipoise.studies.compare import Spread
from equipoise.studies.design import read_design, read_study
from equipoise.studies.results import Result, result_file, write_result
from study_helpers import result


def put(
    results: Path, arm: str, seed: int, accuracies: dict[int, float], commit: str = "0123456789abcdef", **more: Any
) -> None:
    """A finished result of the study of MVR with these accuracies at these epochs."""
    epochs: list[dict[str, Any]] = [
        {
            "epoch": epoch,
            "step": 10 * epoch,
            "scores": {score: {"loss": 1.0, "accuracy": accuracy} for score in ("plain", "bn_recalibrated")},
            "passes": {"forward": 10 * epoch, "backward": 10 * epoch},
            "seconds": 2.0 * epoch,
            "correction": {},
        }
        for epoch, accuracy in accuracies.items()
    ]
    environment = {"device": "cpu", "torch": "2", "date": "2026-01-02", "commit": commit}
    value = {"version": 2, "study": "mvr", "arm": arm, "seed": seed, "finished": True, "epochs": epochs, **more}
    write_result(result_file(results / "mvr", arm, seed), {**value, "environment": environment})


def row(page: str, first: str) -> list[str]:
    """The cells of the only table row with this first cell."""
    lines = [line for line in page.splitlines() if line.startswith(f"| {first} |")]
    assert len(lines) == 1
    return [cell.strip() for cell in lines[0].strip("|").split(" | ")]


def test_without_results_everything_is_listed_as_not_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none is not a folder"):
        write_page(tmp_path / "none", tmp_path / "docs/page.md")
    (tmp_path / "none").mkdir()
    write_page(tmp_path / "none", tmp_path / "docs/page.md")
    page = (tmp_path / "docs/page.md").read_text()
    listed = page.partition("## Appendix: not run")[2]
    for item in paper_items():
        assert re.search(rf"[,|] {re.escape(item.item)}[ ,]", listed), item.item
        assert f"| {item.item} | {item.claims} | [" not in page
    for claim in paper_claims():
        assert row(page, claim.name)[1] == "**not tested**"
    assert "> - Of the paper's six claims, judged in their main settings: 6 not tested (" in page
    assert "The study `published` has not been run" in page
    design = read_study("mvr")
    epochs = sum(design.raw(arm, 0)["epochs"] for arm in design.every_arm) * len(design.seeds)
    assert row(listed, "mvr")[3:6] == [str(len(design.every_arm) * len(design.seeds)), str(epochs), "?"]
    assert not list(tmp_path.glob("docs/*.svg"))


def test_verdicts_and_numbers(tmp_path: Path) -> None:
    results = tmp_path / "results"
    write_result(results / "mvr/study.json", read_study("mvr").to_json())
    for seed, (mvr, both) in enumerate(
        [((0.5, 0.7), (0.6, 0.8)), ((0.52, 0.9), (0.64, 0.85)), ((0.51, 0.8), (0.62, 0.8))]
    ):
        put(results, "MVR", seed, {20: mvr[0], 40: mvr[1]})
        put(results, "AGENT+MVR", seed, {20: both[0], 40: both[1]})
    write_page(results, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    claim = row(page, "AGENT with MVR has a higher accuracy than MVR after 20 epochs")
    assert claim[1:3] == ["AGENT+MVR: 62.0 ± 2.0 % (3)", "MVR: 51.0 ± 1.0 % (3)"]
    interval = ttest_ind([0.6, 0.64, 0.62], [0.5, 0.52, 0.51], equal_var=False).confidence_interval()
    assert claim[3] == f"+11.00 points, 95 % CI +{100 * interval.low:.2f} to +{100 * interval.high:.2f}"
    assert claim[4] == "supported"
    assert row(page, "AGENT with MVR has a higher accuracy than MVR after 40 epochs")[-1] == "inconclusive"
    control = row(page, "Control: AGENT with MVR is better than plain SGD after 40 epochs")
    assert control[-1] == "not tested: SGD has no finished seed"
    assert page.index("| claim | first arm |") < page.index("| control | first arm |")
    assert "| MVR | accuracy, epoch 20 | 62.6 % | 51.0 ± 1.0 % (3) |" in page
    assert "| MVR | 0, 1, 2 | 80.0 ± 10.0 % (3) | 80.0 ± 10.0 % (3) |  | 80 |" in page
    assert (
        "Run on cpu, torch 2, 2026-01-02, commit 0123456789. Seconds are those of one run, start-up included." in page
    )
    assert " Not run: SGD, MVR without momentum, " in page
    assert row(page, "Table 5")[2] == "[mvr](#mvr)"
    assert (
        "Cost: 480 seconds of training, start-up included (480 on cpu)" in page
    )  # six runs of 40 epochs of two seconds


def test_the_parts_of_the_page_come_in_the_order_of_a_reproducibility_report(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    write_page(tmp_path / "none", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    parts = [
        "Six claims",
        "Primary metrics",
        "Deviations",
        "Baseline calibration",
        "Why the paper saw gains",
        "Limits",
    ]
    found = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert found == [*parts, "Appendix: tables and figures of the paper", "Appendix: not run"]
    assert sum(line.startswith("> - ") for line in page.splitlines()) == 6
    assert page.index("> **Summary**") < page.index("## Six claims")


def test_missing_runs_cost_what_runs_of_their_kind_took() -> None:
    study, design = with_results(read_design("mvr"), None, []), read_design("mvr")
    plain = {**design.raw("SGD", 0), "epochs": 4}
    corrected = {**design.raw("AGENT+MVR", 0), "epochs": 4}
    gpu = {"device": "a GPU"}

    def run(recipe: dict[str, Any], seconds: float, **more: Any) -> Result:
        return replace(result("x", 0, [0.5] * 4), **{"recipe": recipe, "spent": seconds, "environment": gpu, **more})

    runs = [run(plain, 4.0), run(plain, 40.0), run(plain, 8.0), run(corrected, 20.0)]  # medians: 2 and 5 s an epoch
    runs.append(run(plain, 1e6, environment={"device": "cpu"}))
    count, _, seconds = missing_cost(study, seconds_per_image(runs))
    expected = 0
    for arm in design.every_arm:
        recipe = design.raw(arm, 0)
        rate = 5 if "correction" in recipe else 2
        expected += rate * recipe["epochs"] * len(design.seeds)
    assert (count, seconds) == (str(len(design.every_arm) * len(design.seeds)), f"{expected:,}")
    assert missing_cost(study, seconds_per_image(runs[:3]))[2] == "?"


def test_the_images_are_named_next_to_the_numbers(tmp_path: Path) -> None:
    results = tmp_path / "results"
    put(results, "MVR", 0, {20: 0.5, 40: 0.6}, recipe=read_study("mvr").raw("MVR", 0))
    (results / "images.yaml").write_text("cifar10: small pictures\n")
    write_page(results, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "Images: small pictures. Run on cpu" in page
    assert "> - Tried: 1 run of 1 study on small pictures, in 80 seconds of training." in page


def test_an_arm_that_diverged_is_reported(tmp_path: Path) -> None:
    results = tmp_path / "results"
    put(results, "MVR", 0, {}, diverged="the loss is nan at batch 3 of epoch 1")
    put(results, "AGENT+MVR", 0, {20: 0.6, 40: 0.7}, commit="fedcba9876543210+changes")
    write_page(results, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "commit 0123456789; cpu, torch 2, 2026-01-02, commit fedcba9876 with changes." in page
    assert "without momentum. Diverged: MVR, seed 0: the loss is nan at batch 3 of epoch 1." in page
    claim = row(page, "AGENT with MVR has a higher accuracy than MVR after 20 epochs")
    assert claim[-1].startswith("inconclusive: MVR diverged (seed 0)")
    assert "| MVR | 0 | diverged |  |  |  |" in page
    assert "| MVR | accuracy, epoch 20 | 62.6 % | diverged |" in page


def test_a_run_that_learned_nothing_is_reported(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for arm, last in (("MVR", 2.3), ("AGENT+MVR", 1.1)):
        put(results, arm, 0, dict.fromkeys((10, 20, 25, 30, 40), 0.1))
        file = result_file(results / "mvr", arm, 0)
        value = json.loads(file.read_text())
        for line in value["epochs"]:
            line["train_loss"] = last if line["epoch"] == 40 else 2.3
        write_result(file, value)
    write_page(results, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert page.count("Learned nothing: MVR, seed 0.") == 1
    claim = row(page, "AGENT with MVR has a higher accuracy than MVR after 20 epochs")
    assert claim[-1].startswith("inconclusive: MVR learned nothing (seed 0)")


def test_unusable_results_are_reported(tmp_path: Path) -> None:
    results = tmp_path / "results"
    write_result(results / "mvr/study.json", read_study("mvr").to_json())
    for seed in (0, 1):
        put(results, "MVR", seed, {20: 0.5, 40: 0.5}, recipe=read_study("mvr").raw("MVR", seed))
        other = read_study("mvr").raw("AGENT+MVR", seed) | {"model": "resnet34"}
        put(results, "AGENT+MVR", seed, {20: 0.6, 40: 0.6}, recipe=other)
    (results / "mvr/mvr-seed1.json").write_text("{")
    told = write_page(results, tmp_path / "page.md")
    assert [line.partition(": ")[2] for line in told] == [
        "left out: it is damaged (not JSON); remove it and run the study again",
        "left out: of another recipe",
        "left out: of another recipe",
    ]
    assert "| MVR | 0 | 50.0 % (1) |" in (tmp_path / "page.md").read_text()
    assert "| AGENT+MVR | 0" not in (tmp_path / "page.md").read_text()
    (results / "again").mkdir()
    write_result(results / "again/study.json", read_study("mvr").to_json())
    with pytest.raises(UserError, match="holds the study mvr twice"):
        write_page(results, tmp_path / "page.md")


def test_numbers_are_shown_in_their_units() -> None:
    assert shown(None, "accuracy") == ""
    assert shown(Spread(0.12345, None, 1), "robust") == "12.3 % (1)"
    assert shown(Spread(0.0123, 0.001, 2), "stability") == "1.23 ± 0.1 % (2)"
    assert shown(Spread(12.0, 1.5, 3), "epochs-to") == "12 ± 1.5 (3)"
    assert shown(Spread(0.6005, None, 1), "correlation", count=False) == "0.6005"


def test_deviations_are_complete() -> None:
    for deviation in deviations():
        assert all(vars(deviation).values()), deviation.what
