"""Operations that change a file, seen before they happen: of tests/write_faults.py."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Hooks:
    """Sees every operation that changes a file below ``root``, and calls ``at`` before it."""

    def __init__(self) -> None:
        self.root, self.at, self.count = "", None, 0  # type: ignore[assignment]
        self.workers, self.dead = 0, False
        self.installed = False

    @contextlib.contextmanager
    def worker(self) -> Iterator[None]:
        self.workers += 1
        try:
            yield
        finally:
            self.workers -= 1
            self.dead = False

    def see(self, what: str, path: Any) -> None:
        if self.at is None or isinstance(path, int):
            return
        name = os.path.abspath(os.fsdecode(path))
        if name.startswith(self.root):
            self.count += 1
            self.at(what, name)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.at is None:
            return
        if event == "open":
            path, _, flags = arguments
            if path is not None and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.see("open", path)
        elif event in ("os.rename", "shutil.copyfile"):
            self.see(event.partition(".")[2], arguments[1])
        elif event == "os.mkdir":
            self.see("mkdir", arguments[0])

    def install(self) -> None:
        import safetensors.torch as st

        if self.installed:
            return
        self.installed = True
        sys.addaudithook(self.audit)
        fsync, unlink, write = os.fsync, os.unlink, os.write
        write_text, save_file = Path.write_text, st.save_file

        def seen_fsync(descriptor: int) -> None:
            self.see("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        def seen_write(descriptor: int, data: bytes) -> int:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if path.startswith("/"):
                self.see("write", path)
            return write(descriptor, data)

        def seen_text(path: Path, text: str, *rest: Any, **more: Any) -> int:
            written = write_text(path, text, *rest, **more)
            self.see("write", path)
            return written

        def seen_tensors(tensors: Any, path: Any, *rest: Any, **more: Any) -> None:
            self.see("open", path)
            save_file(tensors, path, *rest, **more)
            self.see("write", path)

        def dead_unlink(path: Any, **more: Any) -> None:
            if not self.dead:  # the dead tidy nothing up
                unlink(path, **more)

        os.fsync, os.unlink, os.remove, os.write = seen_fsync, dead_unlink, dead_unlink, seen_write
        Path.write_text = seen_text  # type: ignore[method-assign]
        st.save_file = seen_tensors


HOOKS = Hooks()


def torn(what: str, path: str) -> None:
    """Half of what was written and not yet synced is lost."""
    if what not in ("fsync", "write"):
        return
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.stat(path).st_mode):
            os.truncate(path, os.path.getsize(path) // 2)
