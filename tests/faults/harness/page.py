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
    "any moment": "from outside, after a random time",
}


def page(found: Found) -> str:
    """Fill the figures into page.md."""
    kills = found.alone.kills + found.pairs.kills
    figures = {
        "environment": found.environment,
        "seed": found.seed,
        "runs": found.alone.runs,
        "pairs": found.pairs.runs,
        "pipelines": len(found.alone.pipelines),
        "kills": kills.total(),
        "damages": found.alone.damages + found.pairs.damages,
        "inputs": f"{sum(found.inputs.inputs.values()):,}",
        "sanitized": _table("sanitizer and kind of call", "calls", dict(found.sanitized.calls)),
        "calls": f"{found.sanitized.calls.total():,}",
        "failures": len(found.failures),
        "minutes": f"{found.seconds / 60:.0f}",
        "cut": "\n\n**This campaign was stopped early.**" if found.cut_short else "",
        "places": _table("moment", "kills", {PLACES[key]: n for key, n in kills.most_common()}),
        "kinds": _table("input", "tried", dict(found.inputs.inputs)),
        "list": "\n".join(f"- {line}" for line in found.failures) or "None.",
    }
    return re.sub(r"\{(\w+)\}", lambda match: str(figures[match[1]]), TEMPLATE.read_text(encoding="utf-8"))


def _table(first: str, second: str, rows: dict[str, int]) -> str:
    lines = [f"| {first} | {second} |", "|---|---:|", *(f"| {name} | {count:,} |" for name, count in rows.items())]
    return "\n".join(lines)
