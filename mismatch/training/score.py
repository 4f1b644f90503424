"""One pass: every sequence of a rollout through the trainer's forward, teacher-forced."""

from __future__ import annotations

import platform
from dataclasses import dataclass, fields, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
import transformers
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mismatch.captures import Distributions, Likeliest, narrowest
from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.facts import Digests
from mismatch.keys import PLAIN, REFERENCE, TRAIN, Key
from mismatch.models.adapters import adapter_facts
from mismatch.models.derived import form_name, layers_held
from mismatch.models.digests import ZERO, Digest, comparable, digest_tensor, source_hashes
from mismatch.models.resolved import honours_softcap, resolved
from mismatch.run.messages import Reporter
from mismatch.specs import Pass, Sampling
from mismatch.training.distributed import MemoryPeak, World
from mismatch.training.load import LoadedModel, resident_share
from mismatch.training.logprobs import DistributionCapture, TokenStats
from mismatch.training.packing import plan_batches
from mismatch.training.routing.keys import KeyRecorder, KeyRows, sparse_top_k
from mismatch.training.routing.replay import ReplaySource
from mismatch.training.scorer import ForwardOptions, Scorer
from mismatch.training.sequence_parallel import SequenceParallel
from mismatch.training.source import model_directory
from mismatch.training.validate import DeviceBatch, prepare_pass, to_device
from mismatch.types import (
    RANK,
    Bools,
    Ints,
    NotTested,
    Rollout,
    Routing,
    Scoring,
    SideFacts,
    SparseKeys,
    kept_rows,
)


@dataclass(frozen=True, slots=True)
class MicroBatchScores:
    """The results of one micro-batch, as numpy arrays.

    Attributes:
        tokens: [n] indices into T of all forwarded tokens, the rows of ``routes``.
        targets: [a] indices into T of the action tokens, the rows of ``stats``.
        routes: ids [n, L, K], weights [n, L, K] and margin [n, L], those that were recorded.
        overruled: (token, layer) pairs whose own choice of experts was replaced by replay.
        keys: rows [R] of T, ids [R, L, K] and margin [R, L] of sparse attention, where recorded.
    """

    tokens: Ints
    targets: Ints
    stats: dict[str, np.ndarray]
    routes: dict[str, np.ndarray]
    overruled: int
    keys: dict[str, np.ndarray]


def score_pass(
    world: World,
    loaded: LoadedModel,
    rollout: Rollout,
    job: Pass,
    source: ReplaySource | None = None,
    engine_distributions: Distributions | None = None,
    likeliest: int = 0,
) -> Scoring | None:
    """Score a rollout as ``job.spec`` says; all ranks call it, rank 0 gets the scoring.

    Args:
        source: the routes to replay, where the spec asks for that.
        engine_distributions: their positions and ids are kept here too.
        likeliest: most likely ids of every position that are kept.

    Raises:
        EmptyComparison: the rollout has no action token.
        MismatchError: token ids outside the vocabulary, a family whose head or layout this tool
            does not reproduce.
    """
    spec = job.spec
    options, routing_note = prepare_pass(world, loaded, rollout, spec, source)
    capture = DistributionCapture.of(engine_distributions, rollout)
    counting = job.name in (TRAIN, REFERENCE)
    ends = tuple(rollout.fingerprint.get("stop_token_ids") or ()) if counting else ()
    options = replace(options, capture=capture, likeliest=likeliest, ends=ends, counting=counting)
    with MemoryPeak(world.device, True) as peak, torch.set_grad_enabled(spec.grad):
        parts = run_batches(world, loaded, rollout, job, options, source)
    gathered, peaks = world.gather(parts), world.gather(peak.bytes)
    facts = fingerprint(world, loaded, job, rollout.sampling, routing_note)
    if gathered is None or peaks is None:
        return None
    parts = [part for rank in gathered for part in rank]
    facts |= {
        "replay": None if source is None else source.facts(sum(part.overruled for part in parts)),
        "injected": {**dict(spec.inject), "seed": spec.inject_seed} if spec.inject else None,
        "seconds": round(peak.seconds, 3),
        "peak_bytes": peaks,
    }
    distributions = None
    if capture is not None:
        taken = [(part.targets, part.stats.pop("distributions")) for part in parts]
        distributions = capture.joined(taken)
    scoring = _assemble(job.name, rollout, parts, facts, loaded)
    return replace(scoring, distributions=distributions)


