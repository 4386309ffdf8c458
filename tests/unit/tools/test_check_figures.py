"""Numbers in README and docs: right ones pass, and every wrong one is named and can be rewritten."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import charts
import check_figures
from equipoise.studies.results import result_file, write_result
from study_helpers import result_json, write_study


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a study of three runs per arm, and a benchmark."""
    folder = write_study(tmp_path / "results" / "s")
    for seed in range(3):
        for arm, gain in (("SGD", 0.0), ("AGENT", 0.02 + 0.01 * seed)):
            write_result(result_file(folder, arm, seed), result_json(arm, seed, gain))
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "b.json").write_text(json.dumps([{"bytes": 2_500_000, "dense": 10_000_000}]))
    monkeypatch.setattr(check_figures, "ROOT", tmp_path)
    check_figures.study.cache_clear()
    check_figures.bench.cache_clear()
    return tmp_path


def ends(root: Path, arm: str) -> list[float]:
    """The accuracies of the result files, in percent."""
    files = [result_file(root / "results" / "s", arm, seed) for seed in range(3)]
    return [100 * json.loads(file.read_text())["epochs"][-1]["scores"]["plain"]["accuracy"] for file in files]


def check(text: str) -> tuple[str, list[str]]:
    problems: list[str] = []
    return check_figures.checked(text, problems, "README.md"), problems


def test_figures_are_those_of_the_result_files(root: Path) -> None:
    sgd, agent = ends(root, "SGD"), ends(root, "AGENT")
    assert check_figures.text_of("accuracy s SGD digits=2") == f"{np.mean(sgd):.2f} ± {np.std(sgd, ddof=1):.2f} %"
    interval = stats.ttest_ind(agent, sgd, equal_var=False).confidence_interval()
    difference = np.mean(agent) - np.mean(sgd)
    assert check_figures.text_of("gain s AGENT SGD interval=yes") == (
        f"{difference:+.1f} points ({interval.low:+.1f} to {interval.high:+.1f})"
    ).replace("-", "−")
    assert check_figures.text_of("gain s SGD AGENT") == f"−{difference:.1f} points"
    assert check_figures.text_of("gain s SGD AGENT words=yes") == f"{difference:.1f} points below"
    assert check_figures.text_of("gain s AGENT SGD words=yes") == f"{difference:.1f} points above"
    assert check_figures.text_of("gain s SGD SGD") == "0.0 points"
    assert check_figures.text_of("runs s AGENT SGD") == "3 and 3"
    assert check_figures.text_of("value b.json 0/bytes scale=1e-6 format=.2f") == "2.50"
    assert check_figures.text_of("ratio b.json 0/dense 0/bytes format=.0f") == "4"


def test_the_summary_of_speed_takes_the_fastest_dense_and_the_fastest_packed_form(root: Path) -> None:
    times = {"dense float32, a": 12.0, "dense bf16, b": 8.0, "packed 90 %": 6.0, "packed bf16 90 %": 4.0}
    times |= {"packed 95 %": 2.0, "packed 99 %": 1.0, "packed bf16 99 %": 1.6, "onnxruntime, dense float32": 1.0}
    measured = [{"case": "net", "milliseconds": times}, {"case": "epoch", "milliseconds": {"SGD, dense": 1.0}}]
    sections = {"net": {"about": {}, "measured": measured}, "size": {"about": {}, "measured": {"dense": 5}}}
    (root / "bench" / "results" / "cpu.json").write_text(json.dumps(sections))
    assert check_figures.text_of("speed_summary").splitlines()[3:] == [
        "| net | bf16, b: 8 ms | 2.0\xa0× | 4.0\xa0× | 8.0\xa0× |"
    ]


def test_a_cell_is_found_by_the_heads_of_its_table_and_row(root: Path) -> None:
    (root / "docs").mkdir(exist_ok=True)
    (root / "docs" / "a.md").write_text("| x | y |\n|---|---|\n| a | 1 |\n\n| z | y |\n|---|---|\n| a | 2 |\n")
    assert check_figures.text_of("cell docs/a.md x a 1") == "1"
    assert check_figures.text_of("cell docs/a.md z a 1") == "2"
    for wrong in ("z b 1", "a a 1", "z a 2"):
        with pytest.raises(check_figures.Unknown, match=r"docs/a\.md has"):
            check_figures.text_of(f"cell docs/a.md {wrong}")


