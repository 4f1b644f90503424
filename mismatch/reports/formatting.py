"""The one place where numbers become text, and where foreign text is made safe."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

from mismatch.reports.quantities import MISSING, bound, count, number, percent, plural, times
from mismatch.reports.text import line, token_text, visible
from mismatch.reports.words import MARKS
from mismatch.types import Estimate

__all__ = [
    "MISSING", "Format", "badge", "bound", "brief", "chance", "cosine", "count",
    "interval",
    "line", "memory", "near_one", "number", "percent", "plural", "points", "seconds", "signed",
    "small_percent", "tenths", "text", "thousands", "times", "token_text", "visible",
]  # fmt: skip

Format = Callable[..., str]


def text(value: object) -> str:
    """A string as it stands in a column of text."""
    return line(value)


def small_percent(share: float | None) -> str:
    """A share; far below what any run could show there is no number.

    >>> small_percent(3e-7), small_percent(0.25)
    ('< 0.001 %', '25 %')
    """
    return "< 0.001 %" if share is not None and 0.0 < share < 1e-5 else percent(share)


def signed(value: float, digits: int = 3) -> str:
    """A difference, with its sign.

    >>> signed(0.25), signed(-0.25), signed(0.0)
    ('+0.250', '-0.250', '0')
    """
    return ("+" if value > 0 else "") + number(value, digits)


def chance(p: float) -> str:
    """A p-value.

    >>> chance(2e-5), chance(0.04)
    ('< 0.001', '0.040')
    """
    return "< 0.001" if p < 0.001 else brief(p)


def brief(value: float | None) -> str:
    """A value to two significant digits.

    >>> brief(0.0123), brief(None)
    ('0.012', '–')
    """
    return number(value, 2)


def seconds(value: float | None) -> str:
    """A time.

    >>> seconds(11.52), seconds(None)
    ('12 s', '–')
    """
    return MISSING if value is None else f"{brief(value)} s"


def memory(size: float | None) -> str:
    """Bytes, as MiB or GiB.

    >>> memory(5 << 20), memory(3 << 30), memory(None)
    ('5.00 MiB', '3.0 GiB', '–')
    """
    if size is None:
        return MISSING
    return f"{brief(size / 2**30)} GiB" if size >= 2**30 else f"{number(size / 2**20)} MiB"


def points(share: float) -> str:
    """A difference of shares, with its sign.

    >>> points(0.012), points(-0.5)
    ('+1.2 %', '-50 %')
    """
    return f"{'+' if share > 0 else '-' if share < 0 else ''}{percent(abs(share))}"


def thousands(value: int) -> str:
    """A count in a picture.

    >>> thousands(9_999), thousands(12_345)
    ('9,999', '12.3k')
    """
    return count(value) if value < 10_000 else f"{number(value / 1000)}k"


def near_one(value: float | None) -> str:
    """A factor; close to 1 three significant digits hide what matters.

    >>> near_one(1.00123), near_one(0.5)
    ('1.0012', '0.500')
    """
    return f"{value:.4f}" if value is not None and 0.9 < value < 1.1 else number(value)


def tenths(share: float) -> str:
    """A share that may be negative, with one decimal.

    >>> tenths(0.6), tenths(-1e-9)
    ('60.0 %', '0 %')
    """
    if not isfinite(share):
        return MISSING
    text = f"{100.0 * share:.1f}"
    return f"{'0' if text in ('-0.0', '0.0') else text} %"


def interval(estimate: Any, write: Format = number, to: str = " … ") -> str:
    """The 95 % interval of an estimate; "–" where it has none.

    >>> interval(Estimate(0.1, 0.05, 0.2, 64, 8, 4))
    '0.0500 … 0.200'
    """
    if not isinstance(estimate, Estimate) or estimate.low is None or estimate.high is None:
        return MISSING
    return f"{write(estimate.low)}{to}{write(estimate.high)}"


def badge(tone: str) -> str:
    """The mark that stands before a status, so that it is seen without colour."""
    return f"{MARKS[tone]} " if tone in MARKS else ""


def cosine(value: float) -> str:
    """A cosine, with the digits that its distance from 1 needs.

    >>> cosine(0.8), cosine(0.99987), cosine(1.0), cosine(1 - 3e-9)
    ('0.800', '0.99987', '1', '1 - 3e-9')
    """
    gap = 1.0 - value
    if gap == 0.0:
        return "1"
    if gap < 1e-6:
        return f"1 - {gap:.0e}".replace("e-0", "e-")
    digits = 3
    while digits < 8 and gap < 10.0 ** (1 - digits):
        digits += 1
    return f"{value:.{digits}f}"
