"""What runs in the processes that SGLang starts: its scheduler and its detokenizer, prepared.

SGLang starts them with ``spawn``: each begins by unpickling which function to run with which
arguments, in this order, so this module is imported before anything of SGLang is.
The scheduler's first message to the engine carries what ran: kernels, MoE layers, weight digests.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from mismatch.engines.held_weights import NO_DIGESTS, HeldWeights, Ranks
from mismatch.engines.model_calls import attribute
from mismatch.engines.sglang import private, wire
from mismatch.errors import MismatchError
from mismatch.models.resolved import resolved

# Names a file for the scheduler's last error, which SGLang itself only logs.
ERROR_FILE = "MISMATCH_SGLANG_ERROR"
FACTS = "mismatch"  # key of our facts in the scheduler's first message
PR_SET_PDEATHSIG = 1

if getattr(multiprocessing.current_process(), "_inheriting", False):  # unpickling, see above
    # SGLang asks to end with the engine's process too, but only after all its imports: an engine
    # that is killed while it starts would leave a detokenizer that waits for ever.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    private.hook().prepare()


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler, the process that holds the model, with our additions."""
    require_engine()
    scheduler, process = private.scheduler()
    private.hook().register()
    if path := os.environ.get(ERROR_FILE):
        logging.getLogger("sglang.srt.managers.scheduler").addHandler(ErrorFile(path))
    private.load_in_one_dtype()
    lacking = {
        "weights": private.digest_before_repacking(),
        "routes": private.capture_triton_routes(),
    }
    ready = attribute(scheduler, private.READY, None)

    def ready_with_facts(self: Any) -> dict[str, Any]:
        answer: dict[str, Any] = ready(self)
        try:
            facts = _facts(attribute(self, private.RUNNER)) | {"lacking": lacking}
        except MismatchError as error:
            facts = private.no_facts(error.message)
        return answer | {FACTS: facts}

    if ready is not None:  # else ``private.first_facts`` says so
        setattr(scheduler, private.READY, ready_with_facts)
    scheduler.mismatch_call = call
    process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's detokenizer."""
    require_engine()
    private.detokenizer()(*args, **kwargs)


def require_engine() -> None:
    """End this process if the engine's was gone before it asked to end with it."""
    engine = multiprocessing.parent_process()
    if engine is not None and engine.pid != os.getppid():
        os._exit(1)


class ErrorFile(logging.Handler):
    """Keep the last line of the last error in a file; with the code of an error without a text."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self.path = Path(path)

    def emit(self, record: logging.LogRecord) -> None:
        lines = [line.strip() for line in record.getMessage().splitlines() if line.strip(" ^~")]
        if lines:
            alone = lines[-1].isidentifier()  # "AssertionError"
            self.path.write_text(": ".join(lines[: -3 if alone else -2 : -1]))


def _facts(runner: Any) -> dict[str, Any]:
    """Return kernels, devices and weights of one rank as plain data."""
    model = attribute(runner, "model")
    moe = private.moe_layers(model)
    digests, unknown = getattr(model, "mismatch_loaded", NO_DIGESTS)
    methods = {type(getattr(module, "quant_method", module)).__name__ for _, module in moe}
    return {
        "moe_layers": [layer for layer, _ in moe],
        "moe_methods": sorted(methods),
        **{name: str(attribute(runner, name, private.UNKNOWN)) for name in private.FACTS},
        "model_class": type(model).__name__,
        "config": resolved(model),
        "digests": digests,
        "unmapped": unknown,
        "substitutes": list(private.hook().used),
    }


def call(scheduler: Any, name: str, args: list[Any], answer: str) -> None:
    """Answer an RPC by a JSON file, because SGLang's own RPCs return nothing."""
    from torch import distributed

    from mismatch.engines.model_calls import ModelCalls

    class Calls(HeldWeights, ModelCalls):
        """The calls that this process answers."""

        def _mismatch_model(self) -> Any:
            return attribute(scheduler, private.MODEL)

        def mismatch_ranks(self) -> Ranks:
            return Ranks(attribute(scheduler, private.TP_SIZE), private.gathered)

        def mismatch_idle(self) -> bool:
            return bool(attribute(scheduler, private.IDLE, lambda: False)())

    if not hasattr(scheduler, "mismatch_calls"):
        scheduler.mismatch_calls = Calls()
    result = getattr(scheduler.mismatch_calls, name)(*args)
    # After this every rank has written its part.
    distributed.barrier(group=attribute(scheduler, private.CPU_GROUP, None))
    if distributed.get_rank() == 0:
        Path(answer).write_text(json.dumps(result))


def on_failure(number: int, frame: Any) -> None:
    """Handle SGLang's signal that a child failed while the engine starts.

    Raises:
        RuntimeError: always; SGLang's own handler would kill this process silently.
    """
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # several children may send it
    raise RuntimeError("a process of SGLang failed")


def offline() -> Any:
    """Return SGLang's ``Engine`` class with processes that start in this module."""
    engine: Any = private.engine_class(run_scheduler, run_detokenizer)

    class Offline(engine):  # type: ignore[misc]
        def mismatch_called(self, method: str, *args: Any) -> Any:
            """Call a method in the scheduler and return the first rank's answer."""
            with tempfile.TemporaryDirectory(prefix="mismatch-sglang-") as folder:
                answer = Path(folder) / "answer.json"
                try:
                    self.collective_rpc(
                        "mismatch_call", name=method, args=list(args), answer=str(answer)
                    )
                except AssertionError as error:
                    raise MismatchError(f"SGLang failed: {error}", wire.LOG_FIX) from error
                return json.loads(answer.read_text())

    return Offline
