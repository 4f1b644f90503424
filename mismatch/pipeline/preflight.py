"""Everything that can be refused before a process starts, each with its fix."""

from __future__ import annotations

import ast
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_type_hints

from mismatch.engines.known_faults import faults_of
from mismatch.engines.registry import (
    check_machine,
    engine_info,
    require_engine,
    weight_givers,
    with_adapter_way,
)
from mismatch.errors import INSTALL_SCORE, MismatchError, did_you_mean, require_packages
from mismatch.models.adapters import merge_first, require_adapter
from mismatch.models.config import find_config, first_layers, read_config
from mismatch.models.derived import is_mxfp4
from mismatch.models.derived import require_form as require_derived
from mismatch.models.moe import require_forms, require_routes
from mismatch.plugins import load, scorers
from mismatch.processes.adapter import no_float32
from mismatch.processes.exchange import require_file
from mismatch.processes.launch import own_python
from mismatch.prompts.sources import read_prompts, require_within
from mismatch.run.hub import asking_the_hub, cache_folder, cached_snapshot, offline
from mismatch.run.interpreters import WORKER_MODULES, look_into, require_modules, source_files
from mismatch.run.machine import local_gpus, placement
from mismatch.specs import (
    AS_STORED,
    FILE_SCORER,
    OWN_SCORER,
    CheckSpec,
    EngineSpec,
    Flag,
    RolloutSpec,
    Sampling,
    TrainSpec,
)

# What a trainer's process imports; that of a user's function imports torch and numpy.
TRAINER_MODULES = {
    OWN_SCORER: ("torch", *WORKER_MODULES, "transformers", "accelerate"),
    "verl": ("torch", "numpy", "verl"),
    "trl": ("torch", "numpy", "trl"),
}
OWN_EXPERTS = ("auto", "eager", "bounded")  # in addition to those that transformers registers
IN_A_CLONE = f"{INSTALL_SCORE}, or `make env` in a clone"
LEAST_TRANSFORMERS = (5, 5)  # 4.57 loads weights by other functions than those that we take


def require_a_law(sampling: Sampling) -> None:
    """Tokens that were sampled, so that there is a distribution to compare with.

    Raises:
        MismatchError: greedy sampling: its tokens have probability 1, and no divergence.
    """
    if sampling.temperature == 0:
        raise MismatchError(
            "--temperature 0: greedy tokens follow no distribution, so there is nothing to measure",
            "sample at the temperature of training: --temperature 1",
        )


def require_ranges(*specs: Any) -> None:
    """Check that every number of these specs is in its flag's range, wherever they came from.

    Raises:
        MismatchError: one is not.
    """
    for spec in specs:
        for name, hint in get_type_hints(type(spec), include_extras=True).items():
            value = getattr(spec, name)
            for note in get_args(hint)[1:]:
                bounds = note.range if isinstance(note, Flag) else None
                if bounds is not None and value is not None and value not in bounds:
                    flag = f"--{(note.name or name).replace('_', '-')}"
                    raise MismatchError(f"{flag} is {value}", f"give a number {bounds}")


def preflight(spec: CheckSpec, *, reach: bool = True, engine: bool = True) -> None:
    """Before a whole check: both sides.

    Args:
        reach: False leaves out whether the hub can be reached, for a plan without a network.
        engine: False leaves out the engine, which has given all that it is asked for.

    Raises:
        MismatchError: engine not installed, prompts file malformed, nothing to sample …
    """
    require_ranges(spec)
    if spec.train.scorer == FILE_SCORER:
        fault = f"--scorer {FILE_SCORER}: tokens that are not sampled yet have no scores"
        fix = "mismatch rollout; mismatch tokens RUN FILE; then mismatch score RUN --scorer file"
        raise MismatchError(fault, fix)
    if engine:
        preflight_rollout(spec.rollout, reach=reach)
    preflight_training(spec.train, spec.nproc_per_node, reach=reach)
    placement(spec, local_gpus())
    require_routes(spec, weight_givers())
    require_forms(spec)
    if spec.weights_effect is not None and spec.train.adapter is not None:
        fault = "--weights effect= changes weights that an adapter was not trained on"
        raise MismatchError(fault, f"drop it; or {merge_first(spec.train.adapter.path)}")


