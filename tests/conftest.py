"""For all tests: two speeds, and signals.

`make test` leaves out what is marked ``grid``: the further cases of a promise that it has seen kept
on at least one; `make test-rest` runs those. Two processes run tests at the same time, so a test
may measure the memory and the CPU time of its own processes, never those of the machine.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Any

import pytest

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process
# that they start; some tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def grid(values: Iterable[Any], *keep: Any) -> list[Any]:
    """Parameters of a test: those of ``keep`` for `make test`, the others marked ``grid``.

    A value that takes several parameters is a tuple.
    """
    listed = list(values)
    unknown = [value for value in keep if value not in listed]
    if unknown or not keep:
        raise ValueError(f"a grid keeps some of its values; not among them: {unknown}")
    return [value if value in keep else _marked(value) for value in listed]


def _marked(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.grid)
