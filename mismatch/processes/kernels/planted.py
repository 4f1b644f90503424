"""An attention kernel with a planted fault, to see the audit find it; see docs/kernels.md.

mismatch kernels --kernel mismatch.processes.kernels.planted:no_sinks
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def no_sinks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention without the sinks, as in a fused kernel that has no argument for them.

    Shapes: query [B, H, T, D], key and value [B, Hkv, S, D], attention_mask boolean [B, 1, T, S];
    returns [B, T, H, D].
    """
    share = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(share, 1) for x in (key, value))
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.transpose(1, 2), None
