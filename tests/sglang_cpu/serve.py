"""``python -m tests.sglang_cpu.serve …``: SGLang's HTTP server on a CPU.

Takes the arguments of ``python -m sglang.launch_server``, and adds what SGLang needs on a CPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mismatch.engines.sglang.child import run_detokenizer, run_scheduler
from mismatch.engines.sglang.private import HOOK
from tests import sglang_cpu


def main() -> None:
    """Serve until the process is ended by a signal."""
    os.environ[HOOK] = str(Path(__file__).parent)  # for the processes that SGLang starts
    sglang_cpu.prepare()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    more: list[str] = []
    for name, value in sglang_cpu.arguments(context=0).items():
        more += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    load_plugins()
    try:
        launch_server(
            prepare_server_args([*more, *sys.argv[1:]]),  # the last of two wins
            run_scheduler_process_func=run_scheduler,
            run_detokenizer_process_func=run_detokenizer,
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
