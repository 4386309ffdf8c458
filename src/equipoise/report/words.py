"""Numbers of the report as people write them."""

from __future__ import annotations

import math

from equipoise.studies.compare import Spread

UNKNOWN = "–"
SHARES = frozenset({"accuracy", "mean-accuracy", "test", "clean", "robust", "stability"})  # shown in percent
SCORES = {"plain": "plain", "bn_recalibrated": "fresh BatchNorm", "ema": "ema"}


def value_of(metric: str, found: Spread | None, unit: bool = True) -> str:
    """`81.04 ± 0.12 %`, `11.5 ± 0.71`, `never`, or a dash. unit: whether to say that it is in percent."""
    if found is None:
        return UNKNOWN
    if not math.isfinite(found.mean):
        return "never"
    share = metric in SHARES
    scale = 100 if share else 1
    digits = 2 if share else decimals(found.mean)
    text = number(scale * found.mean, digits)
    deviation = (
        "" if found.std is None else number(scale * found.std, 2 if share else max(0, decimals(found.std) - 1))
    )
    if deviation and (share or found.std):  # costs that are the same in every seed need none
        text += f" ± {deviation}"
    text = f"{text} %" if share and unit else text
    return f"{text}, never in {found.never} of {found.count}" if found.never else text


def gain_of(metric: str, found: Spread | None, unit: bool = True) -> str:
    """The difference as `+0.35 points`, where positive is what was claimed."""
    if found is None or found.never or not math.isfinite(found.mean):
        return UNKNOWN
    share = metric in SHARES
    text = f"{100 * found.mean:+.2f}" if share else f"{found.mean:+.{decimals(found.mean)}f}"
    text = text if float(text) else text[1:]  # no sign where nothing is left of it
    words = " points" if share else " epochs" if metric == "epochs-to" else ""
    return text.replace("-", "−") + (words if unit else "")


def number(value: float | None, digits: int | None = None) -> str:
    """With so many decimals, or with as many as make three significant digits."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value and not 1e-5 < abs(value) < 1e7 and digits != 2:
        return f"{value:.2e}"
    return f"{value:.{decimals(value) if digits is None else digits}f}".replace("-", "−")


def decimals(value: float) -> int:
    """After the point, for three significant digits; none for a whole number."""
    if value == round(value) or not math.isfinite(value):
        return 0
    return min(8, max(0, 2 - math.floor(math.log10(abs(value)))))


def chance(p: float | None) -> str:
    """The p of a test."""
    if p is None:
        return UNKNOWN
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def plural(count: int, word: str, many: str = "") -> str:
    return f"{count} {word if count == 1 else many or word + 's'}"
