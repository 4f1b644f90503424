"""What runs inside vLLM's worker process: weight digests, routed experts, tempered prefill.

vLLM imports this module by name in every worker (``worker_extension_cls``) and mixes the class
into vLLM's worker; where its parts lie is in private.py. Answers travel between processes, so they
are plain data.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
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
from mismatch.engines.model_calls import ModelCalls, attribute
from mismatch.engines.vllm import private
from mismatch.engines.vllm.loader import register
from mismatch.engines.vllm.weight_sync import WeightSync
from mismatch.errors import MismatchError
from mismatch.models.resolved import resolved
from mismatch.types import PREFILL, ROUTES, Ints, Sampling

Rows = tuple[Ints, Ints]  # of a batch: sequence in the rollout, index among its action tokens
private.install()
register()  # before the worker loads its model


class Recording:
    """Watches a worker from :meth:`start` to :meth:`stop`; a failure never ends the engine.

    Attributes:
        failed: why there is no recording; "": there is one.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.failed = ""
        self.undo: list[Callable[[], object]] = []

    def start(self) -> None:
        self.attempt(self.watch)

    def stop(self) -> None:
        while self.undo:
            self.undo.pop()()

    def watch(self) -> None:
        raise NotImplementedError

    def attempt(self, work: Callable[..., None], *args: Any) -> None:
        """Do a part of the recording, unless it failed before."""
        try:
            if not self.failed:
                work(*args)
        except Exception as error:
            named = f"{type(error).__name__}: {error}"
            self.failed = error.message if isinstance(error, MismatchError) else named


