"""What runs inside vLLM's worker process: weight digests, routed experts, tempered prefill.

vLLM imports this module by name in every worker (``worker_extension_cls``) and mixes the class
into vLLM's worker, whose ``model_runner`` is used here. Answers travel between processes, so they
are plain data.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mismatch.captures import narrowest
from mismatch.engines.distribution_capture import (
    CaptureRequest,
    DistributionRecorder,
    Packed,
    join_steps,
    pack,
)
from mismatch.engines.held_weights import NO_DIGESTS, Digests
from mismatch.engines.model_calls import ModelCalls
from mismatch.engines.vllm import private
from mismatch.engines.vllm.weight_sync import WeightSync
from mismatch.models.resolved import resolved
from mismatch.types import Ints, Sampling

Rows = tuple[Ints, Ints]  # of a batch: sequence in the rollout, index among its action tokens
private.install()


class RunnerCapture:
    """Records distributions of one model runner between :meth:`start` and :meth:`stop`.

    vLLM's runners keep what a step has to sample in ``execute_model_state`` between
    ``execute_model`` and ``sample_tokens``. The older one has the logits there already. The newer
    one computes them on the way to its sampler, so they are picked up where the model makes them.
    Either way they are the very logits that are sampled from.

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
        """Return everything that was taken; see :meth:`DistributionRecorder.collected`."""
        vars(self.runner).pop("sample_tokens", None)
        vars(self.model).pop("compute_logits", None)
        return {} if self.failed else self.recorder.collected()

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do a part of the recording; a failure ends the recording, never the sampling."""
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
            batch, scheduled = self.runner.input_batch, state.scheduler_output
            counts = [scheduled.num_scheduled_tokens[request] for request in batch.req_ids]
            self._take(self._of(batch.req_ids, batch.num_computed_tokens_cpu, counts), logits)
        elif hasattr(state, "input_batch"):
            batch = state.input_batch
            self._rows = self._of(
                batch.req_ids, batch.num_computed_tokens_np, batch.num_scheduled_tokens
            )

    def _of(self, requests: Sequence[str], computed: Any, counts: Any) -> Rows:
        """Place the tokens that a batch samples: one a request, right behind what is computed."""
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


class WorkerExtension(WeightSync, ModelCalls):
    """Calls that the engine makes by ``collective_rpc``; every name starts with ``mismatch_``."""

    model_runner: Any
    rank: int

    def mismatch_describe(self) -> dict[str, Any]:
        """Return kernels and devices as resolved."""
        runner, model = self.model_runner, self._mismatch_model()
        moe = private.moe_layers(model)
        kernels = {private.kernel_of(module) for _, module in moe}
        return {
            "attention": private.attention_backends(runner),
            "moe_backend": "+".join(sorted(kernels)) or None,
            "moe_layers": [layer for layer, _ in moe],
            "device": str(getattr(runner, "device", "unknown")),
            "model_runner": f"{type(runner).__module__}.{type(runner).__name__}",
            "model_class": type(model).__name__,
            "capture_refused": getattr(model, private.REFUSED, ""),
            "config": resolved(model),
        }

    def mismatch_digests(self, checkpoint_names: list[str]) -> Digests:
        """Return this rank's share of the digests by checkpoint name, and names not understood."""
        model = self._mismatch_model()
        digests, unknown = getattr(model, "mismatch_loaded", NO_DIGESTS)
        try:
            names = private.renamed(model, checkpoint_names)
        except Exception:  # costs the comparison of weights, never the run
            traceback.print_exc()
            return NO_DIGESTS
        return {names.get(name, name): digest for name, digest in digests.items()}, unknown

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
            # In float32: one additional buffer, which vLLM's profile of memory does not know.
            return None if logits is None else logits.float().div_(temperature)

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
        """Stop; return what was taken (nothing on ranks without logits), and what went wrong."""
        taken = self._mismatch_recording.stop()
        return {name: pack(array) for name, array in taken.items()}, self._mismatch_recording.failed

    # ------------------------------------------------------------ routed experts

    def mismatch_start_capture(self) -> None:
        """Record the experts of every forwarded token from now on (V1 model runner)."""
        self._mismatch_steps: dict[str, list[tuple[int, np.ndarray]]] = {}
        current: dict[int, np.ndarray] = {}
        moe = private.moe_layers(self._mismatch_model())
        numbers = {layer: getattr(m.router, "global_num_experts", 0) for layer, m in moe}
        narrow = {layer: narrowest(int(n or 1 << 16)) for layer, n in numbers.items()}  # 0: unsaid

        def seen(layer: int, ids: Any) -> None:
            experts = ids.detach().cpu().numpy()
            # What cannot be an expert must stay visible until it is refused, once all is saved.
            most = np.iinfo(narrow[layer]).max
            possible = experts.min(initial=0) == 0 and experts.max(initial=0) <= most
            current[layer] = experts.astype(narrow[layer] if possible else np.uint16)

        self._mismatch_watch = private.RouteWatch(moe, seen)
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
        """Stop recording; return request id -> experts of its tokens, [rows, L, K]."""
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
