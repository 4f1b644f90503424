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

from mismatch.engines.distribution_capture import stable_top_k
from mismatch.engines.held_weights import HeldWeights, Ranks
from mismatch.engines.loaded_digests import NO_DIGESTS, loaded_digests
from mismatch.engines.sglang import cpu as sglang_cpu
from mismatch.engines.sglang import wire
from mismatch.errors import MismatchError
from mismatch.models.resolved import resolved

# Names a file for the scheduler's last error, which SGLang itself only logs.
ERROR_FILE = "MISMATCH_SGLANG_ERROR"
FACTS = "mismatch"  # key of our facts in the scheduler's first message
PR_SET_PDEATHSIG = 1


def end_with_engine() -> None:
    """Have the kernel end this process when the engine's process ends (Linux).

    SGLang asks for this too, but only after all its imports: an engine that is killed while it
    starts would leave a detokenizer that waits for ever.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def require_engine() -> None:
    """End this process if the engine's was gone before :func:`end_with_engine`."""
    engine = multiprocessing.parent_process()
    if engine is not None and engine.pid != os.getppid():
        os._exit(1)


if getattr(multiprocessing.current_process(), "_inheriting", False):  # unpickling, see above
    end_with_engine()
    sglang_cpu.prepare()


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler, the process that holds the model, with our additions."""
    require_engine()
    from sglang.srt.managers import scheduler

    sglang_cpu.register()
    _keep_errors()
    _one_dtype()
    _digest_before_repacking()
    _capture_triton_routes()
    _describe(scheduler.Scheduler)
    scheduler.Scheduler.mismatch_call = call
    scheduler.run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's detokenizer."""
    require_engine()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)


class ErrorFile(logging.Handler):
    """Keep the last line of the last error in a file."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self.path = Path(path)

    def emit(self, record: logging.LogRecord) -> None:
        lines = [line.strip() for line in record.getMessage().splitlines() if line.strip()]
        if lines:
            self.path.write_text(lines[-1])


def _keep_errors() -> None:
    path = os.environ.get(ERROR_FILE)
    if path:
        logging.getLogger("sglang.srt.managers.scheduler").addHandler(ErrorFile(path))


def _one_dtype() -> None:
    """Load every parameter in the dtype that was asked for.

    SGLang's gpt-oss takes the dtype of its linear layers from config.json and of all else from the
    engine's argument: asked for float32 of a bfloat16 checkpoint it fails in its first forward.
    """
    from sglang.srt.configs.model_config import ModelConfig

    make = ModelConfig.__init__

    def make_with_one_dtype(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for config in (self.hf_config, self.hf_text_config):
            if getattr(config, "dtype", None) is not None:
                config.dtype = self.dtype

    ModelConfig.__init__ = make_with_one_dtype


def _digest_before_repacking() -> None:
    """Digest weights right after loading, before kernels repack them."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    load = DefaultModelLoader.load_weights_only

    def load_then_digest(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(model, *args, **kwargs)
        model.mismatch_loaded = loaded_digests(model)
        return result

    DefaultModelLoader.load_weights_only = staticmethod(load_then_digest)


def _capture_triton_routes() -> None:
    """Capture routes of SGLang's triton_kernels router, which does not capture them itself.

    This router runs gpt-oss where that package is installed; the buffer of routes would stay zero.
    With ``renormalize`` it takes the top k of the logits themselves.
    """
    from sglang.srt.layers.moe import topk

    forward = topk.TopK.forward_cuda

    def forward_then_capture(self: Any, hidden: Any, logits: Any, **kwargs: Any) -> Any:
        output = forward(self, hidden, logits, **kwargs)
        config = self.topk_config
        if output.format is topk.TopKOutputFormat.TRITON_KERNEL and config.renormalize:
            ids = stable_top_k(logits, config.top_k)
            topk.capture_routed_experts_if_allowed(config, self.layer_id, ids)
        return output

    topk.TopK.forward_cuda = forward_then_capture


def _describe(scheduler: Any) -> None:
    """Add our facts to the scheduler's first message to the engine."""
    ready = scheduler.get_init_info

    def with_facts(self: Any) -> dict[str, Any]:
        answer: dict[str, Any] = ready(self)
        answer[FACTS] = _facts(self.tp_worker.model_runner)
        return answer

    scheduler.get_init_info = with_facts


def call(scheduler: Any, name: str, args: list[Any], answer: str) -> None:
    """Answer an RPC by a JSON file, because SGLang's own RPCs return nothing."""
    from torch import distributed

    from mismatch.engines.module_capture import ModuleCalls

    class TensorParallel(Ranks):
        """SGLang's own group."""

        def __init__(self, count: int) -> None:
            self.count = count

        def gather(self, tensor: Any, axis: int) -> Any:
            from sglang.srt.distributed import get_tp_group

            return get_tp_group().all_gather(tensor.contiguous(), axis)

    class Calls(HeldWeights, ModuleCalls):
        """The calls that this process answers."""

        def _mismatch_model(self) -> Any:
            return scheduler.tp_worker.model_runner.model

        def mismatch_ranks(self) -> Ranks:
            return TensorParallel(scheduler.server_args.tp_size)

        def mismatch_idle(self) -> bool:
            return bool(scheduler.is_fully_idle())

    if not hasattr(scheduler, "mismatch_calls"):
        scheduler.mismatch_calls = Calls()
    result = getattr(scheduler.mismatch_calls, name)(*args)
    distributed.barrier(group=scheduler.tp_cpu_group)  # every rank has written its part
    if distributed.get_rank() == 0:
        Path(answer).write_text(json.dumps(result))


def _facts(runner: Any) -> dict[str, Any]:
    """Return kernels, devices and weights of one rank as plain data."""
    model = runner.model
    moe = moe_layers(model)
    digests, unknown = getattr(model, "mismatch_loaded", NO_DIGESTS)
    methods = {type(getattr(module, "quant_method", module)).__name__ for _, module in moe}
    return {
        "attention_class": type(getattr(runner, "attn_backend", None)).__name__,
        "moe_layers": [layer for layer, _ in moe],
        "moe_methods": sorted(methods),
        "device": str(runner.device),
        "model_class": type(model).__name__,
        "config": resolved(model),
        "dtype": str(runner.dtype),
        "kv_cache_dtype": str(runner.kv_cache_dtype),
        "digests": digests,
        "unmapped": unknown,
        "substitutes": list(sglang_cpu.used),
    }


def moe_layers(model: Any) -> list[tuple[int, Any]]:
    """Return (decoder layer, module that holds its experts) of every MoE layer, in order."""
    layers: dict[int, Any] = {}
    for name, module in model.named_modules():
        if hasattr(module, "w13_weight") and hasattr(module, "w2_weight"):
            numbers = [part for part in name.split(".") if part.isdigit()]
            if numbers:
                layers[int(numbers[0])] = module
    return sorted(layers.items())


def on_failure(number: int, frame: Any) -> None:
    """Handle SGLang's signal that a child failed while the engine starts.

    Raises:
        RuntimeError: always; SGLang's own handler would kill this process silently.
    """
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # several children may send it
    raise RuntimeError("a process of SGLang failed")


def offline() -> Any:
    """Return SGLang's ``Engine`` class with processes that start in this module."""
    from sglang.srt.entrypoints.engine import Engine

    class Offline(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(run_scheduler)
        run_detokenizer_process_func = staticmethod(run_detokenizer)

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
