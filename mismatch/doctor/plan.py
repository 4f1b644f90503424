"""What `mismatch check` would do, without doing it: stages, tokens, attention kernel, memory.

Works offline: sizes come from the model's config.json (its directory, the hub's cache, or the one
that ships for an alias). No weight is loaded. What cannot be predicted of a model is named, and the
rest of the plan stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

from mismatch.codec import to_json
from mismatch.doctor.fit import (
    HOST,
    Fit,
    Level,
    copies,
    engine_fit,
    first_layers_fit,
    offloaded,
    trainer_fits,
    warnings_of,
)
from mismatch.doctor.machine import Machine, inspect_machine, machine_with, parse_kind
from mismatch.doctor.memory import Workload
from mismatch.doctor.minutes import LONG_PASS_S, Time, estimate, float32_s
from mismatch.errors import MismatchError, first_line
from mismatch.experiments.fixes.spec_edits import on_engine, on_trainer, with_argument
from mismatch.experiments.scoring_passes import (
    float32_engine,
    training_passes,
    wants_square,
    with_few,
)
from mismatch.keys import LONG, REFERENCE, TRAIN
from mismatch.models.config import FoundConfig, find_config
from mismatch.models.derived import cache, copied_bytes
from mismatch.models.sizes import SizedModel, UnknownSize, sized
from mismatch.prompts.prompt import Prompt
from mismatch.prompts.sources import read_prompts
from mismatch.run.machine import gib, in_words, placement
from mismatch.specs import OWN_SCORER, CheckSpec, EngineSpec
from mismatch.trainers.trl_config import in_plan
from mismatch.types import NO_MLA, WITHOUT_MLA

SCHEMA = "mismatch.plan/3"
TEMPLATE_TOKENS = 96  # of a chat template: gpt-oss's system message takes 68 to 80
CHARACTERS_PER_TOKEN = 3  # low, so that prompts are rather over- than underestimated
UNKNOWN_PROMPT_TOKENS = 512
# Families whose predictions were compared with measured peaks (benchmarks/memory.py).
MEASURED = ("gpt_oss", "qwen3", "qwen3_moe")
IN_FLOAT32 = " in float32"  # behind the engine's name
MANY_GPUS = 8  # from here on the trainer's ranks leave the engine's GPUs
SPLITS = (2, 4, 8)  # tensor parallel sizes that a plan may choose
NEEDED = ("engine", TRAIN, HOST, "disk")  # sides without which there is no check


@dataclass(frozen=True, slots=True)
class Memory:
    """Predictions of both sides, known before anything starts.

    Attributes:
        sides: the engine, unless servers are the engine, every pass of the trainer, and the
            engine in float32; () where they cannot be told.
        notes: assumptions, and which parts are not predicted.
        float32_split: the tensor parallel size at which the engine in float32 fits, if any does.
        float32_offload: GiB of its weights per GPU that vLLM keeps in the host's memory.
        float32_layers: where the whole of it does not fit: its first layers alone run; else 0.
        float32_few: the first sample of each prompt alone is scored in float32 on both sides, as
            all would take long.
    """

    sides: Sequence[Fit] = ()
    notes: tuple[str, ...] = ()
    float32_split: int = 0
    float32_offload: int = 0
    float32_layers: int = 0
    float32_few: bool = False
    cut: bool = False  # by --layers

    @property
    def fits(self) -> bool:
        """Whether the check could run; passes other than the trainer's may be left out."""
        return not self.refused()

    @property
    def warnings(self) -> list[str]:
        return warnings_of(self.sides)

    def refused(self, certain: bool = False) -> list[Fit]:
        """Of the engine, the trainer's own pass and the host's memory those that do not fit.

        Args:
            certain: only what can never fit here.
        """
        lost = [fit for fit in self.sides if fit.side in NEEDED and fit.level == "does not fit"]
        return [fit for fit in lost if fit.certain or not certain]

    def left_out(self) -> dict[str, str]:
        """Return passes other than the trainer's that can never fit here, and why."""
        lost = [fit for fit in self.sides if fit.side not in NEEDED and fit.certain]
        return {fit.side: f"{fit.side}: {fit.warning}" for fit in lost}

    @property
    def best_verdict(self) -> str:
        """The best verdict that this machine's memory allows; "": not known.

        A side without its float32 pass, or without the reference, may be broken unseen.
        """
        if self.left_out():
            return "INCONCLUSIVE"
        if self.cut:
            return "TOLERABLE"
        whole = any(fit.side.endswith(IN_FLOAT32) for fit in self.sides)
        return "HEALTHY" if whole and self.fits else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Memory):
    """A dry run.

    Attributes:
        config_source: where the model's sizes were read.
        machine: the GPUs that the plan is for, where they are not here; else "cuda" or "cpu".
        stages: what runs in which process, in order.
        tokens: "sampled at most", "longest sequence", "scored at most" and so on.
        attention: the trainer's kernel.
        time: of every stage; without stages where it cannot be estimated.
        cheaper: settings with which it fits where it is refused or tight; "": none are known.
    """

    model: str
    config_source: str
    device: str
    machine: str
    stages: dict[str, str]
    tokens: dict[str, int]
    attention: str
    time: Time
    cheaper: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data; ``seconds`` is the total, null where it is not estimated."""
        seconds = self.time.seconds if self.time.stages else None
        facts = {"fits": self.fits, "best_verdict": self.best_verdict, "seconds": seconds}
        return {"schema": SCHEMA, **facts, **to_json(self)}


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
    attention = spec.train.attention
    if spec.train.scorer == OWN_SCORER:
        attention = _attention(attention, config, machine.device)
    elif attention == "auto":
        attention = "the framework's choice"
    spec = placed(spec, machine)
    (load, note), memory = work_of(spec), memory_of(spec, machine)
    engine, samples = spec.rollout.engine, spec.rollout.sampling
    passes, out = with_few(training_passes(spec), memory.float32_few), memory.left_out()
    sequences, longest = load.sequences, load.longest
    tokens = {
        "prompts": sequences // samples.samples_per_prompt,
        "sequences": sequences,
        "longest sequence": longest,
        "sampled at most": sequences * samples.max_tokens * spec.rollout.prompts.turns,
        "rescored by the engine's prefill": sequences * longest * engine.prefill,
        "scored by the trainer at most": longest
        * sum(
            sequences // (samples.samples_per_prompt if each.folder else 1)
            for each in passes
            if each.folder != LONG
        ),
    }
    exact = None
    if f"{engine.engine}{IN_FLOAT32}" not in out:
        sizes = memory.float32_split, memory.float32_offload, memory.float32_layers
        in_float32 = _float32_engine(spec, *sizes)
        exact = None if in_float32 is None else in_float32.rollout.engine
    time = Time({})
    if memory.sides:
        shapes = [sized(config, spec.train.python)] * 3
        for place, side in enumerate((engine, exact or engine), 1):
            if not side.servers:
                shapes[place] = sized(
                    find_config(side.model, side.revision, side.layers), side.python
                )
        passes = [item for item in passes if item.name not in out]
        time = estimate(spec, shapes, load, machine, passes, exact, memory.float32_few)
    fitting = {each.name: getattr(memory, each.name) for each in fields(Memory)}
    return Plan(
        **fitting | {"notes": (*filter(None, [note]), *memory.notes)},
        model=engine.model,
        config_source=config.source,
        device=machine.device,
        machine=gpus or machine.device,
        stages=_stages(spec, len(machine.gpus), exact),
        tokens=tokens,
        attention=attention,
        time=time,
        cheaper=cheaper(spec, memory, machine),
    )


def cheaper(spec: CheckSpec, memory: Memory, machine: Machine | None = None) -> str:
    """Return the fewest settings with which a check fits that is refused or tight; "": none.

    They cost time or memory of the host; where these do not suffice, layers are left out.
    """

    def lacks(memory: Memory) -> int:
        levels = [fit.level for fit in memory.sides if not fit.side.endswith(IN_FLOAT32)]
        return max(map(get_args(Level).index, levels), default=0)

    machine, engine, found = machine or inspect_machine(), spec.rollout.engine, ""
    steps: dict[str, Callable[[CheckSpec], CheckSpec]] = {}
    if spec.train.scorer == OWN_SCORER:
        steps["--micro-batch-tokens 1024"] = partial(on_trainer, micro_batch_tokens=1024)
        steps["--experts-implementation bounded"] = partial(on_trainer, experts="bounded")
        steps |= {"--offload": partial(on_trainer, offload=True)} if machine.gpus else {}
    if engine.engine == "vllm" and machine.gpus and not engine.servers:
        for name, value in (("max_num_batched_tokens", 4096), ("max_num_seqs", 64)):
            steps[f"--engine-arg {name}={value}"] = partial(with_argument, name=name, value=value)
    tries = [each for count in range(len(steps)) for each in combinations(steps, count + 1)]
    least = lacks(memory) if "disk" not in [fit.side for fit in memory.refused()] else 0
    for names in tries if least else ():
        left = lacks(memory_of(reduce(lambda made, name: steps[name](made), names, spec), machine))
        if left < least:
            least, found = left, " ".join(names)
        if not least:
            return found
    if least < 2 or spec.train.scorer != OWN_SCORER or engine.servers:
        return found
    whole = find_config(spec.train.model, spec.train.revision, spec.train.layers).model.layers
    for layers in (whole * 3 // 4, whole // 2, whole // 4, 2):
        with suppress(MismatchError):
            cut = on_engine(on_trainer(spec, layers=layers), layers=layers)
            if 0 < layers < whole and lacks(memory_of(cut, machine)) < 2:
                return f"--layers {layers}"
    return found


# ---------------------------------------------------------------- memory


def memory_of(spec: CheckSpec, machine: Machine | None = None) -> Memory:
    """Predict the memory of a check; without sides where no model's parameters can be counted.

    Raises:
        MismatchError: no config.json offline, or sequences beyond the model's context.
    """
    machine, engine = machine or inspect_machine(), spec.rollout.engine
    work, size, offload, layers, few = work_of(spec)[0], 0, 0, 0, False
    try:
        config = find_config(spec.train.model, spec.train.revision, spec.train.layers)
        shape = sized(config, spec.train.python)
        passes = [item for item in training_passes(spec) if not item.folder]
        sides = [*trainer_fits(spec, shape, work, machine, passes)]
        sides += copies(spec.train, shape, machine)
        notes = []
        if spec.train.autocast:
            notes.append("the copies of the weights that autocast makes are not counted")
        if shape.recurrent:
            unknown = ", ".join(shape.recurrent)
            notes.append(f"not predicted: state caches and activations of {unknown}")
        if shape.family not in MEASURED:
            notes.append(
                f"activations of {shape.family} follow the formulas of a plain decoder layer, "
                f"which were compared with measured peaks of {', '.join(MEASURED)}"
            )
        if not engine.servers:  # their memory is not ours
            # The engine's model may be another checkpoint than the trainer's.
            config = find_config(engine.model, engine.revision, engine.layers)
            served = sized(config, engine.python)
            sides.insert(0, engine_fit(spec, served, work, machine))
            sides += copies(engine, served, machine)
            exact, split, gpus = _float32_engine(spec), None, len(machine.gpus)
            if exact is not None:  # a training world on other GPUs keeps these
                left = gpus - spec.nproc_per_node if placement(exact, gpus).trainer else gpus
                most = max(engine.tensor_parallel_size, left)
                side = f"{engine.engine}{IN_FLOAT32}"
                split = _smallest_split(exact, served, work, machine, (most,), side)
            if exact is not None and split is not None:
                size, fit = split
                if fit.certain:
                    exact = on_engine(exact, tensor_parallel_size=size)
                    offload, fit = offloaded(exact, served, work, machine, fit)
                served_as = exact.rollout.engine
                disk = copies(served_as, served, machine, side)
                fit = next((each for each in disk if each.certain), fit)
                certain = [each.side for each in (*sides, fit) if each.certain]
                if side in certain and REFERENCE not in certain:
                    lone = on_engine(exact, tensor_parallel_size=engine.tensor_parallel_size)
                    where = f" in {cache()} (MISMATCH_CACHE)" if fit in disk else ""
                    lacking = f"{gib(fit.needed)} needed for all, {gib(fit.capacity)} there{where}"
                    layers, fit = first_layers_fit(lone, served, work, machine, fit)
                if layers:
                    size = engine.tensor_parallel_size
                    part = f"the first {layers} of {served.layers} layers alone"
                    notes.insert(0, f"{side}: {part}: {lacking}")
                sides.append(fit)
                mla = served.latent and machine.gpus and engine.engine == "vllm"
                if mla and not fit.certain and NO_MLA[0] not in dict(engine.env):
                    notes.insert(0, f"not tested: {WITHOUT_MLA}")
                if offload:
                    where = "in the host's memory, which the GPU reads through its bus"
                    notes.insert(0, f"{side}: {offload * size} GiB of its weights are {where}")
                started = _float32_engine(spec, size, offload)
                if started is not None and not layers and not fit.certain:
                    spent = float32_s(started, (shape, served), work, machine)
                    few = work.sampling.samples_per_prompt > 1 and spent > LONG_PASS_S
                if few:
                    each = "in float32 the first sample of each prompt alone is scored"
                    notes.insert(0, f"{each}: all take about {spent / 60:.0f} minutes")
                copy = 0 if layers or fit.certain else copied_bytes(served_as, served)
                if copy:
                    where = f"{cache()} while the engine runs in float32"
                    notes.insert(0, f"disk: {gib(copy)} in {where}")
    except UnknownSize as error:
        return Memory(notes=(f"{error.message}; fix: {error.fix}",))
    cut = engine.layers is not None
    return Memory(sides, tuple(notes), size, offload, layers, few, cut)


def _float32_engine(
    spec: CheckSpec, split: int = 0, offload: int = 0, layers: int = 0
) -> CheckSpec | None:
    """Return the spec with its engine in float32; None: it is not started in float32."""
    if spec.rollout.engine.servers or not wants_square(spec):
        return None
    exact = float32_engine(spec.rollout, split, offload, layers)
    return None if exact is None else replace(spec, rollout=exact)


# ---------------------------------------------------------------- the engine's GPUs


def placed(spec: CheckSpec, machine: Machine | None = None) -> CheckSpec:
    """Return the spec with the smallest tensor parallel size at which the engine fits.

    It is looked for on the GPUs that the trainer leaves over, then on all of them, which engine and
    trainer use in turn.
    """
    machine, engine = machine or inspect_machine(), spec.rollout.engine
    gpus = len(machine.gpus)
    if engine.servers or gpus < 2:
        return spec
    try:
        config = find_config(engine.model, engine.revision, engine.layers)
        shape = sized(config, engine.python)
        rooms = (gpus - spec.nproc_per_node, gpus)
        split = _smallest_split(spec, shape, work_of(spec)[0], machine, rooms)
    except MismatchError:  # the plan itself says what is wrong with the model
        return spec
    if split is None or split[1].level == "does not fit":
        return spec
    return on_engine(spec, tensor_parallel_size=split[0])


def ranks_apart(spec: CheckSpec, gpus: str | None = None) -> CheckSpec:
    """Return the spec with ranks on the GPUs that its engines leave free, where that costs nothing.

    On many GPUs the trainer then loads its weights while the engine starts, and scores while it
    rescores; on few, ranks that are missing cost more than that saves.

    Args:
        spec: with a rank on every GPU.
        gpus: GPUs in place of the machine's own, e.g. "8xH100-80GB".
    """
    engine, train, ranks = spec.rollout.engine, spec.train, spec.nproc_per_node
    if ranks < MANY_GPUS or engine.servers or train.scorer != OWN_SCORER:
        return spec

    def lacks(memory: Memory) -> tuple[list[int], int, int]:
        levels = [get_args(Level).index(fit.level) for fit in memory.sides]
        return levels, memory.float32_offload, memory.float32_layers

    with suppress(MismatchError):  # the plan itself says what is wrong
        machine = inspect_machine()
        machine = machine_with(machine, *parse_kind(gpus)) if gpus else machine
        whole = placed(spec, machine)
        with_all = memory_of(whole, machine)
        taken = max(whole.rollout.engine.tensor_parallel_size, with_all.float32_split)
        apart = replace(spec, nproc_per_node=ranks - taken)
        usable = 2 * taken <= ranks == len(machine.gpus) and not taken % train.sequence_parallel
        if usable and lacks(memory_of(placed(apart, machine), machine)) == lacks(with_all):
            return apart
    return spec


def _smallest_split(
    spec: CheckSpec,
    shape: SizedModel,
    work: Workload,
    machine: Machine,
    rooms: Sequence[int],
    side: str = "engine",
) -> tuple[int, Fit] | None:
    """Return the smallest split that fits, else is tight, with its fit; if none does the largest.

    Args:
        rooms: numbers of GPUs that the engine may take, the preferred first.

    Returns:
        None: neither the user's tensor parallel size nor a larger one can be had.
    """
    engine, split = spec.rollout.engine, None
    own = engine.tensor_parallel_size
    for most in rooms:
        found = []
        for size in (n for n in (own, *SPLITS) if own <= n <= most and shape.heads % n == 0):
            changed = on_engine(spec, tensor_parallel_size=size)
            found.append((size, engine_fit(changed, shape, work, machine, side)))
        for wanted in ("fits", "tight"):
            for split in found:
                if split[1].level == wanted:
                    return split
    return split


# ---------------------------------------------------------------- what there is to do


def work_of(spec: CheckSpec) -> tuple[Workload, str]:
    """Count the sequences of a check, at their longest, and say what was assumed, if anything.

    No tokenizer is needed.
    """
    sampling, asked = spec.rollout.sampling, spec.rollout.prompts

    def tokens(prompt: Prompt) -> int:
        if prompt.token_ids is not None:
            return len(prompt.token_ids)
        if prompt.messages is None:
            return math.ceil(len(prompt.text or "") / CHARACTERS_PER_TOKEN)
        length = sum(len(str(message.get("content") or "")) for message in prompt.messages)
        return math.ceil(length / CHARACTERS_PER_TOKEN) + TEMPLATE_TOKENS

    note = ""
    if asked.dataset is not None:
        count, longest = asked.num_prompts, UNKNOWN_PROMPT_TOKENS
        note = f"prompts of the data set are taken to have {UNKNOWN_PROMPT_TOKENS} tokens at most"
    else:
        prompts = read_prompts(asked)
        count, longest = len(prompts), max(map(tokens, prompts))
        if any(prompt.token_ids is None for prompt in prompts):
            note = (
                f"tokens of prompts are estimated: {CHARACTERS_PER_TOKEN} characters each, "
                f"{TEMPLATE_TOKENS} for the chat template"
            )
    sequences = count * sampling.samples_per_prompt
    return Workload(sequences, longest + spec.rollout.most_after_prompt, sampling), note


def _stages(spec: CheckSpec, gpus: int, exact: EngineSpec | None) -> dict[str, str]:
    engine, devices = spec.rollout.engine, placement(spec, gpus)
    where = in_words(devices.engine)
    runs = f"{engine.engine}, tensor parallel {engine.tensor_parallel_size}{where}: samples"
    stages = {"rollout": f"{', '.join(engine.servers)}: samples" if engine.servers else runs}
    if engine.prefill:
        stages["rollout"] += ", then rescores the same tokens by prefill"
    if exact is not None:
        split = exact.tensor_parallel_size
        wide = f", tensor parallel {split}" if split > engine.tensor_parallel_size else where
        stages["rollout in float32"] = f"{engine.engine}{wide}: scores the same tokens"
    ranks = f"{spec.nproc_per_node} rank{'s' if spec.nproc_per_node > 1 else ''}"
    meanwhile = ", while the engine rescores" if devices.overlap and not spec.fixes else ""
    passes = ", ".join(item.name for item in training_passes(spec) if not item.folder)
    launcher = "accelerate launch" if spec.train.accelerate_config else "torchrun"
    code = f"{_trainers_code(spec, gpus)}{in_words(devices.trainer)}"
    stages["score"] = f"{launcher}, {ranks}, {code}: {passes}{meanwhile}"
    return stages


def _trainers_code(spec: CheckSpec, gpus: int) -> str:
    """Return whose code computes the trainer's log-probabilities, and how it is spread."""
    train = spec.train
    if train.scorer == "trl":
        files = train.scorer_config, train.accelerate_config
        return in_plan(*files, spec.nproc_per_node, bool(gpus))
    if train.scorer == "verl":
        instead = " (no GPU: FSDP2 for FSDP1, eager for flash attention)"
        return f"verl's FSDP engine{'' if gpus else instead}"
    return "FSDP2" if train.scorer == OWN_SCORER else train.scorer