def test_tables_of_patterns_are_those_of_the_benchmarks(root: Path) -> None:
    arms = ("2:4", "unstructured 50 %", "16x1 50 %", "fan-in 50 %")
    folder = write_study(root / "results" / "patterns", list(arms))
    for i, seed in itertools.product(range(len(arms)), (0, 1)):
        value = result_json(arms[i], seed)
        value["epochs"][-1]["scores"]["plain"]["accuracy"] = 0.8 + i / 100
        write_result(result_file(folder, arms[i], seed), value)
    assert check_figures.text_of("pattern_accuracies 50=2:4").splitlines()[3:] == [
        "| single weights | 81.00 ± 0.00 % (2) |",
        "| n:m | 2:4: 80.00 ± 0.00 % (2) |",
        "| `16x1` | 82.00 ± 0.00 % (2) |",
        "| `fan_in` | 83.00 ± 0.00 % (2) |",
    ]
    times = [("A wide", 2.0, 1.0), ("A tall", 1.0, 2.0), ("B", 4.0, 5.0)]
    rows = [
        {"layer": name, "dense": {"graph": dense, "eager": 9.0}, "2:4": {"graph": sparse, "eager": 18.0}}
        for name, dense, sparse in times
    ]
    (root / "bench" / "results" / "patterns-gpu.json").write_text(json.dumps({"rows": rows}))
    assert check_figures.text_of("gpu_gains 2:4") == "0.50 to 2.00"
    assert check_figures.text_of('gpu_gains 2:4 "A tall" B format=.1f') == "0.5 to 0.8"
    assert check_figures.text_of("gpu_gains 2:4 clock=eager") == "0.50"
    assert check_figures.text_of("gpu_times dense A") == "1.00 to 2.00"
    last = check_figures.text_of("gpu_two_to_four").splitlines()[-1]
    assert last == "| B | 4.000 | 5.000 | 0.80 × | 9.000 | 18.000 | 0.50 × |"
    with pytest.raises(check_figures.Unknown, match="has no 64x64"):
        check_figures.text_of("gpu_gains 64x64")


def test_readme_begins_with_time_to_accuracy_once_it_was_measured_on_a_cpu(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "BENCH", root / "bench" / "results")
    assert "deploy.png" in check_figures.text_of("first_chart")
    assert check_figures.text_of("second_chart") == "\n"
    line = {"arm": "sparse, 8", "seed": 0, "accuracy": 0.8, "seconds": 60}
    (root / "bench" / "results" / "cpu_accuracy.jsonl").write_text(json.dumps(line) + "\n")
    assert "time-to-accuracy.png" in check_figures.text_of("first_chart")
    assert "deploy.png" in check_figures.text_of("second_chart")


