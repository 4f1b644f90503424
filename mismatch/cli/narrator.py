"""What the user sees while a check runs: one line per stage, with its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_INTERVAL_S = 15.0  # between progress lines where lines cannot be rewritten


class ConsoleNarrator:
    """A spinner on a terminal; plain lines, few of them, anywhere else."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def stage(self, title: str) -> Iterator[Callable[[str], None]]:
        start = time.monotonic()
        if self.console.is_terminal:
            with self.console.status(title) as status:
                yield lambda line: status.update(f"{title}: {line}")
        else:
            self.console.print(f"{title} …", highlight=False)
            yield self._plain_lines()
        elapsed = time.monotonic() - start
        self.console.print(f"{title}: done in {elapsed:.0f} s", highlight=False, markup=False)

    def note(self, text: str) -> None:
        """One line between stages."""
        self.console.print(text, highlight=False, markup=False)

    def _plain_lines(self) -> Callable[[str], None]:
        last = time.monotonic()

        def show(line: str) -> None:
            nonlocal last
            if time.monotonic() - last >= PLAIN_INTERVAL_S:
                last = time.monotonic()
                self.console.print(f"  {line}", highlight=False, markup=False)

        return show
