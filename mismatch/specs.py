"""What to run. Specs are frozen data: hashable, comparable, and written into every artefact."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

Dtype = Literal["bf16", "fp16", "fp32"]
MasterDtype = Literal["auto", "bf16", "fp16", "fp32"]
DTYPES: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
TemperatureIn = Literal["fp32", "logits", "logits-rounded"]
ReplayMode = Literal["ids", "ids+weights"]
WeightsForm = Literal[
    "as-stored", "bf16", "mxfp4", "mxfp4-rounded", "fp8-rounded", "int4-rounded", "nvfp4-rounded"
]
ROUNDED_FORMS = ("fp8-rounded", "int4-rounded", "nvfp4-rounded")
QUANTISED_FORMS = ("mxfp4", "mxfp4-rounded", *ROUNDED_FORMS)
VerdictFrom = Literal["as-is", "after-fixes"]
AdapterWay = Literal["own", "merged"]
AS_STORED: WeightsForm = "as-stored"
Injections = tuple[tuple[str, float], ...]
TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

# Headings of `mismatch check --help`.
MODEL, PROMPTS, ENGINE, SERVERS, TRAIN, FIXES, OUTPUT = (
    "Model",
    "Prompts and sampling",
    "Engine (rollout side)",
    "Running servers",
    "Trainer (FSDP2 side)",
    "Fixes",
    "Verdict and output",
)


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a flag takes; never NaN.

    Attributes:
        above: ``low`` itself is outside.

    >>> str(Range(0, 1, above=True)), 0 in Range(0, 1, above=True), 1 in Range(0, 1)
    ('above 0, at most 1', False, True)
    """

    low: float
    high: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        if self.above:
            return f"above {self.low:g}, at most {self.high:,.15g}"
        return f"from {self.low:g} to {self.high:,.15g}"


AROUND_A_REPLY = 64  # tokens that a chat template puts around a reply, at most
MANY = 10**9  # more of anything than a run can have
SEEDS = Range(0, 2**32 - 1)  # what numpy, torch and the engines all take
RANKS = Range(1, 4096)
SHARE = Range(0, 1, above=True)
WEEK_S = Range(0, 7 * 86400, above=True)