def test_the_section_on_time_to_accuracy_appears_once_it_was_measured(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "BENCH", root / "bench" / "results")
    assert check_figures.text_of("cpu_section") == "\n"
    assert "Not measured." in check_figures.text_of("cpu_table")
    lines = [
        {"arm": "sparse, 8", "accuracy": 0.86, "seconds": 600, "process": 720},
        {"arm": "bf16, 6", "accuracy": 0.86, "seconds": 1800, "process": 1860},
    ]
    (root / "bench" / "results" / "cpu_accuracy.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    section = check_figures.text_of("cpu_section")
    assert section.startswith("\n## CIFAR-10 to 86 % on two CPU cores in 12 minutes\n\n")
    assert section.endswith("| 8 epochs, 1 run | 86.0 | 10.0 | 30.0 (3.0 ×) |  |\n")
    assert "| sparse, 99 % | 8 | 86.0 | 1 | 10.0 | 12.0 | 3.0 × |" in check_figures.text_of("cpu_table")


def test_figures_of_ablations_are_those_of_their_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [("fast", 84.0), ("fast", 86.0), ("no warm-up", 78.75), ("more", 85.5), ("broken", None)]
    lines = [{"arm": arm} | ({"scores": {"plain": score}} if score else {}) for arm, score in runs]
    units = [[8, [[64, count, 0, 0], [64, 1, 0, 0]]] for count in (1000, 1100)]
    stable = [
        {"arm": "RigL", "scores": {"plain": score}, "units": [units[i % 2]]} for i, score in enumerate((90, 70))
    ]
    groups = {"ablation": lines, "stability": stable}
    monkeypatch.setattr(check_figures.accelerate_tables, "group", groups.__getitem__)
    text_of = check_figures.text_of
    assert text_of('loss ablation "no warm-up" digits=2') == "6.25"
    assert text_of("loss ablation more sign=yes") == "+0.5"
    assert text_of('loss ablation more than="no warm-up" digits=2 sign=yes') == "+6.75"
    assert text_of("group_runs ablation fast") == "2"
    assert text_of("group_arms ablation") == "2"
    assert text_of("group_deviation ablation times=2") == f"{2 * np.std([84, 86], ddof=1):.1f}"
    draws = np.random.default_rng(0).normal(size=(200_000, 2)).max(1).mean()  # of two arms
    assert float(text_of("best_by_chance ablation")) == pytest.approx(draws * 2**0.5 * 1.5**0.5, abs=0.02)
    assert text_of("collapsed stability RigL words=yes") == "1 of 2 runs end 20 points below the other"
    assert text_of("collapsed ablation fast") == "none of 2 runs"
    assert text_of("units_without_input RigL 8") == "1,051"
    with pytest.raises(check_figures.Unknown, match="has no runs of broken"):
        text_of("loss ablation broken")
    with pytest.raises(check_figures.Unknown, match="has no reference"):
        text_of("loss stability RigL")
    with pytest.raises(check_figures.Unknown, match="no units of RigL after epoch 2"):
        text_of("units_without_input RigL 2")


def test_clear_differences_are_those_whose_interval_excludes_zero(root: Path) -> None:
    sgd, agent = ends(root, "SGD"), ends(root, "AGENT")
    interval = stats.ttest_ind(agent, sgd, equal_var=False).confidence_interval()
    clear = interval.low > 0 or interval.high < 0
    assert check_figures.text_of("clear_differences s AGENT=SGD SGD=AGENT SGD=SGD") == f"{2 * clear} of the 3"
    assert (
        check_figures.text_of("largest_loss s AGENT=SGD SGD=AGENT") == f"{np.mean(agent) - np.mean(sgd):.1f} points"
    )
    with pytest.raises(check_figures.Unknown, match="SGD=Adam cannot be compared"):
        check_figures.text_of("largest_loss s SGD=Adam")


def test_runs_of_the_fast_recipe_are_counted_only_if_none_collapsed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {8: [84.0, 85.0], 12: [86.0, 79.0], 25: []}
    monkeypatch.setattr(check_figures, "fast_scores", scores.__getitem__)
    assert check_figures.text_of("fast_runs 8") == "2"
    for epochs in ("8 12", "25"):
        with pytest.raises(check_figures.Unknown, match="collapsed"):
            check_figures.text_of(f"fast_runs {epochs}")


def test_a_rival_is_compared_with_the_fastest_dense_one(root: Path) -> None:
    times = {"dense float32, a": 90.0, "dense float32, b": 60.0, "dense bf16": 45.0, "packed": 15.0, "denser": 1.0}
    (root / "bench" / "results" / "cpu.json").write_text(json.dumps({"net": {"measured": [{"milliseconds": times}]}}))
    assert check_figures.text_of('faster net/0 packed than="dense float32"') == "4.0"
    assert check_figures.text_of("faster net/0 packed") == "3.0"
    with pytest.raises(check_figures.Unknown, match='no rival "dense int8"'):
        check_figures.text_of('faster net/0 packed than="dense int8"')


def test_figures_of_deviations_operations_savings_and_constants(root: Path) -> None:
    deviations = [np.std(ends(root, arm), ddof=1) for arm in ("SGD", "AGENT")]
    assert check_figures.text_of("largest_deviation s SGD AGENT") == f"{max(deviations):.2f}"
    with pytest.raises(check_figures.Unknown, match="not all of SGD, Adam"):
        check_figures.text_of("largest_deviation s SGD Adam")
    assert check_figures.text_of("operations_left 0.9 uniform") == "10.0"
    assert check_figures.text_of("saved b.json 0/dense 0/bytes") == "75"
    assert check_figures.text_of("constant math pi format=.2f") == "3.14"
    with pytest.raises(check_figures.Unknown, match="no attribute"):
        check_figures.text_of("constant math nothing")
    (root / "bench" / "results" / "l.jsonl").write_text('{"a": 1}\n{"a": {"b": 4}}\n')
    assert check_figures.text_of("value l.jsonl 1/a/b format=.0f") == "4"


def test_a_wrong_number_is_named_with_its_line_and_replaced(root: Path) -> None:
    right = "<!-- figure: runs s SGD -->3<!-- /figure -->"
    page = f"one\nin {right} and\nby <!-- figure: ratio b.json 0/dense 0/bytes -->5.0<!-- /figure --> times\n"
    done, problems = check(page)
    assert problems == ["README.md:3: figure ratio b.json 0/dense 0/bytes: the text has '5.0', the results '4.0'"]
    assert done == page.replace("5.0", "4.0")
    assert check(done) == (done, [])


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("speed s SGD", "no figure is called speed; choose from accuracy, gain, "),
        ("accuracy s Adam", "Adam has no result in the study s"),
        ("accuracy t SGD", "results/t has no study"),
        ("gain s SGD Adam", "cannot be compared in the study s: Adam has no finished seed"),
        ("value b.json 0/speed", "bench/results/b.json has no 0/speed"),
        ("value c.json 0", "bench/results/c.json cannot be read"),
        ("value b.json 0", "0 is not a number"),
        ("accuracy s", "missing 1 required positional argument"),
        ("accuracy s SGD colour=red", "colour"),
        ('accuracy s "SGD', "No closing quotation"),
    ],
)
def test_a_figure_that_cannot_be_computed_is_one_line(root: Path, call: str, told: str) -> None:
    page = f"| <!-- figure: {call} -->1<!-- /figure --> |"
    done, (problem,) = check(page)
    assert done == page
    assert problem.startswith(f"README.md:1: figure {call}: ")
    assert told in problem
    assert "\n" not in problem


