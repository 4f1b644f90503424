"""What runs inside vLLM's worker process: weight digests, routed experts, tempered prefill.

vLLM imports this module by name in every worker (``worker_extension_cls``) and mixes the class
into its own worker, whose ``model_runner`` is used here. Answers travel between processes, so they
are plain data.

Both keep what a step has to sample in ``execute_model_state`` between ``execute_model`` and
``sample_tokens``. The older runner has the logits there already. The newer one computes them on the
way to its sampler, so they are picked up where the model makes them. Either way they are the very
logits that are sampled from, before any sampler has written into them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from vllm.model_executor.model_loader import base_loader

from mismatch.captures import narrowest
from mismatch.engines.distribution_capture import (
    CaptureRequest,
    DistributionRecorder,
    Packed,
    join_steps,
    pack,
    stable_top_k,
)
from mismatch.engines.loaded_digests import NO_DIGESTS
from mismatch.engines.loaded_digests import loaded_digests as digests_of
from mismatch.engines.module_capture import ModuleCalls
from mismatch.engines.vllm.private import (
    RouteWatch,
    kernel_of,
    moe_layers,
    number_of_experts,
    serve_float32_sinks,
)
from mismatch.engines.vllm.weight_sync import WeightSync
from mismatch.models.resolved import resolved
from mismatch.types import Ints, Sampling

Rows = tuple[Ints, Ints]  # of a batch: sequence in the rollout, index among its action tokens


class RunnerCapture:
    """Records distributions of one model runner between :meth:`start` and :meth:`stop`.

    Args:
        first: vLLM's number of the request that is sequence 0 of the rollout.
        prompts: tokens of each sequence's prompt.
    """

    def __init__(
        self,
        runner: Any,
        model: Any,
        recorder: DistributionRecorder,
        first: int,
        prompts: Sequence[int],
    ) -> None:
        self.runner, self.model, self.recorder = runner, model, recorder
        self.first, self.prompts = first, np.asarray(prompts, np.int64)
        self.failed: str = ""
        self._rows: Rows | None = None  # of the logits that the model makes next

    def start(self) -> None:
        sample: Callable[..., Any] = self.runner.sample_tokens
        compute: Callable[..., Any] = self.model.compute_logits

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            self._attempt(self._look)
            try:
                return sample(*args, **kwargs)
            finally:
                self._rows = None

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            rows, self._rows = self._rows, None
            if rows is not None and logits is not None:
                self._attempt(lambda: self._take(rows, logits))
            return logits

        self.runner.sample_tokens = sample_tokens
        vars(self.model)["compute_logits"] = compute_logits

    def stop(self) -> dict[str, Any]:
        """Everything that was taken; see :meth:`DistributionRecorder.collected`."""
        vars(self.runner).pop("sample_tokens", None)
        vars(self.model).pop("compute_logits", None)
        return {} if self.failed else self.recorder.collected()

    def _attempt(self, work: Callable[[], None]) -> None:
        """A failure ends the recording, never the sampling."""
        if self.failed:
            return
        try:
            work()
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"

    def _look(self) -> None:
        state = self.runner.execute_model_state
        if state is None:
            return
        logits = getattr(state, "logits", None)
        if logits is not None:
            self._take(self._of_scheduled(state.scheduler_output), logits)
        elif hasattr(state, "input_batch"):
            batch = state.input_batch
            self._rows = self._of(
                batch.req_ids, batch.num_computed_tokens_np, batch.num_scheduled_tokens
            )

    def _of_scheduled(self, scheduled: Any) -> Rows:
        batch = self.runner.input_batch
        counts = [scheduled.num_scheduled_tokens[request] for request in batch.req_ids]
        return self._of(batch.req_ids, batch.num_computed_tokens_cpu, counts)

    def _of(self, requests: Sequence[str], computed: Any, counts: Any) -> Rows:
        """The tokens that a batch samples: one per request, right behind what is computed then."""
        size = len(requests)
        numbers = [int(request.split("-", 1)[0]) - self.first for request in requests]
        sequence = np.asarray(numbers, np.int64)
        position = np.asarray(computed[:size], np.int64) + np.asarray(counts[:size], np.int64)
        inside = (sequence >= 0) & (sequence < len(self.prompts))
        index = position - self.prompts[np.where(inside, sequence, 0)]
        return sequence, np.where(inside, index, -1)

    def _take(self, rows: Rows, logits: Any) -> None:
        if len(logits) != len(rows[0]):
            raise ValueError(f"{len(logits)} rows of logits for {len(rows[0])} requests")
        self.recorder.take(*rows, logits)


TRITON_MODULE = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"
TRITON_CLASS = "OAITritonMxfp4ExpertsMonolithic"
BINDER_MODULE = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"
BINDER = "bind_routed_experts_capturer"
REFUSED = "mismatch_capture_refused"  # attribute of a model whose routes cannot be captured


def install() -> None:
    """Before a model is built: take what can be taken, and never fail for the rest."""
    take_triton_routes()
    tolerate_refusal()
    serve_float32_sinks()


def take_triton_routes() -> None:
    """Have vLLM's monolithic Triton kernel write the experts that it routes to.

    With ``renormalize`` the kernel takes the top k of the logits themselves; of equal logits the
    lower expert wins (``triton_kernels/topk_details``). Other versions without this class are left
    as they are.
    """
    try:
        kernel: Any = getattr(importlib.import_module(TRITON_MODULE), TRITON_CLASS)
    except (ImportError, AttributeError):
        return
    apply = kernel.apply
    if getattr(apply, "writes_routes", False):
        return

    def apply_and_write(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("routing_replay_out")
        if out is not None:
            out.copy_(stable_top_k(kwargs["router_logits"], self.topk))
        return apply(self, *args, **kwargs)

    apply_and_write.writes_routes = True  # type: ignore[attr-defined]
    kernel.apply = apply_and_write
    kernel.supports_routing_replay_capture = lambda self: bool(self.renormalize)


def tolerate_refusal() -> None:
    """Where vLLM refuses to capture a model's routes, note why on the model and go on."""
    try:
        bind: Any = getattr(importlib.import_module(BINDER_MODULE), BINDER)
    except (ImportError, AttributeError):
        return
    if getattr(bind, "tolerant", False):
        return

    def bind_or_note(model: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bind(model, *args, **kwargs)
        except ValueError as error:
            setattr(model, REFUSED, str(error))

    bind_or_note.tolerant = True  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):  # those that imported it by name, and its own
        if getattr(module, "__dict__", {}).get(BINDER) is bind:
            setattr(module, BINDER, bind_or_note)


