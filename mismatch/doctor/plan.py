"""What `mismatch check` would do, without doing it: stages, tokens, kernels, memory, limits.

Works offline: sizes come from the model's config.json (its directory, the hub's cache, or the one
that ships for an alias). Nothing is loaded and no process is started.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

from mismatch.doctor.choices import ExpertChoice, expert_choices, expert_warnings
from mismatch.doctor.engine import Demand
from mismatch.doctor.fit import Fit, engine_fit, trainer_fits
from mismatch.doctor.gpus import machine_with, minutes, parse
from mismatch.doctor.machine import Machine
from mismatch.doctor.memory import Work
from mismatch.errors import MismatchError
from mismatch.models.config import FoundConfig, ModelConfig, find_config
from mismatch.run.scorings import TRAIN
from mismatch.specs import CheckSpec, PromptSpec

TEMPLATE_TOKENS = 96  # of a chat template: gpt-oss's system message takes 68 to 80
CHARACTERS_PER_TOKEN = 3  # low, so that prompts are rather over- than underestimated
UNKNOWN_PROMPT_TOKENS = 512
# What resolve_attention makes of these names without a trial, for a model with sinks (True) and
# one without, in the families whose memory is predicted; a test compares the two.
PLAIN_KERNELS = {
    True: {
        "auto": "sink-sdpa",
        "sink-sdpa": "sink-sdpa",
        "transformers": "eager",
        "eager": "eager",
    },
    False: {"auto": "sdpa", "sdpa": "sdpa", "transformers": "sdpa", "eager": "eager"},
}


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
    experts: tuple[ExpertChoice, ...] = field(default=())
    minutes: tuple[float, float] | None = None
    gpus: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        return _warnings(self.sides, self.experts)

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
        gpus: GPUs in place of the machine's own, e.g. "8xH100-80GB"; see mismatch.doctor.gpus.

    Raises:
        MismatchError: no config.json offline, a family whose memory cannot be predicted, prompts
            that cannot be read, or a kernel that would be refused.
    """
    from mismatch.doctor.machine import look
    from mismatch.experiments.passes import training_passes

    machine, kind = machine or look(try_imports=False), None
    if gpus:
        count, kind = parse(gpus)
        machine = machine_with(machine, count, kind)
    found = find_config(spec.train.model, spec.train.revision)
    shape = found.model.require_counts()
    prompts, longest_prompt, notes = _prompts(spec.rollout.prompts)
    longest = longest_prompt + spec.rollout.sampling.max_tokens
    passes = training_passes(spec)
    if spec.train.autocast:
        notes.append("the copies of the weights that autocast makes are not counted")
    if kind is not None:
        notes.append(f"{kind.name}: {kind.supported}")
    sequences = prompts * spec.rollout.sampling.samples_per_prompt
    sides, experts = _sides(spec, shape, prompts, longest, machine)
    return Plan(
        model=spec.rollout.engine.model,
        config_source=found.source,
        device=machine.device,
        stages=_stages(spec, [item.name for item in passes]),
        tokens=_tokens(spec, prompts, longest, len(passes)),
        kernels=_kernels(spec, found, machine.device),
        sides=sides,
        not_measured=tuple(_not_measured(spec, shape, machine)),
        notes=tuple(notes),
        experts=experts,
        minutes=minutes(spec, shape, passes, longest, sequences, kind) if kind else None,
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
    own = [side for side in sides if side.prediction.side not in side_passes(sides)]
    return [s for s in own if s.level == "does not fit" and (s.certain or not certain)]


def side_passes(sides: Sequence[Fit]) -> set[str]:
    """Names of the passes that a check can do without."""
    return {side.prediction.side for side in sides} - {"engine", TRAIN, "host memory"}


def memory_of(spec: CheckSpec) -> Memory:
    """What :func:`plan` would say of memory, alone and fast; empty where nothing is predicted."""
    from mismatch.doctor.machine import look

    try:
        shape = find_config(spec.train.model, spec.train.revision).model.require_counts()
        prompts, longest_prompt, _ = _prompts(spec.rollout.prompts)
        longest = longest_prompt + spec.rollout.sampling.max_tokens
        sides, experts = _sides(spec, shape, prompts, longest, look(try_imports=False))
    except MismatchError:
        return Memory()
    out = [s for s in sides if s.prediction.side in side_passes(sides) and s.certain]
    return Memory(
        _warnings(sides, experts),
        tuple(text for side in refused(sides, certain=True) for text in side.warnings),
        {side.prediction.side: " ".join(side.warnings) for side in out},
    )


def _warnings(sides: tuple[Fit, ...], experts: tuple[ExpertChoice, ...]) -> tuple[str, ...]:
    return (*(text for side in sides for text in side.warnings), *expert_warnings(experts))


def _sides(
    spec: CheckSpec, shape: ModelConfig, prompts: int, longest: int, machine: Machine
) -> tuple[tuple[Fit, ...], tuple[ExpertChoice, ...]]:
    """Memory of the engine and of every pass of the trainer, and of other ways to run experts."""
    from mismatch.experiments.passes import training_passes

    sampling = spec.rollout.sampling
    sequences = prompts * sampling.samples_per_prompt
    demand, work = Demand(sequences, longest, sampling), Work([longest] * sequences, sampling)
    passes = training_passes(spec)
    engine = spec.rollout.engine
    served = shape  # the engine's model may be another checkpoint than the trainer's
    if (engine.model, engine.revision) != (spec.train.model, spec.train.revision):
        served = find_config(engine.model, engine.revision).model.require_counts()
    # The memory of servers is not ours.
    ours = () if engine.servers else (engine_fit(spec, served, demand, machine),)
    sides = (*ours, *trainer_fits(spec, shape, work, machine, passes))
    return sides, expert_choices(shape, passes, spec.nproc_per_node, work, machine.device)


# ---------------------------------------------------------------- what there is to do


def _tokens(spec: CheckSpec, prompts: int, longest: int, passes: int) -> dict[str, int]:
    """Upper bounds: no response ends before its last token."""
    sampling = spec.rollout.sampling
    sequences = prompts * sampling.samples_per_prompt
    return {
        "prompts": prompts,
        "sequences": sequences,
        "longest sequence": longest,
        "sampled at most": sequences * sampling.max_tokens,
        "rescored by the engine's prefill": sequences * longest * spec.rollout.engine.prefill,
        "scored by the trainer at most": sequences * longest * passes,
    }


def _prompts(spec: PromptSpec) -> tuple[int, int, list[str]]:
    """Number of prompts, tokens of the longest (estimated without a tokenizer), and remarks."""
    if spec.dataset is not None:
        note = f"prompts of the data set are taken to have {UNKNOWN_PROMPT_TOKENS} tokens at most"
        return spec.num_prompts, UNKNOWN_PROMPT_TOKENS, [note]
    from mismatch.prompts.prompt import Prompt
    from mismatch.prompts.sources import read_prompts

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


def _stages(spec: CheckSpec, passes: list[str]) -> tuple[Stage, ...]:
    from mismatch.experiments.passes import float32_engine, wants_square

    engine = spec.rollout.engine
    prefill = ", then rescores the same tokens by prefill" if engine.prefill else ""
    ranks = f"{spec.nproc_per_node} rank{'s' if spec.nproc_per_node > 1 else ''}"
    again = not engine.servers and wants_square(spec) and float32_engine(spec.rollout) is not None
    float32 = Stage("rollout in float32", f"1 × {engine.engine}, float32", "scores the same tokens")
    return (
        Stage(
            "rollout",
            ", ".join(engine.servers)
            or f"1 × {engine.engine}, tensor parallel {engine.tensor_parallel_size}",
            f"samples{prefill}",
        ),
        *([float32] if again else []),
        Stage("score", f"torchrun, {ranks}, FSDP2", f"passes: {', '.join(passes)}"),
        Stage("compare", "this process", "metrics with intervals, semantic checks, noise floor"),
        Stage("report", "this process", "report.html, report.json, report.md, tokens.parquet"),
    )


def _kernels(spec: CheckSpec, found: FoundConfig, device: str) -> dict[str, str]:
    train = spec.train
    kernels = {
        "engine": "the servers' own"
        if spec.rollout.engine.servers
        else f"{spec.rollout.engine.engine}, {spec.rollout.engine.dtype}",
        "trainer": f"{train.dtype}, parameters at rest {found.model.rests_in(train.master_dtype)}"
        + (" in host memory" if train.offload else "")
        + (f", autocast {train.autocast}" if train.autocast else ""),
    }
    if found.model.require_counts().experts:
        auto = "grouped_mm (transformers' choice)"
        kernels["experts"] = auto if train.experts == "auto" else train.experts
    kernels["attention"] = _attention(train.attention, found, device)
    return kernels


def _attention(name: str, found: FoundConfig, device: str) -> str:
    """The kernel that the trainer would resolve; MismatchError where it would refuse."""
    model = found.model
    label = PLAIN_KERNELS[model.sinks].get(name, "")
    if not label:
        if any(find_spec(package) is None for package in ("torch", "transformers")):
            return f"{name} (not resolved: torch is not installed)"
        return _resolved_attention(name, found.values)
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
    engine = spec.rollout.engine
    missing = []
    if machine.device == "cpu":
        missing.append("batch variance of GPU kernels: CPU kernels hardly depend on the batch")
        missing.append("CUDA kernels and NCCL: there is no GPU here")
    if not shape.experts:
        missing.append("routing disagreement: a dense model has no experts")
    elif not (engine.routing and spec.train.routing):
        missing.append("routing disagreement: --no-routing")
    if not engine.prefill:
        missing.append("the engine's own noise (decode against prefill): --no-prefill")
    elif spec.rollout.sampling.truncates:
        missing.append("prefill under truncation: prefill logprobs are of the whole distribution")
    if spec.quick or not spec.noise_floor:
        missing.append(f"rounding or fault: {'--quick' if spec.quick else '--no-noise-floor'}")
    if not spec.noise_floor:
        missing.append("the trainer's own noise and float32: --no-noise-floor")
    return missing
