"""A LoRA adapter that vLLM applies itself: whether it can, with what arguments, what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.engines.vllm.arguments import is_cpu_build
from mismatch.models.adapters import (
    PREFIX,
    WEIGHTS,
    Change,
    changes_of,
    merged,
    rank_of,
    stored_shapes,
)
from mismatch.models.config import is_moe
from mismatch.models.digests import digest_tensor
from mismatch.specs import TORCH_NAMES, EngineSpec

if TYPE_CHECKING:
    import torch

    from mismatch.engines.base import LoadedWeights

ROUNDED = 2.0**-6  # relative, of a ratio of two values in bf16
NUMBER = 1  # vLLM's lora_int_id of the one adapter
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for


def no_adapter(spec: EngineSpec) -> str:
    """Say why vLLM cannot apply the adapter of a spec itself; "": nothing is known.

    What depends on the build is that of this environment.
    """
    assert spec.adapter is not None
    if spec.layers is not None:
        return "the adapter has matrices of layers that --layers leaves out"
    if rank_of(spec.adapter.path) > RANKS[-1]:
        return f"vLLM has room for adapters up to rank {RANKS[-1]}"
    if not all(".lora_" in name for name in stored_shapes(Path(spec.adapter.path) / WEIGHTS)):
        return "the adapter holds whole parameters (modules_to_save)"
    if is_cpu_build() and is_moe(spec.model, spec.revision):
        return "vLLM's CPU build has no LoRA kernels for models with experts"
    if not is_cpu_build() and spec.dtype == "fp32":
        return "vLLM's LoRA kernels on GPUs take bf16 and fp16"
    return ""


def lora_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for a spec's adapter; {} where it applies none."""
    if spec.adapter is None or spec.adapter_as != "own":
        return {}
    rank = rank_of(spec.adapter.path)
    room = next(most for most in RANKS if most >= rank)
    arguments = {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
    # One request at a time: vLLM's CPU kernels take prompt logprobs of no more with an adapter.
    return arguments | ({"max_num_seqs": 1} if is_cpu_build() else {})


def as_merged(
    spec: EngineSpec, base: Path, loaded: LoadedWeights, call: Callable[..., list[Any]]
) -> LoadedWeights:
    """Return digests as of merged weights, where vLLM holds base and adapter as their files do.

    A parameter whose base differs keeps the digest of what is held, which no merged one has. One
    whose matrices differ loses it likewise, and one whose matrices cannot be read is not compared.
    Where the matrices differ by one factor, as they do where the scale is another, it is measured.

    Args:
        base: directory of the base model.
        loaded: digests of vLLM's own parameters, which an adapter leaves as they are.
        call: calls a method in vLLM's workers.
    """
    from safetensors import safe_open

    from mismatch.models.derived import open_tensors
    from mismatch.models.weight_states import Prints

    assert spec.adapter is not None
    found = changes_of(spec.adapter, base)
    names = [key.removeprefix(PREFIX) for c in found.values() for key in (c.a, c.b)]
    held, _ = call("mismatch_held_adapter", names, NUMBER, rank_of(spec.adapter.path))[0]
    digests, unread = dict(loaded.digests), set(loaded.unmapped)
    other: dict[str, list[float]] = {}  # parameter -> factors of B in the samples of its values
    with ExitStack() as stack:
        files = open_tensors(base, stack)
        own = stack.enter_context(safe_open(Path(spec.adapter.path) / WEIGHTS, framework="pt"))
        for name, change in found.items():
            if name not in digests:
                continue
            tensor = files[name].get_tensor(name)
            length = len(digests[name])
            if tuple(digests[name]) != digest_tensor(tensor)[:length]:
                continue
            expected = _as_held(spec, change, own.get_tensor)
            if not expected.keys() <= held.keys():
                unread.add(name)
                del digests[name]
                continue
            asked = {n: Prints.of(n, t) for n, t in expected.items()}
            if all(prints.cells == held[n]["cells"] for n, prints in asked.items()):
                digests[name] = digest_tensor(merged(change, tensor, own.get_tensor))[:length]
            else:
                a, b = (key.removeprefix(PREFIX) for key in (change.a, change.b))
                pairs = zip(held[b]["values"], asked[b].values, strict=True)
                same = held[a]["cells"] == asked[a].cells
                other[name] = [ours / theirs for ours, theirs in pairs if theirs] if same else []
    return replace(loaded, digests=digests, unmapped=tuple(sorted(unread)),
                   of_adapter=tuple(sorted(other)), adapter_scale=one_factor(other))  # fmt: skip


def one_factor(ratios: Mapping[str, Sequence[float]]) -> float | None:
    """Return the factor that all of these ratios have but for rounding; None where there is none.

    >>> one_factor({"q": [0.25, 0.2501], "v": [0.2499]}), one_factor({"q": [0.25], "v": [2.0]})
    (0.25, None)
    """
    every = [ratio for each in ratios.values() for ratio in each]
    if not every or not all(ratios.values()):
        return None
    middle = sorted(every)[len(every) // 2]
    fits = all(abs(ratio - middle) <= ROUNDED * abs(middle) for ratio in every)
    return middle if fits else None


def _as_held(
    spec: EngineSpec, change: Change, held: Callable[[str], torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return A [rank, in] and B [out, rank] as vLLM holds them: padded, B times the scale."""
    import torch

    assert spec.adapter is not None
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[spec.dtype])
    a, b = held(change.a).to(dtype), held(change.b).to(dtype) * change.scale
    more = rank_of(spec.adapter.path) - len(a)
    pad = torch.nn.functional.pad
    matrices = {change.a: pad(a, (0, 0, 0, more)), change.b: pad(b, (0, more))}
    return {key.removeprefix(PREFIX): tensor for key, tensor in matrices.items()}
