"""Resolve the attention kernel that really runs, and whether it honours learned attention sinks.

Some families (gpt-oss, MiMo-V2-Flash, Granite-SWA …) learn one logit per head that joins every
softmax's denominator and belongs to no token. A kernel that drops it changes every probability of
the model without an error. So a kernel is resolved before weights load, a kernel known to drop
sinks is refused, and the only way to run one is the planted fault by its name (``no-sinks``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mismatch.errors import MismatchError, first_line
from mismatch.training.user_kernels import is_user_kernel, register_attention

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

# Our kernels: name -> name in transformers' registry, where "sdpa" would mean transformers' own.
OUR_KERNELS = {"sink-sdpa": "mismatch_sinks", "no-sinks": "mismatch_no_sinks"}
# For any model, with sinks or without; see mismatch/training/attention/sink_sdpa.py.
YARDSTICKS = {"plain": "mismatch_plain", "plain-fp8-kv": "mismatch_plain_fp8_kv"}
NAMES = (
    *("auto", "transformers", "eager", "sdpa", "sink-sdpa", "no-sinks", "flex_attention"),
    *("flash_attention_2", "flash_attention_3", "flash_attention_4", "package.module:function"),
)
Place = tuple["torch.device", "torch.dtype"]
PLANTED = "no-sinks (a planted fault)"
SINK_FLASH = re.compile(r"vllm-flash-attn3|flash_attention_4|metal-flash-sdpa|aiter-flash-attn")


@dataclass(frozen=True, slots=True)
class ResolvedAttention:
    """A resolved kernel.

    Attributes:
        requested: the name in the spec.
        implementation: the name in transformers' registry.
        honours_sinks: None where the model has no sinks.
        tried: the outcome of each trial run, one line each.
        error: of the output of a kernel that failed its trial in float32, relative; None: none did.
    """

    requested: str
    implementation: str
    honours_sinks: bool | None
    tried: tuple[str, ...] = ()
    error: float | None = None

    @property
    def label(self) -> str:
        """The kernel's name for reports."""
        if self.requested == "no-sinks":
            return PLANTED
        if is_user_kernel(self.requested):
            return self.requested
        ours = {registered: name for name, registered in {**OUR_KERNELS, **YARDSTICKS}.items()}
        return ours.get(self.implementation, self.implementation)


def resolve_attention(name: str, config: PretrainedConfig) -> ResolvedAttention:
    """Resolve the kernel ``name`` for a model of this configuration, without loading weights.

    Raises:
        MismatchError: an unknown kernel, one that the family does not support, or one that would
            silently drop the model's sinks.
    """
    from mismatch.training.source import skeleton

    return resolve_for(name, skeleton(config))


