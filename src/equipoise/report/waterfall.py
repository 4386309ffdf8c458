"""Why the paper saw gains: the gap between its baseline and its AGENT, split into steps between our arms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.report.markup import Markup, tag
from equipoise.studies.compare import values_of
from equipoise.studies.inference import LEVEL, Effect, welch
from equipoise.studies.results import Question, Study

LOW_RATE, HIGH_RATE, PUBLISHED, RAW = "BSR-Net lr 0.04", "BSR-Net lr 0.1", "AGENT as published", "10 % raw gradient"
PAPER = {20: (0.606, 0.698), 40: (0.626, 0.737)}  # baseline and AGENT, Table 1, standard training, 99 %
WIDTH, ROW, LEFT, RIGHT, TOP = 640, 30, 230, 90, 56  # pixels
THEIRS, OURS, GAIN, LOSS = "#bbbbbb", "#888888", "#0072b2", "#d55e00"  # for the colour-blind too


@dataclass(frozen=True)
class Step:
    """One part of the gap.

    Attributes:
        name: What changes between two arms or two scores.
        gain: The difference in accuracy.
        effect: The same with its uncertainty; `None` below two runs.
    """

    name: str
    gain: float
    effect: Effect | None = None

    @property
    def is_clear(self) -> bool:
        """Whether the step differs from zero with p < 0.05."""
        return self.effect is not None and self.effect.p < LEVEL


@dataclass(frozen=True)
class Waterfall:
    """The steps from our baseline with the learning rate of BSR-Net's own code to AGENT as published."""

    at: int
    start: float
    steps: tuple[Step, ...]

    @property
    def end(self) -> float:
        return self.start + sum(step.gain for step in self.steps)

    @property
    def conclusion(self) -> str:
        """Say which steps differ from zero (p < 0.05) and which do not."""
        clear = [step.name for step in self.steps if step.is_clear]
        rest = [step.name for step in self.steps if not step.is_clear]
        parts = [
            f"{'; '.join(names)}: {word}" for names, word in ((clear, "p < 0.05"), (rest, "not significant")) if names
        ]
        return f"{'. '.join(part[0].upper() + part[1:] for part in parts)}."

    @property
    def finding(self) -> str:
        """Say how much of the gap is the correction's."""
        *_, correction = self.steps
        gap = _signed(self.end - self.start)
        return f"Epochs {self.at - 4} to {self.at}: {_signed(correction.gain)} of {gap} points are the correction's"

    @property
    def sentence(self) -> str:
        """Compare the sum of the steps with the paper's gap."""
        low, high = PAPER[self.at]
        ours, theirs = 100 * (self.end - self.start), 100 * (high - low)
        rest = theirs - ours
        left = f" {rest:.1f} points remain unexplained." if rest >= 0.05 else ""
        return (
            f"Epochs {self.at - 4} to {self.at}: the steps add up to {ours:+.1f} points ({100 * self.start:.1f} to "
            f"{100 * self.end:.1f} %), the paper's gap is {theirs:+.1f} ({100 * low:.1f} to {100 * high:.1f} %).{left}"
        )


def waterfall(study: Study, at: int) -> Waterfall | None:
    """Split the gap into learning rate, scoring, raw images and the correction; `None` if an arm is missing."""

    def values(arm: str, score: str) -> dict[int, float]:
        return values_of(study.results.get(arm, ()), Question(metric="window-accuracy", at=at, score=score))

    high, low, scored = values(HIGH_RATE, "plain"), values(LOW_RATE, "plain"), values(LOW_RATE, "as_published")
    raw, published = values(RAW, "as_published"), values(PUBLISHED, "as_published")
    if not (high and low and scored and raw and published):
        return None
    same = [scored[seed] - low[seed] for seed in scored if seed in low]  # two scores of the same runs
    steps = [
        _between("learning rate 0.1 to 0.04", low, high),
        Step("scored one step after a raw pass", float(np.mean(same)), _of_pairs(same)),
        _between("10 % of the raw gradient", raw, scored),
        _between("the correction itself", published, raw),
    ]
    return Waterfall(at, float(np.mean([*high.values()])), tuple(steps))


def gaps_of(study: Study | None) -> list[Waterfall]:
    """Return the splits at all epochs of the paper's table that a study has; empty without a study."""
    return [gap for at in PAPER if study is not None and (gap := waterfall(study, at)) is not None]


def _between(name: str, after: dict[int, float], before: dict[int, float]) -> Step:
    a, b = [*after.values()], [*before.values()]
    return Step(name, float(np.mean(a) - np.mean(b)), welch(a, b))


def _of_pairs(differences: Sequence[float]) -> Effect | None:
    if len(differences) < 2 or not np.std(differences):
        return None
    error = float(np.std(differences, ddof=1)) / len(differences) ** 0.5
    return Effect(float(np.mean(differences)), error, len(differences) - 1)


def draw(found: Waterfall, background: str | None = None) -> Markup:
    """Draw the steps as an SVG element, between the paper's baseline and its AGENT.

    Args:
        found: The steps.
        background: Its colour. By default there is none, and text has the colour of the page around it.
    """
    low, high = PAPER[found.at]
    bars: list[tuple[str, float, float, str]] = [
        ("the paper's baseline", 0, low, THEIRS),
        ("ours, lr 0.1", 0, found.start, OURS),
    ]
    level = found.start
    for step in found.steps:
        bars.append((step.name, level, level + step.gain, GAIN if step.gain >= 0 else LOSS))
        level += step.gain
    bars += [("AGENT as published", 0, level, OURS), ("the paper's AGENT", 0, high, THEIRS)]
    ends = [end for _, a, b, _ in bars for end in (a, b) if end]
    least, most = math.floor(100 * min(ends) - 1) / 100, max(ends) + 0.005
    scale = (WIDTH - LEFT - RIGHT) / (most - least)
    height = TOP + 8 + ROW * len(bars)
    rows = [tag("rect", width=WIDTH, height=height, fill=background)] if background else []
    rows += [
        tag("text", found.finding, x=8, y=22, font_size=15, font_weight="bold", fill="currentColor"),
        tag(
            "text", f"test accuracy; bars begin at {100 * least:.0f} %", x=8, y=42, font_size=13, fill="currentColor"
        ),
    ]
    for i, (name, a, b, colour) in enumerate(bars):
        a, b = max(a, least), max(b, least)
        x, width, y = LEFT + scale * (min(a, b) - least), max(1.0, scale * abs(b - a)), TOP + ROW * i
        whole = bars[i][1] == 0
        text = f"{100 * b:.1f} %" if whole else _signed(b - a)
        rows += [
            tag("text", name, x=LEFT - 8, y=y + 15, text_anchor="end", font_size=13, fill="currentColor"),
            tag("rect", x=f"{x:.1f}", y=y, width=f"{width:.1f}", height=ROW - 10, fill=colour),
            tag("text", text, x=f"{x + width + 6:.1f}", y=y + 15, font_size=13, fill="currentColor"),
        ]
    label = f"Accuracy in epochs {found.at - 4} to {found.at}: {found.sentence}"
    box = {"viewBox": f"0 0 {WIDTH} {height}", "xmlns": "http://www.w3.org/2000/svg", "font-family": "sans-serif"}
    return tag("svg", rows, width=WIDTH, height=height, role="img", aria_label=label, **box)


def _signed(gain: float) -> str:
    return f"{100 * gain:+.1f}".replace("-", "−")
