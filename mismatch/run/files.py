"""Read files that others made: regular files alone, within bounds of memory.

A FIFO would block a reader for ever, and a device has no end. A small file can also ask for any
amount of memory: by JSON of empty lists, by YAML aliases of aliases, by columns of equal values.
What a reader does with a foreign file happens inside :func:`bounded_memory`.
"""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.errors import MismatchError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

# A Python object takes at most 27 times the bytes of its JSON: with both bounds less than 1 GiB.
LARGEST_JSON = 32 << 20  # bytes of a document, or of a line of JSONL
MOST_CONTAINERS = 1 << 20  # lists and objects in it
LARGEST_YAML = 1 << 20  # bytes
MOST_NODES = 100_000  # of a YAML file, each alias counted as what it stands for
# Bytes that a foreign file may take while it is read, and those for each byte of the file.
READING, TIMES = 640 << 20, 16


def open_regular(path: Path | str) -> io.BufferedReader:
    """Open a file for reading; a link is followed to what it names.

    Raises:
        OSError: as ``open``; also for what is no regular file: a FIFO, a socket, a device.
    """
    # Without O_NONBLOCK the opening of a FIFO waits for somebody who writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "a folder" if stat.S_ISDIR(mode) else "no regular file", str(path))
    return open(descriptor, "rb")


def read_regular(path: Path | str, most: int = LARGEST_JSON) -> bytes:
    """Return the bytes of a file.

    Raises:
        OSError: as :func:`open_regular`; also for a file of more than ``most`` bytes.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"more than {most >> 20} MiB", str(path))
    return data


def parse_json(
    data: bytes,
    parse_constant: Callable[[str], Any] | None = None,
    object_hook: Callable[[dict[str, Any]], Any] | None = None,
) -> Any:
    """Return what JSON says; the hooks as ``json.loads`` takes them.

    Raises:
        ValueError: it is no JSON in UTF-8, or would take too much memory.
        RecursionError: it is nested too deeply.
    """
    if len(data) > LARGEST_JSON:
        raise ValueError(f"more than {LARGEST_JSON >> 20} MiB of JSON")
    if data.count(b"[") + data.count(b"{") > MOST_CONTAINERS:
        raise ValueError(f"more than {MOST_CONTAINERS:,} lists and objects")
    text = data.decode("utf-8")
    return json.loads(text, parse_constant=parse_constant, object_hook=object_hook)


def read_yaml(path: Path | str) -> str:
    """Return the text of a YAML file that is small, also with every alias written out.

    Raises:
        OSError: as :func:`read_regular`.
        ValueError: it is no UTF-8, or as :func:`require_small_yaml`.
    """
    text = read_regular(path, LARGEST_YAML).decode("utf-8")
    require_small_yaml(text)
    return text


def require_small_yaml(text: str) -> None:
    """Refuse YAML that is large with every alias written out.

    Raises:
        ValueError: it has too many values, or contains itself.
        yaml.YAMLError: it is no YAML.
        RecursionError: it is nested too deeply.
    """
    import yaml

    sizes: dict[int, int | None] = {}  # node -> its size; None while it is counted

    def size(node: Any) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = None
            within = [] if isinstance(node, yaml.ScalarNode) else node.value
            parts = [part for each in within for part in (each if type(each) is tuple else [each])]
            sizes[id(node)] = 1 + sum(map(size, parts))
        counted = sizes[id(node)]
        if counted is None:
            raise ValueError("it contains itself")
        return counted

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None and (values := size(root)) > MOST_NODES:
        raise ValueError(f"with its aliases written out it has {values:.3g} values")


def open_parquet(path: Path | str) -> pq.ParquetFile:
    """Open a Parquet file; its footer alone is read.

    Raises:
        OSError: as :func:`open_regular`; its columns have names that are no text.
        pyarrow.ArrowException: it is no Parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    open_regular(path).close()
    # Arrow's own allocator takes a GiB at once, so that no later limit holds.
    pa.set_memory_pool(pa.system_memory_pool())
    try:  # buffering ahead holds a row group several times
        return pq.ParquetFile(path, pre_buffer=False)
    except UnicodeDecodeError as error:
        raise OSError(errno.EINVAL, f"its names are no UTF-8: {error}", str(path)) from error


@contextmanager
def bounded_memory(path: Path, most: int = READING) -> Iterator[None]:
    """Let this process take no more memory than ``most`` bytes and some per byte of a file.

    Only in the main thread, as the limit is of the process, and on Linux.

    Raises:
        MismatchError: reading the file takes more.
    """
    most += TIMES * (path.stat().st_size if path.is_file() else 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = 0
    if threading.current_thread() is threading.main_thread():
        with suppress(OSError), open("/proc/self/statm", "rb") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    limits = [now + most, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    if now:
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    except MemoryError as error:
        fault = f"{path} takes more than {most >> 20} MiB of memory to read"
        raise MismatchError(fault, "is it damaged? write it in smaller parts") from error
    finally:
        if now:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
