"""Kill `mismatch postmortem` before every Nth of its writes; compare what it left.

``python -m tests.postmortem_kills FOLDER FIRST EVERY`` prints a JSON line per kill. What a killed
command left is judged by `mismatch compare`, to the numbers of an undisturbed run, or is refused
with words; nothing stays in the temporary folder or in /dev/shm, which no other process may use.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from random import Random

from tests.write_faults import command, in_child, results
from tests.write_hooks import HOOKS

SHARED = Path("/dev/shm")


def write_dump(path: Path, prompts: int = 24, tokens: int = 16) -> Path:
    """A dump of two sides that differ by noise, two samples a prompt."""
    random = Random(0)
    with path.open("w") as file:
        for number in range(2 * prompts):
            values = [-random.expovariate(1.0) for _ in range(tokens)]
            row = {
                "prompt_token_ids": [number // 2, 1],
                "response_token_ids": [random.randrange(5, 500) for _ in range(tokens)],
                "logprobs": values,
                "train_logprobs": [value + random.gauss(0, 0.01) for value in values],
                "prompt_id": number // 2,
                "step": number % 2,
            }
            file.write(json.dumps(row) + "\n")
    return path


def main(folder: Path, first: int, every: int) -> None:
    disk, log = folder / "disk", folder / "log"
    run, temporary = disk / "run", folder / "tmp"
    temporary.mkdir()
    shared = set(SHARED.iterdir())
    tempfile.tempdir = str(temporary)
    arguments = ["postmortem", str(write_dump(folder / "dump.jsonl")), "--out", str(run)]
    code = command(arguments, log)  # here: what it imports serves all kills
    assert code in (0, 1), log.read_text()
    expected = results(run)
    HOOKS.install()
    operation, number, killed = folder / "operation", first, -signal.SIGKILL
    while killed == -signal.SIGKILL:
        shutil.rmtree(disk)
        disk.mkdir()

        def at(what: str, path: str, number: int = number) -> None:
            if HOOKS.count == number:
                HOOKS.at = None
                operation.write_text(f"{what} {os.path.relpath(path, disk)}")
                os.kill(os.getpid(), signal.SIGKILL)

        def work() -> int:
            HOOKS.root, HOOKS.count, HOOKS.at = str(disk), 0, at
            return command(arguments, log)

        killed = in_child(work)
        if killed == -signal.SIGKILL:
            again = in_child(lambda: command(["compare", str(run)], log))
            words = log.read_text()
            same = again in (0, 1) and results(run) == expected and again == code
            refused = again == 2 and "fix:" in words and "Traceback" not in words
            left = [str(path) for path in {*temporary.iterdir(), *SHARED.iterdir()} - shared]
            outcome = "same" if same else "refused" if refused else f"exit {again}: {words}"
            print(json.dumps([number, operation.read_text(), outcome, left]), flush=True)
        number += every


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3]))
