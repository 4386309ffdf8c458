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
