"""What a side of a comparison, engine or trainer, declares of a scoring: the type of its facts.

Artefacts hold facts as a JSON object. A key that is absent was not said, and most of the keys below
are said by one kind of side alone; None: there is none, or the side does not know. mypy refuses
other names, also in ``get`` (tools/known_keys.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NotRequired, TypedDict, cast

from mismatch.codec import from_json

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Digests = Mapping[str, Sequence[int]]  # parameter -> its digest, see mismatch/models/digests.py


class Replayed(TypedDict):
    """Experts that were given to a trainer."""

    mode: str  # "ids", "ids+weights"
    source: str  # name of the scoring that they are of
    rows_replayed: int  # tokens
    rows_own: int  # tokens that had none, and kept the model's choice
    overruled: int  # choices that replaying changed
    keys: NotRequired[int]  # tokens whose keys of sparse attention were given


class RunningServer(TypedDict):
    url: str
    configuration: str | None  # hash of its settings, or its weight version
    noise: float  # mean |difference| of two probes at the start, nats
    drift: float  # the largest from the first probe


AdapterUsed = TypedDict("AdapterUsed", {"name": str, "digest": str, "as": str})


class Replaced(TypedDict):
    """A setting of a framework's configuration that could not run, and what ran in its place."""

    what: str  # in a word or two: "attention"
    asked: str
    ran: str
    why: str  # it could not run: "it needs a GPU"
    instead: str  # how the configuration asks for what ran; "": it cannot
    causes: list[str]  # that this can make and the run's own setting does not


class SideFacts(TypedDict, total=False):
    """The facts of one scoring; dtypes are "bf16", "fp16", "fp32" or a framework's longer name."""

    # What ran
    mode: Literal["decode", "prefill", "train", "reference", "plain"]
    engine: str  # as --engine names it; of engines alone
    served_by: str  # kind of server
    server: RunningServer
    backend: str  # of trainers: "fsdp2", or as --scorer names it
    code: str  # whose code computed, in words; of trainers that are not ours
    notes: list[str]  # what of a framework's configuration was not followed
    replaced: list[Replaced]  # what of it could not run here
    version: str  # of the engine
    versions: dict[str, str]  # package -> version
    model_class: str
    model_runner: str
    device: str | None  # "cpu", else as the framework names it
    world_size: int  # ranks
    tensor_parallel_size: int | None
    sequence_parallel: int
    ep_size: int | None
    strategy: str  # of verl
    distributed: str  # of accelerate
    offload: bool
    seconds: float
    peak_bytes: list[int]  # of every rank
    load_peak_bytes: list[int]
    resident_fraction: list[float]  # of the parameters, on each rank
    prefill: bool  # whether this engine will rescore
    not_tested: list[dict[str, str]]  # NotTested
    file: str  # that the numbers were read from
    format: str | None  # of it; None: generic
    # The weights
    model: str
    revision: str | None
    layers: list[int]  # [N, M]: the first N of M layers alone
    weights_form: str  # "as-stored", "bf16", "bf16 of fp8" …
    adapter: AdapterUsed
    adapter_held_otherwise: list[str]  # parameters whose adapter is held otherwise than its files
    adapter_times: float  # factor of these adapters over that of the files, where one fits them all
    source_files: dict[str, str]  # name -> sha256
    weights: Digests  # in report.json: one digest of them all, as text
    weights_parameters: int  # in report.json alone: how many
    weights_in_memory: bool  # digested as they run; else as read, before the engine rearranged them
    weights_comparable: bool  # False: a dtype at rest that lost bits
    weights_not_comparable: str  # why there are no digests
    weights_not_of_checkpoint: list[str]  # names, see mismatch/analysis/diagnosis/loaded_weights.py
    weights_not_described: list[str]  # names
    weights_in_engines_form: Digests
    unmapped_weights: list[str]  # the engine's names
    # Precision
    dtype: str | None  # of the computation, where autocast does not lower it
    master_dtype: str | None  # of the parameters at rest
    autocast: str | None
    head_dtype: str
    router_dtype: str | None
    temperature_in: str
    kv_cache_dtype: str | None
    quantization: str | None
    cast_forward_inputs: bool
    float32_matmul: str
    cudnn_tf32: bool
    enable_fp32_lm_head: bool | None
    # Kernels and batches
    config: dict[str, Json]  # as the running model holds it, see mismatch/models/resolved.py
    attention: str
    attention_requested: str | None
    attention_candidates: list[str]  # what trial runs of kernels gave, one line each
    attention_error: float  # of a kernel that failed its trial in float32, relative
    attention_backend: str | None
    honours_sinks: bool | None  # None: the model has no learned sinks
    honours_softcap: bool | None  # likewise of attn_logit_softcapping
    moe: bool
    experts: str | None  # the trainer's kernel
    moe_backend: str | None  # the engine's
    moe_runner_backend: str | None
    flashinfer_mxfp4_moe_precision: str | None  # of SGLang; "bf16", else activations are in MXFP8
    routing: str  # "captured", or why not
    replay: Replayed | None
    sparse_top_k: int  # keys of sparse attention; 0: an indexer whose choice cannot be read
    injected: dict[str, float] | None  # name -> size, and the seed
    reads_images: bool
    layout: str  # "padding" or "packing"
    micro_batch_tokens: int
    micro_batch: str  # its rule in words
    grad: bool
    enforce_eager: bool
    cudagraph_capture_sizes: list[int]  # numbers of sequences; []: no CUDA graphs
    prefix_caching: bool | None
    block_size: int | str | None  # tokens; earlier versions wrote text for vLLM's server
    sliding_window: int | None  # tokens
    chunked_prefill: bool
    max_num_batched_tokens: int | None
    max_num_seqs: int
    max_running_requests: int | None
    max_model_len: int | None  # tokens
    rope_switch: (
        int  # tokens; of a longer max_model_len vLLM takes LongRoPE's long factors; 0: none
    )
    substitutes: list[str]  # kernels that stand in for SGLang's where those do not run
    deterministic: bool
    returns_routes: bool
    sampling_backend: str | None
    disable_radix_cache: bool | None
    disable_cuda_graph: bool | None
    disable_overlap_schedule: bool | None
    enable_deterministic_inference: bool | None
    rl_on_policy_target: str | None
    speculative_algorithm: str | None
    weight_version: str | None
    engine_args: dict[str, Json]
    # Sampling and log-probabilities
    temperature: float  # of the sampling
    sampling: dict[str, Json]  # as sent, by the engine's names
    seed: int | None
    seeding: str  # "per sample", "engine" or "none"
    generation_config: str | None
    stop_token_ids: Sequence[int] | None
    bos_token_id: int | None
    logprobs_dtype: str
    logprobs_mode: str | None
    logprobs_temperature: float | None  # at which they are
    logprobs_truncated: bool | None  # renormalised over the tokens that top-p, top-k and min-p keep
    logprobs_penalised: bool | None  # after the repetition penalty


