"""What `mismatch check` would do, without doing it: stages, tokens, attention kernel, memory.

Works offline: sizes come from the model's config.json (its directory, the hub's cache, or the one
that ships for an alias). No weight is loaded. What cannot be predicted of a model is named, and the
rest of the plan stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import NamedTuple

from mismatch.doctor.fit import Fit, engine_fit, trainer_fits
from mismatch.doctor.machine import Machine, inspect_machine, machine_with, parse_kind
from mismatch.doctor.memory import BYTES, Workload
from mismatch.errors import MismatchError, first_line
from mismatch.experiments.scoring_passes import float32_engine, training_passes, wants_square
from mismatch.models.config import FoundConfig, find_config
from mismatch.models.derived import cache
from mismatch.models.sizes import SizedModel, UnknownSize, sized
from mismatch.prompts.prompt import Prompt
from mismatch.prompts.sources import read_prompts
from mismatch.run.machine import gib, in_words, placement
from mismatch.run.store import TRAIN
from mismatch.specs import CheckSpec, PromptSpec

TEMPLATE_TOKENS = 96  # of a chat template: gpt-oss's system message takes 68 to 80
CHARACTERS_PER_TOKEN = 3  # low, so that prompts are rather over- than underestimated
UNKNOWN_PROMPT_TOKENS = 512
# Families whose predictions were compared with measured peaks (benchmarks/memory.py).
MEASURED = ("gpt_oss", "qwen3", "qwen3_moe")
IN_FLOAT32 = " in float32"  # behind the engine's name
SPLITS = (2, 4, 8)  # tensor parallel sizes that a plan may choose


@dataclass(frozen=True, slots=True)
class Plan:
    """A dry run.

    Attributes:
        config_source: where the model's sizes were read.
        stages: what runs in which process, in order.
        tokens: "sampled at most", "longest sequence", "scored at most" and so on.
        attention: the trainer's kernel.
        sides: memory of the engine and of every pass on one device; () where it cannot be told.
        notes: assumptions, and what of the memory is not predicted.
        gpus: those that the plan is for, where they are not here.
    """

    model: str
    config_source: str
    device: str
    stages: dict[str, str]
    tokens: dict[str, int]
    attention: str
    sides: tuple[Fit, ...]
    notes: tuple[str, ...] = ()
    gpus: str = ""

    @property
    def fits(self) -> bool:
        """Whether the check could run; passes other than the trainer's may be left out."""
        return not refused(self.sides)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of memory, each with the setting that would help."""
        return tuple(warnings_of(self.sides))


def plan(spec: CheckSpec, machine: Machine | None = None, gpus: str = "") -> Plan:
    """Plan a check.

    Args:
        machine: where it would run; None: this machine.
        gpus: GPUs in place of the machine's own, e.g. "8xH100-80GB".

    Raises:
        MismatchError: no config.json offline, prompts that cannot be read, or a kernel that would
            be refused.
    """
    machine = machine or inspect_machine()
    if gpus:
        machine = machine_with(machine, *parse_kind(gpus))
    config = find_config(spec.train.model, spec.train.revision, spec.train.layers)
    # Resolved first: once transformers is imported here, sizes are counted here as well.
    attention = _attention(spec.train.attention, config, machine.device)
    spec = placed(spec, machine)
    work = work_of(spec)
    memory = memory_of(spec, machine)
    return Plan(
        model=spec.rollout.engine.model,
        config_source=config.source,
        device=machine.device,
        stages=_stages(spec, len(machine.gpus), memory),
        tokens=work.tokens,
        attention=attention,
        sides=memory.sides,
        notes=(*work.notes, *memory.notes),
        gpus=gpus,
    )


# ---------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class Memory:
    """Predictions of both sides, known before anything starts.

    Attributes:
        sides: the engine, unless servers are the engine, every pass of the trainer, and the
            engine in float32.
        notes: which parts are not predicted.
        float32_split: the tensor parallel size at which the engine in float32 fits, if any does.
    """

    sides: tuple[Fit, ...] = ()
    notes: tuple[str, ...] = ()
    float32_split: int = 0


class Room(NamedTuple):
    """What is left out of a check for want of memory, and why; see ``run_check``."""

    left_out: dict[str, str]
    float32_split: int = 0
    float32_left_out: str = ""


def memory_of(spec: CheckSpec, machine: Machine | None = None) -> Memory:
    """Predict the memory of a check; without sides where no model's parameters can be counted.

    Raises:
        MismatchError: no config.json offline, or sequences beyond the model's context.
    """
    machine, engine = machine or inspect_machine(), spec.rollout.engine
    work = work_of(spec).load
    try:
        shape = sized(find_config(spec.train.model, spec.train.revision, spec.train.layers))
        sides = trainer_fits(spec, shape, work, machine, training_passes(spec))
        if not engine.servers:  # their memory is not ours
            # The engine's model may be another checkpoint than the trainer's.
            served = sized(find_config(engine.model, engine.revision, engine.layers))
            sides = (engine_fit(spec, served, work, machine), *sides)
            exact = _float32_engine(spec)
            if exact is not None:
                size, fit = _float32_fit(exact, served, work, machine)
                copied = exact.rollout.engine.weights != engine.weights and not fit.certain
                copy = served.stored_bytes(BYTES["bf16"], keeps_mxfp4=False)
                notes = [f"disk: {gib(copy)} in {cache()} while the engine runs in float32"]
                notes = [*notes * copied, *_not_predicted(shape, spec)]
                return Memory((*sides, fit), tuple(notes), size)
    except UnknownSize as error:
        return Memory(notes=(f"memory is not predicted: {error.message}",))
    return Memory(sides, tuple(_not_predicted(shape, spec)))


def _float32_engine(spec: CheckSpec) -> CheckSpec | None:
    """Return the spec with its engine in float32; None: it is not started in float32."""
    if spec.rollout.engine.servers or not wants_square(spec):
        return None
    exact = float32_engine(spec.rollout)
    return None if exact is None else replace(spec, rollout=exact)


def _float32_fit(
    exact: CheckSpec, shape: SizedModel, work: Workload, machine: Machine
) -> tuple[int, Fit]:
    """Return the smallest tensor parallel size at which the engine in float32 fits, and its Fit.

    A training world on other GPUs keeps these meanwhile.
    """
    own, gpus = exact.rollout.engine.tensor_parallel_size, len(machine.gpus)
    shared = not placement(exact, gpus).trainer
    most = max(own, gpus if shared else gpus - exact.nproc_per_node)
    name = f"{exact.rollout.engine.engine}{IN_FLOAT32}"
    fits = {
        size: engine_fit(_split(exact, size), shape, work, machine, name)
        for size in _sizes(own, most, shape)
    }
    size = next(_fitting({size: fit.level for size, fit in fits.items()}), max(fits))
    return size, fits[size]


def _not_predicted(shape: SizedModel, spec: CheckSpec) -> list[str]:
    """Return what the prediction of this model leaves out."""
    notes = []
    if spec.train.autocast:
        notes.append("the copies of the weights that autocast makes are not counted")
    if shape.recurrent:
        notes.append(f"not predicted: state caches and activations of {', '.join(shape.recurrent)}")
    if shape.family not in MEASURED:
        notes.append(
            f"activations of {shape.family} follow the formulas of a plain decoder layer, which "
            f"were compared with measured peaks of {', '.join(MEASURED)}"
        )
    return notes


def side_passes(sides: Sequence[Fit]) -> set[str]:
    """Return names of the passes that a check can do without."""
    return {fit.side for fit in sides} - {"engine", TRAIN, "host memory"}


def refused(sides: Sequence[Fit], certain: bool = False) -> list[Fit]:
    """Of the engine, the trainer's own pass and the host's memory those that do not fit.

    Args:
        certain: only what can never fit here.
    """
    own = [fit for fit in sides if fit.side not in side_passes(sides)]
    return [fit for fit in own if fit.level == "does not fit" and (fit.certain or not certain)]


def warnings_of(sides: Sequence[Fit]) -> list[str]:
    """Return what is wrong, each with what would help; passes that lack the same share a line."""
    names: dict[str, list[str]] = {}
    for fit in sides:
        for text in fit.warnings:
            names.setdefault(text.removeprefix(f"{fit.side}: "), []).append(fit.side)
    return [f"{', '.join(same)}: {text}" for text, same in names.items()]


def left_out(sides: Sequence[Fit]) -> dict[str, str]:
    """Return passes other than the trainer's that can never fit here, and why."""
    optional = side_passes(sides)
    return {f.side: " ".join(f.warnings) for f in sides if f.side in optional and f.certain}


