"""What `mismatch check` would do, without doing it: stages, tokens, kernels, memory, limits.

Works offline: sizes come from the model's config.json (its directory, the hub's cache, or the one
that ships for an alias). No weight is loaded. What cannot be predicted of a model is named, and the
rest of the plan stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from mismatch.codec import to_json
from mismatch.doctor.fit import (
    SPLITS,
    Fit,
    copied_experts,
    engine_fit,
    trainer_fits,
)
from mismatch.doctor.machine import Machine, inspect_machine, machine_with, parse_kind
from mismatch.doctor.memory import Workload
from mismatch.errors import MismatchError, first_line
from mismatch.experiments.scoring_passes import float32_engine, training_passes, wants_square
from mismatch.models.config import FoundConfig, ModelConfig, find_config
from mismatch.models.sizes import SizedModel, UnknownSize, sized
from mismatch.prompts.prompt import Prompt
from mismatch.prompts.sources import read_prompts
from mismatch.run.machine import in_words, placement
from mismatch.run.store import TRAIN
from mismatch.specs import CheckSpec, PromptSpec

TEMPLATE_TOKENS = 96  # of a chat template: gpt-oss's system message takes 68 to 80
CHARACTERS_PER_TOKEN = 3  # low, so that prompts are rather over- than underestimated
UNKNOWN_PROMPT_TOKENS = 512
# Families whose predictions were compared with measured peaks (benchmarks/memory.py).
MEASURED = ("gpt_oss", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Plan:
    """A dry run.

    Attributes:
        config_source: where the model's sizes were read.
        stages: what runs in which process, in order.
        tokens: "sampled at most", "longest sequence", "scored at most" and so on.
        kernels: what would run: attention, experts, engine.
        sides: memory of the engine and of every pass on one device; () where it cannot be told.
        not_measured: what this run cannot show here, and why.
        notes: assumptions.
        warnings: of memory, each with the setting that would help.
        gpus: those that the plan is for, where they are not here.
    """

    model: str
    config_source: str
    device: str
    stages: dict[str, str]
    tokens: dict[str, int]
    kernels: dict[str, str]
    sides: tuple[Fit, ...]
    not_measured: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())
    warnings: tuple[str, ...] = ()
    gpus: str = ""

    @property
    def fits(self) -> bool:
        """Whether the check could run; passes beside the trainer's own may be left out."""
        return not refused(self.sides)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {"schema": "mismatch.plan/2", **to_json(self), "fits": self.fits}


def plan(spec: CheckSpec, machine: Machine | None = None, gpus: str = "") -> Plan:
    """Plan a check.

    Args:
        machine: where it would run; None: this machine (imports are not tried).
        gpus: GPUs in place of the machine's own, e.g. "8xH100-80GB".

    Raises:
        MismatchError: no config.json offline, prompts that cannot be read, or a kernel that would
            be refused.
    """
    machine = machine or inspect_machine(try_imports=False)
    config = find_config(spec.train.model, spec.train.revision)
    notes = []
    if gpus:
        count, kind = parse_kind(gpus)
        machine = machine_with(machine, count, kind)
        notes.append(f"{kind.name}: {kind.supported}")
    # Resolved first: once transformers is imported here, sizes are counted here as well.
    kernels = _kernels(spec, config, machine.device)
    spec = placed(spec, machine)
    work, tokens, remarks = work_of(spec)
    notes += remarks
    passes = training_passes(spec)
    if spec.train.autocast:
        notes.append("the copies of the weights that autocast makes are not counted")
    sides: tuple[Fit, ...] = ()
    warnings: list[str] = []
    try:
        shape = sized(config)
        sides = _sides(spec, shape, work, machine)
        warnings = [text for fit in sides for text in fit.warnings]
        warnings.append(copied_experts(shape, passes, spec.nproc_per_node, work, machine.device))
        notes += not_predicted(shape)
    except UnknownSize as error:
        notes.append(f"memory is not predicted: {error.message}")
    return Plan(
        model=spec.rollout.engine.model,
        config_source=config.source,
        device=machine.device,
        stages=_stages(spec, [item.name for item in passes], len(machine.gpus)),
        tokens=tokens,
        kernels=kernels,
        sides=sides,
        not_measured=tuple(_not_measured(spec, config.model, machine)),
        notes=tuple(notes),
        warnings=tuple(filter(None, warnings)),
        gpus=gpus,
    )


