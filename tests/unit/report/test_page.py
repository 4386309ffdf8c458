"""The report: one page that holds everything, escapes everything, and works in a real browser."""

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from equipoise.cli import main
from equipoise.report import make_page, write_report
from equipoise.report.charts import charts_of
from equipoise.studies.reading import read_results
from equipoise.studies.results import Reading, result_file, write_result
from equipoise.training.run_folder import RunFolder
from study_helpers import line, result_json, write_study

HOSTILE = '</script><img src=x onerror="alert(1)">\u2028<!--<script>{{7*7}}&amp;\'"'
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Page(HTMLParser):
    """Elements with their attributes, and the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name != "meta":
            self._open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name

    def handle_data(self, text: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", text))

    def all(self, name: str) -> list[str]:
        return [text for element, text in self.texts if element == name]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    write_study(tmp_path / "results" / "s")
    return tmp_path / "results"


def page_of(folder: Path) -> str:
    return make_page(read_results(folder), "results")


# The page


def test_verdicts_come_first_and_need_no_script(results: Path) -> None:
    text = page_of(results)
    without_scripts = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    page = Page(without_scripts)
    assert page.all("h2")[0] == "Claims"
    assert "? inconclusive" in page.all("span")  # two seeds
    # 0.32 and 0.321 against 0.3 and 0.301 at epoch 3
    assert {"32.05 ± 0.07 %", "30.05 ± 0.07 %"} <= set(page.all("b"))
    assert any("+2.00 points" in words for words in page.all("p"))
    cells = page.all("td")
    assert "62.05 ± 0.07" in cells  # AGENT at the end, at equal epochs
    assert "35.00 %" in cells  # the paper's number
    assert "32.05 ± 0.07 %" in cells
    assert "−2.95 points" in cells


def test_a_page_of_the_papers_studies_opens_with_the_summary_and_the_six_claims(tmp_path: Path) -> None:
    write_study(tmp_path / "results/other")
    folder = write_study(tmp_path / "results/set-itop", name="set-itop")
    for arm, seed in ((arm, seed) for arm in ("SGD", "AGENT") for seed in (0, 1)):
        write_result(result_file(folder, arm, seed), result_json(arm, seed, name="set-itop"))
    (tmp_path / "results/images.yaml").write_text("digits: tiny pictures\n")
    text = page_of(tmp_path / "results")
    page = Page(re.sub(r"<script.*?</script>", "", text, flags=re.S))
    assert page.all("h2")[:2] == ["Summary", "Six claims of the paper"]
    assert page.all("h2")[-3:] == ["A study", "Claims", "How to read this page"]  # charts before the long lists
    assert text.index('id="six-claims"') < text.index("<nav") < text.index('id="study-0"')
    sentences = re.findall("<li>(.*?)</li>", text.partition('class="summary"')[2].partition("</ul>")[0])
    assert len(sentences) == 6
    assert sentences[-1].startswith("Tried: 4 runs of 1 study on tiny pictures")  # without the other study
    assert any("tiny pictures · fewer than 3 runs of an arm" in words for words in page.all("p"))
    assert all(caption.endswith("· tiny pictures") for caption in page.all("figcaption"))


def test_no_page_is_written_if_there_is_nothing_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for name in "ab":
        (tmp_path / "damaged" / name).mkdir(parents=True)
        (tmp_path / "damaged" / name / "recipe.yaml").write_text("epochs: 3")
    for folder, words in (
        ("empty", "holds no results"),
        ("damaged", "b: left out: it has no metrics.jsonl yet (and 3 other problems)"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["report", str(tmp_path / folder), "-o", str(tmp_path / "page.html")])
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("equipoise: nothing to report: ")
        assert words in line
        assert not (tmp_path / "page.html").exists()


def test_a_margin_is_shown_with_its_claim(tmp_path: Path) -> None:
    asked = {"says": "AGENT loses nothing", "better": "SGD", "than": "AGENT", "at": 3, "margin": 0.03}
    write_study(tmp_path / "s", claims=[asked, {**asked, "margin": -1}])
    page = Page(page_of(tmp_path))
    assert "? inconclusive" in page.all("span")
    assert any("up to 3.00 points worse counts as maintained" in words for words in page.all("p"))
    assert any(
        "study.json: left out: claims[1]: margin=-1.0: how much worse counts as equal, at least 0" in line
        for line in page.all("li")
    )


def test_a_run_in_the_middle_of_its_schedule_is_marked_and_not_compared(tmp_path: Path) -> None:
    write_study(tmp_path / "s")
    for seed in (0, 1):
        value = result_json("AGENT", seed, 0.02)
        for entry in value["epochs"]:
            entry["passes"] = {kind: 2 * count for kind, count in entry["passes"].items()}
        write_result(result_file(tmp_path / "s", "AGENT", seed), value)
    page = Page(page_of(tmp_path))
    cells = page.all("td")
    assert "32.05 ± 0.07 †" in cells  # after three of six epochs, which cost as much as six of SGD
    assert cells[cells.index("32.05 ± 0.07 †") + 1] == "–"
    assert any("† in the middle of its schedule" in words for words in page.all("h3"))


def test_gains_are_differences_from_the_baseline_paired_by_seed_at_every_epoch(tmp_path: Path) -> None:
    claims = [
        {"says": "x", "better": better, "than": than, "metric": "accuracy"}
        for better, than in (("AGENT", "SGD"), ("AGENT", "SVRG"), ("SGD", "SVRG"), ("Short", "SGD"), ("Gone", "SGD"))
    ]
    folder = write_study(tmp_path / "s", ["SGD", "SVRG", "AGENT", "Short"], claims=claims)
    value = result_json("AGENT", 1, 0.04)
    value["epochs"][2]["scores"]["plain"]["accuracy"] += 0.02  # 0.06 above SGD instead of 0.04, in one seed
    write_result(result_file(folder, "AGENT", 1), value)
    for seed in (0, 1):  # half the schedule of SGD: another learning rate at each epoch
        short = result_json("Short", seed, 0.06)
        write_result(result_file(folder, "Short", seed), {**short, "epochs": short["epochs"][:3]})
    (study,) = read_results(tmp_path).studies
    (chart,) = [chart for chart in charts_of(study) if chart.get("form") == "points"]
    assert chart["names"][2] == "AGENT − SGD"
    (series,) = chart["views"][0]["series"]
    assert (chart["views"][0]["label"], series["arm"]) == ("plain", 2)
    epochs, means, deviations = zip(*series["points"], strict=True)
    assert epochs == (1, 2, 3, 4, 5, 6)
    assert means == pytest.approx([0.04, 0.04, 0.05, 0.04, 0.04, 0.04])
    assert deviations == pytest.approx([0, 0, 0.02 / 2**0.5, 0, 0, 0], rel=1e-4, abs=1e-9)
    assert chart["finding"] == "plain, at the end: +4.00 points (AGENT − SGD)"


def test_a_run_that_diverged_is_named_with_its_arm(results: Path) -> None:
    lost = {**result_json("SGD", 1), "epochs": [], "diverged": "the loss is nan at batch 3 of epoch 1"}
    write_result(result_file(results / "s", "SGD", 1), lost)
    page = Page(page_of(results))
    assert "SGD, seed 1: diverged, the loss is nan at batch 3 of epoch 1" in page.all("li")
    assert "diverged" in page.all("th")
    assert "seed 1" in page.all("td")
    assert any("SGD diverged (seed 1)" in words for words in page.all("p"))
    assert "✓ supported" not in page.all("span")[5:]  # after the tallies


def test_the_dates_of_the_runs_are_one_span(results: Path) -> None:
    assert "2026-11-15" in page_of(results)
    assert " to 2026" not in page_of(results)
    late = result_json("SGD", 1)
    late["environment"] = {**late["environment"], "date": "2026-11-17"}
    write_result(result_file(results / "s", "SGD", 1), late)
    assert "2026-11-15 to 2026-11-17" in page_of(results)


def test_a_run_that_learned_nothing_is_named(results: Path) -> None:
    idle = result_json("SGD", 1)
    idle["epochs"] = [{**line, "train_loss": 2.3} for line in idle["epochs"]]
    write_result(result_file(results / "s", "SGD", 1), idle)
    page = Page(page_of(results))
    assert "SGD, seed 1: learned nothing, its loss did not fall" in page.all("li")
    assert any("SGD learned nothing (seed 1)" in words for words in page.all("p"))


def test_the_data_of_the_charts_is_that_of_the_files(results: Path) -> None:
    (text,) = [t for t in Page(page_of(results)).all("script") if t.startswith("[")]
    (study,) = json.loads(text)
    assert study["arms"] == ["SGD", "AGENT"]
    charts = {chart["title"]: chart for chart in study["charts"]}
    assert (
        charts["Accuracy on test images"]["finding"]
        == "plain, at the end: 60.05 ± 0.07 % (SGD), 62.05 ± 0.07 % (AGENT)"
    )
    points = charts["Accuracy on test images"]["views"][0]["series"][1]["points"]
    assert points[2] == [3, pytest.approx(0.3205), pytest.approx(0.00070711, rel=1e-4)]
    assert study["costs"][1]["3"] == [3, 6]  # gradient evaluations and seconds
    assert [view["label"] for view in charts["Weight of the correction"]["views"]] == ["c", "weight γc"]
    assert charts["Weight of the correction"]["views"][0]["series"] == [
        {"arm": 1, "points": [[i, 0.5, 0] for i in range(1, 7)]}
    ]


def test_bars_and_dots_are_drawn_to_scale_without_a_script(results: Path) -> None:
    for seed, seconds in ((0, 4.0), (1, 6.0)):
        value = result_json("SGD", seed)
        for entry in value["epochs"]:
            entry["seconds"] = seconds * entry["epoch"]
        write_result(result_file(results / "s", "SGD", seed), value)
    text = re.sub(r"<script.*?</script>", "", page_of(results), flags=re.S)
    page = Page(text)
    assert {"training seconds per epoch", "gradient evaluations per epoch, SGD = 1"} <= set(page.all("caption"))

    def rows(part: str) -> dict[tuple[str, str], str]:
        found = re.findall(r'<tr><th scope="row">(\w+)</th><td>(<svg.*?</svg>)</td><td>([^<]*)</td></tr>', part)
        return {(name, value): svg for name, svg, value in found}

    bars = rows(text.partition("training seconds per epoch")[2].partition("</table>")[0])
    # 5 ± √2 seconds for SGD and 2 ± 0 for AGENT; the longest bar with its deviation fills the width
    most = 5 + 2**0.5
    sgd, agent = bars["SGD", "5 ± 1.4"], bars["AGENT", "2"]
    assert f'<rect width="{100 * 5 / most:.2f}%"' in sgd
    assert f'x1="{100 * (5 - 2**0.5) / most:.2f}%" x2="100.00%"' in sgd
    assert f'<rect width="{100 * 2 / most:.2f}%"' in agent
    assert "<line" not in agent
    # 5 of 100 weights of fc, all of head: the axis has the decades from 1 to 100 %
    dots = rows(text)
    fc, head = dots["fc", "100"], dots["head", "10"]
    assert "<title>all arms: 5 %</title>" in fc
    assert re.findall(r'<circle class="a0" cx="([\d.]+)%"', fc) == [f"{100 * (1 + math.log10(0.05) / 2):.2f}"]
    assert 'cx="100.00%"' in head


def test_the_page_of_all_committed_results_stays_below_one_and_a_half_megabytes() -> None:
    page = page_of(Path(__file__).parents[3] / "results")
    assert len(page.encode()) < 1_500_000


def test_the_page_loads_nothing_and_runs_only_its_own_script(results: Path) -> None:
    write_study(results / "t", title="Another")
    text = page_of(results)
    page = Page(text)
    assert not [
        a for _, attributes in page.elements for a in attributes if a in ("src", "style") or a.startswith("on")
    ]
    assert {a["href"][0] for _, a in page.elements if a.get("href")} == {"#"}  # of the table of contents
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"https://github.com/leeoniya/uPlot"}  # of its licence
    assert "@import" not in text
    assert "url(" not in "".join(page.all("style"))
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    for kind, texts in (("style", page.all("style")), ("script", page.all("script")[1:])):
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert len(digests) == 2  # uPlot's and ours
        assert f"{kind}-src " + " ".join(f"'sha256-{digest}'" for digest in digests) in policy  # type: ignore[operator]
    assert "default-src 'none'" in policy  # type: ignore[operator]


def hostile_study(folder: Path) -> Path:
    """Every name and text of a study is an attack."""
    asked = {
        "version": 2,
        "name": HOSTILE,
        "title": HOSTILE,
        "about": HOSTILE,
        "arms": {HOSTILE: {}, "none" + HOSTILE: {}},
    }
    claims = [
        {"says": HOSTILE, "better": HOSTILE, "than": HOSTILE},
        {"better": HOSTILE, "than": "X", "metric": HOSTILE},
    ]
    paper = [{"arm": HOSTILE, "metric": HOSTILE, "value": 1, "score": HOSTILE}]
    write_result(folder / "study.json", {**asked, "claims": claims, "paper": paper})
    for seed in (0, 1):
        value = result_json(HOSTILE, seed, name=HOSTILE)
        value["layers"] = {HOSTILE: {"size": 10, "active": 1}}
        value["environment"] = dict.fromkeys(("device", "torch", "equipoise", "date"), HOSTILE)
        value["recipe"] = {HOSTILE: HOSTILE}
        value["epochs"][-1]["split"] = HOSTILE
        write_result(result_file(folder, HOSTILE, seed), value)
    (folder / "<img src=x onerror=alert(1)>.json").write_text("{")
    return folder


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    hostile_study(tmp_path / "results" / "s")
    write_study(tmp_path / "results" / "t")
    page = Page(page_of(tmp_path / "results"))
    names = [name for name, _ in page.elements]
    assert "img" not in names
    assert names.count("script") == 3
    assert not [a for _, attributes in page.elements for a in attributes if a.startswith("on")]
    assert HOSTILE in page.all("h2")
    assert Page(page_of(tmp_path / "results" / "s")).all("h1") == [HOSTILE]
    (data,) = [t for t in page.all("script") if t.startswith("[")]
    assert json.loads(data)[0]["arms"][0] == HOSTILE
    assert not set("<>&\u2028") & set(data)
    assert any("<img" in item for item in page.all("li"))


def test_problems_are_on_the_page_even_without_studies(results: Path) -> None:
    (results / "s" / "zzz.json").write_text('{"version": 9}')
    assert any("version 9" in item for item in Page(page_of(results)).all("li"))
    page = Page(make_page(Reading((), ("nothing there",)), "results"))
    assert "nothing there" in page.all("li")


def test_a_run_gives_the_same_page(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "my run", {"epochs": 2})
    for i in (1, 2):
        folder.append(line(i, 0.25 * i, c=0.4))
    folder.finish({"version": 1, "test": {"plain": {"accuracy": 0.51}}})
    reading = write_report(tmp_path / "my run", tmp_path / "deep" / "x.html")
    assert reading.problems == ()
    page = Page((tmp_path / "deep" / "x.html").read_text(encoding="utf-8"))
    assert page.all("h1") == ["my run"]
    assert "51.00" in page.all("td")
    assert "2 epochs" in page.all("p")
    points = json.loads(page.all("script")[0])[0]["charts"][0]["views"][0]["series"][0]["points"]
    assert points == [[1, 0.25, None], [2, 0.5, None]]
    assert {"Accuracy on test images", "Weight of the correction"} <= set(page.all("figcaption"))


# The command


def test_the_command_prints_problems_and_writes_the_page(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "s" / "zzz.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["report", "results"])
    assert end.value.code == 0
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "results/s/zzz.json: left out: it is damaged (not JSON); remove it and run the study again",
        "report: report.html",
    ]
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("out", [".", "file/below.html"])
def test_a_path_that_cannot_be_written_is_one_line(
    results: Path, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(SystemExit) as end:
        main(["report", "results", "-o", out])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("equipoise: cannot write the report to ")


def test_a_name_with_an_unpaired_surrogate_is_written(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", title="\ud800 a title")
    write_report(folder, tmp_path / "x.html")
    assert "? a title" in (tmp_path / "x.html").read_text(encoding="utf-8")


# A real browser


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("kind", ["sound", "hostile"])
def test_chromium_draws_the_charts_without_an_error(tmp_path: Path, kind: str) -> None:
    folder = write_study(tmp_path / "s") if kind == "sound" else hostile_study(tmp_path / "s")
    write_report(folder, tmp_path / "report.html")
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", *quiet, "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", (tmp_path / "report.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert not [words for words in done.stderr.splitlines() if "CONSOLE" in words]
    dom = done.stdout
    curves = dom.count('<figure class="chart lines')
    assert curves >= 4
    assert dom.count("<canvas ") == dom.count('class="uplot ') == curves
    buttons = re.findall(r'<div class="u-label"><button type="button" aria-pressed="true">(.*?)</button>', dom)
    assert len(buttons) >= curves
    if kind == "sound":
        assert {"SGD", "AGENT", "AGENT − SGD"} == set(buttons)
        assert '<td class="u-value">62.05 ± 0.07 %</td>' in dom  # AGENT at the end, while no pointer is on the chart
        labels = re.findall(r'aria-label="([^"]*: [^"]*)"', dom)
        looks = {label.partition(",")[0]: label for label in labels}
        assert looks["Accuracy on test images"].endswith("plain: SGD, AGENT")
        # both arms have the same losses, so neither curve may hide the other
        assert looks["Training loss"].endswith("loss: SGD, AGENT; in turn, as dashes: SGD, AGENT")
    assert "NaN" not in dom.partition("<script")[0]
    assert "<img" not in dom
