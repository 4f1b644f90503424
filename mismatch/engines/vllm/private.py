"""vLLM's private names that differ between versions 0.22 and 0.33: where each is.

Every function degrades: where a version lacks a name the caller gets nothing, and the measurement
that needs it is reported as not tested. Runs in vLLM's worker process.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.engines.distribution_capture import stable_top_k
from mismatch.engines.held_weights import loaded_digests
from mismatch.engines.model_calls import attribute
from mismatch.errors import MismatchError
from mismatch.types import PREFILL, ROUTES, Ints

if TYPE_CHECKING:
    import torch

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
# Modules whose ``select_experts`` vLLM's CPU kernels call themselves. These kernels choose their
# experts without the router (up to 0.28), so a capture function of the router sees nothing there.
CPU_CHOOSERS = (
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe",  # 0.22 to 0.26
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",  # 0.27 to 0.30
)
TRITON_MODULE = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"
BINDER_MODULE = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"
BINDER = "bind_routed_experts_capturer"
RUNNERS_BINDER = "_bind_routed_experts_capturer"
REFUSED = "mismatch_capture_refused"  # attribute of a model whose routes cannot be captured
OURS = "of_mismatch"  # attribute of a function that stands in the place of vLLM's
# Of a kernel: the function that gets its experts. vLLM sets it from 0.27 to 0.31.
WRITER = "routing_replay_capture_fn"


def found(module: str, name: str) -> Any:
    """Return what a module of vLLM holds under a (dotted) name; None: this version lacks it."""
    try:
        value = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    return value


# ---------------------------------------------------------------- where it is in vLLM's objects
# To be read with :func:`attribute`, which raises MismatchError where a version lacks a name.

ENGINE = "llm_engine"  # these of vllm.LLM
ADD_ADAPTER, REMOVE_ADAPTER = f"{ENGINE}.add_lora", f"{ENGINE}.remove_lora"
SHUTDOWN = f"{ENGINE}.engine_core.shutdown"
CONFIG = f"{ENGINE}.vllm_config"
RUNNER = "model_runner"  # of a worker
SAMPLE, FORWARD = "sample_tokens", "execute_model"  # of a model runner
LOGITS = "compute_logits"  # of a model
REPACK = "process_weights_after_loading"  # a loader's step that repacks the weights
WEIGHTS = "weights as loaded"
TP_SIZE = "parallel_config.tensor_parallel_size"  # of a worker
SLOTS, STACKS = "lora_manager.lora_index_to_id", ("lora_a_stacked", "lora_b_stacked")
EXPERT_COUNT = "router.global_num_experts"  # of a MoE layer
IDENTITY_ROWS = 1024  # of the identity matrix at a time


def model_of(worker: Any) -> Any:
    """Return the model of a worker."""
    return attribute(worker, f"{RUNNER}.get_model")()


def around(holder: Any, name: str, function: Callable[..., Any]) -> Callable[[], object]:
    """Wrap a method of one object: the function gets it first. Return what undoes this."""
    vars(holder)[name] = partial(function, attribute(holder, name))
    return partial(vars(holder).pop, name, None)


def config_of(llm: Any, arguments: dict[str, Any]) -> Any:
    """Return vLLM's ``VllmConfig``, as it runs, else as it follows from the arguments."""
    from vllm import EngineArgs

    return attribute(llm, CONFIG, None) or EngineArgs(**arguments).create_engine_config()


