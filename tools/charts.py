"""Draw the charts of README and docs from committed results.

    python tools/charts.py [--out docs]

- time-to-accuracy.png: final accuracy over training time. On a GPU from the study `time-to-accuracy`, with the seconds
  of an epoch from bench/results/startup.jsonl for runs that shared their device; on CPU cores from
  bench/results/cpu_accuracy.jsonl of bench/cpu_accuracy.py, in processor time if other programs shared the cores. A
  dense training of which only steps were timed is a vertical line.
- epochs-to-accuracy.png: final accuracy over epochs, from the study `time-to-accuracy`.
- patterns.png: final accuracy over speed-up on a CPU, from the study `patterns` and bench/results/patterns-cpu.json of
  bench/patterns_cpu.py.
- deploy.png: size, latency and throughput of an exported model, from bench/results/deploy.json of bench/deploy.py.

A panel or a chart without data is left out. Each file holds a digest of its data, by which tools/check_figures.py
notices that the results have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.patheffects import withStroke
from PIL import Image

import cpu_times
from equipoise.display.figures import COLOURS, drawing
from equipoise.studies.reading import read_results
from equipoise.studies.results import Result

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench" / "results"
OURS = "ours: fast recipe, 99 % sparse"
FAMILIES = {"dense": "dense", "SET-ITOP published": "SET-ITOP as in the paper, 99 % sparse", "fast": OURS}
OURS_BF16 = "ours, bf16 activations, 99 % sparse"
KINDS = {"float32": "dense, float32", "bf16": "dense, bf16", "sparse": OURS, "sparse bf16": OURS_BF16}
KINDS |= dict.fromkeys(("published", "published bf16"), "SET-ITOP as in the paper, packed")
SHORT = {
    **{name: name.split(" as in")[0] for name in (*FAMILIES.values(), *KINDS.values())},
    OURS: "ours",
    OURS_BF16: "ours, bf16",
}
GPU = "one H200"
LOOKS = {OURS: (COLOURS[0], "o"), OURS_BF16: (COLOURS[2], "v"), FAMILIES["SET-ITOP published"]: (COLOURS[1], "s")}
LOOKS |= {
    KINDS["published"]: (COLOURS[1], "s"),
    "dense": (COLOURS[6], "D"),
    KINDS["float32"]: (COLOURS[6], "D"),
    KINDS["bf16"]: (COLOURS[6], "^"),
}


class Point(NamedTuple):
    """A budget of training: its time, and the mean and deviation of the final accuracy in percent over runs."""

    time: float
    mean: float | None  # if the training was run to its end
    std: float


Panel = dict[str, list[Point]]  # by family
LEAST_RANGE = 6  # points of accuracy in a panel


def read_lines(file: str) -> list[dict[str, Any]]:
    """Read a file of JSON lines; none if it does not exist."""
    path = BENCH / file
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def point(times: Sequence[float], accuracies: Sequence[float]) -> Point:
    std = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    return Point(statistics.mean(times), 100 * statistics.mean(accuracies), 100 * std)


# Accuracy over training time


def time_to_accuracy() -> dict[str, Panel] | None:
    """Return the points of both panels; `None` if neither has a run of ours."""
    name, points = cpu_points()
    panels = {name: points, GPU: gpu_points()}
    shown = {name: panel for name, panel in panels.items() if panel.keys() & {OURS, OURS_BF16}}
    return shown or None


def budgets() -> dict[tuple[str, int], Sequence[Result]]:
    """Return the runs of VGG-C in the study, by arm without its epochs, and epochs."""
    folder = ROOT / "results" / "time-to-accuracy"
    arms = read_results(folder).studies[0].results if folder.is_dir() else {}
    named = {arm: re.fullmatch(r"(?!VGG-16)(.*), (\d+) epochs", arm) for arm in arms}
    return {(match[1], int(match[2])): arms[arm] for arm, match in named.items() if match and arms[arm]}


def gpu_points() -> Panel:
    """Return the budgets whose training time is known, by the seconds of an epoch if those were measured."""
    timed = [line["seconds"] / line["epochs"] for line in read_lines("startup.jsonl") if "train" in line]
    found: Panel = {}
    for (arm, epochs), results in budgets().items():
        times = [epochs * statistics.mean(timed)] if timed else seconds_of(results)
        if times and arm in FAMILIES:
            found.setdefault(FAMILIES[arm], []).append(point(times, [result.test["plain"] for result in results]))
    return {family: sorted(points) for family, points in found.items()}


def seconds_of(results: Sequence[Result]) -> list[float]:
    """Return the training seconds of runs that had the device to themselves."""
    return [seconds for result in results if (seconds := result.epochs[-1].seconds) is not None]


def on_cpu(file: str = "cpu_accuracy.jsonl") -> cpu_times.Measured:
    """Return what bench/cpu_accuracy.py measured, with the accuracies of the same trainings on a GPU."""
    kinds = {"dense": ("bf16", "float32"), "SET-ITOP published": ("published", "published bf16")}
    found: dict[str, dict[int, list[float]]] = {}
    for (arm, epochs), results in budgets().items():
        for kind in kinds.get(arm, ()):
            found.setdefault(kind, {})[epochs] = [100 * result.test["plain"] for result in results]
    return cpu_times.read(BENCH / file, found)


def cpu_points() -> tuple[str, Panel]:
    """Return what the panel of bench/cpu_accuracy.py is called, and its arms up to the slowest one that is compared."""
    measured = on_cpu()
    compared = cpu_times.compare(measured)
    most = max((arm.minutes for arm in measured.arms), default=0.0)
    if compared is not None and compared.float32 is not None:
        most = max(compared.float32, compared.ours.minutes)
    found: Panel = {}
    for arm in (arm for arm in measured.arms if arm.minutes <= most):
        scores = [accuracy / 100 for accuracy in arm.accuracies]
        shown = point(arm.times, scores) if scores else Point(arm.minutes, None, 0.0)
        found.setdefault(KINDS[arm.kind], []).append(shown)
    return measured.cores + ", processor time" * measured.shared, found


def fastest(panel: Panel, unit: str) -> str:
    """Say when each family first ends at an accuracy that all of them reach: `84.7 % in 6 s (ours), 36 s (dense)`."""
    scored = {name: [p for p in points if p.mean is not None] for name, points in panel.items()}
    scored = {name: points for name, points in scored.items() if points}
    target = min(max(point.mean or 0.0 for point in points) for points in scored.values())
    times = {name: min(p.time for p in points if (p.mean or 0.0) >= target) for name, points in scored.items()}
    told = [
        f"{time:.2g} {unit} ({SHORT.get(name, name)})"
        for name, time in sorted(times.items(), key=lambda item: item[1])
    ]
    return f"{target:.1f} % in {', '.join(told)}"


def draw_time_to_accuracy(panels: dict[str, Panel], path: Path, digest: str) -> None:
    finding = cpu_times.finding(on_cpu()) if panels.keys() - {GPU} else ""
    title = finding or fastest(panels[GPU], "s")
    with drawing(path, title, len(panels), size=(7.5 * len(panels), 5.6), source=digest) as axes:
        for axis, (place, panel) in zip(axes, panels.items(), strict=True):
            for family, points in panel.items():
                colour, marker = LOOKS[family]
                scored = [point for point in points if point.mean is not None]
                if scored:
                    time, mean, std = zip(*scored, strict=True)
                    line = {"lw": 2, "ls": "-" if len(scored) > 1 else ""}
                    axis.errorbar(time, mean, std, label=family, color=colour, marker=marker, ms=8, capsize=4, **line)
                for time in (point.time for point in points if point.mean is None):
                    axis.axvline(time, color=colour, lw=2, ls="--")
                    where = {"transform": axis.get_xaxis_transform(), "rotation": 90, "ha": "right", "va": "center"}
                    axis.text(time, 0.5, f"{family}: timed, not scored ", color=colour, **where)
            unit, words = ("s", "seconds") if place == GPU else ("min", "minutes")
            told = f"VGG-C on CIFAR-10, {place}: final test accuracy in %"
            if finding and place == GPU:
                told += f"\n{fastest(panel, unit)}"
            elif place != GPU and any(arm.on_gpu for arm in on_cpu().arms):
                others = " and SET-ITOP" if on_cpu().of("published", "published bf16") else ""
                told += f"\ndense{others}: steps timed here, accuracy from a GPU"
            axis.set_title(told)
            axis.set_xlabel(f"{words} of training steps, without start-up")
            axis.set_xlim(left=0, right=1.04 * max(point.time for points in panel.values() for point in points))
            low, high = axis.get_ylim()
            room = max(0.0, LEAST_RANGE - (high - low)) / 2  # or a few runs would fill the panel with their noise
            axis.set_ylim(low - room, high + room)
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)


# Accuracy over epochs


def epochs_to_accuracy() -> Panel | None:
    """Return all budgets of the study by arm; `None` without a run of ours."""
    found: Panel = {}
    for (arm, epochs), results in budgets().items():
        found.setdefault(arm, []).append(point([epochs], [result.test["plain"] for result in results]))
    return {arm: sorted(points) for arm, points in found.items()} if "fast" in found else None


def fewest(panel: Panel) -> str:
    """Compare the first budget of ours that ends at the best published recipe with that recipe."""
    published = [(points[-1], arm) for arm, points in panel.items() if arm.endswith(" published")]
    if not published:
        return "The fast recipe and others"
    best, name = max(published, key=lambda entry: entry[0].mean)
    reached = [point for point in panel["fast"] if point.mean >= best.mean]
    ours = reached[0] if reached else max(panel["fast"], key=lambda point: point.mean)
    gain = ours.mean - best.mean
    side = f"{abs(gain):.1f} points {'above' if gain >= 0 else 'below'} {name.removesuffix(' published')}"
    told = f"{ours.time:.0f} epochs of the fast recipe end {side} as published in {best.time:.0f} epochs"
    dense = next((point for point in panel.get("dense", ()) if point.time == ours.time), None)
    if dense is None:
        reaching = [point.time for point in panel.get("dense", ()) if point.mean >= best.mean]
        return told + (f";\ndense training ends above it in {min(reaching):.0f}" if reaching else "")
    gap = dense.mean - ours.mean
    return f"{told},\nand {abs(gap):.1f} points {'below' if gap >= 0 else 'above'} dense training in as many"


def aside(panel: Panel, arm: str) -> float:
    """Epochs by which the points of an arm are drawn to the right, so that they do not cover those of earlier arms."""
    earlier = [point for other in list(panel)[: list(panel).index(arm)] for point in panel[other]]
    close = [p for p in panel[arm] for o in earlier if p.time == o.time and abs((p.mean or 0) - (o.mean or 0)) < 0.3]
    return 0.9 if close else 0.0


def draw_epochs_to_accuracy(panel: Panel, path: Path, digest: str) -> None:
    with drawing(path, fewest(panel), 1, size=(10, 5.4), source=digest) as (axis,):
        grey = COLOURS[6]  # of dense training, as in the chart of time
        colours = iter([colour for colour in COLOURS if colour != grey])
        for (arm, points), marker in zip(panel.items(), "osD^vP*", strict=False):
            colour = grey if arm == "dense" else next(colours)
            time, mean, std = zip(*points, strict=True)
            time = [epochs + aside(panel, arm) for epochs in time]
            line = {"lw": 2, "ls": "-" if len(points) > 1 else ""}
            axis.errorbar(time, mean, std, label=arm, color=colour, marker=marker, ms=9, capsize=4, **line)
        axis.set_title("VGG-C on CIFAR-10, 99 % sparse or dense: final test accuracy, %")
        axis.set_xlabel("epochs of training")
        axis.set_xlim(left=0)
        axis.legend()


# Structured sparsity

PATTERNS: dict[str, tuple[str, str, tuple[int, int], str]] = {  # label, marker, and where the names of points stand
    "unstructured": ("single weights", "o", (4, 12), "left"),
    "n:m": ("n:m, one density in all layers", "s", (5, -12), "left"),
    "16x1": ("blocks of 16x1", "D", (-8, -9), "right"),
    "fan-in": ("constant fan-in", "^", (-9, -6), "right"),
}
STYLES = {"fan-in": ":"}  # green and pink look alike to some
TASKS = {"train": "training step", "infer": "inference of 128 images"}


def patterns() -> dict[str, Any] | None:
    """Return the accuracy of dense training, and speed-up, accuracy and arm by task and pattern."""
    folder, speeds = ROOT / "results" / "patterns", BENCH / "patterns-cpu.json"
    if not folder.is_dir() or not speeds.exists():
        return None
    timed = json.loads(speeds.read_text())
    arms = {arm: runs for arm, runs in read_results(folder).studies[0].results.items() if runs}
    scores = {arm: point([0.0], [run.test["plain"] for run in runs]) for arm, runs in arms.items()}
    found: dict[str, dict[str, list[tuple[float, float, float, str]]]] = {task: {} for task in TASKS}
    for task, arm in ((task, arm) for task in TASKS for arm in scores if arm in timed[task]["speedup"]):
        pattern = "n:m" if re.fullmatch(r"\d+:\d+", arm) else arm.split()[0]
        speed, score = timed[task]["speedup"][arm], scores[arm]
        found[task].setdefault(pattern, []).append((speed, score.mean, score.std, arm))
    return {"dense": scores["dense"], "tasks": found} if found["train"] and "dense" in scores else None


def quickest(dense: Point, arms: dict[str, list[tuple[float, float, float, str]]]) -> str:
    """Say what the fastest arm costs, and what single weights do at its sparsity or the highest one of theirs."""
    speed, mean, _, name = max(arm for points in arms.values() for arm in points)
    told = f"{name} trains {speed:.1f} times as fast as dense and ends {dense.mean - mean:.1f} points below it"
    if "unstructured" not in arms or name.startswith("unstructured"):
        return told
    speed, mean, _, name = max(arms["unstructured"])
    sparsity = name.removeprefix("unstructured ")
    return f"{told};\nsingle weights at {sparsity}: {speed:.1f} times as fast, {dense.mean - mean:.1f} points below"


def draw_patterns(data: dict[str, Any], path: Path, digest: str) -> None:
    dense = Point(*data["dense"])
    with drawing(path, quickest(dense, data["tasks"]["train"]), 2, size=(14, 7.4), source=digest) as axes:
        for axis, (task, arms) in zip(axes, data["tasks"].items(), strict=True):
            axis.axhline(dense.mean, color=COLOURS[6], lw=1.5, ls="--", label="dense")
            for (pattern, points), colour in zip(arms.items(), COLOURS, strict=False):
                speed, mean, std, names = zip(*sorted(points), strict=True)
                label, marker, offset, side = PATTERNS[pattern]
                bars = axis.errorbar(
                    speed,
                    mean,
                    std,
                    color=colour,
                    marker=marker,
                    ms=8,
                    lw=2,
                    ls=STYLES.get(pattern, "-"),
                    label=label,
                    capsize=3,
                )
                for part in (*bars[1], *bars[2]):
                    part.set_alpha(0.35)
                for x, y, name in zip(speed, mean, names, strict=True):
                    text = name.removeprefix(pattern).strip()
                    if text in ("50 %", "75 %"):  # these would cover each other
                        continue
                    where = {"xytext": offset, "textcoords": "offset points", "ha": side, "va": "center"}
                    axis.annotate(
                        text, (x, y), color=colour, path_effects=[withStroke(linewidth=4, foreground="w")], **where
                    )
            axis.set_title(f"{TASKS[task]}: test accuracy in %")
            axis.set_xlabel("times as fast as dense float32, one CPU thread")
            axis.margins(x=0.1)
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)


# Exported models


def deploy() -> list[dict[str, Any]] | None:
    file = BENCH / "deploy.json"
    return json.loads(file.read_text()) if file.exists() else None


def draw_deploy(entries: list[dict[str, Any]], path: Path, digest: str) -> None:
    """Draw bars of the dense rivals, and of ours by sparsity."""

    def dense(pick: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(map(pick, entries))

    def torch_seconds(k: int) -> float:
        return dense(lambda e: min(e["seconds"]["PyTorch"][k], e["seconds"]["PyTorch channels_last"][k]))

    rows: dict[str, tuple[float, float, float]] = {
        "PyTorch, dense": (dense(lambda e: e["dense_bytes"]), torch_seconds(0), torch_seconds(1)),
        "onnxruntime, dense": (
            dense(lambda e: e["onnx_bytes"]),
            dense(lambda e: e["seconds"]["onnxruntime"][0]),
            dense(lambda e: e["seconds"]["onnxruntime"][1]),
        ),
    }
    rows |= {f"equipoise, {100 * e['sparsity']:g} %": (e["file_bytes"], *e["seconds"]["equipoise"]) for e in entries}
    best = entries[-1]
    times = [torch_seconds(k) / best["seconds"]["equipoise"][k] for k in (0, 1)]
    smaller = [best["dense_bytes"] / best[key] for key in ("file_bytes", "int8_bytes")]
    threads = f"{best['threads']} thread{'s' * (best['threads'] > 1)}{', processor time' * best['cpu_time']}"
    title = (
        f"{best['model']} at {100 * best['sparsity']:g} %: "
        f"a file {smaller[0]:.0f} times smaller (int8: {smaller[1]:.0f}), "
        f"and {times[0]:.1f} times the speed of dense\n"
        f"PyTorch for one image and {times[1]:.1f} times for 128 ({threads})"
    )
    panels: dict[str, Callable[[tuple[float, float, float]], float]] = {
        "file, MB": lambda row: row[0] / 1e6,
        "one image, ms": lambda row: 1e3 * row[1],
        "128 at a time, images per second": lambda row: 128 / row[2],
    }
    colours = [COLOURS[6]] * 2 + [COLOURS[0]] * len(entries)
    with drawing(path, title, len(panels), size=(14, 1.8 + 0.5 * len(rows)), source=digest) as axes:
        for i, (axis, (name, pick)) in enumerate(zip(axes, panels.items(), strict=True)):
            values = [pick(row) for row in rows.values()]
            axis.barh(range(len(rows)), values, color=colours, height=0.65)
            for k, value in enumerate(values):
                axis.text(value, k, f" {value:.3g}" if value < 1000 else f" {value:,.0f}", va="center")
            axis.set_yticks(range(len(rows)), list(rows) if i == 0 else [""] * len(rows))
            axis.invert_yaxis()
            axis.grid(axis="y", visible=False)
            axis.set_title(name)
            axis.margins(x=0.22)


# Files

CHARTS: dict[str, tuple[Callable[[], Any], Callable[[Any, Path, str], None]]] = {
    "time-to-accuracy.png": (time_to_accuracy, draw_time_to_accuracy),
    "epochs-to-accuracy.png": (epochs_to_accuracy, draw_epochs_to_accuracy),
    "patterns.png": (patterns, draw_patterns),
    "deploy.png": (deploy, draw_deploy),
}


def digest_of(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def drawn_from(file: Path) -> str:
    """Return the digest of the data that a chart was drawn from; empty if there is no chart."""
    if not file.is_file():
        return ""
    with Image.open(file) as image:
        return str(image.info.get("Source", ""))


def stale_charts(write: bool, folder: Path = ROOT / "docs") -> list[str]:
    """Name charts that are missing or were drawn from other data, and draw them again with `write`."""
    found = []
    for name, (read, draw) in CHARTS.items():
        data = read()
        if data is None or drawn_from(folder / name) == digest_of(data):
            continue
        found.append(f"{folder.name}/{name}: the results give another chart")
        if write:
            draw(data, folder / name, digest_of(data))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    out = parser.parse_args().out
    for name, (read, draw) in CHARTS.items():
        data = read()
        if data is None:
            print(f"{name}: no results yet")
            continue
        draw(data, out / name, digest_of(data))
        print(out / name)


if __name__ == "__main__":
    main()
