"""Which attention kernel really runs, and whether it honours learned attention sinks.

Some families (gpt-oss, MiMo-V2-Flash, Granite-SWA …) learn one logit per head that joins every
softmax's denominator and belongs to no token. A kernel that drops it changes every probability of
the model without any error. So: a kernel is resolved before weights load, a kernel known to drop
sinks is refused, and the only way to get one is to plant that fault by name (``no-sinks``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mismatch.errors import MismatchError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

# Our names in transformers' registry; one with "sdpa" in it would be taken for transformers' own.
OURS = {"sink-sdpa": "mismatch_sinks", "no-sinks": "mismatch_no_sinks"}
NAMES = ("auto", "eager", "sdpa", "sink-sdpa", "no-sinks", "flash_attention_2", "flash_attention_3")
PLANTED = "no-sinks (planted fault: ignores the learned sinks)"
SINK_FLASH = re.compile(r"vllm-flash-attn3|flash_attention_4|metal-flash-sdpa|aiter-flash-attn")


@dataclass(frozen=True, slots=True)
class Attention:
    """A resolved kernel.

    Attributes:
        requested: as in the spec.
        implementation: transformers' registry name, what really runs.
        honours_sinks: None where the model has no sinks.
    """

    requested: str
    implementation: str
    honours_sinks: bool | None

    @property
    def label(self) -> str:
        """The kernel's name for reports."""
        if self.requested == "no-sinks":
            return PLANTED
        ours = {registered: name for name, registered in OURS.items()}
        return ours.get(self.implementation, self.implementation)


def resolve_attention(
    name: str, config: PretrainedConfig, trust_remote_code: bool = False
) -> Attention:
    """Decide which kernel ``name`` means for this model, without loading weights.

    Raises:
        MismatchError: an unknown kernel, one that the family does not support, or one that would
            silently drop the model's sinks.
    """
    from mismatch.training.source import skeleton

    return resolve_for(name, skeleton(config, trust_remote_code))


def resolve_for(name: str, model: PreTrainedModel) -> Attention:
    """:func:`resolve_attention` for a model that exists already (on the meta device)."""
    register_kernels()
    sinks = has_sinks(model)
    if name == "auto":
        name = "eager" if sinks or not model._supports_sdpa else "sdpa"
        return Attention("auto", name, True if sinks else None)
    if name in OURS:
        if not sinks:
            raise MismatchError(
                f"--attention {name} makes no sense: {_family(model)} has no attention sinks",
                "use --attention auto",
            )
        return Attention(name, OURS[name], name == "sink-sdpa")
    if sinks and name == "sdpa":
        raise MismatchError(
            f"--attention sdpa ignores the learned attention sinks of {_family(model)}",
            "use --attention sink-sdpa, eager or auto; to see the damage: --attention no-sinks",
        )
    implementation = _transformers_choice(name, model)
    if sinks and not _honours(implementation):
        raise MismatchError(
            f"--attention {name} resolves to {implementation}, which is not known to honour the "
            f"attention sinks of {_family(model)}",
            "use --attention auto, eager or sink-sdpa",
        )
    return Attention(name, implementation, True if sinks else None)


def has_sinks(model: PreTrainedModel) -> bool:
    """Whether the model learns attention sinks."""
    return any("sink" in name.rpartition(".")[2] for name, _ in model.named_parameters())


def _family(model: PreTrainedModel) -> str:
    return str(model.config.model_type)


def _honours(implementation: str) -> bool:
    return implementation in ("eager", "flex_attention") or bool(SINK_FLASH.search(implementation))


def _transformers_choice(name: str, model: PreTrainedModel) -> str:
    """What transformers makes of the name: it rewrites flash names to other kernels silently."""
    try:
        return str(model._check_and_adjust_attn_implementation(name, is_init_check=True))
    except Exception as error:  # unknown name, package not installed, kernel not downloadable …
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MismatchError(
            f"--attention {name} cannot run {_family(model)}: {reason}",
            f"use --attention auto, or one of {', '.join(NAMES[1:])}",
        ) from error


# ---------------------------------------------------------------- our kernels


def register_kernels() -> None:
    """Make our kernels known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    kernels = {"sink-sdpa": sink_attention, "no-sinks": sinkless_attention}
    for name, registered in OURS.items():
        AttentionInterface.register(registered, kernels[name])
        AttentionMaskInterface.register(registered, boolean_mask)


def boolean_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """[B, 1, Tq, Tk] True where a token may look; every token may look at itself.

    The mask is always there (transformers skips plain causal masks for sdpa), and no row is empty:
    padding whose window holds only padding would become NaN and poison real rows as 0 · NaN.
    """
    import torch
    from transformers.masking_utils import sdpa_mask

    kwargs["allow_is_causal_skip"] = False
    mask = sdpa_mask(*args, **kwargs)
    assert mask is not None
    queries, keys = mask.shape[-2:]
    itself = torch.eye(queries, keys, dtype=torch.bool, device=mask.device)
    return mask | itself


def sink_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax over the tokens and the sink, in PyTorch's fused kernel; differentiable in the sinks.

    A key and a value of zeros are appended: their score is 0 before the additive mask, which
    carries the sink logit, so the softmax sees exactly one more term and the output none.

    Shapes: query [B, H, Tq, D], key and value [B, Hkv, Tk, D], s_aux [H]; returns [B, Tq, H, D].
    """
    import torch
    import torch.nn.functional as F

    sinks = s_aux if s_aux is not None else module.sinks
    assert isinstance(sinks, torch.Tensor)
    batch, heads, queries, _dim = query.shape
    key, value = (F.pad(_per_head(x, heads), (0, 0, 0, 1)) for x in (key, value))
    blocked = torch.finfo(query.dtype).min
    mask = attention_mask.new_zeros(attention_mask.shape, dtype=query.dtype)
    mask = mask.masked_fill(~attention_mask, blocked).expand(batch, heads, queries, -1)
    column = sinks.to(query.dtype).view(1, heads, 1, 1).expand(batch, heads, queries, 1)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=torch.cat([mask, column], -1), dropout_p=dropout, scale=scaling
    )
    return out.transpose(1, 2).contiguous(), None


def sinkless_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The planted fault: plain attention for a model with sinks, as a wrong kernel would run it."""
    import torch.nn.functional as F

    key, value = (_per_head(x, query.shape[1]) for x in (key, value))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return out.transpose(1, 2).contiguous(), None


def _per_head(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat grouped keys or values, so that every query head has its own."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)
