"""Reference attention by its definition in float64, its rounding floor, and limits."""

from __future__ import annotations

import torch

from mismatch.processes.kernels.cases import Inputs
from mismatch.training.attention.trial import definition, relative_error

__all__ = ["attention", "leaves_of", "limit_of", "relative_error", "rounded"]
# A right kernel rounds in other places than plain attention with a float32 softmax does, and may
# keep its softmax in the inputs' dtype (gpt-oss' own eager does: it stays below 3 times that
# floor). A feature that is ignored moves the output by 10 % and more, 4 times this in bfloat16.
TIMES_FLOOR = 8.0
# A missing gradient has an error of 1: no floor may pass it.
HIGHEST = 0.5
# Central differences: truncation goes with the square of the step, rounding with its inverse. Also
# in float64 the rounding may be float32's: most families' eager attention has its softmax there.
STEPS = {torch.float64: 2e-3, torch.float32: 2e-2}
DIFFERENCES = {torch.float64: 1e-3, torch.float32: 2e-2}


def attention(
    inputs: Inputs,
    mask: torch.Tensor,
    scaling: float,
    *,
    sinks: bool = True,
    neighbours: bool = True,
) -> torch.Tensor:
    """[B, T, H, Dv] by :func:`definition`; without ``sinks`` as in a kernel that drops them."""
    return definition(inputs.given(sinks), mask, scaling, neighbours=neighbours)


def rounded(inputs: Inputs, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """The same in the inputs' dtype with a float32 softmax, as a trainer's plain attention.

    Its error is the floor: what rounding alone costs in this dtype. In float64 too the softmax is
    in float32, as in the families' own eager attention.
    """
    return definition(inputs.given(), mask, scaling, softmax=torch.float32)


def leaves_of(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Copies of the kernel's inputs that require gradients, in another dtype if one is given."""
    return Inputs(
        *(
            None if x is None else x.detach().to(dtype or x.dtype, copy=True).requires_grad_()
            for x in inputs
        )  # type: ignore[arg-type]
    )


def limit_of(floor: float) -> float:
    """Limit of a relative error, from the floor: rounding alone on the same inputs."""
    return min(TIMES_FLOOR * floor, HIGHEST)
