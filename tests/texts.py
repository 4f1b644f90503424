"""What a sentence measured, whatever its words are."""

from __future__ import annotations

import re

NUMBER = re.compile(r"(?<![\w.-])[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


def numbers(text: str) -> list[float]:
    """Its numbers, in order; digits of a name (``fp32``, ``k3_kl``) are none.

    >>> numbers("5,142 tokens of fp32 fell by −0.5 nats (−0.6 to 1e-3)")
    [5142.0, -0.5, -0.6, 0.001]
    """
    return [float(each.replace(",", "").replace("−", "-")) for each in NUMBER.findall(text)]
