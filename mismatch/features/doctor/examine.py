"""What this machine could measure, what it could not and why, and what to install."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mismatch.codec import to_json
from mismatch.doctor.machine import Machine, inspect_machine
from mismatch.doctor.memory import BYTES
from mismatch.doctor.plan import Plan, plan, refused
from mismatch.doctor.show import print_list, print_memory, print_table, say
from mismatch.engines.registry import engine_info, engine_infos
from mismatch.errors import MismatchError
from mismatch.models.config import find_config
from mismatch.models.sizes import UnknownSize, sized
from mismatch.run.hub import offline
from mismatch.run.machine import SHARED_BYTES, gib
from mismatch.specs import CheckSpec

if TYPE_CHECKING:
    from rich.console import Console

MIB = 1 << 20
TRAINER_FIX = "pip install 'train-infer-mismatch[score]', or `make env` in a clone"
FLASH = (
    ("attention flash_attention_2", "flash_attn", "pip install flash-attn"),
    ("attention flash_attention_3", "flash_attn_interface", "build FlashAttention-3 (hopper/)"),
)


@dataclass(frozen=True, slots=True)
class Ability:
    """Something that can be measured or run here, or not.

    Attributes:
        why: the reason, or a remark.
        fix: what makes it possible; "" where nothing here would.
    """

    name: str
    possible: bool
    why: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        problems: what keeps `mismatch check` from running here; empty: it could.
        plan: for the model that was asked about, or None.
    """

    machine: Machine
    engines: tuple[Ability, ...]
    measurable: tuple[Ability, ...]
    problems: tuple[Ability, ...]
    warnings: tuple[str, ...]
    plan: Plan | None

    @property
    def ready(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        plan = self.plan.to_dict() if self.plan else None
        return {
            "schema": "mismatch.doctor/2",
            "ready": self.ready,
            **to_json(replace(self, plan=None)),
            "plan": plan,
        }


def examine(spec: CheckSpec, with_model: bool, machine: Machine | None = None) -> Diagnosis:
    """Examine this machine for the check that ``spec`` describes.

    Args:
        with_model: also plan the run: does the model fit on both sides?
        machine: None: look at this one.
    """
    machine = machine or inspect_machine()
    engines = tuple(_engine(machine, name) for name in engine_infos() if name in machine.packages)
    problems = [item for item in (_trainer(machine), _chosen(engines, spec)) if not item.possible]
    planned, warnings = None, list(_warnings(machine, spec))
    if with_model:
        try:
            planned = plan(spec, machine)
        except MismatchError as error:
            problems.append(Ability("plan", False, error.message, error.fix))
        else:
            lost = refused(planned.sides)
            problems += [Ability("memory", False, side.warnings[0]) for side in lost]
            known = {text for side in lost for text in side.warnings}
            warnings += [text for text in planned.warnings if text not in known]
            problems += _weights(spec, machine)
    return Diagnosis(
        machine=machine,
        engines=engines,
        measurable=tuple(_measurable(machine, engines)),
        problems=tuple(problems),
        warnings=tuple(dict.fromkeys(warnings)),
        plan=planned,
    )


def _engine(machine: Machine, name: str) -> Ability:
    package, fix = machine.packages[name], engine_info(name).install_hint
    if package.version is None:
        return Ability(name, False, "not installed", fix)
    label = f"{package.distribution} {package.version}"
    if package.works is False:
        return Ability(name, False, f"{label} cannot be imported: {package.error}", fix)
    return Ability(name, True, label)


def _trainer(machine: Machine) -> Ability:
    torch, why, fix = machine.packages["torch"], "", TRAINER_FIX
    for name in ("torch", "transformers"):
        package = machine.packages[name]
        if package.version is None:
            return Ability("trainer", False, f"{name} is not installed", fix)
        if package.works is False:
            why = f"{name} {package.version} cannot be imported: {package.error}"
            return Ability("trainer", False, why, fix)
    if machine.gpus and torch.works and not torch.facts.get("gpus"):
        built = torch.facts.get("cuda") or "no CUDA"
        why = f"there are GPUs, but torch {torch.version} (built for {built}) cannot use them"
        fix = "install a torch for this driver's CUDA version"
    elif torch.facts.get("hip"):
        why = f"torch {torch.version} is built for ROCm {torch.facts['hip']}: never run by mismatch"
        fix = "use NVIDIA GPUs, or the CPU build of torch"
    elif torch.facts.get("fsdp") is False:
        why = "this torch has no torch.distributed"
    return Ability("trainer", not why, why, fix if why else "")


def _chosen(engines: tuple[Ability, ...], spec: CheckSpec) -> Ability:
    wanted = spec.rollout.engine.engine
    if elsewhere := spec.rollout.engine.python:
        return Ability(f"engine {wanted}", True, f"in {elsewhere}; not examined")
    for engine in engines:
        if engine.name == wanted:
            others = [item.name for item in engines if item.possible]
            hint = f"{engine.fix}; or use what is here: --engine {others[0]}" if others else ""
            return Ability(f"engine {wanted}", engine.possible, engine.why, hint or engine.fix)
    return Ability(f"engine {wanted}", True, "a third party's; not examined")


def _measurable(machine: Machine, engines: tuple[Ability, ...]) -> list[Ability]:
    """What a check here shows, and what it cannot."""
    vllm, gpus = engines[0], len(machine.gpus)
    some = any(engine.possible for engine in engines)
    on_gpu = "" if gpus else "there is no GPU here"
    on_cpu = "" if gpus else "on CPU kernels, not on those of your training machine"
    need = "" if some else "no engine works here"
    batches = on_gpu and "CPU kernels hardly depend on it"
    own = on_cpu if vllm.possible else vllm.why
    return [
        Ability("decode against trainer", some, need or on_cpu),
        Ability("decode against prefill (the engine's own noise)", some, need),
        Ability("routed experts of an MoE model", some, need),
        Ability("vLLM's own kernels", vllm.possible, own, vllm.fix),
        Ability("FSDP2 over several ranks", True, f"{gpus} GPUs" if gpus else "gloo"),
        Ability("batch variance of GPU kernels", bool(gpus), batches),
        Ability("CUDA kernels, NCCL", bool(gpus), on_gpu),
        *(_flash(machine, *row) for row in FLASH),
    ]


def _flash(machine: Machine, name: str, module: str, fix: str) -> Ability:
    package = machine.packages[module]
    if not machine.gpus:
        return Ability(name, False, "needs a CUDA GPU")
    if package.version is None:
        return Ability(name, False, "not installed", fix)
    return Ability(name, True, f"{package.distribution} {package.version}; models without sinks")


def _warnings(machine: Machine, spec: CheckSpec) -> list[str]:
    ranks, gpus = spec.nproc_per_node, len(machine.gpus)
    shared = f"/dev/shm has {machine.shm_bytes // MIB} MiB: workers may fail to share memory; in a "
    warnings = {
        f"{shared}container: docker run --shm-size=2g": machine.shm_bytes < SHARED_BYTES,
        "less than 1 GiB is free in this directory: choose another with --out": (
            machine.disk_free_bytes < 1 << 30
        ),
        f"--nproc-per-node {ranks}, but there are {gpus} GPUs": 0 < gpus < ranks,
        f"{ranks} ranks share {machine.cores} cores: slow; --nproc-per-node 1": (
            not gpus and ranks > machine.cores
        ),
    }
    return [text for text, applies in warnings.items() if applies]


def _weights(spec: CheckSpec, machine: Machine) -> list[Ability]:
    """Where the weights are not, and whether they could be fetched."""
    config = find_config(spec.train.model, spec.train.revision)
    if config.weights is not None:
        return []
    try:
        size = sized(config).stored_bytes(BYTES[spec.rollout.engine.dtype], keeps_mxfp4=True)
    except UnknownSize:
        return []
    free = machine.cache_free_bytes
    need = f"{size / 1e9:.0f} GB of weights are not on this machine"
    if offline():
        return [Ability("weights", False, f"{need}, and HF_HUB_OFFLINE is set", "unset it")]
    if size > free:
        fix = "set HF_HOME to a larger disk, or give a directory"
        return [
            Ability("weights", False, f"{need}; {machine.cache_dir} has {free / 1e9:.0f} GB", fix)
        ]
    return []


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print what the doctor found; the last line says whether a check could run here."""
    print_table(console, "machine", _machine(diagnosis.machine))
    for title, abilities in (
        ("engines", diagnosis.engines),
        ("what can be measured here", diagnosis.measurable),
    ):
        rows = [
            (item.name, "yes" if item.possible else "no", "; ".join(filter(None, remarks)))
            for item in abilities
            for remarks in [(item.why, item.fix)]
        ]
        print_table(console, title, rows)
    if diagnosis.plan is not None:
        say(console, "")
        print_memory(diagnosis.plan, console)
        print_table(console, "what would run", list(diagnosis.plan.kernels.items()))
    print_list(console, "warnings", diagnosis.warnings)
    say(console, "")
    if diagnosis.ready:
        say(console, "ready: mismatch check can run here")
        return
    say(console, "not ready: mismatch check cannot run here")
    for problem in diagnosis.problems:
        say(console, f"  {problem.name}: {problem.why}")
        if problem.fix:
            say(console, f"    fix: {problem.fix}")


def _machine(machine: Machine) -> list[tuple[str, str]]:
    free = gib(machine.ram_free_bytes)
    states = {True: "", False: " (cannot be imported)", None: ""}
    gpus = [f"{g.name}, {gib(g.memory_bytes)}, driver {g.driver}" for g in machine.gpus]
    installed = [package for package in machine.packages.values() if package.version is not None]
    return [
        ("python", machine.python),
        ("CPU", f"{machine.cores} cores, {gib(machine.ram_bytes)}, {free} free"),
        ("shared memory", gib(machine.shm_bytes)),
        ("disk, here", f"{gib(machine.disk_free_bytes)} free"),
        ("disk, hub's cache", f"{gib(machine.cache_free_bytes)} free in {machine.cache_dir}"),
        *(("GPU", text) for text in gpus or ["none (nvidia-smi lists none)"]),
        *((p.distribution, f"{p.version}{states[p.works]}") for p in installed),
    ]