def test_a_line_that_begins_with_a_figure_would_be_an_html_block_of_markdown(root: Path) -> None:
    begins = "Three\n  <!-- figure: runs s SGD -->3<!-- /figure --> runs"
    assert check(begins)[1] == [
        "README.md:2: figure runs s SGD: move it away from the start of the line, which ends a paragraph"
    ]
    whole = "<!-- figure: runs s SGD -->\n3\n<!-- /figure -->"  # such as a table
    assert "move it away" not in check(whole)[1][0]


@pytest.mark.parametrize("page", ["<!-- figure: runs s SGD -->3", "3<!-- /figure -->"])
def test_a_figure_that_is_not_closed_is_refused(root: Path, page: str) -> None:
    assert check(page)[1] == [
        "README.md: a figure is not closed; write <!-- figure: NAME ... -->text<!-- /figure -->"
    ]


def test_the_command_fails_until_the_pages_are_written(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = root / "docs" / "deep" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text("Of <!-- figure: runs s SGD -->7<!-- /figure -->\n")
    monkeypatch.setattr(check_figures, "stale_charts", lambda write: [])
    monkeypatch.setattr(check_figures, "write_page", lambda results, page: page.write_text("the six claims"))
    words = {"check": ["x"], "write": ["x", "--write"]}

    def run(kind: str) -> str:
        monkeypatch.setattr("sys.argv", words[kind])
        check_figures.main()
        return capsys.readouterr().out

    with pytest.raises(SystemExit, match="1"):
        run("check")
    told = capsys.readouterr().out
    assert "docs/deep/page.md:1: figure runs s SGD: the text has '7', the results '3'" in told
    assert "docs/reproduction.md: the results give another page" in told
    assert "run `make figures`" in told
    assert "run `make figures`" not in run("write")
    assert page.read_text() == "Of <!-- figure: runs s SGD -->3<!-- /figure -->\n"
    assert run("check") == ""
    page.write_text("Of <!-- figure: runs t SGD -->3<!-- /figure -->\n")  # cannot be computed
    with pytest.raises(SystemExit, match="1"):
        run("write")
    page.unlink()
    (root / "docs" / "reproduction.md").write_text("older")
    with pytest.raises(SystemExit, match="1"):
        run("check")
