"""The parts of a dump, and the processes that read them: this one, several, or a Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from mismatch.errors import MismatchError, named_line

PART_BYTES = 32 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A file, or some row groups of a Parquet file, that a process reads by itself.

    Attributes:
        number: in the order of the dump.
        first: rows of the file before it.
        groups: None: the whole file.
    """

    file: Path
    number: int
    first: int = 0
    groups: tuple[int, ...] | None = None


def parts_of(files: Sequence[Path]) -> list[Part]:
    """Return the parts of a dump, in order: files, and of large Parquet files their row groups."""
    parts: list[Part] = []
    for file in files:
        for first, groups in _groups(file) if file.suffix == ".parquet" else [(0, None)]:
            parts.append(Part(file, len(parts), first, groups))
    return parts


def _groups(file: Path) -> Iterator[tuple[int, tuple[int, ...] | None]]:
    """Yield rows before some row groups, and their numbers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        about = pq.read_metadata(file)
    except (pa.ArrowException, OSError):  # reading it says what is wrong
        yield 0, None
        return
    first, rows, size, groups = 0, 0, 0, []
    for number in range(about.num_row_groups):
        groups.append(number)
        size += about.row_group(number).total_byte_size
        rows += about.row_group(number).num_rows
        if size >= PART_BYTES or number == about.num_row_groups - 1:
            yield first, tuple(groups)
            first, size, groups = rows, 0, []
    if not about.num_row_groups:
        yield 0, None


@dataclass(frozen=True)
class Where:
    """Which processes read a dump.

    Attributes:
        workers: processes of this machine; None: one per core where the dump is large.
        dask: address of a scheduler whose workers have mismatch and see the files.
    """

    workers: int | None = 1
    dask: str | None = None

    def each(self, work: Callable[[Part], T], parts: Sequence[Part]) -> Iterator[T]:
        """Yield the work's result for every part, in order.

        Raises:
            MismatchError: of the work; a process was killed; Dask is not there.
        """
        if self.dask is not None:
            yield from _on_dask(self.dask, work, parts)
            return
        workers = self.workers
        if workers is None:
            size = sum(part.file.stat().st_size for part in parts if part.first == 0)
            workers = len(os.sched_getaffinity(0)) if size > 2 * PART_BYTES else 1
        if min(workers, len(parts)) <= 1:
            yield from map(work, parts)
            return
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(min(workers, len(parts)), context, _end_with_parent)
        try:
            yield from pool.map(work, parts)
        except BrokenProcessPool as error:
            fault = "a process that reads the dump was killed"
            raise MismatchError(fault, "was memory short? --workers 1 needs least") from error
        finally:
            pool.shutdown(cancel_futures=True)


HERE = Where()


def _end_with_parent() -> None:
    """End this process with the one that started it; Ctrl-C is for that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _on_dask(address: str, work: Callable[[Part], T], parts: Sequence[Part]) -> Iterator[T]:
    try:
        from distributed import Client
    except ImportError as error:
        raise MismatchError(
            "--dask needs Dask's client", "pip install 'train-infer-mismatch[dask]'"
        ) from error
    try:
        client = Client(address, timeout=30)
    except (OSError, ValueError) as error:
        fault = f"--dask {address}: no scheduler answers: {named_line(error)}"
        raise MismatchError(fault, "give its address, such as tcp://HOST:8786") from error
    with client:
        absolute = [replace(part, file=part.file.resolve()) for part in parts]
        futures = client.map(work, absolute, pure=False)
        for future in futures:
            yield future.result()
            future.release()
