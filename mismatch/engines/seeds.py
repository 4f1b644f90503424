"""One seed per sample, all derived from the run's."""

from __future__ import annotations

import hashlib


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """A 31-bit seed for one sample of one prompt.

    Hashed, not counted: with ``seed + sample`` two runs with neighbouring seeds would share most of
    their random streams.
    """
    text = f"{seed}/{prompt}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