@dataclass(frozen=True, slots=True)
class Flag:
    """The flag that sets a field, as an annotation of it; mismatch/cli/flags.py reads it.

    Attributes:
        panel: heading in the help.
        name: with underscores; "": the field's own.
        kind: type of the flag's value where it is not the field's: the command converts it, and
            the flag's default is None.
        range: of numbers, the flag's and the field's.
        switch: has no --no-NAME.
        rare: not in the help of commands, but among the settings that it names.
    """

    panel: str
    help: str = ""
    name: str = ""
    kind: Any = None
    range: Range | None = None
    switch: bool = False
    rare: bool = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that samples. All of it is sent to the engine explicitly.

    >>> Sampling(temperature=0.7).truncates
    False
    >>> Sampling(top_k=-1) == Sampling()
    True
    """

    temperature: Annotated[float, Flag(PROMPTS, "Sampling temperature.", range=Range(0, 100))] = 1.0
    top_p: Annotated[float, Flag(PROMPTS, "Nucleus sampling; 1: off.", range=SHARE)] = 1.0
    top_k: Annotated[
        int, Flag(PROMPTS, "Sample from the k likeliest; 0 or -1: off.", range=Range(-1, MANY))
    ] = 0
    min_p: Annotated[
        float,
        Flag(
            PROMPTS, "Drop tokens below this share of the likeliest's; 0: off.", range=Range(0, 1)
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Flag(
            PROMPTS,
            "Makes earlier tokens less likely; 1: off.",
            range=Range(0, 100, above=True),
        ),
    ] = 1.0
    max_tokens: Annotated[int, Flag(PROMPTS, "Longest response.", range=Range(1, 10**7))] = 128
    samples_per_prompt: Annotated[
        int, Flag(PROMPTS, "Samples of each prompt.", range=Range(1, 10**5))
    ] = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.top_k == -1:  # vLLM's, verl's and TRL's way to say it
            object.__setattr__(self, "top_k", 0)

    @property
    def truncates(self) -> bool:
        """Whether the tail of the distribution is cut before sampling."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def penalises(self) -> bool:
        """Whether tokens that were there before lose probability."""
        return self.repetition_penalty != 1.0

    @property
    def plain(self) -> bool:
        """Whether it draws from the model's whole distribution, at some temperature."""
        return self == self.uncut()

    @property
    def cut(self) -> str:
        """How the tail is cut, for a sentence."""
        return f"top-p {self.top_p:g}, top-k {self.top_k or 'off'}, min-p {self.min_p or 'off'}"

    def uncut(self) -> Sampling:
        """Return the sampling that draws from all tokens as the model weighs them."""
        return dataclasses.replace(self, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)

    @property
    def scored_temperature(self) -> float:
        """Greedy decoding (T = 0) has no distribution to score by: it is scored at T = 1."""
        return self.temperature if self.temperature > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of PEFT over a spec's model.

    Attributes:
        path: directory with adapter_config.json and adapter_model.safetensors.
        digest: twelve hexadecimal digits of both files' sha256.
    """

    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One inference engine.

    Attributes:
        model: hub id or directory, resolved (no alias).
        args: further engine arguments, (name, value) pairs, values as JSON would read them.
        layers: that are run, from the first; None: all.
        python: interpreter that the engine's process runs under; None: this interpreter.
        weights: the form in which the experts are served, see mismatch/models/derived.py.
        env: environment variables of the engine's process, (name, value) pairs.
        servers: addresses of running servers that sample, for the engine "server".
        adapter_as: how the adapter is served; None: by the engine's own LoRA, if it has one here.
    """

    engine: Annotated[str, Flag(ENGINE, "Name of the engine.")] = "vllm"
    model: str = ""
    revision: Annotated[str | None, Flag(MODEL, "Revision of a hub model.")] = None
    dtype: Annotated[Dtype, Flag(ENGINE, "Dtype of the engine.")] = "bf16"
    tensor_parallel_size: Annotated[int, Flag(ENGINE, "GPUs per engine.", range=RANKS)] = 1
    max_model_len: Annotated[
        int | None,
        Flag(ENGINE, "Longest sequence; default: as long as needed.", range=Range(2, MANY)),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None, Flag(ENGINE, "Share of a GPU's memory that vLLM takes.", range=SHARE)
    ] = None
    args: Annotated[
        tuple[tuple[str, Any], ...],
        Flag(
            ENGINE,
            "Any other argument of the engine, key=value (JSON); repeatable.",
            name="engine_arg",
            kind=list[str] | None,
        ),
    ] = ()
    routing: Annotated[bool, Flag(ENGINE, "Capture routed experts.", rare=True)] = True
    prefill: Annotated[bool, Flag(ENGINE, "Rescore by the engine's prefill.", rare=True)] = True
    trust_remote_code: Annotated[bool, Flag(MODEL, "Run code that comes with the model.")] = False
    layers: Annotated[
        int | None, Flag(MODEL, "Run the model's first N layers alone.", range=Range(1, MANY))
    ] = None
    adapter: Annotated[
        Adapter | None,
        Flag(MODEL, "LoRA adapter (PEFT directory) of both sides.", kind=str | None),
    ] = None
    adapter_as: Annotated[
        AdapterWay | None,
        Flag(
            ENGINE,
            "Serve the adapter by the engine's LoRA (default where it can), or merged.",
            rare=True,
        ),
    ] = None
    python: str | None = None
    weights: WeightsForm = AS_STORED
    env: tuple[tuple[str, str], ...] = ()
    servers: Annotated[
        tuple[str, ...],
        Flag(
            SERVERS,
            "URL of a running vLLM or SGLang server; docs/how-to/servers.md.",
            name="server",
            kind=list[str] | None,
        ),
    ] = ()
    served_model: Annotated[
        str | None, Flag(SERVERS, "Model name on the server, if different.")
    ] = None
    server_concurrency: Annotated[
        int, Flag(SERVERS, "Requests at a time.", range=Range(1, 4096), rare=True)
    ] = 32
    server_timeout_s: Annotated[
        float,
        Flag(
            SERVERS,
            "Time limit of a request, in seconds.",
            name="server_timeout",
            range=WEEK_S,
            rare=True,
        ),
    ] = 600.0


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """Where the prompts come from: a built-in task, a JSONL file, or a data set; and who replies.

    Attributes:
        dataset: wins over ``task``.
        answer_column: None: no rewards.
        environment: None: every sequence has one turn.
    """

    task: Annotated[
        str,
        Flag(
            PROMPTS,
            "Built-in prompts: arithmetic, or calculator (two or three steps, with that "
            "environment).",
        ),
    ] = "arithmetic"
    path: Annotated[
        str | None,
        Flag(
            PROMPTS,
            "JSONL file: prompt, messages or prompt_token_ids per line. Default: --task.",
            name="prompts",
        ),
    ] = None
    num_prompts: Annotated[
        int,
        Flag(
            PROMPTS,
            "Default: 64, or all of a --prompts file.",
            kind=int | None,
            range=Range(1, MANY),
        ),
    ] = 64
    seed: Annotated[int, Flag(PROMPTS, "Seed of prompts, sampling and intervals.", range=SEEDS)] = 0
    dataset: Annotated[
        str | None,
        Flag(PROMPTS, "Hub id, file (jsonl, json, parquet, csv) or save_to_disk directory."),
    ] = None
    dataset_config: Annotated[
        str | None, Flag(PROMPTS, "Configuration of a hub data set.", rare=True)
    ] = None
    dataset_split: Annotated[str, Flag(PROMPTS, "Split of the data set.", rare=True)] = "train"
    prompt_column: Annotated[
        str | None, Flag(PROMPTS, "Column with the prompts; default: found by its name.")
    ] = None
    answer_column: Annotated[
        str | None, Flag(PROMPTS, "Column with the answers (whole numbers), for rewards.")
    ] = None
    environment: Annotated[
        str | None,
        Flag(
            PROMPTS,
            "Replies to responses, for several turns: retry, calculator, or your "
            "package.module:Class; docs/how-to/multi-turn.md.",
        ),
    ] = None
    max_turns: Annotated[
        int, Flag(PROMPTS, "Responses per sequence, with --environment.", range=Range(1, 1000))
    ] = 4
    max_observation_tokens: Annotated[
        int,
        Flag(
            PROMPTS, "Tokens kept of a reply, with --environment.", range=Range(1, 10**6), rare=True
        ),
    ] = 256

    @property
    def file(self) -> Path | None:
        """The file or folder of this machine that prompts are read from; None: none is named.

        The one place that says what a name means: what decides whether a stored spec may name a
        file, and what reads the file, both ask here.
        """
        if self.dataset is not None:
            local = Path(self.dataset).expanduser()
            return local if local.exists() else None  # None: of a hub
        return Path(self.path) if self.path is not None else None

    @property
    def turns(self) -> int:
        """Responses of a sequence, at most."""
        return self.max_turns if self.environment else 1


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What the engine is asked to do."""

    engine: EngineSpec = field(default_factory=EngineSpec)
    prompts: PromptSpec = field(default_factory=PromptSpec)
    sampling: Sampling = field(default_factory=Sampling)
    exact_kl: Annotated[
        int,
        Flag(
            ENGINE,
            "Tokens at which whole distributions are kept, for exact KL; 0: off.",
            range=Range(0, 10**7),
            rare=True,
        ),
    ] = 512
    exact_kl_top_k: Annotated[
        int,
        Flag(
            ENGINE,
            "Ids kept per distribution, for vocabularies above 4,096.",
            range=Range(1, 10**6),
            rare=True,
        ),
    ] = 64

    @property
    def most_after_prompt(self) -> int:
        """Tokens that all turns together may put after a prompt."""
        between = self.prompts.max_observation_tokens + AROUND_A_REPLY
        return self.sampling.max_tokens + (self.prompts.turns - 1) * (
            self.sampling.max_tokens + between
        )


OWN_SCORER = "fsdp"  # mismatch's own FSDP2 world
FILE_SCORER = "file"  # a trainer on another machine, whose numbers come in a file


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """One way to run the training forward.

    Attributes:
        dtype: FSDP's ``param_dtype``: the dtype of the computation.
        master_dtype: of parameters at rest; "auto": bf16 where every value of the checkpoint is
            one, so that what a layer gathers is bit for bit what float32 would give, else fp32.
        offload: FSDP2's CPU offload: shards rest in host memory, each layer is copied when used.
        autocast: dtype of an enclosing ``torch.autocast``, or None.
        head_dtype: dtype of the LM head's matmul; None: that of the computation.
        experts: transformers' experts implementation; "auto" is transformers' own choice.
        router_dtype: "fp32": routers multiply, score and choose in float32; None: in the
            computation's dtype, or as the family's own code says.
        layout: "padding" (one row per sequence, right-padded) or "packing" (several per row).
        sequence_parallel: N ranks that share each micro-batch, every one with 1 / N of its
            positions (Ulysses); see mismatch/training/sequence_parallel.py.
        temperature_in: where logits are divided by T: "fp32" after the upcast; "logits" before it,
            in the dtype they have; "logits-rounded" likewise, with T rounded to that dtype first.
        logprobs_dtype: what logprobs and entropies are rounded to on their way out, or None.
        grad: run the forward in train mode with gradients on.
        layers: as of the engine.
        adapter: merged into what is loaded.
        adapter_as: "own": applied apart from the base, as an engine's own LoRA does.
        weights: the form of the experts that are loaded, see mismatch/models/derived.py.
        replay_routing: "ids": use the experts of another scoring, weighted by this model's own
            gate; "ids+weights": its weights too, as constants. None: the model's own choice.
        replay_source: the scoring whose routes are replayed; None: the engine's decode.
        inject: (name, size) of disturbances planted on purpose, see mismatch/models/moe.py.
        scorer: whose code computes the log-probabilities: "fsdp" is ours, see mismatch/trainers.
        python: interpreter of the training processes; None: this interpreter.
        scorer_config: the framework's own configuration, of an adapter.
        scorer_overrides: ``key=value`` over that file.
    """

    model: str = ""
    revision: str | None = None
    scorer: Annotated[
        str,
        Flag(TRAIN, "Whose code scores: fsdp, verl, trl, megatron, module:Class, or file."),
    ] = OWN_SCORER
    python: str | None = None
    scorer_config: Annotated[
        str | None,
        Flag(TRAIN, "For --scorer: your framework's file, logprobs, or tp=2,ep=2."),
    ] = None
    scorer_overrides: tuple[str, ...] = ()
    accelerate_config: Annotated[
        str | None, Flag(TRAIN, "Your accelerate file; --scorer trl launches its ranks by it.")
    ] = None
    dtype: Annotated[
        Dtype, Flag(TRAIN, "Dtype in which the trainer computes.", name="train_dtype")
    ] = "bf16"
    master_dtype: Annotated[
        MasterDtype,
        Flag(
            TRAIN,
            "Dtype of FSDP's parameter shards; auto: the checkpoint's, if that loses nothing.",
            rare=True,
        ),
    ] = "auto"
    offload: Annotated[
        bool, Flag(TRAIN, "Keep the sharded parameters in host memory.", switch=True)
    ] = False
    autocast: Annotated[Dtype | None, Flag(TRAIN, "Run under torch.autocast, as verl does.")] = None
    attention: Annotated[
        str,
        Flag(
            TRAIN,
            "auto, eager, sdpa, sink-sdpa …, or your own package.module:function; "
            "no-sinks is a planted fault.",
        ),
    ] = "auto"
    experts: Annotated[
        str,
        Flag(
            TRAIN,
            "auto, eager, grouped_mm, batched_mm; bounded: least memory.",
            name="experts_implementation",
        ),
    ] = "auto"
    head_dtype: Annotated[Dtype | None, Flag(TRAIN, "Dtype of the LM head.", rare=True)] = None
    router_dtype: Annotated[Dtype | None, Flag(TRAIN, "Dtype of the routers.")] = None
    micro_batch_tokens: Annotated[
        int, Flag(TRAIN, "Tokens per micro-batch.", range=Range(1, MANY))
    ] = 4096
    layout: Annotated[
        Literal["padding", "packing"], Flag(TRAIN, "One sequence per row, or several.")
    ] = "padding"
    sequence_parallel: Annotated[
        int, Flag(TRAIN, "Ranks that share each sequence: Ulysses.", range=RANKS)
    ] = 1
    grad: bool = False
    routing: bool = True
    trust_remote_code: bool = False
    layers: int | None = None
    adapter: Annotated[
        Adapter | None,
        Flag(MODEL, "Another adapter for the trainer.", name="train_adapter", kind=str | None),
    ] = None
    adapter_as: AdapterWay | None = None
    temperature_in: Annotated[
        TemperatureIn, Flag(TRAIN, "Where logits are divided by the temperature.", rare=True)
    ] = "fp32"
    logprobs_dtype: Annotated[
        Dtype | None, Flag(TRAIN, "Dtype of the trainer's logprobs.", rare=True)
    ] = None
    weights: WeightsForm = AS_STORED
    replay_routing: Annotated[
        ReplayMode | None,
        Flag(TRAIN, "Run the engine's experts in the trainer: router replay (R3)."),
    ] = None
    replay_source: str | None = None
    inject: Injections = ()
    inject_seed: int = 0


@dataclass(frozen=True, slots=True)
class Pass:
    """One scoring that a training world has to make.

    Attributes:
        folder: within the run directory, whose tokens it scores; "": the run's own.
        optional: what may keep it out while the others go on: "memory" that does not suffice,
            "any" failure, or a budget of time that is used up. "": nothing may.
    """

    name: str
    spec: TrainSpec
    folder: str = ""
    optional: Literal["", "memory", "any"] = ""


@dataclass(frozen=True, slots=True)
class CheckSpec:
    """The whole of `mismatch check`.

    Attributes:
        preset: the framework whose trainer ``train`` imitates, with the version read; or "".
        not_reproduced: what that framework does and this run does not, one sentence each.
        quick: leave out the passes that only the square needs, see experiments.scoring_passes.
        two_passes: the trainer's "old" against its "new" pass. None: from passes that are made
            anyway; True: with what router replay does to them; False: leave it out.
        inject: disturbances of the new pass alone.
        weights_effect: also score with the trainer's weights in this form; None: do not. bf16:
            with those of the engine's checkpoint.
        fixes: what ``--fix`` asked for: ids, "a+b", "all" or a side, see experiments.fixes.
        verdict: which verdict the run ends with; "after-fixes": that of the best combination.
        explain: tell the leading causes apart by experiment, see experiments.explanation. None: if
            the run is broken and no cause is confirmed.
        extras: flags of features that were set, by name; see mismatch/plugins.py.
    """

    rollout: RolloutSpec = field(default_factory=RolloutSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    nproc_per_node: Annotated[
        int,
        Flag(
            TRAIN,
            "Ranks; default: GPUs (of 8 those that engines leave), 2 on a CPU.",
            kind=int | None,
            range=RANKS,
        ),
    ] = 2
    noise_floor: Annotated[
        bool, Flag(TRAIN, "Also run the trainer twice and in float32 to measure noise.", rare=True)
    ] = True
    seed: int = 0  # of the bootstrap
    context_length: Annotated[
        int | None,
        Flag(
            TRAIN,
            "Tokens of one long sequence that both sides score in float32 too (0: none); "
            "default: 2,048, or --max-tokens if that is more.",
            range=Range(0, MANY),
            rare=True,
        ),
    ] = None
    preset: str = ""
    not_reproduced: tuple[str, ...] = ()
    quick: bool = False
    two_passes: Annotated[
        bool | None,
        Flag(
            TRAIN,
            "Compare PPO's two passes, also with router replay (two more passes); "
            "default: only the passes of the noise floor.",
            rare=True,
        ),
    ] = None
    weights_effect: WeightsForm | None = None
    inject: Annotated[
        Injections,
        Flag(
            TRAIN,
            "router-noise=SIGMA: disturb the new pass on purpose; repeatable.",
            kind=list[str] | None,
            rare=True,
        ),
    ] = ()
    fixes: Annotated[
        tuple[str, ...],
        Flag(
            FIXES,
            "Apply and measure: ids of `mismatch fixes` with commas, a+b together, a side "
            "(engine, train, estimator), or all; repeatable.",
            name="fix",
            kind=list[str] | None,
        ),
    ] = ()
    budget_minutes: Annotated[
        float | None,
        Flag(
            FIXES,
            "Minutes for fixes and experiments, on top of the check; default: no limit.",
            range=Range(0, MANY, above=True),
        ),
    ] = None
    verdict: Annotated[
        VerdictFrom,
        Flag(FIXES, "Take verdict and exit code as-is, or after the best fixes.", rare=True),
    ] = "as-is"
    explain: Annotated[
        bool | None,
        Flag(
            FIXES,
            "Run experiments that separate the leading causes; with --resume RUN for a finished "
            "run. Default: of a BROKEN run without a confirmed cause, for ten minutes at most.",
        ),
    ] = None
    overlap: Annotated[
        bool | None,
        Flag(
            TRAIN,
            "Score while the engine rescores; default: if they use different GPUs.",
            rare=True,
        ),
    ] = None
    extras: tuple[tuple[str, Any], ...] = ()

    def extra(self, name: str) -> Any:
        """Return the value of a feature's flag; None where it was not set."""
        return dict(self.extras).get(name)


