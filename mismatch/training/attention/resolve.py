"""Which attention kernel really runs, and whether it honours learned attention sinks.

Some families (gpt-oss, MiMo-V2-Flash, Granite-SWA …) learn one logit per head that joins every
softmax's denominator and belongs to no token. A kernel that drops it changes every probability of
the model without any error. So: a kernel is resolved before weights load, a kernel known to drop
sinks is refused, and the only way to get one is to plant that fault by name (``no-sinks``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mismatch.errors import MismatchError
from mismatch.training.user_kernels import is_user_kernel, register_attention

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

# Our names in transformers' registry; one with "sdpa" in it would be taken for transformers' own.
OURS = {
    "sink-sdpa": "mismatch_sinks",
    "sink-flex": "mismatch_sinks_flex",
    "no-sinks": "mismatch_no_sinks",
}
NAMES = (
    *("auto", "transformers", "eager", "sdpa", "sink-sdpa", "sink-flex", "no-sinks"),
    *("flash_attention_2", "flash_attention_3", "package.module:function"),
)
Place = tuple["torch.device", "torch.dtype"]
PLANTED = "no-sinks (planted fault: ignores the learned sinks)"
SINK_FLASH = re.compile(r"vllm-flash-attn3|flash_attention_4|metal-flash-sdpa|aiter-flash-attn")


@dataclass(frozen=True, slots=True)
class Attention:
    """A resolved kernel.

    Attributes:
        requested: as in the spec.
        implementation: transformers' registry name, what really runs.
        honours_sinks: None where the model has no sinks.
        tried: what was found of each kernel that was run before it was trusted, a line each.
    """

    requested: str
    implementation: str
    honours_sinks: bool | None
    tried: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The kernel's name for reports."""
        if self.requested == "no-sinks":
            return PLANTED
        if is_user_kernel(self.requested):
            return self.requested
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


def resolve_for(
    name: str,
    model: PreTrainedModel,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Attention:
    """:func:`resolve_attention` for a model that exists already (on the meta device).

    Args:
        device, dtype: where and in what kernels will compute. With both, a kernel that nobody can
            vouch for is run on a few tokens first, and ``auto`` takes the fastest that is right;
            all ranks must call it. Without, nothing runs.
    """
    register_kernels()
    sinks = has_sinks(model)
    place = None if device is None or dtype is None else (device, dtype)
    if name == "auto":
        return _automatic(model, sinks, place)
    if is_user_kernel(name):
        return _yours(name, model, sinks, place)
    if name == "transformers":  # what from_pretrained takes when nobody names a kernel
        name = "sdpa" if model._supports_sdpa else "eager"
    if name in OURS:
        if not sinks:
            raise MismatchError(
                f"--attention {name} makes no sense: {_family(model)} has no attention sinks",
                "use --attention auto",
            )
        if not _lets_masks_be(model):
            raise MismatchError(
                f"--attention {name} cannot run {_family(model)}, which computes with its masks",
                "use --attention auto",
            )
        if name == "sink-flex":
            _require_gpu(device)
            return _trusted(name, OURS[name], model, sinks, place)
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
    if sinks and implementation != "eager":
        return _trusted(name, implementation, model, sinks, place)
    return Attention(name, implementation, True if sinks else None)


def _automatic(model: PreTrainedModel, sinks: bool, place: Place | None) -> Attention:
    """One kernel whatever the length: a pass must not mix two (docs/decisions, number 4).

    On a CPU there is but one that is right forward and backward in bounded memory.
    """
    if not sinks:
        return Attention("auto", "sdpa" if model._supports_sdpa else "eager", None)
    if not _lets_masks_be(model):
        return Attention("auto", "eager", True)
    if place is None or place[0].type != "cuda":
        return Attention("auto", OURS["sink-sdpa"], True)
    from mismatch.training.attention.trial import FLASH, first_right, geometry_of

    candidates = {FLASH: partial(_transformers_choice, FLASH, model)}
    if model._supports_flex_attn:
        candidates["sink-flex"] = partial(str, OURS["sink-flex"])
    chosen, tried = first_right(candidates, geometry_of(model, sinks), *place)
    return Attention("auto", chosen or OURS["sink-sdpa"], True, tried)


def _yours(name: str, model: PreTrainedModel, sinks: bool, place: Place | None) -> Attention:
    if not _lets_masks_be(model):
        raise MismatchError(
            f"--attention {name} cannot run {_family(model)}, which computes with its masks",
            "use --attention auto",
        )
    return _trusted(name, register_attention(name), model, sinks, place)


def _trusted(
    name: str, implementation: str, model: PreTrainedModel, sinks: bool, place: Place | None
) -> Attention:
    """A kernel that was asked for by name, if a trial finds its output right.

    Gradients that are wrong are told, and not refused: what they do can be measured.
    """
    if place is None:
        return Attention(name, implementation, True if sinks else None)
    from mismatch.training.attention.trial import geometry_of, trial

    found = trial(implementation, geometry_of(model, sinks), *place)
    if found.fault:
        without = " (the model has attention sinks: are they used?)" if sinks else ""
        raise MismatchError(
            f"--attention {name}: {found.fault}, against float64 on random tokens{without}",
            "mend the kernel, or use --attention auto; `mismatch kernels` looks at it closely",
        )
    tried = f"{name}: {found.backward_fault or 'passed'}"
    return Attention(name, implementation, True if sinks else None, (tried,))


def _require_gpu(device: torch.device | None) -> None:
    import torch

    if device is None and torch.cuda.is_available():
        return
    if device is None or device.type != "cuda":
        raise MismatchError(
            "--attention sink-flex needs a CUDA device: flex attention has no gradients on a CPU",
            "use --attention auto",
        )


def has_sinks(model: PreTrainedModel) -> bool:
    """Whether the model learns attention sinks."""
    return any("sink" in name.rpartition(".")[2] for name, _ in model.named_parameters())


def _family(model: PreTrainedModel) -> str:
    return str(model.config.model_type)


def _lets_masks_be(model: PreTrainedModel) -> bool:
    """Whether the family hands masks on untouched: one that runs flash kernels, without 4D masks,
    does; DeepSeek-V4 and Hunyuan-V4 append keys of their own and take eager's mask apart.
    """
    return bool(model._supports_flash_attn)


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

    from mismatch.training.attention.sink_flex import flex_mask, sink_flex_attention
    from mismatch.training.attention.sink_sdpa import (
        blocked_mask,
        sink_attention,
        sinkless_attention,
    )

    kernels = {
        "sink-sdpa": (sink_attention, blocked_mask),
        "sink-flex": (sink_flex_attention, flex_mask),
        "no-sinks": (sinkless_attention, blocked_mask),
    }
    for name, registered in OURS.items():
        kernel, mask = kernels[name]
        AttentionInterface.register(registered, kernel)
        AttentionMaskInterface.register(registered, mask)
