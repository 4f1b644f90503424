"""Work that several metrics have in common, done once.

Every metric is a function of plain arrays and says its formula in full. Many ask for the same
intermediate (rho - 1, |delta|, sums per sequence): a function under :func:`shared` remembers its
answer for the arrays it was given, as long as a :func:`sharing` block lasts. Outside one it is the
plain function. Answers are shared, so nobody may write into them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Answer = TypeVar("Answer")
Memo = dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]]

_memo: ContextVar[Memo | None] = ContextVar("shared work", default=None)


@contextmanager
def sharing() -> Iterator[None]:
    """Within the block, shared functions answer each question once."""
    token = _memo.set({})
    try:
        yield
    finally:
        _memo.reset(token)


def shared(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Remember the answer per array object; positional arguments only."""

    @functools.wraps(function)
    def call(*arrays: Any) -> Answer:
        memo = _memo.get()
        if memo is None:
            return function(*arrays)
        key = (function, *map(id, arrays))
        if key not in memo:
            # The arrays are kept with the answer: while they live, nothing else has their ids.
            memo[key] = function(*arrays), arrays
        answer: Answer = memo[key][0]
        return answer

    return call
