"""SGLang's private names, written against 0.5.23: where each is, and what a version lacks.

A name that is missing costs one measurement, never the run: functions return why they could do
nothing, and "" where they did. What SGLang cannot run without is refused (:func:`needed`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from mismatch.engines.distribution_capture import stable_top_k
from mismatch.engines.held_weights import loaded_digests
from mismatch.errors import MismatchError

# The folder of a package that adds to SGLang's processes: `prepare()` runs in each of them before
# SGLang is imported, `register()` in its scheduler, `arguments(context)` makes arguments of its
# engine, and `used` has a sentence per replaced part. The tests run SGLang on a CPU with it.
HOOK = "MISMATCH_SGLANG_HOOK"
# To be read with :func:`attribute`: these of a scheduler, and the loop of an engine.
RUNNER, MODEL = "tp_worker.model_runner", "tp_worker.model_runner.model"
READY, IDLE = "get_init_info", "is_fully_idle"
CPU_GROUP, TP_SIZE = "tp_cpu_group", "server_args.tp_size"
LOOP, FLUSH = "loop", "tokenizer_manager.flush_cache"
FACTS, UNKNOWN = ("device", "dtype", "kv_cache_dtype", "model_class"), "unknown"
SILENT = "its scheduler's first message cannot be read (_scheduler_init_result)"


def hook() -> Any:
    """Return the package in the folder ``MISMATCH_SGLANG_HOOK``, or one that adds nothing."""
    folder = os.environ.get(HOOK)
    if folder:
        parent, name = os.path.split(os.path.abspath(folder))
        if parent not in sys.path:
            sys.path.append(parent)
        return import_module(name)
    nothing = {"prepare": lambda: None, "register": lambda: None, "arguments": lambda context: {}}
    return SimpleNamespace(**nothing, used=[])


def needed(module: str, name: str) -> Any:
    """Return a name of SGLang without which it does not run.

    Raises:
        MismatchError: this version lacks it.
    """
    try:
        return getattr(import_module(f"sglang.srt.{module}"), name)
    except (ImportError, AttributeError) as error:
        fault = f"this SGLang has no sglang.srt.{module}.{name}: {error}"
        raise MismatchError(
            fault, "install a version that mismatch was run with: 0.5.23"
        ) from error


def scheduler() -> tuple[Any, Any]:
    """Return SGLang's scheduler class, and the function that its process runs."""
    home = "managers.scheduler"
    return needed(home, "Scheduler"), needed(home, "run_scheduler_process")


def detokenizer() -> Any:
    """Return the function that SGLang's detokenizer process runs."""
    return needed("managers.detokenizer_manager", "run_detokenizer_process")


def engine_class(scheduler: Any, detokenizer: Any) -> Any:
    """Return SGLang's class of engines, with our functions for its processes to run.

    ``sglang.Engine`` is a proxy that has no subclasses.
    """
    methods = {"scheduler": staticmethod(scheduler), "detokenizer": staticmethod(detokenizer)}
    ours = {f"run_{name}_process_func": method for name, method in methods.items()}
    return type("Engine", (needed("entrypoints.engine", "Engine"),), ours)


def first_facts(engine: Any, key: str) -> dict[str, Any]:
    """Return our facts in the scheduler's first message; nothing but why where it is not there."""
    try:
        return engine._scheduler_init_result.scheduler_infos[0][key]  # type: ignore[no-any-return]
    except (AttributeError, LookupError, TypeError):
        return no_facts(SILENT)


def no_facts(why: str) -> dict[str, Any]:
    """Return the facts of a scheduler whose model is not found."""
    facts: dict[str, Any] = dict.fromkeys(FACTS, UNKNOWN)
    facts |= {"moe_layers": [], "moe_methods": [], "digests": {}, "unmapped": [], "config": {}}
    return facts | {"substitutes": [], "lacking": dict.fromkeys(("weights", "routes"), why)}