FUNCTION = "the function "  # of a user, in front of its name in a trainer's code


def known(facts: SideFacts) -> SideFacts:
    """Return the facts that are not None, and of their type: servers say what they like."""
    kept: dict[str, Any] = {}
    for key, fact in facts.items():
        with suppress(TypeError):
            kept |= {} if fact is None else from_json(SideFacts, {key: fact})
    return cast(SideFacts, kept)


def was_read(facts: SideFacts) -> bool:
    """Return whether a side's numbers may be a copy of the other's: they come from a file, or from
    a user's function, which has no float32 that would show that it computes.

    >>> was_read({"mode": "train", "code": "verl"}), was_read({"mode": "train", "backend": "fsdp2"})
    (True, False)
    >>> was_read({"mode": "train", "backend": "my:score", "code": f"{FUNCTION}my:score"})
    True
    """
    if str(facts.get("code") or "").startswith(FUNCTION):
        return True
    return "file" in facts or "format" in facts or not ("engine" in facts or "backend" in facts)


def replay_of(facts: SideFacts) -> str:
    """Say how experts were given to a side, and by which scoring; "" where it chose them.

    >>> replay_of({"replay": {"mode": "ids+weights", "source": "vllm:decode"}})
    'ids and weights of vllm:decode'
    """
    replay = facts.get("replay")
    return f"{replay['mode'].replace('+', ' and ')} of {replay['source']}" if replay else ""


ROUTER_NOISE = "router-noise"  # what can be injected


def injections_in_words(injections: Sequence[tuple[str, float]], seed: int | None = None) -> str:
    """Return one phrase for messages and reports; "" where nothing is injected.

    >>> injections_in_words((("router-noise", 0.05),), seed=3)
    'router-noise=0.05 (seed 3)'
    """
    if not injections:
        return ""
    known = {name: name if name == ROUTER_NOISE else f"unknown {name!r}" for name, _ in injections}
    text = ", ".join(f"{known[name]}={size:g}" for name, size in injections)
    return text if seed is None else f"{text} (seed {seed})"


def injected_into(facts: SideFacts) -> str:
    """Return what was injected into a side, as :func:`injections_in_words` has it."""
    sizes = dict(facts.get("injected") or {})
    seed = sizes.pop("seed", None)
    return injections_in_words(tuple(sizes.items()), None if seed is None else int(seed))