def preflight_rollout(spec: RolloutSpec, *, reach: bool = True) -> None:
    """Before the engine's process starts.

    Raises:
        MismatchError: see :func:`preflight`.
    """
    require_ranges(spec, spec.prompts, spec.sampling)
    require_a_law(spec.sampling)
    require_engine_names(spec.engine, spec.prompts.environment)
    preflight_engine(spec.engine, reach=reach, dataset=spec.prompts.dataset is not None)
    given = [prompt for prompt in read_prompts(spec.prompts) if prompt.token_ids]
    try:
        vocabulary = (
            find_config(spec.engine.model, spec.engine.revision).model.vocab if given else 0
        )
    except MismatchError:  # its config.json is not on this machine
        vocabulary = 0
    for prompt in given if vocabulary else ():
        require_within(prompt, prompt.token_ids or (), vocabulary)


def preflight_engine(spec: EngineSpec, *, reach: bool = True, dataset: bool = False) -> None:
    """Check one engine before its process starts.

    Args:
        dataset: its interpreter has to read a data set, too.

    Raises:
        MismatchError: see :func:`preflight`.
    """
    require_ranges(spec)
    if (python := own_python(spec)) is None:
        require_engine(spec.engine)
    else:
        needed = [engine_info(spec.engine).module, "datasets" if dataset else None]
        needed += ["transformers", "httpx"] if spec.servers else []
        modules = (*WORKER_MODULES, *(name for name in needed if name))
        flag, who = f"--python {spec.engine}=", f"the engine {spec.engine}"
        flag = "--python" if spec.servers else flag
        require_modules(python, flag, modules, who)
    require_form(spec)
    require_sound_version(spec)
    check_machine(spec)
    if reach:
        require_reachable(spec.model, spec.revision)


def require_names(spec: CheckSpec) -> None:
    """Refuse names that no side knows before anything is planned or started.

    Raises:
        MismatchError: an unknown trainer, kernel, environment, or argument of the engine.
    """
    require_trainer_names(spec.train)
    require_engine_names(spec.rollout.engine, spec.rollout.prompts.environment)


def require_engine_names(engine: EngineSpec, environment: str | None = None) -> None:
    """Refuse arguments that an engine does not have, and environments that nothing has.

    Raises:
        MismatchError: an unknown one.
    """
    from mismatch.prompts.environments import built_in

    require_layers(engine)
    require_adapter(engine)
    known = engine_info(engine.engine).no_adapter is None or own_python(engine) is None
    if engine.adapter_as == "own" and known:  # else its separate environment has to say
        with_adapter_way(engine)
    if engine.args:
        check_machine(replace(engine, python=own_python(engine)))
    if environment is not None:
        built_in(environment)


def require_layers(spec: EngineSpec | TrainSpec) -> None:
    """Raise MismatchError where a model on this machine has no more layers, or cannot be cut."""
    if spec.layers is None:
        return
    try:
        values = find_config(spec.model, spec.revision).values
    except MismatchError:
        return  # what is not on this machine is cut with its weights
    first_layers(values, spec.layers)


