"""Comparison of renderings and JSON that allows for the last bits of a sum.

Another CPU adds the same numbers in another order, so the last digits of a float differ between
machines. Words, keys, counts and order must be equal everywhere.
"""

from __future__ import annotations

import math
import re
from typing import Any

RELATIVE, ABSOLUTE = 1e-9, 1e-12
FLIPS = 0.01  # share of choices of experts: two routers in float32 may break a tie differently
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def differing_json(now: Any, golden: Any, at: str = "$") -> list[str]:
    """List the places at which two JSON documents differ; floats may differ by their last bits."""
    if isinstance(now, dict) and isinstance(golden, dict):
        if list(now) != list(golden):
            return [f"{at}: keys {list(now)} instead of {list(golden)}"]
        return [
            line for key in now for line in differing_json(now[key], golden[key], f"{at}.{key}")
        ]
    if isinstance(now, list) and isinstance(golden, list):
        if len(now) != len(golden):
            return [f"{at}: {len(now)} entries instead of {len(golden)}"]
        pairs = enumerate(zip(now, golden, strict=True))
        return [line for i, pair in pairs for line in differing_json(*pair, f"{at}[{i}]")]
    if isinstance(now, float) and isinstance(golden, float):
        same = math.isclose(now, golden, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        return [] if same else [f"{at}: {now!r} instead of {golden!r}"]
    same = type(now) is type(golden) and now == golden
    return [] if same else [f"{at}: {now!r} instead of {golden!r}"]


def differing_text(now: str, golden: str) -> list[str]:
    """List the places at which two texts differ, white space apart.

    Words must be equal. A number may differ by one unit of the golden text's last printed digit.
    """
    here, there = " ".join(now.split()), " ".join(golden.split())
    if (words := NUMBER.sub("#", here)) != (expected := NUMBER.sub("#", there)):
        first = next(
            (i for i, (a, b) in enumerate(zip(words, expected, strict=False)) if a != b),
            min(len(words), len(expected)),
        )
        start = max(0, first - 60)
        return [f"…{words[start : first + 60]}… instead of …{expected[start : first + 60]}…"]
    pairs = zip(NUMBER.findall(here), NUMBER.findall(there), strict=True)
    return [f"{a} instead of {b}" for a, b in pairs if not _near(a, b)]


def _near(now: str, golden: str) -> bool:
    """Whether two printed numbers differ by at most one unit of the last printed digit."""
    if now == golden:
        return True
    mantissa, _, exponent = golden.replace(",", "").partition("e")
    decimals = len(mantissa.partition(".")[2])
    if not decimals and not exponent:
        return False  # a count
    unit = 10.0 ** (int(exponent or 0) - decimals)
    return abs(float(now.replace(",", "")) - float(golden.replace(",", ""))) <= 1.000001 * unit
