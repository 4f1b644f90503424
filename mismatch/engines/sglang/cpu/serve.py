"""``python -m mismatch.engines.sglang.cpu.serve …``: SGLang's HTTP server with this CPU support.

Takes the arguments of ``python -m sglang.launch_server``. On a CPU it sets what SGLang needs there,
unless it is given; elsewhere it is SGLang's own server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mismatch.engines.sglang import cpu as sglang_cpu
from mismatch.engines.sglang.child import run_detokenizer, run_scheduler


def with_cpu_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments with those for a CPU that are not given."""
    given = {argument.partition("=")[0] for argument in arguments}
    more: list[str] = []
    for name, value in sglang_cpu.ARGUMENTS.items():
        flag = f"--{name.replace('_', '-')}"
        if flag not in given:
            more += [flag] if value is True else [flag, str(value)]
    return [*arguments, *more]


def main(arguments: Sequence[str]) -> None:
    """Serve until the process is told to end."""
    sglang_cpu.prepare()
    if sglang_cpu.on_cpu():
        arguments = with_cpu_arguments(arguments)
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        launch_server(
            prepare_server_args(list(arguments)),
            run_scheduler_process_func=run_scheduler,
            run_detokenizer_process_func=run_detokenizer,
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