def require_trainer_names(spec: TrainSpec) -> None:
    """Refuse names of trainers and kernels that nothing has; imports no torch, so it is quick.

    Raises:
        MismatchError: an unknown name. A colon or a slash makes it a function or a hub's kernel.
    """
    from mismatch.trainers.worker import place_of

    require_layers(spec)
    require_adapter(spec)
    if spec.adapter is not None and spec.scorer not in (OWN_SCORER, FILE_SCORER):
        fault = f"an adapter and --scorer {spec.scorer}: that trainer loads whole models"
        raise MismatchError(fault, merge_first(spec.adapter.path))
    if spec.layers is not None and spec.scorer != OWN_SCORER:
        fault = f"--layers and --scorer {spec.scorer}: that trainer loads the whole model"
        raise MismatchError(fault, "drop --layers, or --scorer")
    if spec.scorer not in (OWN_SCORER, FILE_SCORER):
        place_of(spec.scorer)
        if spec.scorer_config is not None:
            require_configuration(spec.scorer, spec.scorer_config, spec.python)
    from mismatch.training.attention.resolve import NAMES, YARDSTICKS

    kernels = (
        ("--attention", spec.attention, (*NAMES, *YARDSTICKS), "AttentionInterface"),
        ("--experts-implementation", spec.experts, OWN_EXPERTS, "ExpertsInterface"),
    )
    for flag, name, own, interface in kernels:
        if spec.scorer != OWN_SCORER or name in own or set(":/|") & set(name):
            continue
        registered = registered_kernels(interface, spec.python)
        if not (registered or spec.python) and interface == "AttentionInterface":  # none to ask
            registered = {"eager", "sdpa", "flex_attention", "flash_attention_2"}
            registered |= {"flash_attention_3", "flash_attention_4"}
        if registered and name not in registered:
            # Neither a planted fault nor our own yardsticks are what somebody meant.
            hidden = {"no-sinks", *YARDSTICKS}
            hidden |= {each for each in registered if each.startswith("mismatch_")}
            known = [n for n in (*own, *sorted(registered.difference(own))) if n not in hidden]
            near = did_you_mean(name, known)
            raise MismatchError(
                f"{flag} {name}: there is no such kernel", f"{near}one of {', '.join(known)}"
            )


def require_configuration(scorer: str, path: str, python: str | None) -> None:
    """Refuse a configuration of a built-in trainer that its worker could not read.

    Raises:
        MismatchError: no such file, no mapping, or a key that is a typing error (TRL).
    """
    from mismatch.run.yaml_file import read_mapping
    from mismatch.trainers.trl_config import require_known_keys

    if scorer == "trl":
        require_known_keys(path, python)
    elif scorer == "verl":
        read_mapping(Path(path), path)


