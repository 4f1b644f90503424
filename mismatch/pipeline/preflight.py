"""Everything that can be refused before a process starts, each with its fix."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mismatch import __version__
from mismatch.engines.registry import check_machine, engine_info, require_engine, weight_givers
from mismatch.errors import MismatchError
from mismatch.models.moe import require_forms, require_routes
from mismatch.processes.interpreters import interpreter_environment, own_python
from mismatch.specs import AS_STORED, CheckSpec, EngineSpec, RolloutSpec, TrainSpec, require_a_law

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBE = """
import importlib.util as u, json, sys
missing = [name for name in {needed!r} if u.find_spec(name) is None]
found = None
if u.find_spec("mismatch") is not None:
    import mismatch
    found = mismatch.__version__
print(json.dumps([missing, found]))
"""
LIGHT = ("numpy", "pyarrow", "safetensors", "psutil")  # what every worker imports
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
OFFLINE = (
    "without a network: download it where there is one (hf download {model}), copy the cache and "
    "set HF_HUB_OFFLINE=1, or give the directory: --model DIR"
)


def preflight(spec: CheckSpec) -> None:
    """Before a whole check: both sides.

    Raises:
        MismatchError: engine not installed, prompts file malformed, nothing to sample …
    """
    preflight_rollout(spec.rollout)
    if spec.other_engine is not None:
        preflight_rollout(replace(spec.rollout, engine=spec.other_engine))
    preflight_training(spec.train, spec.nproc_per_node)
    require_routes(spec, weight_givers())
    require_forms(spec)


def preflight_rollout(spec: RolloutSpec) -> None:
    """Before the engine's process starts.

    Raises:
        MismatchError: see :func:`preflight`.
    """
    from mismatch.prompts.sources import read_prompts

    if own_python(spec.engine) is None:
        require_engine(spec.engine.engine)
    else:
        require_interpreter(spec.engine, dataset=spec.prompts.dataset is not None)
    sampling = spec.sampling
    _positive("--samples-per-prompt", sampling.samples_per_prompt)
    _positive("--max-tokens", sampling.max_tokens)
    _positive("--num-prompts", spec.prompts.num_prompts)
    require_a_law(sampling)
    if not 0 < sampling.temperature <= 100:
        raise MismatchError(f"--temperature is {sampling.temperature}", "use one up to 100")
    if not 0 < sampling.top_p <= 1:
        raise MismatchError(f"--top-p is {sampling.top_p}", "use a share above 0, up to 1 (off)")
    if spec.exact_kl < 0:
        raise MismatchError(f"--exact-kl is {spec.exact_kl}", "use 0 (off) or a positive number")
    _positive("--exact-kl-top-k", spec.exact_kl_top_k)
    if sampling.top_k < 0:
        raise MismatchError(f"--top-k is {sampling.top_k}", "use 0 (off) or a positive number")
    read_prompts(spec.prompts)
    require_form(spec.engine)
    check_machine(spec.engine)
    require_reachable(spec.engine.model, spec.engine.revision)


def preflight_training(spec: TrainSpec, nproc_per_node: int) -> None:
    """Before the training world starts.

    Raises:
        MismatchError: torch missing, nothing to run on, a port in use, the model out of reach.
    """
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise MismatchError(
            f"{' and '.join(missing)} not installed: the training side needs them",
            "pip install 'train-infer-mismatch[score]', or `make env` in a clone",
        )
    _positive("--nproc-per-node", nproc_per_node)
    _positive("--micro-batch-tokens", spec.micro_batch_tokens)
    require_free_port(os.environ)
    require_reachable(spec.model, spec.revision)


def require_form(spec: EngineSpec) -> None:
    """The form of the experts that is asked for can be made of a checkpoint that is here.

    Raises:
        MismatchError: it cannot.
    """
    from mismatch.models.derived import is_mxfp4
    from mismatch.models.derived import require_form as require_derived

    directory = Path(spec.model)
    if not (directory / "config.json").is_file():
        return
    if spec.weights not in (AS_STORED, "mxfp4" if is_mxfp4(directory) else "bf16"):
        require_derived(directory, spec.weights)  # what it is stored in can always be served


def _positive(flag: str, value: int) -> None:
    if value < 1:
        raise MismatchError(f"{flag} is {value}", f"use a positive number: {flag} 1")


# ---------------------------------------------------------------- the machine


def require_free_port(environment: Mapping[str, str]) -> None:
    """The ranks meet at MASTER_PORT if that is set, else at a port that torchrun finds.

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
        raise MismatchError(
            f"port {port} (MASTER_PORT) cannot be used: {error.strerror}", fix
        ) from error


