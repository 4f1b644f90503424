"""What holds code before it runs: ``python -I -S sandbox_guard.py LIMITS`` with the code on stdin.

A script of its own that imports nothing of this package: it starts in the sandbox, limits itself
for good, and becomes a Python that runs its stdin. LIMITS is JSON: memory_bytes, file_bytes, cpu_s,
disk_bytes, "mounts": whether it has a mount namespace to make read-only, and "trees": the
interpreter's folders, beside which the kernel refuses files (where it can: Linux from 5.13 on);
null: it need not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
RDONLY, NOSUID, NODEV, AT_RECURSIVE, MOUNT_SETATTR = 0x1, 0x2, 0x4, 0x8000, 442
NO_NEW_PRIVS, SET_SECCOMP, CAPBSET_DROP, FILTER = 38, 22, 24, 2
ALLOW, FAIL = 0x7FFF0000, 0x00050000
CLONE_THREAD = 0x00010000
FILES = 10_000  # and folders
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
FILE_WRITE, FILE_READ, TREE_READ = 0x2, 0x4, 0xD  # a tree: execute, read files and folders
TREES = ("/usr", "/lib", "/lib64", "/bin", "/proc/self", "/sys/devices/system/cpu")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero",
                "/proc/cpuinfo", "/proc/meminfo", "/proc/stat")  # fmt: skip
# machine -> (audit architecture, clone, clone3, calls refused: fork, vfork, socket, io_uring_setup,
# ptrace, kill, tkill, tgkill, rt_sigqueueinfo, pidfd_send_signal, process_vm_writev, unshare)
CALLS = {
    "x86_64": (
        *(0xC000003E, 56, 435),
        (57, 58, 41, 425, 101, 62, 200, 234, 129, 424, 311, 272),
    ),
    "aarch64": (0xC00000B7, 220, 435, (198, 425, 117, 129, 130, 131, 138, 424, 271, 97)),
}


def limit(limits: dict[str, Any]) -> None:
    """Memory, size of a file, CPU time, open files; no core dump."""
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # a lower limit is in force
            resource.setrlimit(kind, (value, value))


def mount_read_only(path: str, size: int) -> None:
    """All of the tree read-only and without devices, but for a small file system at ``path``."""
    attributes = (ctypes.c_uint64 * 4)(RDONLY | NOSUID | NODEV, 0, 0, 0)
    root = ctypes.c_char_p(b"/")
    if LIBC.syscall(MOUNT_SETATTR, -100, root, AT_RECURSIVE, attributes, 32):
        return
    if LIBC.mount(b"proc", b"/proc", b"proc", NOSUID | NODEV, None):
        LIBC.mount(b"none", b"/proc", b"tmpfs", RDONLY, None)
    LIBC.mount(
        b"none", path.encode(), b"tmpfs", NOSUID | NODEV, f"size={size},nr_inodes={FILES}".encode()
    )
    os.chdir(path)


def refuse_files(trees: list[str]) -> bool:
    """No file but those of this directory, and to read the interpreter's and a few of the system's;
    False: this kernel has no Landlock. See landlock(7); the numbers are those of all machines."""
    version = LIBC.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    # Access rights are bits, of which later kernels know more: 1 to 13, rename, truncate.
    every = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    handled = ctypes.c_uint64(every)
    rules = LIBC.syscall(CREATE_RULESET, ctypes.byref(handled), 8, 0)
    if rules < 0:
        return False
    allowed = [(os.getcwd(), every), ("/dev/null", FILE_READ | FILE_WRITE)]
    allowed += [(path, TREE_READ) for path in (*trees, *TREES)]
    allowed += [(path, FILE_READ) for path in SYSTEM_FILES]
    for path, access in allowed:
        with contextlib.suppress(OSError):  # not on this machine
            tree = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = ctypes.create_string_buffer(struct.pack("=Qi", access, tree))
            LIBC.syscall(ADD_RULE, rules, 1, rule, 0)
            os.close(tree)
    return bool(LIBC.syscall(RESTRICT_SELF, rules, 0) == 0)


def drop_privileges() -> None:
    """No capability comes back with the next program, which could undo the mounts."""
    for capability in range(64):
        LIBC.prctl(CAPBSET_DROP, capability, 0, 0, 0)
    LIBC.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)


def refuse_calls() -> bool:
    """No new process (threads may start), no socket, no signal to others; False: not possible."""
    if sys.platform != "linux" or platform.machine() not in CALLS:
        return False
    architecture, clone, clone3, refused = CALLS[platform.machine()]
    load, equal, above, bits, end = 0x20, 0x15, 0x35, 0x45, 0x06
    no = (end, 0, 0, FAIL | errno.EPERM)
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), no, (load, 0, 0, 0)]
    program += [(above, 0, 1, 0x40000000), no]
    for call in refused:
        program += [(equal, 0, 1, call), no]
    program += [(equal, 0, 1, clone3), (end, 0, 0, FAIL | errno.ENOSYS)]
    program += [(equal, 1, 0, clone), (end, 0, 0, ALLOW)]
    program += [(load, 0, 0, 16), (bits, 1, 0, CLONE_THREAD), no, (end, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    head = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    return bool(LIBC.prctl(SET_SECCOMP, FILTER, head, 0, 0) == 0)


def main() -> None:
    limits = json.loads(sys.argv[1])
    if limits["mounts"]:
        mount_read_only(os.getcwd(), limits["disk_bytes"])
    limit(limits)
    drop_privileges()
    if limits["trees"] is not None:
        refuse_files(limits["trees"])
    if not refuse_calls():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    os.execv(sys.executable, [sys.executable, "-I", "-u", "-"])


if __name__ == "__main__":
    main()
