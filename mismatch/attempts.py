"""Parts of a report that may raise: what failed is noted, and everything else is made."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from mismatch.errors import STORED, MismatchError, named_line
from mismatch.types import Check, NotTested

T = TypeVar("T")
LOG = logging.getLogger("mismatch")  # without a handler it writes to stderr


class Attempts:
    """Makes parts of a report, and keeps what could not be made.

    >>> attempts = Attempts()
    >>> attempts.make("sum", sum, [1, 2], otherwise=0), attempts.failed
    (3, [])
    """

    def __init__(self) -> None:
        self.failed: list[NotTested] = []

    def make(self, what: str, make: Callable[..., T], *given: Any, otherwise: Any) -> T:
        """Return what ``make`` returns for ``given``; ``otherwise`` where it raises."""
        try:
            return make(*given)
        except Exception as error:
            if STORED.get() and not isinstance(error, OSError):
                raise
            self.note(what, error)
            kept: T = otherwise
            return kept

    def checks(self, *asked: tuple[Any, ...]) -> list[Check]:
        """Return the checks that functions make: each is given with its arguments."""
        made = (
            self.make(make.__name__.replace("_", "-"), make, *given, otherwise=None)
            for make, *given in asked
        )
        return [check for check in made if check is not None]

    def note(self, what: str, error: Exception) -> None:
        """Keep why a part was not made."""
        if isinstance(error, MismatchError):
            self.failed.append(NotTested(what, error.headline, error.fix))
        else:
            LOG.error("%s: internal error", what, exc_info=error)
            self.failed.append(internal_error(what, named_line(error)))


def internal_error(what: str, said: str) -> NotTested:
    """Return what a report says of a part that failed by a fault of mismatch."""
    reason = f"internal error, please report: {said}"
    return NotTested(what, reason, "report it with the traceback that was printed")
