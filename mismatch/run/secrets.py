"""What looks like a secret is not written: not into artefacts, reports, logs, nor to a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from mismatch.errors import MismatchError

HIDDEN = "***"
SHORTEST = 8  # characters: a shorter value is a word that occurs anyway
# Names of variables, arguments and parameters of URLs; not max_tokens, token_ids, keyword …
NAME = re.compile(
    r"(^|[_.-])(TOKEN|KEY|KEYS|SECRET|PASS|PASSWD|PASSWORD|PASSPHRASE|CREDENTIALS?|AUTH|APIKEY)($|[_.-])",
    re.IGNORECASE,
)
# Secrets that are known by their look, wherever they stand.
SHAPES = re.compile(
    r"(?<![A-Za-z0-9_-])(?:hf_[A-Za-z0-9]{16,}"
    r"|sk-[A-Za-z0-9_-]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|AIza[0-9A-Za-z_-]{35}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
    r"|(?<=Bearer )[A-Za-z0-9._~+/=-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[A-Za-z0-9+/=\s\\n-]*"
)
PASSWORD = re.compile(r"(?<=://)[^\s/@\"'<>]+@")  # user:password@ of an address
PARAMETER = re.compile(r"(?<=[?&])([\w.\\-]+)=([^&\s\"'#<>]+)")  # Markdown escapes its name


def redact(text: str) -> str:
    """Text without passwords in addresses, what has the look of a key, and the environment's keys.

    >>> redact("https://me:pw@host/x?token=abc sk-0123456789abcdefXYZ")
    'https://***@host/x?token=*** ***'
    """
    for value in _environment():
        text = text.replace(value, HIDDEN)
    if "://" in text:
        text = PASSWORD.sub(f"{HIDDEN}@", text)
        text = PARAMETER.sub(_parameter, text)
    return SHAPES.sub(HIDDEN, text)


def _parameter(found: re.Match[str]) -> str:
    return f"{found[1]}={HIDDEN}" if NAME.search(found[1].replace("\\", "")) else found[0]


def _environment() -> list[str]:
    """Values of this process's variables whose names say that they are secret, longest first."""
    values = {
        value.strip()
        for name, value in os.environ.items()
        if NAME.search(name) and len(value.strip()) >= SHORTEST and not os.path.exists(value)
    }
    return sorted(values, key=len, reverse=True)


def redacted_command(arguments: Sequence[str]) -> list[str]:
    """A command line whose arguments' values are hidden where their names say secret.

    >>> redacted_command(["--engine-arg", "hf_token=abc", "--password", "x", "--max-tokens", "9"])
    ['--engine-arg', 'hf_token=***', '--password', '***', '--max-tokens', '9']
    """
    shown: list[str] = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if equals and NAME.search(name.lstrip("-")):
            argument = f"{name}={HIDDEN}"
        elif shown and shown[-1].startswith("--") and NAME.search(shown[-1].lstrip("-")):
            argument = HIDDEN
        shown.append(redact(argument))
    return shown


def require_no_secret(flag: str, name: str, value: object) -> None:
    """Refuse a setting that is kept in the run and holds a secret.

    Raises:
        MismatchError: its name or its look says so; the message does not repeat it.
    """
    text = str(value)
    if NAME.search(name) or redact(text) != text:
        raise MismatchError(
            f"{flag} {name}: that looks like a secret, and settings are kept in the run",
            "give it by the environment of the command, e.g. HF_TOKEN=… mismatch …",
        )
