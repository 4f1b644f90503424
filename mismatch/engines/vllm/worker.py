"""What runs inside vLLM's worker process: weight digests, routed experts, tempered prefill.

vLLM imports this module by name in every worker (``worker_extension_cls``) and mixes the class
into its own worker, whose ``model_runner`` is used here. Answers travel between processes, so they
are plain data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.model_executor.model_loader import base_loader

from mismatch.captures import narrowest
from mismatch.engines import fused_weights
from mismatch.engines.distribution_capture import Packed, Wanted, Watcher, join_steps, pack
from mismatch.engines.fused_weights import NO_DIGESTS
from mismatch.engines.module_capture import ModuleCalls
from mismatch.engines.vllm import capture
from mismatch.engines.vllm.capture import RunnerWatch
from mismatch.engines.vllm.weight_sync import WeightSync
from mismatch.models.resolved import resolved
from mismatch.types import Sampling


def loaded_digests(model: Any) -> tuple[dict[str, list[int]], list[str]]:
    """Name (vLLM's, unfused) -> digest of this rank's own share, and parameters not understood.

    A rank leaves out what another rank counts already (replicated parameters), so that the sum
    over ranks is the digest of the whole parameter.
    """
    return fused_weights.loaded_digests(model, _owned)


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
capture.install()


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
        moe = [runner_of for _, runner_of in self._mismatch_moe()]
        kernels = {_moe_kernel(module) for module in moe}
        return {
            "attention": "+".join(sorted(backends)) or "unknown",
            "moe_backend": "+".join(sorted(kernels)) or None,
            "moe_layers": [layer for layer, _ in self._mismatch_moe()],
            "device": str(runner.device),
            "model_runner": f"{type(runner).__module__}.{type(runner).__name__}",
            "model_class": type(self._mismatch_model()).__name__,
            "capture_refused": getattr(self._mismatch_model(), capture.REFUSED, ""),
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

    def mismatch_start_watch(self, wanted: dict[str, Any], first: int, prompts: list[int]) -> None:
        """Take whole distributions at the wanted positions from now on."""
        law = Sampling(**wanted["law"])
        watcher = Watcher(Wanted(**{**wanted, "law": law}))
        model = self._mismatch_model()
        self._mismatch_watch = RunnerWatch(self.model_runner, model, watcher, first, prompts)
        self._mismatch_watch.start()

    def mismatch_stop_watch(self) -> tuple[dict[str, Packed], str]:
        """Stop it. What was taken (nothing on ranks without logits), and what went wrong."""
        taken = self._mismatch_watch.stop()
        return {name: pack(array) for name, array in taken.items()}, self._mismatch_watch.failed

    # ------------------------------------------------------------ routed experts

    def mismatch_start_capture(self) -> None:
        """Record the experts of every forwarded token from now on (V1 model runner)."""
        self._mismatch_steps: dict[str, list[tuple[int, np.ndarray]]] = {}
        current: dict[int, np.ndarray] = {}
        moe = self._mismatch_moe()
        for layer, module in moe:
            module.router.set_capture_fn(_recorder(current, layer, module.router))
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
        for _, module in self._mismatch_moe():
            module.router.set_capture_fn(None)
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

    def _mismatch_moe(self) -> list[tuple[int, Any]]:
        """(decoder layer, MoE runner) of every MoE layer, in order."""
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        modules = self._mismatch_model().modules()
        found = [(m.layer_id, m) for m in modules if isinstance(m, MoERunner)]
        return sorted(found, key=lambda pair: pair[0])


def _recorder(current: dict[int, np.ndarray], layer: int, router: Any) -> Callable[[Any], None]:
    small = narrowest(router.global_num_experts)

    def record(ids: Any) -> None:
        found = ids.detach().cpu().numpy()
        # What cannot be an expert must stay visible until it is refused, once all is saved.
        possible = found.min(initial=0) == 0 and found.max(initial=0) <= np.iinfo(small).max
        current[layer] = found.astype(small if possible else np.uint16)

    return record


def tempered_in_place(logits: Any, temperature: float) -> Any:
    """Logits in float32, divided: one buffer beside them, none where they are float32 already.

    vLLM's profile of memory knows of neither.
    """
    return logits.float().div_(temperature)


def _moe_kernel(module: Any) -> str:
    method = module.routed_experts.quant_method
    kernel = getattr(method, "moe_kernel", None)
    implementation = getattr(kernel, "fused_experts", None)
    chosen = implementation if implementation is not None else method
    return type(chosen).__name__
