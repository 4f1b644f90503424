"""The fingerprint of a training pass: settings as resolved, not as requested."""

from __future__ import annotations

import platform
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mismatch.models.digests import ZERO, Digest, comparable, digest_tensor, source_hashes
from mismatch.models.resolved import resolved
from mismatch.run.scorings import PLAIN
from mismatch.specs import Pass, TrainSpec
from mismatch.training.distributed import World
from mismatch.training.load import LoadedModel, resident_share
from mismatch.training.logprobs import SamplingTransforms
from mismatch.training.routing.replay import ReplaySource
from mismatch.training.scorer import Scorer
from mismatch.types import Fingerprint, Sampling


def fingerprint(
    world: World, loaded: LoadedModel, job: Pass, sampling: Sampling, routing: str
) -> Fingerprint:
    """Facts about one pass; all ranks must call it (shards and digests are summed over them)."""
    import transformers

    spec, scorer = job.spec, loaded.scorer
    shares = world.gather((resident_share(scorer), loaded.peak_bytes)) or []
    facts: Fingerprint = {
        "mode": _mode(job.name),
        "backend": "fsdp2",
        "model": spec.model,
        "revision": spec.revision,
        "weights_form": spec.weights,
        "dtype": spec.dtype,
        "master_dtype": loaded.master_dtype,
        "offload": spec.offload,
        "autocast": spec.autocast,
        "head_dtype": spec.head_dtype or spec.autocast or spec.dtype,
        "router_dtype": spec.router_dtype,
        "temperature_in": spec.temperature_in,
        "logprobs_dtype": spec.logprobs_dtype or "fp32",
        "attention": loaded.attention.label,
        "attention_requested": spec.attention,
        "honours_sinks": loaded.attention.honours_sinks,
        "cast_forward_inputs": _casts_inputs(scorer),
        "config": _configuration(loaded, spec),
        "experts": loaded.experts,
        "moe": bool(scorer.moe),
        "routing": routing,
        "layout": spec.layout,
        "micro_batch_tokens": spec.micro_batch_tokens,
        "grad": spec.grad,
        "temperature": sampling.temperature,
        "logprobs_temperature": SamplingTransforms(sampling.temperature).scored_temperature,
        "logprobs_truncated": False,
        "world_size": world.size,
        "device": _device_name(world.device),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "resident_fraction": [share for share, _ in shares],
        **_contents(world, loaded),
        "weights_comparable": comparable(loaded.master_dtype),
    }
    if loaded.attention.tried:  # kernels that were run before one was trusted
        facts["attention_candidates"] = list(loaded.attention.tried)
    if spec.sequence_parallel > 1:
        facts["sequence_parallel"] = spec.sequence_parallel
    if loaded.peak_bytes is not None:
        facts["load_peak_bytes"] = [peak for _, peak in shares]
    return facts


def _casts_inputs(scorer: Scorer) -> bool:
    """Whether FSDP2 casts what enters a wrapped module, RoPE tables among it."""
    policies = [m._get_fsdp_state()._mp_policy for m in scorer.modules()
                if isinstance(m, FSDPModule)]  # fmt: skip
    return any(p.cast_forward_inputs and p.param_dtype is not None for p in policies)


def _configuration(loaded: LoadedModel, spec: TrainSpec) -> dict[str, Any]:
    """What the loaded model computes with, and the dtypes that this pass sets."""
    dtype = spec.autocast or spec.dtype
    return resolved(loaded.scorer.model, loaded.attention.honours_sinks) | {
        "head_dtype": spec.head_dtype or dtype,
        **({"router_dtype": spec.router_dtype or dtype} if loaded.scorer.moe else {}),
    }


def _mode(name: str) -> str:
    """What a pass is for: "reference", "plain" (a yardstick), or "train"."""
    kind = name.partition(":")[0]
    return kind if kind in ("reference", PLAIN) else "train"


def _contents(world: World, loaded: LoadedModel) -> Fingerprint:
    """Hashes of files and weights, computed once per load: passes do not change them."""
    if loaded.scorer not in _digests:
        _digests[loaded.scorer] = {
            "source_files": _sources(world, loaded),
            "weights": loaded_digests(world, loaded),
        }
    return _digests[loaded.scorer]


_digests: WeakKeyDictionary[Scorer, Fingerprint] = WeakKeyDictionary()


def loaded_digests(world: World, loaded: LoadedModel) -> dict[str, Digest]:
    """Digest of every parameter and persistent buffer as held, by the model's own names."""
    tensors = loaded.scorer.model.state_dict()
    digests = []
    for tensor in tensors.values():
        if isinstance(tensor, DTensor):
            _, start = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
            digests.append(digest_tensor(tensor.to_local(), start))
        elif tensor.is_floating_point() and world.rank == 0:  # buffers are the same on all ranks
            digests.append(digest_tensor(tensor))
        else:
            digests.append(ZERO)
    totals = world.sum(torch.tensor(digests, dtype=torch.int64))
    return {
        name: tuple(int(value) for value in row) for name, row in zip(tensors, totals, strict=True)
    }


def _sources(world: World, loaded: LoadedModel) -> dict[str, str]:
    if world.rank != 0 or loaded.directory is None:
        return {}
    return source_hashes(loaded.directory)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def intervention_facts(spec: TrainSpec, source: ReplaySource | None, overruled: int) -> Fingerprint:
    """The fingerprint's entries on replayed routes and injected disturbances.

    Args:
        overruled: (token, layer) pairs whose own choice of experts was replaced.
    """
    facts: Fingerprint = {"replay": None, "injected": None}
    if source is not None:
        facts["replay"] = {
            "mode": source.mode,
            "source": source.name,
            **source.rows(),
            "overruled": overruled,
        }
    if spec.inject:
        facts["injected"] = {**dict(spec.inject), "seed": spec.inject_seed}
    return facts
