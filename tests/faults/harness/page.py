"""The page with the figures of a campaign."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.campaign import Found

TEMPLATE = Path(__file__).with_name("page.md")
PLACES = {
    "step": "within a training step",
    "refresh": "within a refresh of the correction",
    "update": "within a topology update",
    "checkpoint": "while a checkpoint is written",
    "evaluation": "within an evaluation",
    "line": "while a line of metrics is written",
    "result": "while the result is written",
    "study result": "while the result of a study is written",
    "framework checkpoint": "while the state for the checkpoint of a framework is collected",
    "any moment": "from outside, after a random time",
}
KINDS = {
    "one process": "`equipoise train` in one process",
    "two processes": "`equipoise train` in two processes",
    "three processes": "`equipoise train` in three processes",
    "studies": "`equipoise study`, two arms",
    "Lightning": "PyTorch Lightning, from its checkpoints",
    "Hugging Face Trainer": "Hugging Face Trainer, from its checkpoints",
}


def page(found: Found) -> str:
    """Fill the figures into page.md."""
    tally = found.tally
    signed = sum(count for name, count in tally.inputs.items() if name.endswith(", signed"))
    figures = {
        "environment": found.environment,
        "seed": found.seed,
        "runs": f"{tally.runs.total():,}",
        "pipelines": len(tally.pipelines),
        "kills": f"{tally.kills.total():,}",
        "kill_seconds": f"{tally.kill_seconds / max(tally.kills.total(), 1):.1f}",
        "damages": tally.damages,
        "inputs": f"{tally.inputs.total():,}",
        "signed": f"{signed:,}",
        "concurrent": f"{tally.concurrent.total():,}",
        "calls": f"{tally.calls.total():,}",
        "failures": len(tally.failures),
        "minutes": f"{found.seconds / 60:.0f}",
        "cut": "\n\n**This campaign was stopped early.**" if found.cut_short else "",
        "subjects": _table("runs that were killed", "runs", {kind: tally.runs[key] for key, kind in KINDS.items()}),
        "places": _table("moment", "kills", {PLACES[key]: n for key, n in tally.kills.most_common()}),
        "kinds": _table("input", "tried", dict(sorted(tally.inputs.items()))),
        "together": _table("at the same time", "runs", dict(sorted(tally.concurrent.items()))),
        "sanitized": _table("sanitizer and kind of call", "calls", dict(sorted(tally.calls.items()))),
        "list": "\n".join(f"- {line}" for line in tally.failures) or "None.",
    }
    return re.sub(r"\{(\w+)\}", lambda match: str(figures[match[1]]), TEMPLATE.read_text(encoding="utf-8"))


def _table(first: str, second: str, rows: dict[str, int]) -> str:
    lines = [f"| {first} | {second} |", "|---|---:|", *(f"| {name} | {count:,} |" for name, count in rows.items())]
    return "\n".join(lines)