def run_batches(
    world: World,
    loaded: LoadedModel,
    rollout: Rollout,
    job: Pass,
    options: ForwardOptions,
    source: ReplaySource | None = None,
) -> list[MicroBatchScores]:
    """Run this rank's micro-batches: every W-th, and as many forward passes as any other rank.

    Ranks that share their sequences take the same sequences, each rank different positions.
    """
    lengths = [int(n) for n in np.diff(rollout.offsets)]
    batches = plan_batches(lengths, job.spec.micro_batch_tokens, job.spec.layout)
    parallel = SequenceParallel.of(world, job.spec.sequence_parallel)
    selecting = np.zeros(len(rollout.token_ids), np.bool_)
    sparse = loaded.scorer.sparse
    if sparse and options.routing and job.spec.sequence_parallel == 1:
        selecting[kept_rows(rollout, sparse[0].top_k, len(sparse))] = True
    progress = Reporter(job.name, "tokens")
    parts, done = [], 0
    with parallel.installed(loaded.attention.implementation):
        for first in range(0, len(batches), parallel.count):
            own = first + parallel.index
            idle = own >= len(batches)
            # FSDP2 gathers in step: a rank without work repeats a batch and drops the result.
            group = batches[0 if idle else own]
            inputs = to_device(rollout, group, job.spec, options, world.device, source, parallel)
            part = _forward(loaded, inputs, selecting, source)
            if job.name == TRAIN and parallel.count > 1:
                part.stats[RANK] = np.full(len(part.targets), parallel.index)
            if not idle:
                parts.append(part)
            done += sum(batch.tokens for batch in batches[first : first + parallel.count])
            if world.rank == 0:
                progress(done, sum(lengths), done)
    return parts


def _forward(
    loaded: LoadedModel, inputs: DeviceBatch, selecting: Bools, source: ReplaySource | None
) -> MicroBatchScores:
    """Run one micro-batch; ``selecting`` [T]: tokens whose sparse selections are kept."""
    batch, scorer, capture = inputs.batch, loaded.scorer, inputs.options.capture
    captured = None if capture is None else capture.rows(inputs.targets)
    wanted, recorder = selecting[inputs.tokens], None
    if wanted.any():
        replayed = None if source is None else source.keys_of(inputs.tokens[wanted])
        recorder = KeyRecorder(scorer.sparse, KeyRows.of(batch, torch.from_numpy(wanted), replayed))
    values, layers = scorer(
        scorer.score,
        batch,
        inputs.predicting,
        inputs.target_ids,
        inputs.options,
        captured,
        recorder,
    )
    stats = {
        field.name: value.detach().cpu().numpy()
        for field, value in zip(fields(TokenStats), values, strict=True)
        if value is not None
    }
    routes = {}
    for name in ("ids", "weights", "margin") if layers else ():
        by_layer = [getattr(layer, name) for layer in layers]
        if all(value is not None for value in by_layer):
            rows = [value.detach()[batch.rows].cpu().numpy() for value in by_layer]
            routes[name] = np.stack(rows, axis=1)
    if layers:
        routes["ids"] = routes["ids"].astype(narrowest(scorer.moe[0].num_experts))
    overruled = 0 if inputs.replay is None else inputs.replay.overruled
    keys: dict[str, np.ndarray] = {}
    if recorder is not None and (seen := recorder.finished()) is not None:
        ids, margin = seen.ids.cpu().numpy(), seen.margin.cpu().numpy()
        keys = {"rows": inputs.tokens[wanted], "ids": ids.astype(np.uint16), "margin": margin}
    return MicroBatchScores(inputs.tokens, inputs.targets, stats, routes, overruled, keys)


def _assemble(
    name: str,
    rollout: Rollout,
    parts: list[MicroBatchScores],
    facts: SideFacts,
    loaded: LoadedModel,
) -> Scoring:
    """Concatenate all micro-batches in the rollout's order; no action token may be missing."""
    targets = np.concatenate([part.targets for part in parts])
    order = np.argsort(targets, kind="stable")
    if not np.array_equal(targets[order], rollout.actions):
        fault = f"{name}: {len(targets)} tokens were scored, the rollout has {rollout.n_actions}"
        raise MismatchError(fault, "a rank lost its part; run the pass again")
    stats = {
        key: np.concatenate([part.stats[key] for part in parts])[order] for key in parts[0].stats
    }
    routing, moe = None, loaded.scorer.moe
    if parts[0].routes:
        rows = np.argsort(np.concatenate([part.tokens for part in parts]), kind="stable")
        margins = all("margin" in part.routes for part in parts)
        routes = {
            key: np.concatenate([part.routes[key] for part in parts])[rows]
            for key in ("ids", "weights", *(("margin",) if margins else ()))
        }
        routing = Routing(
            layers=tuple(layer.index for layer in moe),
            num_experts=moe[0].num_experts,
            present=np.ones(len(rollout.token_ids), np.bool_),
            **routes,
        )
    keys = None
    if recorded := [part.keys for part in parts if part.keys]:
        joined = {key: np.concatenate([each[key] for each in recorded]) for key in recorded[0]}
        keys = SparseKeys.of(rollout, [layer.index for layer in loaded.scorer.sparse], joined)
    extra = {name: name for name in ("kept_mass", "end_mass", "earlier_mass", RANK)}
    extra["untempered"] = "logprobs_untempered"
    kept = "likeliest" in stats
    return Scoring(
        name=name,
        token_ids=rollout.token_ids[rollout.actions],
        logprobs=stats["logprobs"].astype(np.float64),
        entropy=stats["entropy"].astype(np.float64),
        top1=stats["top1"].astype(np.int64),
        fingerprint=facts,
        routing=routing,
        extra={label: stats[k].astype(np.float64) for k, label in extra.items() if k in stats},
        likeliest=Likeliest(stats["likeliest_ids"], stats["likeliest"]) if kept else None,
        keys=keys,
    )


