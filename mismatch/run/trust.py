"""What of a stored spec is taken only from the command line, or after ``--trust-run``.

A run directory is data: ``spec.json`` of a copied run is as foreign as any file. What is in
:data:`NEEDS_TRUST` could run code, send something to a host, or read a file to send it there.
tests/cli/test_trust.py lists all other fields of every spec, so that none is forgotten.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.run.files import read_regular
from mismatch.specs import CheckSpec, EngineSpec, PromptSpec, RolloutSpec, Sampling, TrainSpec

FLAG = "--trust-run"
KEY_BYTES = 32  # as long as the digest, so that neither is easier to guess
Rule = Callable[[Any, CheckSpec], str]
"""(value, the whole spec) -> what it would do, with its flag; "": nothing."""


def _if_set(text: str) -> Rule:
    return lambda value, spec: text.format(value) if value else ""


def _if_named(text: str, marks: str = ":") -> Rule:
    """Ask where a name is that of a function or of a hub repository."""
    return lambda value, spec: (
        text.format(value) if value and any(mark in value for mark in marks) else ""
    )


def _each(text: str) -> Rule:
    return lambda pairs, spec: ", ".join(
        text.format(pair if isinstance(pair, str) else pair[0]) for pair in pairs
    )


def _if_sent(text: str) -> Rule:
    """Ask for a file of prompts where a server would get it."""
    return lambda value, spec: text.format(value) if value and spec.rollout.engine.servers else ""


NEEDS_TRUST: dict[type, dict[str, Rule]] = {
    CheckSpec: {},
    RolloutSpec: {},
    Sampling: {},
    EngineSpec: {
        "python": _if_set("the interpreter {} (--python)"),
        "env": _each("the environment variable {}"),
        "args": _each("the engine argument {} (--engine-arg)"),
        "trust_remote_code": _if_set("code of the engine's model (--trust-remote-code)"),
        "servers": _each("requests to {} (--server)"),
    },
    PromptSpec: {
        "environment": _if_named("the class {} (--environment)"),
        "path": _if_sent("the file {}, sent to the servers (--prompts)"),
        "dataset": _if_sent("the data set {}, sent to the servers (--dataset)"),
    },
    TrainSpec: {
        "attention": _if_named("the function {} (--attention)", ":/"),
        "experts": _if_named("the function {} (--experts-implementation)", ":/"),
        "python": _if_set("the interpreter {} (--python)"),
        "scorer": _if_named("the trainer {} (--scorer)"),
        "scorer_overrides": _each("the override {} (--framework-override)"),
        "scorer_config": _if_set("the configuration {} (--scorer-config)"),
        "accelerate_config": _if_set("the configuration {} (--accelerate-config)"),
        "trust_remote_code": _if_set("code of the trainer's model (--trust-remote-code)"),
    },
}


def require_trust(run_dir: Path, spec: CheckSpec, trusted: bool) -> None:
    """Refuse a stored spec that names what needs trust, before anything of it is used.

    Raises:
        MismatchError: nobody said that the run may do so; every field is listed.
    """
    needs = [] if trusted else list(code_of(spec))
    if needs:
        raise MismatchError(
            f"the spec of {run_dir} names what could run code here, or be sent your data:\n    "
            + "\n    ".join(needs),
            f"if that is yours: {FLAG}; or give the flags of the run again, with --resume",
        )


def seal(spec: bytes) -> str:
    """Return a mark of the spec.json that this user's command wrote; nobody else can make it.

    The key is made once, in a file that its owner alone can read. A run that carries the mark of
    its spec needs no ``--trust-run``: all that the spec names was typed, or trusted, here.

    Returns:
        HMAC-SHA256 in hex; "": there is no folder for a key.
    """
    folder = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "mismatch"
    path = folder / "key"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)  # noqa: E731
        with suppress(FileExistsError), open(path, "xb", opener=own) as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        key = read_regular(path)
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return ""
    return hmac.new(key, spec, "sha256").hexdigest() if len(key) == KEY_BYTES else ""


def code_of(spec: CheckSpec) -> Iterator[str]:
    """Yield what a spec would run, import, or send to others; a line per field."""
    for part in (spec.rollout.engine, spec.rollout.prompts, spec.train):
        for name, rule in NEEDS_TRUST[type(part)].items():
            if text := rule(getattr(part, name), spec):
                yield text
