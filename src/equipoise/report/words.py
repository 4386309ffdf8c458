"""Numbers and phrases of the report."""

from __future__ import annotations

import math

from equipoise.studies.compare import Spread
from equipoise.studies.inference import Effect
from equipoise.studies.metrics import IN_PERCENT, LOWER_IS_BETTER

UNKNOWN = "–"
UNTIMED = "Seconds are omitted for runs that shared the device or did not record their start-up separately"


def value_of(metric: str, found: Spread | None, unit: bool = True) -> str:
    """Format a value with its deviation: `81.04 ± 0.12 %`, `11.5 ± 0.71`, `never`, or a dash if unknown."""
    if found is None:
        return UNKNOWN
    if not math.isfinite(found.mean):
        return "never"
    share = metric in IN_PERCENT
    scale = 100 if share else 1
    text = number(scale * found.mean, 2 if share else decimals(found.mean))
    if found.std is not None and (share or found.std):  # a cost without deviation needs none
        text += f" ± {number(scale * found.std, 2 if share else max(0, decimals(found.std) - 1))}"
    text = f"{text} %" if share and unit else text
    return f"{text}, never in {found.never} of {found.count}" if found.never else text


def gain_of(metric: str, found: Spread | None, unit: bool = True) -> str:
    """Format a difference with its sign: `+0.35 points`."""
    if found is None or found.never or not math.isfinite(found.mean):
        return UNKNOWN
    share = metric in IN_PERCENT
    text = f"{100 * found.mean:+.2f}" if share else f"{found.mean:+.{decimals(found.mean)}f}"
    text = text if float(text) else text[1:]  # zero has no sign
    words = " points" if share else " epochs" if metric == "epochs-to" else ""
    return text.replace("-", "−") + (words if unit else "")


def difference(metric: str, gain: float | None, effect: Effect | None = None, lower: bool = False) -> str:
    """Format a difference that is positive if it agrees with a claim: `+0.35 points, 95 % CI −0.20 to +0.90`.

    Of metrics of which lower is better, the sign is replaced by a word: `2.0 epochs fewer`, `0.0035 higher`. The same
    holds with `lower`, for a claim that an arm has a lower value.
    """
    if gain is None or not math.isfinite(gain):
        return UNKNOWN
    lower = lower or metric in LOWER_IS_BETTER
    ends = [] if effect is None else [*effect.interval()]
    ends = [-end for end in reversed(ends)] if lower else ends
    share = metric in IN_PERCENT
    digits = 2 if share else max(2, decimals(gain))
    unit = " points" if share else " epochs" if metric == "epochs-to" else ""

    def signed(value: float) -> str:
        text = f"{(100 if share else 1) * value:+.{digits}f}"
        return (text if float(text) else text[1:]).replace("-", "−")

    text = signed(gain)
    if lower and not float(text.replace("−", "-")):
        text = "no difference"
    elif lower:
        down, up = ("fewer", "more") if metric == "epochs-to" else ("lower", "higher")
        text = f"{text.lstrip('+−')}{unit} {down if gain >= 0 else up}"
    else:
        text += unit
    return f"{text}, 95 % CI {signed(ends[0])} to {signed(ends[1])}" if ends else text


def number(value: float | None, digits: int | None = None) -> str:
    """Format a number with this many decimals; `None` for as many as make three significant digits."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value and not 1e-5 < abs(value) < 1e7 and digits != 2:
        return f"{value:.2e}"
    return f"{value:.{decimals(value) if digits is None else digits}f}".replace("-", "−")


def decimals(value: float) -> int:
    """Return the number of decimals for three significant digits; 0 for a whole number."""
    if value == round(value) or not math.isfinite(value):
        return 0
    return min(8, max(0, 2 - math.floor(math.log10(abs(value)))))


def p_value(p: float) -> str:
    """Format the p of a test."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def plural(count: int, word: str, many: str = "") -> str:
    """Format a count with its noun: `1 seed`, `2 seeds`."""
    return f"{count} {word if count == 1 else many or word + 's'}"