def fingerprint(
    world: World, loaded: LoadedModel, job: Pass, sampling: Sampling, routing: str
) -> SideFacts:
    """Facts about one pass; all ranks must call it (shards and digests are summed over them)."""
    spec, scorer, device = job.spec, loaded.scorer, world.device
    side = Key(job.name).side
    head_dtype = spec.head_dtype or spec.autocast or spec.dtype
    policies = [
        module._get_fsdp_state()._mp_policy
        for module in scorer.modules()
        if isinstance(module, FSDPModule)
    ]
    config = resolved(scorer.model, loaded.attention.honours_sinks) | {"head_dtype": head_dtype}
    if scorer.moe:
        config["router_dtype"] = spec.router_dtype or spec.autocast or spec.dtype
    shares = world.gather((resident_share(scorer), loaded.peak_bytes)) or []
    facts: SideFacts = {
        "mode": "reference" if side == REFERENCE.side else "plain" if side == PLAIN else "train",
        "backend": "fsdp2",
        "model": spec.model,
        "revision": spec.revision,
        "weights_form": form_name(spec.weights, model_directory(spec)),
        **layers_held(loaded.directory),
        "dtype": spec.dtype,
        "master_dtype": loaded.master_dtype,
        "offload": spec.offload,
        "autocast": spec.autocast,
        "head_dtype": head_dtype,
        "router_dtype": spec.router_dtype,
        "temperature_in": spec.temperature_in,
        "logprobs_dtype": spec.logprobs_dtype or "fp32",
        "attention": loaded.attention.label,
        "attention_requested": spec.attention,
        "honours_sinks": loaded.attention.honours_sinks,
        "honours_softcap": honours_softcap(scorer.model.config, loaded.attention.implementation),
        # Whether FSDP2 casts what enters a wrapped module, RoPE tables among it.
        "cast_forward_inputs": any(
            policy.cast_forward_inputs and policy.param_dtype is not None for policy in policies
        ),
        "config": config,
        "experts": loaded.experts,
        "moe": bool(scorer.moe),
        "reads_images": scorer.model.config is not scorer.decoder_config,
        "routing": routing,
        "layout": spec.layout,
        "micro_batch_tokens": spec.micro_batch_tokens,
        "grad": spec.grad,
        "temperature": sampling.temperature,
        "logprobs_temperature": sampling.scored_temperature,
        "logprobs_truncated": False,
        "world_size": world.size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
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
    facts |= adapter_facts(spec.adapter, spec.adapter_as)
    if (top_k := sparse_top_k(scorer.decoder)) is not None:
        facts["sparse_top_k"] = top_k
    if loaded.attention.tried:  # kernels that were run before one was trusted
        facts["attention_candidates"] = list(loaded.attention.tried)
    if loaded.attention.error is not None:
        facts["attention_error"] = min(loaded.attention.error, 1e9)  # JSON has no infinity
    if loaded.dropout:
        names = ", ".join(f"{name} {value:g}" for name, value in sorted(loaded.dropout.items()))
        reason = f"the model has {names}; every pass set it to 0"
        how = "train without it too: with it on, log-probabilities in train mode are random"
        facts["not_tested"] = to_json([NotTested("dropout", reason, how)])
    if spec.sequence_parallel > 1:
        facts["sequence_parallel"] = spec.sequence_parallel
    if loaded.peak_bytes is not None:
        facts["load_peak_bytes"] = [peak for _, peak in shares]
    return facts


def _contents(world: World, loaded: LoadedModel) -> SideFacts:
    """Hashes of files and weights, computed once per load: passes do not change them."""
    if loaded.scorer not in _digests:
        directory = loaded.directory if world.rank == 0 else None
        _digests[loaded.scorer] = {
            "source_files": {} if directory is None else source_hashes(directory),
            "weights": loaded_digests(world, loaded),
        }
    return _digests[loaded.scorer]


_digests: WeakKeyDictionary[Scorer, SideFacts] = WeakKeyDictionary()


def weights_changed(world: World, loaded: LoadedModel) -> Digests:
    """Digests of the weights after a step; later passes say what they ran with. All ranks call."""
    facts = _contents(world, loaded)
    _digests[loaded.scorer] = facts | {"weights": loaded_digests(world, loaded)}
    return _digests[loaded.scorer]["weights"]


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
