"""What `mismatch check` would do, without doing it: stages, tokens, kernels, memory, limits.

Works offline: sizes come from the model's config.json (its directory, the hub's cache, or the one
that ships for an alias). Nothing is loaded and no process is started.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from mismatch.doctor.fit import (
    SPLITS,
    ExpertChoice,
    Fit,
    engine_fit,
    expert_choices,
    expert_warnings,
    predict_sync_probe,
    trainer_fits,
)
from mismatch.doctor.machine import GpuType, Machine, inspect_machine, machine_with, parse_kind
from mismatch.doctor.memory import Prediction, Workload
from mismatch.engines.registry import engine_info
from mismatch.errors import MismatchError
from mismatch.experiments.scoring_passes import float32_engine, training_passes, wants_square
from mismatch.models.config import FoundConfig, ModelConfig, find_config
from mismatch.prompts.prompt import Prompt
from mismatch.prompts.sources import read_prompts
from mismatch.run.machine import in_words, placement
from mismatch.run.store import TRAIN
from mismatch.specs import CheckSpec, Pass, PromptSpec

TEMPLATE_TOKENS = 96  # of a chat template: gpt-oss's system message takes 68 to 80
CHARACTERS_PER_TOKEN = 3  # low, so that prompts are rather over- than underestimated
UNKNOWN_PROMPT_TOKENS = 512
# What resolve_attention makes of these names without a trial, for a model with sinks (True) and
# one without, in the families whose memory is predicted; a test compares the two.
_SINKS = {"auto": "sink-sdpa", "sink-sdpa": "sink-sdpa", "transformers": "eager", "eager": "eager"}
_NO_SINKS = {"auto": "sdpa", "sdpa": "sdpa", "transformers": "sdpa", "eager": "eager"}
PLAIN_KERNELS = {True: _SINKS, False: _NO_SINKS}
# Shares of the data sheet that such work is usually seen to reach, (slow, fast): matrix products,
# memory traffic; then seconds of a step, and of the start of the engine (compilation and graphs)
# with the training world.
PRODUCTS, TRAFFIC, STEP_S = (0.1, 0.45), (0.25, 0.7), (0.02, 0.003)
DISK_BYTES_S = (0.3e9, 3e9)
STARTS_S = (300.0, 60.0)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the run, in order.

    Attributes:
        processes: how many, and what they are.
    """

    name: str
    processes: str
    work: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A dry run.

    Attributes:
        config_source: where the model's sizes were read.
        tokens: "sampled at most", "longest sequence", "scored at most" and so on.
        kernels: what would run: attention, experts, engine.
        sides: memory of the engine and of every pass on one device.
        experts: what each way of running the experts would need; () for a dense model.
        not_measured: what this run cannot show here, and why.
        notes: assumptions.
        sync_probe: what a probe of the weight sync takes beside the engine.
        minutes: that it may take, fewest and most, an estimate; None where nothing is known of it.
        gpus: those that the plan is for, where they are not here.
    """

    model: str
    config_source: str
    device: str
    stages: tuple[Stage, ...]
    tokens: dict[str, int]
    kernels: dict[str, str]
    sides: tuple[Fit, ...]
    not_measured: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())
    sync_probe: Prediction | None = None
    experts: tuple[ExpertChoice, ...] = field(default=())
    minutes: tuple[float, float] | None = None
    gpus: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        texts = [text for side in self.sides for text in side.warnings]
        return (*texts, *expert_warnings(self.experts))

    @property
    def fits(self) -> bool:
        """Whether the check could run; passes beside the trainer's own may be left out."""
        return not refused(self.sides)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        data = asdict(self)
        for plain, side in zip(data["sides"], self.sides, strict=True):
            plain["prediction"]["peak_bytes"] = side.prediction.peak_bytes
            plain["prediction"]["moment"] = side.prediction.moment
        return {"schema": "mismatch.plan/1", **data, "fits": self.fits, "warnings": self.warnings}


