"""What to run. Specs are frozen data: hashable, comparable, and written into every artefact."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from mismatch.codec import from_json
from mismatch.types import Sampling

Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
TemperatureIn = Literal["fp32", "logits", "logits-rounded"]
ReplayMode = Literal["ids", "ids+weights"]
WeightsForm = Literal["as-stored", "bf16", "mxfp4", "mxfp4-rounded"]
VerdictFrom = Literal["as-is", "after-fixes"]
AS_STORED: WeightsForm = "as-stored"
Injections = tuple[tuple[str, float], ...]
TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One inference engine.

    Attributes:
        model: hub id or directory, resolved (no alias).
        args: further engine arguments, (name, value) pairs, values as JSON would read them.
        python: interpreter that the engine's process runs under; None: this one.
        weights: the form in which the experts are served, see mismatch/models/derived.py.
        env: environment variables of the engine's process, (name, value) pairs.
        servers: addresses of running servers that sample, for the engine "server".
        served_model: the model's name there; None: found by its own.
        server_concurrency: requests at a time, per server.
        server_timeout_s: that one request may take.
    """

    engine: str = "vllm"
    model: str = ""
    revision: str | None = None
    dtype: Dtype = "bf16"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    args: tuple[tuple[str, Any], ...] = ()
    routing: bool = True
    prefill: bool = True
    trust_remote_code: bool = False
    python: str | None = None
    weights: WeightsForm = AS_STORED
    env: tuple[tuple[str, str], ...] = ()
    servers: tuple[str, ...] = ()
    served_model: str | None = None
    server_concurrency: int = 32
    server_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """Where the prompts come from: the built-in task, a JSONL file, or a data set.

    Attributes:
        dataset: hub id, file (jsonl, json, parquet, csv) or directory; wins over ``task``.
        prompt_column: None: found by its name.
        answer_column: None: no rewards.
    """

    task: str = "arithmetic"
    path: str | None = None
    num_prompts: int = 64
    seed: int = 0
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "train"
    prompt_column: str | None = None
    answer_column: str | None = None


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What the engine is asked to do.

    Attributes:
        exact_kl: action tokens at which whole distributions are kept; 0: none.
        exact_kl_top_k: ids kept of each, where the vocabulary is too large to keep it whole.
    """

    engine: EngineSpec = field(default_factory=EngineSpec)
    prompts: PromptSpec = field(default_factory=PromptSpec)
    sampling: Sampling = field(default_factory=Sampling)
    exact_kl: int = 512
    exact_kl_top_k: int = 64


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """One way to run the training forward.

    Attributes:
        dtype: FSDP's ``param_dtype``: the dtype of the computation.
        master_dtype: dtype of the sharded parameters at rest.
        autocast: dtype of an enclosing ``torch.autocast``, or None.
        head_dtype: dtype of the LM head's matmul; None: that of the computation.
        experts: transformers' experts implementation; "auto" is transformers' own choice.
        router_dtype: "fp32": routers multiply, score and choose in float32; None: in the
            computation's dtype, or as the family's own code says.
        layout: "padding" (one row per sequence, right-padded) or "packing" (several per row).
        temperature_in: where logits are divided by T: "fp32" after the upcast; "logits" before it,
            in their own dtype; "logits-rounded" likewise, with T rounded to that dtype first.
        logprobs_dtype: what logprobs and entropies are rounded to on their way out, or None.
        grad: run the forward in train mode with gradients on.
        weights: the form of the experts that are loaded, see mismatch/models/derived.py.
        replay_routing: "ids": use the experts of another scoring, weighted by this model's own
            gate; "ids+weights": its weights too, as constants. None: the model's own choice.
        replay_source: the scoring whose routes are replayed; None: the engine's decode.
        inject: (name, size) of disturbances planted on purpose, see mismatch/injections.py.
    """

    model: str = ""
    revision: str | None = None
    dtype: Dtype = "bf16"
    master_dtype: Dtype = "fp32"
    autocast: Dtype | None = None
    attention: str = "auto"
    experts: str = "auto"
    head_dtype: Dtype | None = None
    router_dtype: Dtype | None = None
    micro_batch_tokens: int = 4096
    layout: Literal["padding", "packing"] = "padding"
    grad: bool = False
    routing: bool = True
    trust_remote_code: bool = False
    temperature_in: TemperatureIn = "fp32"
    logprobs_dtype: Dtype | None = None
    weights: WeightsForm = AS_STORED
    replay_routing: ReplayMode | None = None
    replay_source: str | None = None
    inject: Injections = ()
    inject_seed: int = 0


@dataclass(frozen=True, slots=True)
class Pass:
    """One named scoring that the training world has to make."""

    name: str
    spec: TrainSpec


@dataclass(frozen=True, slots=True)
class CheckSpec:
    """The whole of `mismatch check`.

    Attributes:
        preset: the framework whose trainer ``train`` imitates, with the version read; or "".
        not_reproduced: what that framework does and this run does not, one sentence each.
        forecast_length: response length that importance weights are forecast at, tokens.
        two_passes: the trainer's "old" against its "new" pass. None: from passes that are made
            anyway; True: with what router replay does to them; False: leave it out.
        inject: disturbances of the new pass alone.
        weights_effect: also score with the trainer's experts in this form; None: do not.
        fixes: what ``--fix`` asked for: ids, "a+b", "all" or a side, see experiments.fixes.
        budget_minutes: that fixes may take beyond the check itself; None: no limit.
        verdict: which verdict the run ends with; "after-fixes": that of the best combination.
        other_engine: a second engine, each rescoring the other's tokens; experiments/engine_pair.
        gradients: also take the policy gradient of one batch, see experiments.gradients.
        gradient_prompts: of that batch, at most.
    """

    rollout: RolloutSpec = field(default_factory=RolloutSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    nproc_per_node: int = 2
    noise_floor: bool = True
    seed: int = 0  # of the bootstrap
    preset: str = ""
    not_reproduced: tuple[str, ...] = ()
    forecast_length: int = 16_384
    two_passes: bool | None = None
    weights_effect: WeightsForm | None = None
    inject: Injections = ()
    fixes: tuple[str, ...] = ()
    budget_minutes: float | None = None
    verdict: VerdictFrom = "as-is"
    other_engine: EngineSpec | None = None
    gradients: bool = False
    gradient_prompts: int = 16


T = TypeVar("T")


def to_dict(spec: Any) -> dict[str, Any]:
    """A spec as plain JSON data."""
    return dataclasses.asdict(spec)


def from_dict(cls: type[T], data: dict[str, Any]) -> T:
    """The inverse of :func:`to_dict`.

    Raises:
        TypeError: a field is unknown, missing or of another type.
    """
    return from_json(cls, data)


def weights_key(spec: TrainSpec) -> tuple[Any, ...]:
    """What has to be equal for two passes to share loaded weights."""
    return (
        spec.model,
        spec.revision,
        spec.dtype,
        spec.master_dtype,
        spec.weights,
        spec.trust_remote_code,
    )


def load_key(spec: TrainSpec) -> tuple[Any, ...]:
    """What has to be equal for two passes to run the same kernels on the same weights."""
    return (*weights_key(spec), spec.attention, spec.autocast, spec.experts)


PLACES = ("servers", "served_model", "server_concurrency", "server_timeout_s")


def _anywhere(data: dict[str, Any]) -> dict[str, Any]:
    """A spec's data without the places of servers."""
    return {
        name: _anywhere(value) if isinstance(value, dict) else value
        for name, value in data.items()
        if name not in PLACES
    }


def spec_hash(spec: Any) -> str:
    """Twelve hex digits that change whenever anything in the spec does, but where servers are.

    A run may go on with servers at other addresses: that they are the same otherwise is asked of
    the servers, see mismatch/engines/servers.
    """
    text = json.dumps(_anywhere(to_dict(spec)), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
