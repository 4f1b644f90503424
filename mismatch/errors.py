"""The errors that users see: what went wrong, where, and how to fix it."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from importlib.util import find_spec

INSTALL_SCORE = "pip install 'train-infer-mismatch[score]'"  # the packages of the training side
STORED: ContextVar[bool] = ContextVar("STORED", default=False)  # what fails is a file's fault


class MismatchError(Exception):
    """A failure with a remedy. The command line prints both and exits with code 2.

    Args:
        message: what went wrong and where (file, line, layer, row …).
        fix: what the user can do about it; a command where one exists.
        log: last lines of the log of a process that failed without an error message.

    Attributes:
        headline: the message without the log.
        message: the headline and the log.
    """

    def __init__(self, message: str, fix: str = "", log: str = "") -> None:
        super().__init__(message)
        self.headline = message
        self.message = f"{message}; its last lines:\n{log}" if log else message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


def require_packages(*names: str, fix: str = INSTALL_SCORE) -> None:
    """Refuse to start a worker that would fail for want of a package of the training side.

    Raises:
        MismatchError: a package is missing; the fix is the line that installs it.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise MismatchError(f"{' and '.join(missing)} not installed", fix)


class EmptyComparison(MismatchError):
    """A metric was asked for over zero tokens. Nothing measured is never 0, 1 or NaN."""

    def __init__(self, message: str = "no action tokens to compare", fix: str = "") -> None:
        super().__init__(
            message, fix or "check the action mask: no token was sampled by the policy"
        )


class OutOfMemory(MismatchError):
    """The memory of a GPU or of the host is too small, here or in a worker."""


class WrongAnswer(MismatchError):
    """A pass answers for other tokens, without numbers, or as its layout has it: a fault shown."""


class CorruptCapture(MismatchError):
    """Routed experts that cannot be true: wrong shape, ids out of range, missing rows."""


def did_you_mean(name: str, choices: Iterable[str], most: int = 2, cutoff: float = 0.5) -> str:
    """Return the known names that are nearest, as the beginning of a fix; "" where none is near.

    >>> did_you_mean("vLM", ["vllm", "sglang"])
    'did you mean vllm? '
    """
    from difflib import get_close_matches

    near = get_close_matches(name.lower(), list(choices), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}? " if near else ""


def one_line(text: object) -> str:
    """Return foreign text (a column, a served model, a path) without line ends, for a message.

    >>> one_line("a\\n::error::b")
    'a ::error::b'
    """
    return " ".join(str(text).split())


def argument(text: object) -> str:
    """Return foreign text as one argument of a command that a user may copy into a shell.

    >>> argument("m; rm -r x")
    "'m; rm -r x'"
    """
    return shlex.quote(one_line(text))


def in_list(names: Sequence[str], most: int = 4) -> str:
    """Return some names, and how many more.

    >>> in_list(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def first_line(error: BaseException) -> str:
    """Return an exception in one line, for a message; its class where it says nothing.

    Of a validation error of pydantic, whose first line only counts, what each field was refused
    for.
    """
    fields = getattr(error, "errors", None)
    found = fields() if callable(fields) else ()
    said = "; ".join(": ".join((*map(str, each["loc"]), each["msg"])) for each in found)
    text = " ".join(said.replace("Value error, ", "").split()) or str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return textwrap.shorten(lines[0], 300, placeholder=" …") if lines else type(error).__name__


def named_line(error: BaseException) -> str:
    """:func:`first_line` behind the name of the exception's class."""
    name, text = type(error).__name__, first_line(error)
    return name if text == name else f"{name}: {text}"