def plan(spec: CheckSpec, machine: Machine | None = None, gpus: str = "") -> Plan:
    """Plan a check.

    Args:
        machine: where it would run; None: this machine (imports are not tried).
        gpus: GPUs in place of the machine's own, e.g. "8xH100-80GB".

    Raises:
        MismatchError: no config.json offline, a family whose memory cannot be predicted, prompts
            that cannot be read, or a kernel that would be refused.
    """
    machine, kind = machine or inspect_machine(try_imports=False), None
    if gpus:
        count, kind = parse_kind(gpus)
        machine = machine_with(machine, count, kind)
    spec = placed(spec, machine)
    config = find_config(spec.train.model, spec.train.revision)
    shape = config.model.require_counts()
    work, tokens, notes = work_of(spec)
    passes = training_passes(spec)
    if spec.train.autocast:
        notes.append("the copies of the weights that autocast makes are not counted")
    if kind is not None:
        notes.append(f"{kind.name}: {kind.supported}")
    sides, experts = _sides(spec, shape, work, machine)
    return Plan(
        model=spec.rollout.engine.model,
        config_source=config.source,
        device=machine.device,
        stages=_stages(spec, [item.name for item in passes], len(machine.gpus)),
        tokens=tokens,
        kernels=_kernels(spec, config, machine.device),
        sides=sides,
        not_measured=tuple(_not_measured(spec, shape, machine)),
        notes=tuple(notes),
        sync_probe=predict_sync_probe(shape, spec.rollout.engine),
        experts=experts,
        minutes=_minutes(spec, shape, passes, sum(work.lengths), kind) if kind else None,
        gpus=gpus,
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """What memory allows of a check, known before anything starts.

    Attributes:
        warnings: as of a plan.
        refused: why it cannot run at all, one sentence each.
        left_out: passes beside the trainer's own that cannot fit, and why.
    """

    warnings: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)


def refused(sides: Sequence[Fit], certain: bool = False) -> list[Fit]:
    """Of the engine, the trainer's own pass and the host's memory those that do not fit.

    Args:
        certain: only what can never fit here.
    """
    own = [fit for fit in sides if fit.side not in side_passes(sides)]
    return [fit for fit in own if fit.level == "does not fit" and (fit.certain or not certain)]


def side_passes(sides: Sequence[Fit]) -> set[str]:
    """Names of the passes that a check can do without."""
    return {fit.side for fit in sides} - {"engine", TRAIN, "host memory"}