def resolve_for(
    name: str,
    model: PreTrainedModel,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> ResolvedAttention:
    """:func:`resolve_attention` for an existing model (it may be on the meta device).

    Args:
        device, dtype: of the computation. With both, kernels that are not known to be right are
            tried on a few tokens, on a GPU that of ``auto`` too. Without, nothing runs.
    """
    register_kernels()
    sinks, family = has_sinks(model), model.config.model_type
    honours = True if sinks else None
    target = None if device is None or dtype is None else (device, dtype)
    # Families that support flash kernels, which have no 4D masks, hand masks to the kernel
    # unchanged; DeepSeek-V4 and Hunyuan-V4 append additional keys and index into eager's mask.
    passes_masks = bool(model._supports_flash_attn)
    if name == "auto" and not sinks:
        return ResolvedAttention(name, "sdpa" if model._supports_sdpa else "eager", None)
    if name == "auto" and not passes_masks:
        return ResolvedAttention(name, "eager", True)
    if name == "auto":
        # One kernel for all lengths: a pass must not mix two (docs/decisions, number 4). It is
        # right forward and backward, in bounded memory; which others are faster on a GPU is not
        # measured yet (decision 7), so there it is tried first.
        kernel = OUR_KERNELS["sink-sdpa"]
        if target is None or target[0].type != "cuda":
            return ResolvedAttention(name, kernel, True)
        return replace(_tried("sink-sdpa", kernel, model, sinks, target), requested=name)
    if name == "transformers":  # what from_pretrained takes when nobody names a kernel
        name = "sdpa" if model._supports_sdpa else "eager"
    if name in YARDSTICKS:
        return _yardstick(name, model, sinks, passes_masks)
    if name in OUR_KERNELS and not sinks:
        fault = f"--attention {name} makes no sense: {family} has no attention sinks"
        raise MismatchError(fault, "use --attention auto")
    if (name in OUR_KERNELS or is_user_kernel(name)) and not passes_masks:
        fault = f"--attention {name} cannot run {family}, which computes with its masks"
        raise MismatchError(fault, "use --attention auto")
    if name in OUR_KERNELS:
        return ResolvedAttention(name, OUR_KERNELS[name], name == "sink-sdpa")
    if is_user_kernel(name):
        return _tried(name, register_attention(name), model, sinks, target)
    if sinks and name == "sdpa":
        fault = f"--attention sdpa ignores the learned attention sinks of {family}"
        fix = "use --attention sink-sdpa, eager or auto; to see the damage: --attention no-sinks"
        raise MismatchError(fault, fix)
    implementation = _transformers_choice(name, model)
    if not sinks or implementation == "eager":
        return ResolvedAttention(name, implementation, honours)
    if implementation != "flex_attention" and not SINK_FLASH.search(implementation):
        raise MismatchError(
            f"--attention {name} resolves to {implementation}, which is not known to honour the "
            f"attention sinks of {family}",
            "use --attention auto, eager or sink-sdpa",
        )
    return _tried(name, implementation, model, sinks, target)


def _yardstick(
    name: str, model: PreTrainedModel, sinks: bool, passes_masks: bool
) -> ResolvedAttention:
    """Plain attention by blocks of queries; whole, by the family's eager code, where it must be."""
    from mismatch.training.attention.sink_sdpa import eager_of

    honours = True if sinks else None
    if passes_masks and (sinks or eager_of(model)):
        return ResolvedAttention(name, YARDSTICKS[name], honours)
    if name == "plain":
        return ResolvedAttention(name, "eager", honours)
    raise MismatchError(
        f"--attention {name} cannot run {model.config.model_type}: its keys and values are out of "
        "reach",
        "use --attention plain",
    )


def _tried(
    name: str, implementation: str, model: PreTrainedModel, sinks: bool, target: Place | None
) -> ResolvedAttention:
    """Return a kernel that the user named, if its output passes a trial.

    Wrong gradients are recorded, not refused: their effect can be measured. So are wrong outputs in
    float32, where a kernel can fail that passed in bfloat16: its pass shows the damage.
    """
    if target is None:
        return ResolvedAttention(name, implementation, True if sinks else None)
    from mismatch.training.attention.trial import geometry_of, try_kernel

    trial = try_kernel(implementation, geometry_of(model, sinks), *target)
    error = trial.forward if trial.fault and target[1].itemsize >= 4 else None
    if trial.fault and error is None:
        without = " (the model has attention sinks: are they used?)" if sinks else ""
        raise MismatchError(
            f"--attention {name}: {trial.fault}, against float64 on random tokens{without}",
            f"repair the kernel, or use --attention {'eager' if name == 'sink-sdpa' else 'auto'}; "
            "`mismatch kernels` looks at it closely",
        )
    tried = f"{name}: {trial.fault or trial.backward_fault or 'passed'}"
    return ResolvedAttention(name, implementation, True if sinks else None, (tried,), error)


def has_sinks(model: PreTrainedModel) -> bool:
    """Return whether the model learns attention sinks."""
    return any("sink" in name.rpartition(".")[2] for name, _ in model.named_parameters())


def _transformers_choice(name: str, model: PreTrainedModel) -> str:
    """Return the kernel that transformers resolves a name to; it silently rewrites flash names."""
    try:
        return str(model._check_and_adjust_attn_implementation(name, is_init_check=True))
    except Exception as error:  # unknown name, package not installed, kernel not downloadable …
        fault = f"--attention {name} cannot run {model.config.model_type}: {first_line(error)}"
        fix = f"use --attention auto, or one of {', '.join(n for n in NAMES[1:] if n != name)}"
        raise MismatchError(fault, fix) from error


def register_kernels() -> None:
    """Register our kernels with transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from mismatch.training.attention import sink_sdpa

    kernels = {
        OUR_KERNELS["sink-sdpa"]: sink_sdpa.sink_attention,
        OUR_KERNELS["no-sinks"]: sink_sdpa.sinkless_attention,
        YARDSTICKS["plain"]: sink_sdpa.plain_attention,
        YARDSTICKS["plain-fp8-kv"]: sink_sdpa.plain_fp8_attention,
    }
    for registered, kernel in kernels.items():
        AttentionInterface.register(registered, kernel)
        AttentionMaskInterface.register(registered, sink_sdpa.BlockedMask)