def placed(spec: CheckSpec, machine: Machine) -> CheckSpec:
    """Return the spec with the smallest tensor parallel size at which the engine fits.

    It is looked for on the GPUs that the trainer leaves over, then on all of them, which engine and
    trainer use in turn.
    """
    engine, gpus = spec.rollout.engine, len(machine.gpus)
    if engine.servers or gpus < 2:
        return spec

    own = engine.tensor_parallel_size
    try:
        shape = sized(find_config(engine.model, engine.revision, engine.layers))
        work = work_of(spec).load
        for room in (gpus - spec.nproc_per_node, gpus):
            levels = {
                size: engine_fit(_split(spec, size), shape, work, machine).level
                for size in _sizes(own, room, shape)
            }
            for size in _fitting(levels):
                return _split(spec, size)
    except MismatchError:  # the plan itself says what is wrong with the model
        pass
    return spec


def _split(spec: CheckSpec, size: int) -> CheckSpec:
    """Return the spec with its engine's tensor parallel size."""
    wide = replace(spec.rollout.engine, tensor_parallel_size=size)
    return replace(spec, rollout=replace(spec.rollout, engine=wide))


def _sizes(own: int, most: int, shape: SizedModel) -> list[int]:
    """Return tensor parallel sizes that can be chosen: the user's, or more."""
    return [n for n in (own, *SPLITS) if own <= n <= most and shape.heads % n == 0]


