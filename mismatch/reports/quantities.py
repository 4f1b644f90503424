"""How numbers are written: few significant digits, the same way in every rendering."""

from __future__ import annotations

import math

MISSING = "–"


def number(value: float | None, digits: int = 3) -> str:
    """A value to ``digits`` significant digits.

    >>> number(0.011123), number(3.1e-4), number(12345.6), number(0.0)
    ('0.0111', '3.10e-4', '12,346', '0')
    """
    if value is None or not math.isfinite(value):
        return MISSING if value is None or math.isnan(value) else ("inf" if value > 0 else "-inf")
    if value == 0:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    rounded = float(f"{value:.{digits}g}")
    if abs(rounded) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{value:.{decimals}f}"


def bound(value: float) -> str:
    """A bound of a level, without trailing zeros.

    >>> bound(0.03), bound(1e-5), bound(0.002), bound(0.013)
    ('0.03', '1e-5', '0.002', '0.013')
    """
    if value != 0 and abs(value) < 1e-3:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}"


def percent(share: float | None, digits: int = 2) -> str:
    """A share as percent.

    >>> percent(0.0373), percent(0.0), percent(0.998), percent(0.00021)
    ('3.7 %', '0 %', '99.80 %', '0.021 %')
    """
    if share is None or not math.isfinite(share):
        return MISSING
    scaled = share * 100
    if abs(scaled) >= 100:
        return f"{scaled:,.0f} %"
    if scaled >= 90:  # what is missing to 100 % is what matters
        missing = number(100 - scaled, digits)
        decimals = len(missing.partition(".")[2]) if "e" not in missing else 2
        return f"{scaled:.{min(decimals, 2)}f} %"
    return f"{number(scaled, digits)} %"


def count(value: int) -> str:
    """A whole number with thousands separated.

    >>> count(8192)
    '8,192'
    """
    return f"{value:,}"


def plural(value: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "token"), plural(2048, "token")
    ('1 token', '2,048 tokens')
    """
    return f"{value:,} {noun}" + ("" if value == 1 else "s")


def times(factor: float) -> str:
    """A ratio of two values.

    >>> times(0.63), times(12.4), times(137.0)
    ('0.63×', '12×', '137×')
    """
    return f"{number(factor, 2 if abs(factor) < 100 else 3)}×"
