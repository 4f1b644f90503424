"""Whole distributions out of vLLM's worker while it samples, for both of its model runners.

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

from mismatch.engines.distribution_capture import Watcher, stable_top_k
from mismatch.types import Ints

Rows = tuple[Ints, Ints]  # of a batch: sequence in the rollout, index among its action tokens


class RunnerWatch:
    """Watches one model runner between :meth:`start` and :meth:`stop`.

    Args:
        first: vLLM's number of the request that is sequence 0 of the rollout.
        prompts: tokens of each sequence's prompt.
    """

    def __init__(
        self, runner: Any, model: Any, watcher: Watcher, first: int, prompts: Sequence[int]
    ) -> None:
        self.runner, self.model, self.watcher = runner, model, watcher
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
        """Everything that was taken; see :meth:`Watcher.collected`."""
        vars(self.runner).pop("sample_tokens", None)
        vars(self.model).pop("compute_logits", None)
        return {} if self.failed else self.watcher.collected()

    def _attempt(self, work: Callable[[], None]) -> None:
        """What is watched must never cost what is sampled: a failure ends the watching."""
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
        known = (sequence >= 0) & (sequence < len(self.prompts))
        index = position - self.prompts[np.where(known, sequence, 0)]
        return sequence, np.where(known, index, -1)

    def _take(self, rows: Rows, logits: Any) -> None:
        if len(logits) != len(rows[0]):
            raise ValueError(f"{len(logits)} rows of logits for {len(rows[0])} requests")
        self.watcher.take(*rows, logits)


TRITON_MODULE = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"
TRITON_CLASS = "OAITritonMxfp4ExpertsMonolithic"
BINDER_MODULE = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"
BINDER = "bind_routed_experts_capturer"
REFUSED = "mismatch_capture_refused"  # attribute of a model whose routes cannot be captured


def install() -> None:
    """Before a model is built: take what can be taken, and never fail for the rest."""
    take_triton_routes()
    tolerate_refusal()


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