def registered_kernels(interface: str, python: str | None) -> set[str]:
    """Return the kernels that transformers registers, from its source; empty where it has none."""
    names: set[str] = set()
    for path in source_files("transformers", python, "modeling_utils.py", "integrations/*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith(interface):
                keys = [key for each in ast.walk(node) for key in getattr(each, "keys", ())]
                names |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return {name for name in names if "|" not in name}  # "paged|eager" is for generation


def preflight_training(
    spec: TrainSpec, nproc_per_node: int, *, reach: bool = True, meets: bool = True
) -> None:
    """Before the training world starts.

    Args:
        nproc_per_node: ranks of this machine.
        meets: they have to find each other; False: a launcher has seen to that.

    Raises:
        MismatchError: torch missing, nothing to run on, a port in use, the model out of reach.
    """
    if spec.python is not None:
        loads = OWN_SCORER if spec.scorer == FILE_SCORER else spec.scorer
        modules = TRAINER_MODULES.get(loads, ("torch", "numpy"))
        require_modules(spec.python, "--python train=", modules, "the trainer")
        if spec.scorer == OWN_SCORER:
            require_transformers(spec.python)
    else:
        why = "the reference passes need them, " if spec.scorer == FILE_SCORER else ""
        fix = f"{why}name your training environment: --python train=PATH; or {IN_A_CLONE}"
        require_packages("torch", "transformers", fix=fix)
        theirs = spec.scorer != OWN_SCORER and spec.scorer in TRAINER_MODULES
        if theirs and find_spec(spec.scorer) is None:
            fault = f"this environment has no {spec.scorer}, which the trainer needs"
            fix = (
                f"name the one that has it: --python PATH; or --framework {spec.scorer} --own-loop"
            )
            raise MismatchError(fault, fix)
    require_ranges(spec)
    require_trainer_names(spec)
    if spec.scorer == FILE_SCORER:
        require_file(spec.scorer_config)
    gpus = local_gpus()
    given = gpus == 1 and not meets  # by a launcher, to each rank (srun --gpus-per-task=1)
    if gpus and nproc_per_node > gpus and not given:
        fault = f"--nproc-per-node is {nproc_per_node}, this machine has {gpus} GPUs"
        raise MismatchError(fault, f"one rank needs one GPU: --nproc-per-node {gpus}, or fewer")
    if meets and nproc_per_node % spec.sequence_parallel:
        raise MismatchError(
            f"--sequence-parallel {spec.sequence_parallel} does not divide the "
            f"{nproc_per_node} ranks of --nproc-per-node",
            "set one of them so that it does",
        )
    if added := scorers().get(spec.scorer):
        python = spec.python or sys.executable
        require_modules(python, "--python train=", added.modules, "the trainer")
        ranks = nproc_per_node if meets else int(os.environ.get("WORLD_SIZE", nproc_per_node))
        if added.require:
            load(added.require)(spec, ranks)
    if meets:
        require_free_port(os.environ)
    if reach:
        require_reachable(spec.model, spec.revision)
        if meets:
            no_float32(spec.scorer, spec.python)  # a user's code that cannot be imported says so


def require_transformers(python: str) -> None:
    """Refuse a transformers that our own FSDP2 loop cannot load a model with.

    Raises:
        MismatchError: it is older than the oldest that was run.
    """
    version = look_into(python, (), ("transformers",)).packages.get("transformers", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers and numbers < LEAST_TRANSFORMERS:
        raise MismatchError(
            f"transformers {version} in {python}: mismatch's own FSDP2 loop needs "
            f"{'.'.join(map(str, LEAST_TRANSFORMERS))} or newer",
            "let your framework's code score: --scorer trl, verl or package.module:Class",
        )


def require_form(spec: EngineSpec) -> None:
    """Check that the experts' form that is asked for can be made of a checkpoint that is here.

    Raises:
        MismatchError: it cannot.
    """
    directory = Path(spec.model)
    if not (directory / "config.json").is_file():
        return
    if spec.weights not in (AS_STORED, "mxfp4" if is_mxfp4(directory) else "bf16"):
        require_derived(directory, spec.weights)  # what it is stored in can always be served


# ---------------------------------------------------------------- the machine


def require_free_port(environment: Mapping[str, str]) -> None:
    """Check MASTER_PORT, where the ranks meet if it is set (else torchrun finds a port).

    Raises:
        MismatchError: no number, or in use.
    """
    port = environment.get("MASTER_PORT")
    if port is None:
        return
    fix = "unset MASTER_PORT (a free port is found then), or choose another"
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", int(port)))
    except (ValueError, OverflowError) as error:
        raise MismatchError(f"MASTER_PORT is {port!r}, no port number", fix) from error
    except OSError as error:
        fault = f"port {port} (MASTER_PORT) cannot be used: {error.strerror}"
        raise MismatchError(fault, fix) from error


# ---------------------------------------------------------------- another environment


def require_sound_version(spec: EngineSpec) -> None:
    """Refuse an engine version with a known fault for this checkpoint.

    Raises:
        MismatchError: it has one.
    """
    directory = Path(spec.model)
    if spec.weights != AS_STORED or not (directory / "config.json").is_file():
        return
    names = engine_info(spec.engine).packages
    packages = look_into(own_python(spec) or sys.executable, packages=tuple(names)).packages
    versions = [packages[name] for name in names if name in packages]
    model_type = read_config(directory).get("model_type", "")
    stored = "mxfp4" if is_mxfp4(directory) else "bf16"
    if versions:
        for fault in faults_of(spec.engine, versions[0], model_type, stored):
            raise MismatchError(fault.what, f"{fault.fix}; {fault.link}")


# ---------------------------------------------------------------- the hub


def require_reachable(model: str, revision: str | None) -> None:
    """Check that a hub model's configuration can be had: from the cache, or from the hub.

    Raises:
        MismatchError: hub out of reach, cache not writable, no such model or no access to it.
    """
    if Path(model).is_dir() or cached_snapshot(model, revision) is not None:
        return
    from huggingface_hub import hf_hub_download

    cache = cache_folder()
    try:
        if not offline():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=cache):
                pass
    except OSError as error:
        fault = f"the hub's cache {cache} cannot be written: {error.strerror}"
        raise MismatchError(fault, "set HF_HOME to a directory that can be written") from error
    with asking_the_hub(model, revision):
        hf_hub_download(model, "config.json", revision=revision)
