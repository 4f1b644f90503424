"""A run directory is data: what its spec would execute, import or send needs the caller's word.

``spec.json`` of a copied run is as foreign as any file. Numbers, names and paths of data in it are
used; an interpreter, environment variables, engine arguments, functions and code of model
repositories are used only if the caller gives them again, or says ``--trust-run``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mismatch.errors import MismatchError
from mismatch.specs import CheckSpec, EngineSpec, TrainSpec

FLAG = "--trust-run"
KEY_VARIABLE = "MISMATCH_API_KEY"  # as in mismatch.engines.servers.address


def require_trust(run_dir: Path, spec: CheckSpec, trusted: bool) -> None:
    """Called with a stored spec, before anything that it names is used.

    Raises:
        MismatchError: it names what could run code here, and nobody said that it may.
    """
    needs = [] if trusted else list(code_of(spec))
    if needs:
        raise MismatchError(
            f"the spec of {run_dir} names what could run code here, or be sent your key:\n    "
            + "\n    ".join(needs),
            f"if that is yours: {FLAG}; or give the flags of the run again, with --resume",
        )


def code_of(spec: CheckSpec) -> Iterator[str]:
    """What a spec would execute, import, or send to others; one line each."""
    yield from _of_engine(spec.rollout.engine)
    if spec.other_engine is not None:
        yield from _of_engine(spec.other_engine)
    yield from _of_trainer(spec.train)


def _of_engine(engine: EngineSpec) -> Iterator[str]:
    if engine.python is not None:
        yield f"the interpreter {engine.python} (--engine-python {engine.engine}={engine.python})"
    yield from (f"the environment variable {name}" for name, _ in engine.env)
    yield from (f"the engine argument {name} (--engine-arg)" for name, _ in engine.args)
    if engine.trust_remote_code:
        yield f"the code of the model repository {engine.model} (--trust-remote-code)"
    if engine.servers and os.environ.get(KEY_VARIABLE):
        yield f"requests with your {KEY_VARIABLE} to {', '.join(engine.servers)} (--server)"


def _of_trainer(train: TrainSpec) -> Iterator[str]:
    kernels = {"--attention": train.attention, "--experts-implementation": train.experts}
    for flag, name in kernels.items():
        if ":" in name or "/" in name:  # a function, or kernels of a hub repository
            yield f"the function {name} ({flag})"
    if train.trust_remote_code:
        yield f"the code of the model repository {train.model} (--trust-remote-code)"