class RunnerCapture(Recording):
    """Records distributions: the very logits that vLLM samples from.

    The older model runner has them when it begins to sample. The newer one computes them on the way
    to its sampler, so they are picked up where the model makes them.

    Args:
        first: vLLM's number of the request that is sequence 0 of the rollout.
        prompts: tokens of each sequence's prompt.
    """

    def __init__(
        self, worker: Any, recorder: DistributionRecorder, first: int, prompts: Sequence[int]
    ) -> None:
        super().__init__(worker)
        self.recorder = recorder
        self.first, self.prompts = first, np.asarray(prompts, np.int64)
        self._rows: Rows | None = None  # of the logits that the model makes next

    def watch(self) -> None:
        runner, model = attribute(self.worker, private.RUNNER), private.model_of(self.worker)
        self.undo.append(private.around(runner, private.SAMPLE, self._sample))
        self.undo.append(private.around(model, private.LOGITS, self._compute))

    def _sample(self, sample: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.attempt(self._look)
        try:
            return sample(*args, **kwargs)
        finally:
            self._rows = None

    def _compute(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        rows, self._rows = self._rows, None
        if rows is not None and logits is not None:
            self.attempt(self._take, rows, logits)
        return logits

    def _look(self) -> None:
        step = private.to_sample(attribute(self.worker, private.RUNNER))
        if step is None:
            return
        # One token a request is sampled, right behind what is computed.
        numbers = [int(request.split("-", 1)[0]) - self.first for request in step.requests]
        sequence = np.asarray(numbers, np.int64)
        position = np.asarray(step.computed, np.int64) + np.asarray(step.scheduled, np.int64)
        inside = (sequence >= 0) & (sequence < len(self.prompts))
        index = position - self.prompts[np.where(inside, sequence, 0)]
        rows = sequence, np.where(inside, index, -1)
        if step.logits is None:
            self._rows = rows
        else:
            self._take(rows, step.logits)

    def _take(self, rows: Rows, logits: Any) -> None:
        if len(logits) != len(rows[0]):
            raise ValueError(f"{len(logits)} rows of logits for {len(rows[0])} requests")
        self.recorder.take(*rows, logits)


class RouteCapture(Recording):
    """Records the experts of every forwarded token (V1 model runner): request -> its rows."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self.steps: dict[str, list[tuple[int, np.ndarray]]] = {}
        self._current: dict[int, np.ndarray] = {}

    def watch(self) -> None:
        self._moe = private.moe_layers(private.model_of(self.worker))
        counts = {n: attribute(module, private.EXPERT_COUNT, 0) for n, module in self._moe}
        self._narrow = {layer: narrowest(int(n or 1 << 16)) for layer, n in counts.items()}
        runner = attribute(self.worker, private.RUNNER)
        self.undo.append(private.around(runner, private.FORWARD, self._forward))
        self.undo.append(private.RouteWatch(self._moe, partial(self.attempt, self._seen)).close)

    def _seen(self, layer: int, ids: Any) -> None:
        experts = ids.detach().cpu().numpy()
        # What cannot be an expert must stay visible until it is refused, once all is saved.
        most = np.iinfo(self._narrow[layer]).max
        possible = experts.min(initial=0) == 0 and experts.max(initial=0) <= most
        self._current[layer] = experts.astype(self._narrow[layer] if possible else np.uint16)

    def _forward(self, forward: Callable[..., Any], scheduled: Any, *args: Any, **more: Any) -> Any:
        self._current.clear()
        result = forward(scheduled, *args, **more)
        if len(self._current) == len(self._moe):
            self.attempt(self._split, scheduled)
        return result

    def _split(self, scheduled: Any) -> None:
        """Cut one step's rows [tokens, L, K] into requests, in the batch's order."""
        experts = np.stack([self._current[layer] for layer, _ in self._moe], axis=1)
        step = private.forwarded(attribute(self.worker, private.RUNNER), scheduled)
        row = 0
        for request, start, count in zip(step.requests, step.computed, step.scheduled, strict=True):
            if count:
                part = (int(start), experts[row : row + count])
                self.steps.setdefault(request, []).append(part)
            row += count


class WorkerExtension(WeightSync, ModelCalls):
    """Calls that the engine makes by ``collective_rpc``; every name starts with ``mismatch_``."""

    def mismatch_describe(self) -> dict[str, Any]:
        """Return kernels and devices as resolved; ``lacking``: what cannot be measured, and why."""
        runner = attribute(self, private.RUNNER, None)
        facts: dict[str, Any] = {
            "attention": private.attention_backends(runner),
            "device": str(attribute(runner, "device", "unknown")),
            "model_runner": f"{type(runner).__module__}.{type(runner).__name__}",
        }
        try:
            model = self._mismatch_model()
        except MismatchError as error:
            facts |= {"moe_backend": None, "moe_layers": [], "model_class": "unknown", "config": {}}
            lacking = dict.fromkeys((ROUTES, PREFILL, private.WEIGHTS), error.message)
            return facts | {"lacking": lacking}
        moe = private.moe_layers(model)
        kernels = {private.kernel_of(module) for _, module in moe}
        return facts | {
            "moe_backend": "+".join(sorted(kernels)) or None,
            "moe_layers": [layer for layer, _ in moe],
            "model_class": type(model).__name__,
            "lacking": private.lacking(model),
            "config": resolved(model),
        }

    def mismatch_digests(self, checkpoint_names: list[str]) -> Digests:
        """Return this rank's share of the digests by checkpoint name, and names not understood."""
        try:
            model = self._mismatch_model()
            digests, unknown = getattr(model, "mismatch_loaded", NO_DIGESTS)
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
        for undo in vars(self).pop("_mismatch_tempered", ()):
            undo()
        if temperature == 1.0:
            return

        def tempered(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            # In float32: one additional buffer, which vLLM's profile of memory does not know.
            return None if logits is None else logits.float().div_(temperature)

        undo = private.around(self._mismatch_model(), private.LOGITS, tempered)
        self._mismatch_tempered = [undo]

    # ------------------------------------------------------------ whole distributions

    def mismatch_start_distributions(
        self, wanted: dict[str, Any], first: int, prompts: list[int]
    ) -> None:
        """Take whole distributions at the wanted positions from now on."""
        law = Sampling(**wanted["law"])
        recorder = DistributionRecorder(CaptureRequest(**{**wanted, "law": law}))
        self._mismatch_recording = RunnerCapture(self, recorder, first, prompts)
        self._mismatch_recording.start()

    def mismatch_stop_distributions(self) -> tuple[dict[str, Packed], str]:
        """Stop; return what was taken (nothing on ranks without logits), and what went wrong."""
        recording = self._mismatch_recording
        recording.stop()
        taken = {} if recording.failed else recording.recorder.collected()
        return {name: pack(array) for name, array in taken.items()}, recording.failed

    # ------------------------------------------------------------ routed experts

    def mismatch_start_capture(self) -> None:
        """Record the experts of every forwarded token from now on."""
        self._mismatch_routes = RouteCapture(self)
        self._mismatch_routes.start()

    def mismatch_stop_capture(self) -> tuple[dict[str, Packed], str]:
        """Stop; return request id -> experts of its tokens, [rows, L, K], and what went wrong."""
        self._mismatch_routes.stop()
        steps, self._mismatch_routes.steps = self._mismatch_routes.steps, {}
        packed = {request: pack(join_steps(parts)) for request, parts in steps.items()}
        return packed, self._mismatch_routes.failed