def device_type() -> str | None:
    """Return "cuda" or "cpu", on which vLLM of this process computes; None: it does not say."""
    return getattr(found("vllm.platforms", "current_platform"), "device_type", None) or None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a model runner: its requests in the order of the batch."""

    requests: list[str]
    computed: Ints  # tokens of each that were computed before
    scheduled: Ints  # tokens of each that this step computes
    logits: Any = None  # to sample from; None: the model has yet to compute them


def forwarded(runner: Any, scheduled: Any, logits: Any = None) -> Step:
    """Return a step of the older runner, of what the scheduler told it to compute."""
    batch, counts = attribute(runner, "input_batch"), attribute(scheduled, "num_scheduled_tokens")
    requests = list(attribute(batch, "req_ids"))
    computed = attribute(batch, "num_computed_tokens_cpu")[: len(requests)]
    return Step(requests, computed, np.array([counts.get(r, 0) for r in requests]), logits)


def to_sample(runner: Any) -> Step | None:
    """Return the step whose tokens are sampled next; None: of another rank, or none.

    Runners keep it in ``execute_model_state`` between ``execute_model`` and ``sample_tokens``.
    """
    state = attribute(runner, "execute_model_state")
    if state is None:
        return None
    if not hasattr(state, "input_batch"):
        logits = attribute(state, "logits")
        scheduled = attribute(state, "scheduler_output")
        return None if logits is None else forwarded(runner, scheduled, logits)
    batch, requests = state.input_batch, list(attribute(state, "input_batch.req_ids"))
    names = "num_computed_tokens_np", "num_scheduled_tokens"
    return Step(requests, *(attribute(batch, name)[: len(requests)] for name in names))


# ---------------------------------------------------------------- before a model is built


def install() -> None:
    """Take what can be taken, and never fail for the rest; again: change nothing."""
    digest_before_repacking()
    take_triton_routes()
    bind_in_older_runners()
    tolerate_refusal()
    serve_float32_sinks()


def digest_before_repacking() -> None:
    """Have the loader digest the weights just after loading.

    A moment later kernels repack or drop them (oneDNN on CPU keeps no readable copy), and a worker
    extension is not called in between: the loader's own step is the only place.
    """
    home = "vllm.model_executor.model_loader.base_loader"
    repack = found(home, REPACK)
    if repack is None or hasattr(repack, OURS):
        return

    def digest_then_repack(model: Any, *args: Any, **kwargs: Any) -> Any:
        model.mismatch_loaded = loaded_digests(model, _owned)
        return repack(model, *args, **kwargs)

    setattr(digest_then_repack, OURS, True)
    vars(sys.modules[home])[REPACK] = digest_then_repack


def _owned(module: Any, part: str, leaf: str) -> bool:
    """Tell whether this rank counts a part: sliced parts always, copies on the first rank only.

    The sum over ranks is then the digest of the whole parameter.
    """
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    rank = get_tensor_model_parallel_rank()
    if part in ("k_proj", "v_proj"):
        return bool(rank % getattr(module, "num_kv_head_replicas", 1) == 0)
    sliced = isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding))
    sliced |= isinstance(module, RowParallelLinear) and leaf == "weight"
    sliced |= leaf == "sinks"
    return (sliced and getattr(module, "tp_size", 2) > 1) or rank == 0


def take_triton_routes() -> None:
    """Have vLLM's monolithic Triton kernel write the experts that it routes to.

    With ``renormalize`` the kernel takes the top k of the logits themselves; of equal logits the
    lower expert wins (``triton_kernels/topk_details``). vLLM gives a buffer from 0.32 on.
    """
    kernel = found(TRITON_MODULE, "OAITritonMxfp4ExpertsMonolithic")
    if kernel is None or hasattr(kernel.apply, OURS):
        return
    apply = kernel.apply

    def apply_and_write(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("routing_replay_out")
        write = getattr(self, WRITER, None) if out is None else out.copy_
        if write is not None:
            write(stable_top_k(kwargs["router_logits"], self.topk))
        return apply(self, *args, **kwargs)

    setattr(apply_and_write, OURS, True)
    kernel.apply = apply_and_write
    kernel.supports_routing_replay_capture = lambda self: bool(self.renormalize)


def bind_in_older_runners() -> None:
    """Before 0.28 a method of the runner binds the capture: see to kernels, and note a refusal.

    Before 0.27 it binds routers alone, which a monolithic kernel does not call.
    """
    runner = found("vllm.v1.worker.gpu_model_runner", "GPUModelRunner")
    bind = getattr(runner, RUNNERS_BINDER, None)
    if bind is None or hasattr(bind, OURS):
        return

    def bind_or_note(self: Any, capturer: Any) -> None:
        try:
            bind(self, capturer)
        except ValueError as error:
            note_refusal(self.model, error)
        for _, moe in moe_layers(self.model):
            kernel = experts_kernel(getattr(moe, "routed_experts", moe))
            ours = hasattr(getattr(kernel, "apply", None), OURS) and kernel.renormalize
            if ours and not hasattr(kernel, "set_capture_fn"):
                setattr(kernel, WRITER, getattr(moe.router, "capture_fn", None))

    setattr(bind_or_note, OURS, True)
    setattr(runner, RUNNERS_BINDER, bind_or_note)


def note_refusal(model: Any, error: Exception) -> None:
    """Note on a model, inside what wraps it for CUDA graphs, why its routes are not captured."""
    setattr(getattr(model, "unwrap", lambda: model)(), REFUSED, str(error))


def tolerate_refusal() -> None:
    """Where vLLM refuses to capture a model's routes, note why on the model and go on."""
    bind = found(BINDER_MODULE, BINDER)
    if bind is None or hasattr(bind, OURS):
        return

    def bind_or_note(model: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bind(model, *args, **kwargs)
        except ValueError as error:
            note_refusal(model, error)

    setattr(bind_or_note, OURS, True)
    for module in list(sys.modules.values()):  # its module, and those that import it
        if getattr(module, "__dict__", {}).get(BINDER) is bind:
            setattr(module, BINDER, bind_or_note)


def serve_float32_sinks() -> None:
    """Have CPU attention before vLLM 0.31 serve a float32 model's sinks, which it takes in bf16.

    Only sinks that bf16 holds exactly are cast, as those of a bf16 checkpoint are.
    """
    attention = found("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl")
    release = found("vllm", "__version_tuple__")
    if not attention or not release or release[:2] >= (0, 31) or hasattr(attention.forward, OURS):
        return
    forward = attention.forward

    def cast_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        sinks = getattr(self, "sinks", None)
        if sinks is not None and sinks.dtype.itemsize == 4:
            rounded = sinks.bfloat16()
            if (rounded.float() == sinks).all():
                self.sinks = rounded
        return forward(self, *args, **kwargs)

    setattr(cast_first, OURS, True)
    attention.forward = cast_first


# ---------------------------------------------------------------- of a loaded model


def lacking(model: Any) -> dict[str, str]:
    """Return measurement -> why a loaded model does not allow it; "": it does."""
    whole, digested = hasattr(model, LOGITS), hasattr(model, "mismatch_loaded")
    return {
        ROUTES: getattr(model, REFUSED, ""),
        PREFILL: "" if whole else f"this vLLM has no {type(model).__name__}.{LOGITS} to temper",
        WEIGHTS: "" if digested else f"the loader of this load format is not watched ({REPACK})",
    }


def attention_backends(runner: Any) -> str:
    """Return the names of the attention backends in use, "unknown" where they are not found."""
    try:
        layers = runner.vllm_config.compilation_config.static_forward_context.values()
        names = {each.attn_backend.get_name() for each in layers if hasattr(each, "attn_backend")}
    except AttributeError:
        return "unknown"
    return "+".join(sorted(names)) or "unknown"


def moe_layers(model: Any) -> list[tuple[int, Any]]:
    """Return (decoder layer, module with its router) of every MoE layer, in order.

    A module is known by a router that can be watched, not by its class: that is ``FusedMoE`` in
    vLLM 0.22 and ``MoERunner`` from 0.24 on.
    """
    layers: dict[int, Any] = {}
    for name, module in model.named_modules():
        router = getattr(module, "router", None)
        match = LAYER.search(getattr(module, "layer_name", None) or name)
        if match and callable(getattr(router, "set_capture_fn", None)):
            layers.setdefault(int(match[1]), module)
    return sorted(layers.items())


def kernel_of(moe: Any) -> str:
    """Return the name of the class or function that computes a MoE layer's experts.

    Of MXFP4 experts also which kernel was chosen: some quantise the activations too.
    """
    experts = getattr(moe, "routed_experts", moe)  # the layer itself in 0.22
    method = getattr(experts, "quant_method", None)
    chosen = experts_kernel(experts) or getattr(method, "cpu_fused_moe", None)
    name = type(method if chosen is None else chosen).__name__
    packed = getattr(getattr(method, "mxfp4_backend", None), "value", None)
    return f"{name} ({packed})" if packed else name


def experts_kernel(experts: Any) -> Any:
    """Return the kernel object of a module that holds experts; None: it has none."""
    kernel = getattr(getattr(experts, "quant_method", None), "moe_kernel", None)
    return getattr(kernel, "fused_experts", None)


def expert_packer(experts: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function that shuffled a module's experts on a CPU; None: they lie as loaded."""
    kernel = experts_kernel(experts)
    pack = found("vllm._custom_ops", "cpu_prepack_moe_weight")
    if getattr(kernel, "isa", None) is None or getattr(kernel, "_use_zentorch", False):
        return None
    return pack and (lambda weight: pack(weight, kernel.isa))


def gathered(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the parts of all ranks of vLLM's tensor parallel group.

    Raises:
        MismatchError: this version has no such group; what needs it is not tested.
    """
    group = found("vllm.distributed", "get_tp_group")
    if group is None:
        raise MismatchError("this vLLM has no get_tp_group: weights of several GPUs are not read")
    return group().all_gather(tensor.contiguous(), axis)  # type: ignore[no-any-return]


def by_identity(module: Any) -> torch.Tensor | None:
    """Return [out, in] weights of a linear layer as its kernel on a CPU computes with them.

    Every product has one term that is not 0, so that the values come out as they are. None: the
    layer has no such kernel.
    """
    import torch

    if not callable(getattr(module, "cpu_linear", None)):
        return None
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    sizes = [int(getattr(module, name)) for name in names if hasattr(module, name)]
    width = sizes[0] if sizes else int(module.weight.shape[1])
    columns = []
    for start in range(0, width, IDENTITY_ROWS):
        rows = torch.arange(start, min(start + IDENTITY_ROWS, width))
        probe = torch.zeros(len(rows), width, dtype=module.weight.dtype)
        probe[torch.arange(len(rows)), rows] = 1
        columns.append(module.cpu_linear(probe, module.weight, None))
    return torch.cat(columns).t()


def sinks_in_use(module: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return the attention backend's own sinks, which may be a copy of the parameter."""
    for child in module.modules():
        sinks = getattr(getattr(child, "impl", None), "sinks", None)
        if sinks is not None:
            return sinks.data  # type: ignore[no-any-return]
    return parameter


def renamed(model: Any, checkpoint_names: list[str]) -> dict[str, str]:
    """Return vLLM's name, as if nothing were fused -> checkpoint name, of what its loader renames.

    ``apply_list`` is public in every version; before 0.26 fusing is not part of the mapper.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return {}
    if any(field.name == "orig_to_new_stacked" for field in fields(mapper)):
        mapper = replace(mapper, orig_to_new_stacked={})
    return {new: name for name in checkpoint_names for new in mapper.apply_list([name]) if new}


class RouteWatch:
    """Calls a function with the experts that every MoE layer chooses, until :meth:`close`.

    Args:
        layers: as :func:`moe_layers` returns them.
        seen: gets the layer and its expert ids [tokens, k], an integer tensor.
    """

    def __init__(self, layers: list[tuple[int, Any]], seen: Callable[[int, Any], None]) -> None:
        self.at_work: int | None = None
        self.seen = seen
        self._undo: list[Callable[[], object]] = []
        for layer, module in layers:
            module.router.set_capture_fn(partial(seen, layer))
            self._undo.append(partial(module.router.set_capture_fn, None))
            self._undo.append(module.register_forward_pre_hook(partial(self._enter, layer)).remove)
        for name in CPU_CHOOSERS:
            choose = found(name, "select_experts")
            if choose is not None:  # else this version's kernels ask the router
                home = sys.modules[name]
                vars(home)["select_experts"] = partial(self._chosen, choose)
                self._undo.append(partial(setattr, home, "select_experts", choose))

    def close(self) -> None:
        """Stop watching; vLLM is as it was."""
        while self._undo:
            self._undo.pop()()

    def _enter(self, layer: int, *_: Any) -> None:
        self.at_work = layer

    def _chosen(self, choose: Callable[..., tuple[Any, Ints]], *args: Any, **kwargs: Any) -> Any:
        weights, ids = choose(*args, **kwargs)
        if self.at_work is not None:
            self.seen(self.at_work, ids)
        return weights, ids