def loaded_digests(model: Any) -> tuple[dict[str, list[int]], list[str]]:
    """Name (vLLM's, unfused) -> digest of this rank's own share, and parameters not understood.

    A rank leaves out what another rank counts already (replicated parameters), so that the sum
    over ranks is the digest of the whole parameter.
    """
    return digests_of(model, _owned)


def _owned(module: Any, part: str, leaf: str) -> bool:
    """Whether this rank counts this part: sliced parts always, copies on the first rank only."""
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


def _digest_before_repacking() -> None:
    """Make the loader digest the weights just after loading.

    A moment later kernels repack or drop them (oneDNN on CPU keeps no readable copy), and a worker
    extension is not called in between: the loader's own step is the only place.
    """
    loader: Any = base_loader
    repack: Callable[..., Any] = loader.process_weights_after_loading
    if getattr(repack, "digests_first", False):
        return

    def digest_then_repack(model: Any, *args: Any, **kwargs: Any) -> Any:
        model.mismatch_loaded = loaded_digests(model)
        return repack(model, *args, **kwargs)

    digest_then_repack.digests_first = True  # type: ignore[attr-defined]
    loader.process_weights_after_loading = digest_then_repack


_digest_before_repacking()
install()


class WorkerExtension(WeightSync, ModuleCalls):
    """Calls that the engine makes by ``collective_rpc``; every name starts with ``mismatch_``."""

    model_runner: Any
    rank: int

    # ------------------------------------------------------------ weights

    def mismatch_digests(self) -> tuple[dict[str, list[int]], list[str]]:
        """This rank's share of the digests by name, and the names that are not understood."""
        digests, unknown = getattr(self._mismatch_model(), "mismatch_loaded", NO_DIGESTS)
        return digests, unknown

    # ------------------------------------------------------------ what runs

    def mismatch_describe(self) -> dict[str, Any]:
        """Kernels and devices as resolved."""
        runner = self.model_runner
        layers = runner.vllm_config.compilation_config.static_forward_context.values()
        backends = {
            layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")
        }
        moe = moe_layers(self._mismatch_model())
        kernels = {kernel_of(module) for _, module in moe}
        return {
            "attention": "+".join(sorted(backends)) or "unknown",
            "moe_backend": "+".join(sorted(kernels)) or None,
            "moe_layers": [layer for layer, _ in moe],
            "device": str(runner.device),
            "model_runner": f"{type(runner).__module__}.{type(runner).__name__}",
            "model_class": type(self._mismatch_model()).__name__,
            "capture_refused": getattr(self._mismatch_model(), REFUSED, ""),
            "config": resolved(self._mismatch_model()),
        }

    # ------------------------------------------------------------ tempered prefill

    def mismatch_set_temperature(self, temperature: float) -> None:
        """Divide all logits by ``temperature`` from now on (1.0: stop doing it).

        vLLM computes prompt logprobs from raw logits in every logprob mode; they cannot be tempered
        afterwards, because that takes the logsumexp over the whole vocabulary.
        """
        model = self._mismatch_model()
        vars(model).pop("compute_logits", None)
        if temperature == 1.0:
            return
        compute = model.compute_logits

        def tempered(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            return None if logits is None else tempered_in_place(logits, temperature)

        vars(model)["compute_logits"] = tempered

    # ------------------------------------------------------------ whole distributions

    def mismatch_start_distributions(
        self, wanted: dict[str, Any], first: int, prompts: list[int]
    ) -> None:
        """Take whole distributions at the wanted positions from now on."""
        law = Sampling(**wanted["law"])
        recorder = DistributionRecorder(CaptureRequest(**{**wanted, "law": law}))
        model = self._mismatch_model()
        self._mismatch_recording = RunnerCapture(self.model_runner, model, recorder, first, prompts)
        self._mismatch_recording.start()

    def mismatch_stop_distributions(self) -> tuple[dict[str, Packed], str]:
        """Stop it. What was taken (nothing on ranks without logits), and what went wrong."""
        taken = self._mismatch_recording.stop()
        return {name: pack(array) for name, array in taken.items()}, self._mismatch_recording.failed

    # ------------------------------------------------------------ routed experts

    def mismatch_start_capture(self) -> None:
        """Record the experts of every forwarded token from now on (V1 model runner)."""
        self._mismatch_steps: dict[str, list[tuple[int, np.ndarray]]] = {}
        current: dict[int, np.ndarray] = {}
        moe = moe_layers(self._mismatch_model())
        narrow = {layer: narrowest(number_of_experts(module.router)) for layer, module in moe}

        def seen(layer: int, ids: Any) -> None:
            experts = ids.detach().cpu().numpy()
            # What cannot be an expert must stay visible until it is refused, once all is saved.
            most = np.iinfo(narrow[layer]).max
            possible = experts.min(initial=0) == 0 and experts.max(initial=0) <= most
            current[layer] = experts.astype(narrow[layer] if possible else np.uint16)

        self._mismatch_watch = RouteWatch(moe, seen)
        runner = self.model_runner
        execute = runner.execute_model

        def recording(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            current.clear()
            result = execute(scheduled, *args, **kwargs)
            if scheduled.total_num_scheduled_tokens and len(current) == len(moe):
                stacked = np.stack([current[layer] for layer, _ in moe], axis=1)
                self._mismatch_split(scheduled, stacked)
            return result

        runner.execute_model = recording

    def mismatch_stop_capture(self) -> dict[str, Packed]:
        """Stop recording. Request id -> experts of its tokens, [rows, L, K]."""
        vars(self.model_runner).pop("execute_model", None)
        self._mismatch_watch.close()
        steps, self._mismatch_steps = self._mismatch_steps, {}
        return {request: pack(join_steps(parts)) for request, parts in steps.items()}

    def _mismatch_split(self, scheduled: Any, experts: np.ndarray) -> None:
        """Cut one step's rows [tokens, L, K] into requests, in the batch's order."""
        batch = self.model_runner.input_batch
        row = 0
        for request in batch.req_ids:
            count = scheduled.num_scheduled_tokens.get(request, 0)
            if count:
                index = batch.req_id_to_index[request]
                start = int(batch.num_computed_tokens_cpu[index])
                part = (start, experts[row : row + count])
                self._mismatch_steps.setdefault(request, []).append(part)
            row += count


def tempered_in_place(logits: Any, temperature: float) -> Any:
    """Logits in float32, divided: one buffer beside them, none where they are float32 already.

    vLLM's profile of memory knows of neither.
    """
    return logits.float().div_(temperature)