# ---------------------------------------------------------------- another environment


def require_interpreter(spec: EngineSpec, dataset: bool = False) -> None:
    """Whether the engine's process could start under its own interpreter.

    Args:
        dataset: it has to read a data set as well.

    Raises:
        MismatchError: no such interpreter, the engine or mismatch missing there, or mismatch of
            another version.
    """
    python = own_python(spec)
    assert python is not None
    flag = f"--engine-python {spec.engine}="
    extras = f"{spec.engine},datasets" if dataset else spec.engine
    install = f"{python} -m pip install 'train-infer-mismatch[{extras}]'"
    more = ("datasets",) if dataset else ()
    code = PROBE.format(needed=(*LIGHT, *more, engine_info(spec.engine).module))
    try:
        done = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **interpreter_environment(python)},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MismatchError(
            f"{flag}{python} cannot be started: {getattr(error, 'strerror', error)}",
            "give the path of an interpreter, such as ENV/bin/python",
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MismatchError(f"{flag}{python} fails: {last}", install)
    missing, found = json.loads(done.stdout.strip().splitlines()[-1])
    if missing or found is None:
        absent = ", ".join([*missing, *([] if found else ["mismatch"])])
        raise MismatchError(f"{flag}{python}: {absent} not installed there", install)
    if found != __version__:
        raise MismatchError(
            f"{flag}{python} has mismatch {found}, this is {__version__}",
            f"{install}=={__version__}",
        )


# ---------------------------------------------------------------- the hub


def require_reachable(model: str, revision: str | None) -> None:
    """A hub model's configuration can be had: from the cache, or from the hub.

    Raises:
        MismatchError: hub out of reach, cache not writable, no such model or no access to it.
    """
    if Path(model).is_dir() or find_spec("huggingface_hub") is None:
        return
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
        return
    if constants.HF_HUB_OFFLINE:
        raise MismatchError(
            f"{model} is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set",
            OFFLINE.format(model=model),
        )
    _require_writable(Path(constants.HF_HUB_CACHE))
    _require_name(constants.ENDPOINT, model)
    try:
        hf_hub_download(model, "config.json", revision=revision)
    except GatedRepoError as error:
        raise MismatchError(
            f"{model}: access has to be asked for on the hub", "ask there, then: hf auth login"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = f" at revision {revision}" if revision else ""
        raise MismatchError(
            f"the hub has no model {model}{at}, or it is private",
            "check the name; for a private model: hf auth login",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise MismatchError(
            f"{model}: the hub cannot be reached: {str(error).splitlines()[0]}",
            OFFLINE.format(model=model),
        ) from error


def _require_writable(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise MismatchError(
            f"the hub's cache {cache} cannot be written: {error.strerror}",
            "set HF_HOME to a directory with space that can be written",
        ) from error


def _require_name(endpoint: str, model: str) -> None:
    """Fail at once where the hub's name is not known: its client would try for half a minute."""
    host = urlsplit(endpoint).hostname
    if host is None or any(os.environ.get(name) for name in PROXIES):
        return
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise MismatchError(
            f"{model}: the hub cannot be reached: {host}: {error.strerror}",
            OFFLINE.format(model=model),
        ) from error
