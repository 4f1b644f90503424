"""Commands on small and read-only file systems, in a mount namespace of their own."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

# Arguments: directory, mount options, number of things to copy in, the things, the command.
MOUNT = """
directory=$1 options=$2 count=$3; shift 3
mount -t tmpfs -o "${options%,ro}" tmpfs "$directory" || exit 125
while [ "$count" -gt 0 ]; do cp -r "$1" "$directory/"; shift; count=$((count - 1)); done
case $options in *,ro) mount -o remount,ro "$directory" || exit 125;; esac
exec "$@"
"""


@functools.cache
def namespace() -> tuple[str, ...]:
    """The way to a mount namespace that works here; skips the test where none does."""
    flags = ("-m",) if os.geteuid() == 0 else ("-r", "-m")
    probe = ["unshare", *flags, "sh", "-c", "mount -t tmpfs tmpfs /tmp"]
    try:
        works = subprocess.run(probe, capture_output=True).returncode == 0
    except OSError:
        works = False
    return ("unshare", *flags) if works else ()


def mounted(
    directory: Path | str,
    options: str,
    command: Sequence[str],
    cwd: Path,
    fill: Sequence[str] = (),
    timeout: float = 300,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command while a tmpfs with these options lies at ``directory``; "…,ro" once filled."""
    if not namespace():
        pytest.skip("machine: no mount namespace: cannot make a small or read-only file system")
    Path(directory).mkdir(exist_ok=True)
    script = ["sh", "-c", MOUNT, "sh", str(directory), options, str(len(fill)), *fill]
    done = subprocess.run(
        [*namespace(), *script, *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **env},
    )
    assert done.returncode != 125, done.stderr
    return done