def not_predicted(shape: SizedModel) -> list[str]:
    """What the prediction of this model leaves out."""
    notes = []
    if shape.recurrent:
        notes.append(f"not predicted: state caches and activations of {', '.join(shape.recurrent)}")
    if shape.family not in MEASURED:
        notes.append(
            f"activations of {shape.family} follow the formulas of a plain decoder layer, which "
            f"were compared with measured peaks of {', '.join(MEASURED)}"
        )
    return notes


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
    """Return the spec with the smallest tensor parallel size at which the engine fits.

    It is looked for on the GPUs that the trainer leaves over, then on all of them, which engine and
    trainer use in turn.
    """
    engine, gpus = spec.rollout.engine, len(machine.gpus)
    if engine.servers or gpus < 2:
        return spec
    try:
        shape = sized(find_config(engine.model, engine.revision))
        work = work_of(spec)[0]
        for room in (gpus - spec.nproc_per_node, gpus):
            if size := _tensor_parallel(spec, shape, work, machine, room):
                wide = replace(engine, tensor_parallel_size=size)
                return replace(spec, rollout=replace(spec.rollout, engine=wide))
    except MismatchError:  # the plan itself says what is wrong with the model
        pass
    return spec


def _tensor_parallel(
    spec: CheckSpec, shape: SizedModel, work: Workload, machine: Machine, room: int
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
    """What :func:`plan` would say of memory, alone and fast; empty where no config.json is here."""
    try:
        shape = sized(find_config(spec.train.model, spec.train.revision))
        work, machine = work_of(spec)[0], inspect_machine(try_imports=False)
        sides = _sides(spec, shape, work, machine)
    except UnknownSize as error:
        return Memory((f"not predicted: {error.message}",))
    except MismatchError:
        return Memory()
    passes = training_passes(spec)
    copied = copied_experts(shape, passes, spec.nproc_per_node, work, machine.device)
    optional = side_passes(sides)
    return Memory(
        tuple(filter(None, (*(text for fit in sides for text in fit.warnings), copied))),
        tuple(text for fit in refused(sides, certain=True) for text in fit.warnings),
        {f.side: " ".join(f.warnings) for f in sides if f.side in optional and f.certain},
    )


def _sides(spec: CheckSpec, shape: SizedModel, work: Workload, machine: Machine) -> tuple[Fit, ...]:
    """Memory of the engine and of every pass of the trainer."""
    engine = spec.rollout.engine
    served = shape  # the engine's model may be another checkpoint than the trainer's
    if (engine.model, engine.revision) != (spec.train.model, spec.train.revision):
        served = sized(find_config(engine.model, engine.revision))
    # The memory of servers is not ours.
    ours = () if engine.servers else (engine_fit(spec, served, work, machine),)
    return (*ours, *trainer_fits(spec, shape, work, machine, training_passes(spec)))


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


def _stages(spec: CheckSpec, passes: list[str], gpus: int) -> dict[str, str]:
    engine, devices = spec.rollout.engine, placement(spec, gpus)
    where = in_words(devices.engine)
    runs = f"{engine.engine}, tensor parallel {engine.tensor_parallel_size}{where}: samples"
    stages = {"rollout": f"{', '.join(engine.servers)}: samples" if engine.servers else runs}
    if engine.prefill:
        stages["rollout"] += ", then rescores the same tokens by prefill"
    if not engine.servers and wants_square(spec) and float32_engine(spec.rollout) is not None:
        stages["rollout in float32"] = f"{engine.engine}{where}: scores the same tokens"
    ranks = f"{spec.nproc_per_node} rank{'s' if spec.nproc_per_node > 1 else ''}"
    meanwhile = ", while the engine rescores" if devices.overlap and not spec.fixes else ""
    stages["score"] = (
        f"torchrun, {ranks}, FSDP2{in_words(devices.trainer)}: {', '.join(passes)}{meanwhile}"
    )
    return stages


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
    if config.model.experts:
        auto = "grouped_mm (transformers' choice)"
        kernels["experts"] = auto if train.experts == "auto" else train.experts
    kernels["attention"] = _attention(train.attention, config, device)
    return kernels


def _attention(name: str, config: FoundConfig, device: str) -> str:
    """The kernel that the trainer would resolve; MismatchError where it would refuse."""
    if any(find_spec(package) is None for package in ("torch", "transformers")):
        return f"{name} (not resolved: torch is not installed)"
    from transformers import AutoConfig

    from mismatch.training.attention.resolve import resolve_attention

    unread = ("model_type", "quantization_config")
    fields = {k: v for k, v in config.values.items() if k not in unread}
    try:
        described = AutoConfig.for_model(config.values["model_type"], **fields)
    except (ValueError, KeyError, TypeError) as error:
        return f"{name} (not resolved: {first_line(error)})"
    resolved = resolve_attention(name, described)
    trial = name == "auto" and resolved.label == "sink-sdpa" and device != "cpu"
    sinks = {None: "", True: ", honours the sinks", False: ", IGNORES the sinks"}
    passed = ", once it passed a trial on the GPU" if trial else ""
    return f"{resolved.label}{passed}{sinks[resolved.honours_sinks]}"


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
