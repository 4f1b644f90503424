"""What this machine could measure, what it could not and why, and what to install."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from mismatch.doctor.choices import expert_warnings
from mismatch.doctor.engine import weight_bytes
from mismatch.doctor.machine import Machine, Package, look
from mismatch.doctor.plan import Plan, plan, refused
from mismatch.engines.registry import engine_info, engine_infos
from mismatch.errors import MismatchError
from mismatch.models.config import find_config, offline
from mismatch.run.machine import SHARED_BYTES
from mismatch.specs import CheckSpec

MIB = 1 << 20
TRAINER_FIX = "pip install 'train-infer-mismatch[score]', or `make env` in a clone"


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
    kernels: tuple[Ability, ...]
    measurable: tuple[Ability, ...]
    problems: tuple[Ability, ...]
    warnings: tuple[str, ...]
    plan: Plan | None

    @property
    def ready(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "schema": "mismatch.doctor/1",
            "ready": self.ready,
            **{
                name: [asdict(item) for item in getattr(self, name)]
                for name in ("engines", "kernels", "measurable", "problems")
            },
            "warnings": list(self.warnings),
            "machine": self.machine.to_dict(),
            "plan": self.plan.to_dict() if self.plan else None,
        }


def examine(spec: CheckSpec, with_model: bool, machine: Machine | None = None) -> Diagnosis:
    """Examine this machine for the check that ``spec`` describes.

    Args:
        with_model: also plan the run: does the model fit on both sides?
        machine: None: look at this one.
    """
    machine = machine or look()
    engines = tuple(_engine(machine, name) for name in engine_infos() if name in machine.packages)
    problems = [item for item in (_trainer(machine), _chosen(engines, spec)) if not item.possible]
    planned, warnings = None, list(_warnings(machine, spec))
    if with_model:
        try:
            planned = plan(spec, machine)
        except MismatchError as error:
            problems.append(Ability("plan", False, error.message, error.fix))
        else:
            problems += [
                Ability("memory", False, side.warnings[0]) for side in refused(planned.sides)
            ]
            lost = refused(planned.sides)
            warnings += [text for s in planned.sides if s not in lost for text in s.warnings]
            warnings += expert_warnings(planned.experts)
            problems += _weights(spec, machine)
    return Diagnosis(
        machine=machine,
        engines=engines,
        kernels=tuple(_kernels(machine)),
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
    for name in ("torch", "transformers"):
        package = machine.packages[name]
        if package.version is None:
            return Ability("trainer", False, f"{name} is not installed", TRAINER_FIX)
        if package.works is False:
            why = f"{name} {package.version} cannot be imported: {package.error}"
            return Ability("trainer", False, why, TRAINER_FIX)
    torch = machine.packages["torch"]
    if machine.gpus and torch.works and not torch.facts.get("gpus"):
        built = torch.facts.get("cuda") or "no CUDA"
        why = f"there are GPUs, but torch {torch.version} (built for {built}) cannot use them"
        return Ability("trainer", False, why, "install a torch for this driver's CUDA version")
    if torch.facts.get("hip"):
        why = f"torch {torch.version} is built for ROCm {torch.facts['hip']}: never run by mismatch"
        return Ability("trainer", False, why, "use NVIDIA GPUs, or the CPU build of torch")
    if torch.facts.get("fsdp") is False:
        return Ability("trainer", False, "this torch has no torch.distributed", TRAINER_FIX)
    return Ability("trainer", True)


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


def _kernels(machine: Machine) -> list[Ability]:
    """Attention and expert kernels of the trainer."""
    torch = machine.packages["torch"].version is not None
    gpu = bool(machine.gpus)
    absent = "" if torch else "torch is not installed"
    fix = "" if torch else TRAINER_FIX
    kernels = [
        Ability("attention eager", torch, absent or "any model; memory grows with length²", fix),
        Ability("attention sdpa", torch, absent or "models without sinks", fix),
        Ability("attention sink-sdpa", torch, absent or "models with sinks (gpt-oss)", fix),
        Ability(
            "attention sink-flex",
            torch and gpu,
            absent or ("models with sinks, tried before use" if gpu else "needs a CUDA GPU"),
            fix,
        ),
    ]
    sources = {
        "attention flash_attention_2": ("flash_attn", "pip install flash-attn"),
        "attention flash_attention_3": ("flash_attn_interface", "build FlashAttention-3 (hopper/)"),
    }
    for name, (package, command) in sources.items():
        kernels.append(_flash(name, machine.packages[package], command, gpu))
    kernels.append(Ability("experts grouped_mm", torch, absent or "", fix))
    kernels.append(Ability("experts batched_mm", torch, absent or "copies weights per token", fix))
    why = absent or "eager's numbers in least memory"
    kernels.append(Ability("experts bounded", torch, why, fix))
    return kernels


def _flash(name: str, package: Package, command: str, gpu: bool) -> Ability:
    if not gpu:
        return Ability(name, False, "needs a CUDA GPU")
    if package.version is None:
        return Ability(name, False, "not installed", command)
    return Ability(name, True, f"{package.distribution} {package.version}; models without sinks")


def _measurable(machine: Machine, engines: tuple[Ability, ...]) -> list[Ability]:
    """What a check here shows, and what it cannot."""
    vllm = engines[0].possible
    some = any(engine.possible for engine in engines)
    gpu = bool(machine.gpus)
    on_gpu = "" if gpu else "there is no GPU here"
    cpu_note = "" if gpu else "on CPU kernels, not on those of your training machine"
    need = "no engine works here"
    return [
        Ability("decode against trainer", some, cpu_note if some else need),
        Ability("decode against prefill (the engine's own noise)", some, "" if some else need),
        Ability("routed experts of an MoE model", some, "" if some else need),
        Ability("vLLM's own kernels", vllm, cpu_note if vllm else engines[0].why, engines[0].fix),
        Ability("FSDP2 over several ranks", True, f"{len(machine.gpus)} GPUs" if gpu else "gloo"),
        Ability("batch variance of GPU kernels", gpu, on_gpu and "CPU kernels hardly depend on it"),
        Ability("CUDA kernels, NCCL", gpu, on_gpu),
    ]


def _warnings(machine: Machine, spec: CheckSpec) -> list[str]:
    found = []
    if machine.shm_bytes < SHARED_BYTES:
        found.append(
            f"/dev/shm has {machine.shm_bytes // MIB} MiB: workers may fail to share memory; in a "
            "container: docker run --shm-size=2g"
        )
    if machine.disk_free_bytes < 1 << 30:
        found.append("less than 1 GiB is free in this directory: choose another with --out")
    ranks = spec.nproc_per_node
    if machine.gpus and ranks > len(machine.gpus):
        found.append(f"--nproc-per-node {ranks}, but there are {len(machine.gpus)} GPUs")
    if not machine.gpus and ranks > machine.cores:
        found.append(f"{ranks} ranks share {machine.cores} cores: slow; --nproc-per-node 1")
    return found


def _weights(spec: CheckSpec, machine: Machine) -> list[Ability]:
    """Where the weights are, or whether they could be fetched."""
    found = find_config(spec.train.model, spec.train.revision)
    if found.weights is not None:
        return []
    size = weight_bytes(
        found.model.require_counts(), replace(spec.rollout.engine, tensor_parallel_size=1), True
    )
    need = f"{size / 1e9:.0f} GB of weights are not on this machine"
    if offline():
        return [Ability("weights", False, f"{need}, and HF_HUB_OFFLINE is set", "unset it")]
    if size > machine.cache_free_bytes:
        free = machine.cache_free_bytes / 1e9
        fix = "set HF_HOME to a larger disk, or give a directory"
        return [Ability("weights", False, f"{need}; {machine.cache_dir} has {free:.0f} GB", fix)]
    return []
