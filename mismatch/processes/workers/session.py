"""The worker: ``python -m mismatch.processes.workers.session SESSION.json``.

It runs the tasks of one session (mismatch/processes/tasks.py), as an engine or as one rank of a
training world, and leaves artefacts in the run directory. A training world is started by the tool,
or by your own torchrun::

    torchrun --nproc-per-node 2 -m mismatch.processes.workers.session SESSION.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mismatch.processes.tasks import EngineSession, read_session
from mismatch.run.messages import exit_worker


def main(arguments: Sequence[str]) -> int:
    """Run one session; 0, or another code with the error left for the parent."""
    if len(arguments) != 1:
        print("usage: python -m mismatch.processes.workers.session SESSION.json", file=sys.stderr)
        return 2
    session = read_session(Path(arguments[0]))
    if isinstance(session, EngineSession):
        from mismatch.processes.workers import engine

        return engine.work(session)
    from mismatch.processes.workers import train

    return train.work(session)


if __name__ == "__main__":
    exit_worker(main(sys.argv[1:]))