def placed(spec: CheckSpec, machine: Machine) -> CheckSpec:
    """With as many replicas of the engine as the GPUs allow, where nobody said how many.

    On the GPUs that the trainer leaves over, if the engine fits there, else on all of them, in
    turn with the trainer. A model that does not fit on one GPU gets a larger tensor parallel size.
    """
    engine, gpus = spec.rollout.engine, len(machine.gpus)
    free = gpus - spec.nproc_per_node
    if engine.data_parallel_size is not None or engine.servers or gpus < 2:
        return spec
    if not engine_info(engine.engine).replicas:
        return spec
    try:
        shape = find_config(engine.model, engine.revision).model.require_counts()
        work, tokens, _ = work_of(spec)
        for room in (free, gpus):
            size = _tensor_parallel(spec, shape, work, machine, room)
            if size:
                count = min(room // size, tokens["prompts"])
                wide = replace(engine, tensor_parallel_size=size, data_parallel_size=count)
                return replace(spec, rollout=replace(spec.rollout, engine=wide))
    except MismatchError:  # not for this function to say
        pass
    return spec


def _tensor_parallel(
    spec: CheckSpec, shape: ModelConfig, work: Workload, machine: Machine, room: int
) -> int:
    """The smallest size at which the engine fits well on ``room`` GPUs, or just; 0: none."""
    own = spec.rollout.engine.tensor_parallel_size
    sizes = [n for n in (own, *SPLITS) if own <= n <= room and shape.heads % n == 0]
    levels: dict[str, int] = {}
    for size in sizes:
        engine = replace(spec.rollout.engine, tensor_parallel_size=size)
        wider = replace(spec, rollout=replace(spec.rollout, engine=engine))
        levels.setdefault(engine_fit(wider, shape, work, machine).level, size)
    return levels.get("fits") or levels.get("tight") or 0


def memory_of(spec: CheckSpec) -> Memory:
    """What :func:`plan` would say of memory, alone and fast; empty where nothing is predicted."""
    try:
        shape = find_config(spec.train.model, spec.train.revision).model.require_counts()
        sides, experts = _sides(spec, shape, work_of(spec)[0], inspect_machine(try_imports=False))
    except MismatchError:
        return Memory()
    optional = side_passes(sides)
    return Memory(
        (*(text for fit in sides for text in fit.warnings), *expert_warnings(experts)),
        tuple(text for fit in refused(sides, certain=True) for text in fit.warnings),
        {f.side: " ".join(f.warnings) for f in sides if f.side in optional and f.certain},
    )


def _sides(
    spec: CheckSpec, shape: ModelConfig, work: Workload, machine: Machine
) -> tuple[tuple[Fit, ...], tuple[ExpertChoice, ...]]:
    """Memory of the engine and of every pass of the trainer, and of other ways to run experts."""
    passes, engine = training_passes(spec), spec.rollout.engine
    served = shape  # the engine's model may be another checkpoint than the trainer's
    if (engine.model, engine.revision) != (spec.train.model, spec.train.revision):
        served = find_config(engine.model, engine.revision).model.require_counts()
    # The memory of servers is not ours.
    ours = () if engine.servers else (engine_fit(spec, served, work, machine),)
    sides = (*ours, *trainer_fits(spec, shape, work, machine, passes))
    return sides, expert_choices(shape, passes, spec.nproc_per_node, work, machine.device)


# ---------------------------------------------------------------- what there is to do


def work_of(spec: CheckSpec) -> tuple[Workload, dict[str, int], list[str]]:
    """Sequences at their longest, the tokens that this makes at most, and remarks."""
    prompts, longest_prompt, notes = _prompts(spec.rollout.prompts)
    sampling = spec.rollout.sampling
    sequences = prompts * sampling.samples_per_prompt
    longest = longest_prompt + spec.rollout.most_after_prompt
    tokens = {
        "prompts": prompts,
        "sequences": sequences,
        "longest sequence": longest,
        "sampled at most": sequences * sampling.max_tokens * spec.rollout.prompts.turns,
        "rescored by the engine's prefill": sequences * longest * spec.rollout.engine.prefill,
        "scored by the trainer at most": sequences * longest * len(training_passes(spec)),
    }
    return Workload([longest] * sequences, sampling), tokens, notes


def _prompts(spec: PromptSpec) -> tuple[int, int, list[str]]:
    """Number of prompts, tokens of the longest (estimated without a tokenizer), and remarks."""
    if spec.dataset is not None:
        note = f"prompts of the data set are taken to have {UNKNOWN_PROMPT_TOKENS} tokens at most"
        return spec.num_prompts, UNKNOWN_PROMPT_TOKENS, [note]

    def tokens(prompt: Prompt) -> int:
        if prompt.token_ids is not None:
            return len(prompt.token_ids)
        if prompt.messages is not None:
            length = sum(len(str(message.get("content") or "")) for message in prompt.messages)
            return math.ceil(length / CHARACTERS_PER_TOKEN) + TEMPLATE_TOKENS
        return math.ceil(len(prompt.text or "") / CHARACTERS_PER_TOKEN)

    prompts = read_prompts(spec)
    notes = []
    if any(prompt.token_ids is None for prompt in prompts):
        notes.append(
            f"tokens of prompts are estimated: {CHARACTERS_PER_TOKEN} characters each, "
            f"{TEMPLATE_TOKENS} for the chat template"
        )
    return len(prompts), max(tokens(prompt) for prompt in prompts), notes


def _stages(spec: CheckSpec, passes: list[str], gpus: int) -> tuple[Stage, ...]:
    engine, devices = spec.rollout.engine, placement(spec, gpus)
    replicas = engine.data_parallel_size or 1
    where = in_words(devices.engine)
    prefill = ", then rescores the same tokens by prefill" if engine.prefill else ""
    ranks = f"{spec.nproc_per_node} rank{'s' if spec.nproc_per_node > 1 else ''}"
    again = not engine.servers and wants_square(spec) and float32_engine(spec.rollout) is not None
    meanwhile = ", while the engine rescores" if devices.overlap and not spec.fixes else ""
    float32 = Stage(
        "rollout in float32",
        f"{replicas} × {engine.engine}, float32{where}",
        "scores the same tokens",
    )
    return (
        Stage(
            "rollout",
            ", ".join(engine.servers)
            or f"{replicas} × {engine.engine}, tensor parallel {engine.tensor_parallel_size}"
            f"{where}",
            f"samples{prefill}",
        ),
        *([float32] if again else []),
        Stage(
            "score",
            f"torchrun, {ranks}, FSDP2{in_words(devices.trainer)}",
            f"passes: {', '.join(passes)}{meanwhile}",
        ),
        Stage("compare", "this process", "metrics with intervals, semantic checks, noise floor"),
        Stage("report", "this process", "report.html, report.json, report.md, tokens.parquet"),
    )


def _kernels(spec: CheckSpec, config: FoundConfig, device: str) -> dict[str, str]:
    train = spec.train
    kernels = {
        "engine": "the servers' own"
        if spec.rollout.engine.servers
        else f"{spec.rollout.engine.engine}, {spec.rollout.engine.dtype}",
        "trainer": f"{train.dtype}, parameters at rest {config.model.rests_in(train.master_dtype)}"
        + (" in host memory" if train.offload else "")
        + (f", autocast {train.autocast}" if train.autocast else ""),
    }
    if config.model.require_counts().experts:
        auto = "grouped_mm (transformers' choice)"
        kernels["experts"] = auto if train.experts == "auto" else train.experts
    kernels["attention"] = _attention(train.attention, config, device)
    return kernels


def _attention(name: str, config: FoundConfig, device: str) -> str:
    """The kernel that the trainer would resolve; MismatchError where it would refuse."""
    model = config.model
    label = PLAIN_KERNELS[model.sinks].get(name, "")
    if not label:
        if any(find_spec(package) is None for package in ("torch", "transformers")):
            return f"{name} (not resolved: torch is not installed)"
        return _resolved_attention(name, config.values)
    if name == "auto" and label == "sink-sdpa" and device != "cpu":
        label += ", once it passed a trial on the GPU"
    return f"{label}, honours the sinks" if model.sinks else label


def _resolved_attention(name: str, values: dict[str, Any]) -> str:
    """Resolved as the trainer does it, which takes torch and transformers (5 s of CPU)."""
    from transformers import AutoConfig

    from mismatch.training.attention.resolve import resolve_attention

    fields = {k: v for k, v in values.items() if k not in ("model_type", "quantization_config")}
    resolved = resolve_attention(name, AutoConfig.for_model(values["model_type"], **fields))
    sinks = {None: "", True: ", honours the sinks", False: ", IGNORES the sinks"}
    return f"{resolved.label}{sinks[resolved.honours_sinks]}"


def _not_measured(spec: CheckSpec, shape: ModelConfig, machine: Machine) -> list[str]:
    engine, on_cpu = spec.rollout.engine, not machine.gpus
    routed = engine.routing and spec.train.routing
    truncated = engine.prefill and spec.rollout.sampling.truncates
    rounding = "--quick" if spec.quick else "--no-noise-floor"
    missing = {
        "batch variance of GPU kernels: CPU kernels hardly depend on the batch": on_cpu,
        "CUDA kernels and NCCL: there is no GPU here": on_cpu,
        "routing disagreement: a dense model has no experts": not shape.experts,
        "routing disagreement: --no-routing": shape.experts and not routed,
        "the engine's own noise (decode against prefill): --no-prefill": not engine.prefill,
        "prefill under truncation: prefill logprobs are of the whole distribution": truncated,
        f"rounding or fault: {rounding}": spec.quick or not spec.noise_floor,
        "the trainer's own noise and float32: --no-noise-floor": not spec.noise_floor,
    }
    return [text for text, applies in missing.items() if applies]


def _minutes(
    spec: CheckSpec, shape: ModelConfig, passes: Sequence[Pass], tokens: int, kind: GpuType
) -> tuple[float, float]:
    """(fewest, most) minutes of a check, every response at its longest: estimates."""
    ranks, engine = spec.nproc_per_node, spec.rollout.engine
    weights = 2 * shape.parameters  # in bf16, read from disk for each load and at each step
    loads = len({(item.spec.dtype, item.spec.weights) for item in passes})
    # Every micro-batch gathers and copies all weights once more.
    batches = max(1, tokens // ranks // spec.train.micro_batch_tokens)

    def seconds(end: int) -> float:
        traffic = kind.gb_s * 1e9 * TRAFFIC[end]
        forward = 2 * shape.active_parameters * tokens / PRODUCTS[end] / 1e12
        step = weights / engine.tensor_parallel_size / traffic + STEP_S[end]
        sampling = spec.rollout.sampling.max_tokens * step
        prefill = forward / kind.bf16 / engine.tensor_parallel_size
        reading = (1 + loads) * weights / DISK_BYTES_S[end]
        rates = [kind.fp32 if item.spec.dtype == "fp32" else kind.bf16 for item in passes]
        scoring = sum(forward / rate / ranks for rate in rates)
        gathers = len(passes) * batches * 2 * weights / traffic
        return STARTS_S[end] + reading + sampling + prefill + scoring + gathers

    return seconds(1) / 60, seconds(0) / 60
