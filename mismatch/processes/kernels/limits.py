"""What is held against what: every limit of the audit, with its reason."""

from __future__ import annotations

import torch

# A right kernel rounds in other places than plain attention with a float32 softmax does, and may
# keep its softmax in the inputs' dtype (gpt-oss' own eager does: it stays below 3 times that
# floor). A feature that is ignored moves the output by 10 % and more, 4 times this in bfloat16.
TIMES_FLOOR = 8.0
# What is not there at all has an error of 1; no floor may excuse that.
HIGHEST = 0.5
# Central differences: truncation goes with the square of the step, rounding with its inverse. Also
# in float64 the rounding may be float32's: most families' eager attention has its softmax there.
STEPS = {torch.float64: 2e-3, torch.float32: 2e-2}
DIFFERENCES = {torch.float64: 1e-3, torch.float32: 2e-2}


def limit_of(floor: float) -> float:
    """Of a relative error, from what rounding alone gives on the same inputs."""
    return min(TIMES_FLOOR * floor, HIGHEST)