def handle_signals(engine: Any, end: Callable[..., None], fail: Callable[..., None]) -> None:
    """Have SGLang call our functions when it is told to end, and when a child has failed."""
    handlers = SimpleNamespace(sigterm_handler=end, running_phase_sigquit_handler=fail)
    manager = getattr(engine, "tokenizer_manager", SimpleNamespace())
    manager.signal_handler_class = lambda manager: handlers


def server_arguments() -> set[str]:
    """Return the names of SGLang's engine arguments."""
    kind = needed("server_args", "ServerArgs")
    return set(getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__)


def gathered(tensor: Any, axis: int) -> Any:
    """Return the parts of all ranks of SGLang's tensor parallel group."""
    return needed("distributed", "get_tp_group")().all_gather(tensor.contiguous(), axis)


def end_with_children() -> None:
    """End this process and its children at once."""
    try:
        needed("utils", "kill_process_tree")(os.getpid())
    except MismatchError:
        import psutil  # SGLang's own requirement

        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
        os._exit(1)


def load_in_one_dtype() -> None:
    """Load every parameter in the dtype that was asked for.

    SGLang's gpt-oss takes the dtype of its linear layers from config.json and of all else from the
    engine's argument: asked for float32 of a bfloat16 checkpoint it fails in its first forward.
    """
    try:
        from sglang.srt.configs.model_config import ModelConfig
    except ImportError:  # it costs gpt-oss in float32
        return
    make = ModelConfig.__init__

    def make_with_one_dtype(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for name in ("hf_config", "hf_text_config"):
            config: Any = getattr(self, name, None)
            if getattr(config, "dtype", None) is not None:
                config.dtype = self.dtype

    ModelConfig.__init__ = make_with_one_dtype


def digest_before_repacking() -> str:
    """Digest weights right after loading, before kernels repack them."""
    try:
        from sglang.srt.model_loader.loader import DefaultModelLoader

        load = DefaultModelLoader.load_weights_only
    except (ImportError, AttributeError):
        return "its loader has no step between loading and repacking (load_weights_only)"

    def load_then_digest(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(model, *args, **kwargs)
        model.mismatch_loaded = loaded_digests(model)
        return result

    DefaultModelLoader.load_weights_only = staticmethod(load_then_digest)
    return ""


def capture_triton_routes() -> str:
    """Capture routes of SGLang's triton_kernels router, which does not capture them itself.

    This router runs gpt-oss where that package is installed; the buffer of routes would stay zero.
    With ``renormalize`` it takes the top k of the logits themselves.
    """
    try:
        from sglang.srt.layers.moe import topk

        forward, capture = topk.TopK.forward_cuda, topk.capture_routed_experts_if_allowed
        kernels = topk.TopKOutputFormat.TRITON_KERNEL
    except (ImportError, AttributeError):
        return "its router of triton_kernels cannot be watched (capture_routed_experts_if_allowed)"

    def forward_then_capture(self: Any, hidden: Any, logits: Any, **kwargs: Any) -> Any:
        output = forward(self, hidden, logits, **kwargs)
        config = self.topk_config
        if output.format is kernels and config.renormalize:
            capture(config, self.layer_id, stable_top_k(logits, config.top_k))
        return output

    topk.TopK.forward_cuda = forward_then_capture
    return ""


def moe_layers(model: Any) -> list[tuple[int, Any]]:
    """Return (decoder layer, module that holds its experts) of every MoE layer, in order.

    A kernel may have dropped the weights as loaded (``triton_kernel`` does), so the class counts.
    """
    layers: dict[int, Any] = {}
    for name, module in model.named_modules():
        numbers = [part for part in name.split(".") if part.isdigit()]
        fused = any(kind.__name__ == "FusedMoE" for kind in type(module).__mro__)
        if numbers and (fused or hasattr(module, "w13_weight")):
            layers.setdefault(int(numbers[0]), module)
    return sorted(layers.items())
