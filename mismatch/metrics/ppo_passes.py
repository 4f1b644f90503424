"""PPO's old against its new forward pass: how far from 1 is the ratio while nothing has changed?

Both passes are the trainer's, with the same weights on the same tokens; only the micro-batches
differ. On-policy the ratio exp(new - old) should then be 1 everywhere. Where it is not, PPO clips
tokens that no update has touched, and their gradients are lost or biased.

The ratio is taken as a trainer takes it: in float32, from float32 log-probabilities.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics.registry import POSITIVE, SHARE, Metric, floats
from mismatch.metrics.token import CLIP
from mismatch.types import Floats


def ratios(old: Floats, new: Floats) -> Floats:
    """PPO's ratio of every token, [A], computed in float32; returned as float64.

    Args:
        old, new: [A] log-probabilities, nats.

    Raises:
        EmptyComparison: no token.
        MismatchError: arrays of different lengths, or log-probabilities that are not finite.
    """
    if len(old) != len(new):
        raise MismatchError(f"two passes: {len(old)} tokens against {len(new)}")
    if len(old) == 0:
        raise EmptyComparison("two passes: no action tokens to compare")
    if not (np.isfinite(old).all() and np.isfinite(new).all()):
        raise MismatchError("two passes: log-probabilities that are not finite")
    with np.errstate(over="ignore"):  # infinite where float32 overflows, as in a trainer
        return floats(np.exp(new.astype(np.float32) - old.astype(np.float32)))


def _metric(name: str, terms: Any, unit: str, kind: Any = "mean") -> Metric:
    """Return a metric of this module alone: no comparison of engine and trainer shows it."""
    bounds = SHARE if unit == "share" else POSITIVE
    return Metric(name, terms, kind, unit, bounds=bounds)


METRICS_OF_RATIO = (
    _metric("ratio_not_one", lambda ratio: floats(ratio != 1.0), "share"),
    _metric("ratio_off_mean", lambda ratio: floats(np.abs(ratio - 1.0)), "1"),
    _metric("ratio_off_max", lambda ratio: float(np.abs(ratio - 1.0).max()), "1", "extreme"),
    _metric("ratio_clipped", lambda ratio: floats(np.abs(ratio - 1.0) > CLIP), "share"),
    # What an override of the ratio leaves as it is.
    _metric("logprob_abs_diff_mean", lambda delta: floats(np.abs(delta)), "nats"),
)
METRICS_OF_ROUTES = (  # ``layers`` [A]: a token's share of layers with other experts
    _metric("routing_disagree_layer", lambda layers: layers, "share"),
    _metric("routing_disagree_any", lambda layers: floats(layers > 0.0), "share"),
)
