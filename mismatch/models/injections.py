"""Disturbances that are planted on purpose: their names, how they are asked for, what they do.

They stand in for noise that a machine cannot show by itself (a CPU is nearly bitwise stable), and
are named as injected wherever their effect is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mismatch.errors import MismatchError
from mismatch.specs import Injections

ROUTER_NOISE = "router-noise"
KNOWN = {
    ROUTER_NOISE: "normal noise of this standard deviation on every router logit",
}


def parse_injections(texts: Sequence[str] | None) -> Injections:
    """What ``--inject NAME=SIZE`` (repeatable) asks for.

    >>> parse_injections(["router-noise=0.05"])
    (('router-noise', 0.05),)

    Raises:
        MismatchError: an unknown name, a name given twice, or a size that is no positive number.
    """
    found: dict[str, float] = {}
    for text in texts or ():
        name, equals, size = text.partition("=")
        name = name.strip()
        if name not in KNOWN:
            raise MismatchError(f"--inject {text!r}: no such disturbance", f"use {_usage()}")
        if name in found:
            raise MismatchError(f"--inject {name} is given twice", "give it once")
        found[name] = _size(text, size if equals else "")
    return tuple(found.items())


def describe(injections: Injections, seed: int | None = None) -> str:
    """One phrase for messages and reports; "" where nothing is injected.

    >>> describe((("router-noise", 0.05),), seed=3)
    'router-noise=0.05 (seed 3)'
    """
    if not injections:
        return ""
    text = ", ".join(f"{name}={size:g}" for name, size in injections)
    return text if seed is None else f"{text} (seed {seed})"


def _size(text: str, size: str) -> float:
    try:
        value = float(size)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise MismatchError(f"--inject {text!r}: the size is no positive number", f"use {_usage()}")
    return value


def _usage() -> str:
    return " or ".join(f"--inject {name}=SIGMA ({what})" for name, what in KNOWN.items())