def _attention(name: str, config: FoundConfig, device: str) -> str:
    """Return the kernel that the trainer would resolve; MismatchError where it would refuse."""
    from mismatch.training.user_kernels import is_user_kernel

    if is_user_kernel(name):  # a plan imports nothing of the user: the top package is looked up
        top = name.partition(":")[0].partition(".")[0]
        if find_spec(top) or any(Path().glob(f"{top}*")):
            return f"{name} (not imported for a plan)"
        raise MismatchError(f"--attention {name}: no module {top}", "put it on PYTHONPATH")
    if any(find_spec(package) is None for package in ("torch", "transformers")):
        return f"{name} (not resolved: torch is not installed)"
    from transformers import AutoConfig

    from mismatch.training.attention.resolve import resolve_attention

    unread = ("model_type", "quantization_config")
    fields = {k: v for k, v in config.values.items() if k not in unread}
    try:
        described = AutoConfig.for_model(config.values["model_type"], **fields)
    except Exception as error:  # whatever a family's class raises at a value it dislikes
        return f"{name} (not resolved: {first_line(error)})"
    resolved = resolve_attention(name, described)
    trial = name == "auto" and resolved.label == "sink-sdpa" and device != "cpu"
    sinks = {None: "", True: ", honours the sinks", False: ", IGNORES the sinks"}
    passed = ", once it passed a trial on the GPU" if trial else ""
    return f"{resolved.label}{passed}{sinks[resolved.honours_sinks]}"