def _fitting(levels: Mapping[int, str]) -> Iterator[int]:
    """Yield sizes that fit, then those that are tight, each from the smallest on."""
    for wanted in ("fits", "tight"):
        yield from (size for size, level in levels.items() if level == wanted)


# ---------------------------------------------------------------- what there is to do


class Work(NamedTuple):
    """What a check has to sample and score: sequences at their longest, and their tokens."""

    load: Workload
    tokens: dict[str, int]
    notes: list[str]


def work_of(spec: CheckSpec) -> Work:
    """Count the sequences of a check, at their longest."""
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
    return Work(Workload([longest] * sequences, sampling), tokens, notes)


def _prompts(spec: PromptSpec) -> tuple[int, int, list[str]]:
    """Return how many prompts, tokens of the longest (estimated without a tokenizer), remarks."""
    if spec.dataset is not None:
        note = f"prompts of the data set are taken to have {UNKNOWN_PROMPT_TOKENS} tokens at most"
        return spec.num_prompts, UNKNOWN_PROMPT_TOKENS, [note]

    def tokens(prompt: Prompt) -> int:
        if prompt.token_ids is not None:
            return len(prompt.token_ids)
        if prompt.messages is None:
            return math.ceil(len(prompt.text or "") / CHARACTERS_PER_TOKEN)
        length = sum(len(str(message.get("content") or "")) for message in prompt.messages)
        return math.ceil(length / CHARACTERS_PER_TOKEN) + TEMPLATE_TOKENS

    prompts = read_prompts(spec)
    estimated = any(prompt.token_ids is None for prompt in prompts)
    note = (
        f"tokens of prompts are estimated: {CHARACTERS_PER_TOKEN} characters each, "
        f"{TEMPLATE_TOKENS} for the chat template"
    )
    return len(prompts), max(map(tokens, prompts)), [note] if estimated else []


def _stages(spec: CheckSpec, gpus: int, memory: Memory) -> dict[str, str]:
    engine, devices = spec.rollout.engine, placement(spec, gpus)
    where = in_words(devices.engine)
    runs = f"{engine.engine}, tensor parallel {engine.tensor_parallel_size}{where}: samples"
    stages = {"rollout": f"{', '.join(engine.servers)}: samples" if engine.servers else runs}
    if engine.prefill:
        stages["rollout"] += ", then rescores the same tokens by prefill"
    exact = f"{engine.engine}{IN_FLOAT32}"
    if _float32_engine(spec) is not None and exact not in left_out(memory.sides):
        split = memory.float32_split
        wide = f", tensor parallel {split}" if split > engine.tensor_parallel_size else ""
        stages["rollout in float32"] = f"{engine.engine}{wide or where}: scores the same tokens"
    ranks = f"{spec.nproc_per_node} rank{'s' if spec.nproc_per_node > 1 else ''}"
    meanwhile = ", while the engine rescores" if devices.overlap and not spec.fixes else ""
    passes = ", ".join(item.name for item in training_passes(spec))
    stages["score"] = f"torchrun, {ranks}, FSDP2{in_words(devices.trainer)}: {passes}{meanwhile}"
    return stages


def _attention(name: str, config: FoundConfig, device: str) -> str:
    """Return the kernel that the trainer would resolve; MismatchError where it would refuse."""
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