def to_dict(spec: Any) -> dict[str, Any]:
    """Return a spec as plain JSON data."""
    return dataclasses.asdict(spec)


def weights_key(spec: TrainSpec) -> tuple[Any, ...]:
    """Return what has to be equal for two passes to share loaded weights."""
    return (
        spec.model,
        spec.revision,
        spec.dtype,
        spec.master_dtype,
        spec.offload,
        spec.weights,
        spec.layers,
        spec.adapter,
        spec.adapter_as,
        spec.trust_remote_code,
    )


def load_key(spec: TrainSpec) -> tuple[Any, ...]:
    """Return what has to be equal for two passes to run the same kernels on the same weights."""
    return (*weights_key(spec), spec.attention, spec.autocast, spec.experts)


TURNS = ("environment", "max_turns", "max_observation_tokens")
PLACES = (*("servers", "served_model", "server_concurrency", "server_timeout_s"), "overlap")
LATER = {"layers": None, "adapter": None, "adapter_as": None, "min_p": 0.0}
LATER |= {"repetition_penalty": 1.0}


PACKAGED = re.compile(r"[/\\]mismatch[/\\]models[/\\][^/\\]+$")


def _anywhere(data: dict[str, Any]) -> dict[str, Any]:
    """Return a spec's data without what changes no number: where it runs, turns if there is one."""
    dropped = {*PLACES} if data.get("environment") else {*PLACES, *TURNS}
    # A spec from before one of these fields has the same hash.
    dropped |= {name for name, off in LATER.items() if data.get(name, name) == off}
    return {
        name: _anywhere(value) if isinstance(value, dict) else value
        for name, value in data.items()
        if name not in dropped
    }


def portable(data: dict[str, Any]) -> dict[str, Any]:
    """Return a spec's data with short names for models that ship with the package, wherever it is.

    >>> portable({"train": {"model": "/somewhere/mismatch/models/tiny-gpt-oss"}})
    {'train': {'model': 'tiny-gpt-oss'}}
    """
    named: dict[str, Any] = {
        name: portable(value) for name, value in data.items() if isinstance(value, dict)
    }
    if isinstance(model := data.get("model"), str) and PACKAGED.search(model):
        named["model"] = PurePath(model).name
    return data | named


def spec_hash(spec: Any) -> str:
    """Return twelve hex digits that change whenever anything in the spec does, but the place.

    A run may go on with a server at another address. Passes do not depend on what runs next to
    them.
    """
    import hashlib
    import json

    text = json.dumps(_anywhere(portable(to_dict(spec))), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
