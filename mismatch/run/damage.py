"""The one place where content of a wrong kind, in a file that can be parsed, becomes an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from mismatch.errors import MismatchError

# What reading code raises where a value is of another kind than it writes.
WRONG = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Around all that reads one file.

    Raises:
        MismatchError: its content is not what this version writes.
    """
    try:
        yield
    except WRONG as error:
        raise MismatchError(
            f"{path} is damaged, or of another version: {type(error).__name__}: {error}",
            "copy the run directory again, or make this file again: delete it, then "
            "mismatch check --resume RUN",
        ) from error


def readable(file: str | Callable[..., str]) -> Callable[[F], F]:
    """:func:`damage_named` around a reader of ``(run_dir, *names)``.

    Args:
        file: path inside the run directory, or how the names make one.
    """

    def decorate(reader: F) -> F:
        @wraps(reader)
        def read(run_dir: Path | str, *names: str) -> Any:
            name = file if isinstance(file, str) else file(*names)
            with damage_named(Path(run_dir) / name):
                return reader(run_dir, *names)

        return cast(F, read)

    return decorate
