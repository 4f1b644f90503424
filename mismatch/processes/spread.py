"""Work on many parts: in this process, in several, or on a Dask cluster, to the same results."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TypeVar

from mismatch.errors import MismatchError, named_line

P = TypeVar("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Where:
    """Which processes work on the parts of something large.

    Attributes:
        workers: processes of this machine; None: one per core where it is large.
        dask: address of a scheduler whose workers have mismatch and see the files.
    """

    workers: int | None = 1
    dask: str | None = None

    def each(self, work: Callable[[P], T], parts: Sequence[P], large: bool) -> Iterator[T]:
        """Yield the work's result for every part, in order.

        Args:
            work: can be sent to another process, as its parts and results can.

        Raises:
            MismatchError: of the work; a process was killed; Dask is not there.
        """
        if self.dask is not None:
            yield from _on_dask(self.dask, work, parts)
            return
        workers = self.workers
        if workers is None:
            has = hasattr(os, "sched_getaffinity")  # macOS does not say which cores may be used
            cores = len(os.sched_getaffinity(0)) if has else os.cpu_count() or 1
            workers = cores if large else 1
        if min(workers, len(parts)) <= 1:
            yield from map(work, parts)
            return
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(min(workers, len(parts)), context, _end_with_parent)
        try:
            yield from pool.map(work, parts)
        except BrokenProcessPool as error:
            fault = "a process that read a part was killed"
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


def _on_dask(address: str, work: Callable[[P], T], parts: Sequence[P]) -> Iterator[T]:
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
        for future in client.map(work, parts, pure=False):
            try:
                result = future.result()
            except MismatchError:
                raise
            except Exception as error:  # a worker that was killed, or has no mismatch
                fault = f"--dask {address}: a worker failed: {named_line(error)}"
                raise MismatchError(fault, "its workers need mismatch and the files") from error
            yield result
            future.release()
