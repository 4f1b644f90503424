"""vLLM as an engine, on GPUs and on CPUs (written against 0.32 and 0.33)."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import Likeliest
from mismatch.codec import to_json
from mismatch.engines.base import (
    GREEDY_TOP,
    Capabilities,
    Continued,
    Engine,
    ExpertLayout,
    LoadedWeights,
    Mode,
    Progress,
    Sample,
    TokenIds,
    by_prompt,
    requests_of,
    require_starts,
    sample_seed,
)
from mismatch.engines.distribution_capture import CaptureRequest, unpack
from mismatch.engines.model_calls import attribute
from mismatch.engines.model_info import CauseInLog, ModelInfo, load_fix, read_model_info
from mismatch.engines.registry import checkpoint_names, model_directory, model_facts, short_dtype
from mismatch.engines.vllm import private
from mismatch.engines.vllm.arguments import (
    capture_sizes,
    captures_routes,
    engine_arguments,
    is_cpu_build,
    no_capture,
    sampling_arguments,
    set_environment,
    without_refused_capture,
)
from mismatch.engines.vllm.loader import loader_arguments
from mismatch.engines.vllm.lora import NUMBER, as_merged, lora_arguments
from mismatch.errors import MismatchError, first_line
from mismatch.specs import EngineSpec
from mismatch.types import (
    EXACT_KL,
    NO_MLA,
    PREFILL,
    ROUTES,
    WITHOUT_MLA,
    Floats,
    NotTested,
    Sampling,
    SideFacts,
)

STATES = "Chunked prefill is required for mamba cache mode"  # vLLM's words for models with states
# Its words where its engine's process failed, and where one that imports a model's code did.
CHILD_FAILED = ("See root cause above", "failed to be inspected")


class VllmEngine(Engine):
    """vLLM's offline ``LLM`` with one model; see :class:`mismatch.engines.base.Engine`."""

    name: ClassVar[str] = "vllm"

    def __init__(self, spec: EngineSpec, sampling: Sampling, longest: int) -> None:
        set_environment(spec.model)
        self.spec = spec
        self.sampling = sampling
        self.info: ModelInfo = read_model_info(spec)
        self._applies = bool(lora_arguments(spec))  # the adapter itself, not merged weights
        self._arguments = lora_arguments(spec) | engine_arguments(
            spec, sampling, self.info, longest
        )
        self._arguments |= loader_arguments(spec)
        self._capture = captures_routes(spec, self.info)
        self._sent: dict[str, Any] = {}
        self._refused = ""  # why vLLM does not capture routes that were asked for
        self._prefill_temperature = 1.0
        self._next_id = 0
        self._stop: tuple[str, ...] = ()
        self._wanted: CaptureRequest | None = None
        self._distributions: dict[str, NDArray[Any]] = {}
        self._untaken = ""  # why there are none
        self.adapter: Any = None  # vLLM's LoRARequest of every request

    @classmethod
    def capabilities(cls, spec: EngineSpec, sampling: Sampling) -> Capabilities:
        """See the protocol; vLLM's GPU kernels depend on the batch, so seeds do not fix tokens."""
        reasons = {}
        if not is_cpu_build():
            reasons["deterministic"] = (
                "vLLM's GPU kernels depend on what else is in the batch; "
                "VLLM_BATCH_INVARIANT=1 makes them independent of it"
            )
        obstacle = no_capture(spec)
        if obstacle is not None:
            reasons["routed_experts"] = obstacle
        return Capabilities(
            deterministic=is_cpu_build(),
            routed_experts=obstacle is None,
            distributions=True,
            cache_reading=True,
            reasons=reasons,
        )

    def __enter__(self) -> VllmEngine:
        try:
            arguments = self._arguments | capture_sizes(self.spec, self.sequences)
            arguments, self._refused = without_refused_capture(arguments)
            self.llm = started(arguments)
            if self._applies and self.spec.adapter is not None:  # all requests carry it
                from vllm.lora.request import LoRARequest

                self.adapter = LoRARequest("mismatch", NUMBER, self.spec.adapter.path)
                attribute(self.llm, private.ADD_ADAPTER)(self.adapter)
        except MismatchError:
            raise
        except Exception as error:
            if self._applies:
                what = f"vLLM cannot load {self.spec.model} with the adapter: {first_line(error)}"
                raise MismatchError(what, "serve them merged: --adapter-as merged") from error
            if any(words in str(error) for words in CHILD_FAILED):
                raise CauseInLog(f"vLLM cannot load {self.spec.model}", load_fix(error)) from error
            fault = f"vLLM cannot load {self.spec.model}: {first_line(error)}"
            raise MismatchError(fault, load_fix(error)) from error
        self.config = private.config_of(self.llm, arguments)
        self._facts: dict[str, Any] = self._call("mismatch_describe")[0]
        lacking: dict[str, str] = self._facts["lacking"]
        self._refused = self._refused or (lacking[ROUTES] if self._capture else "")
        runner = self._facts["model_runner"]
        if self._capture and not self._refused:
            if not self._facts["moe_layers"]:
                self._refused = f"no layer with experts was found in {self._facts['model_class']}"
            elif is_cpu_build() and not runner.startswith("vllm.v1.worker.cpu_model_runner"):
                self._refused = (
                    f"routes cannot be captured in {runner}; set VLLM_USE_V2_MODEL_RUNNER=0"
                )
        self._capture = self._capture and not self._refused
        return self

    def __exit__(self, *exc: object) -> None:
        # The process ends with the engine; what has to go is vLLM's own children.
        with suppress(MismatchError):  # this version has no function for it: they end with it too
            attribute(self.llm, private.SHUTDOWN)()

    # ------------------------------------------------------------ decode

    def generate(self, prompts: TokenIds, progress: Progress, turn: int = 1) -> list[list[Sample]]:
        jobs = requests_of(len(prompts), self.sampling, turn)
        params = [self._params(prompt, sample) for prompt, sample in jobs]
        on_cpu = self._capture and is_cpu_build()
        if on_cpu:
            self._call("mismatch_start_capture")
        if self._wanted is not None:
            sizes = [len(prompts[p]) for p, _ in jobs]
            self._call("mismatch_start_distributions", asdict(self._wanted), self._next_id, sizes)
        outputs = self._run([prompts[p] for p, _ in jobs], params, progress)
        if self._wanted is not None:
            # Tensor-parallel ranks have the same, or none.
            self._distributions, untaken = {}, ""
            for packed, failed in self._call("mismatch_stop_distributions"):
                untaken = untaken or failed
                if not self._distributions:
                    self._distributions = {name: unpack(array) for name, array in packed.items()}
            if not self._distributions:
                self._untaken = self._untaken or untaken
        rows = self._captured(outputs) if on_cpu else [None] * len(jobs)
        samples = [
            self._sample(request, output, routed, job)
            for (request, output), routed, job in zip(outputs, rows, jobs, strict=True)
        ]
        return by_prompt(samples, len(prompts))

    def stop_at(self, texts: Sequence[str]) -> None:
        self._stop = tuple(texts)

    def _params(self, prompt: int, sample: int) -> Any:
        from vllm import SamplingParams

        arguments = sampling_arguments(self.sampling, self.info.stop_ids, self._stop)
        if self._seeds_requests:
            arguments["seed"] = sample_seed(self.sampling.seed, prompt, sample)
        most = int(self.config.model_config.max_logprobs)  # as --engine-arg may allow
        arguments["logprobs"] = self.likeliest if most < 0 else min(self.likeliest, most)
        params = SamplingParams(**arguments, flat_logprobs=True)
        self._sent = {name: getattr(params, name) for name in arguments if name != "seed"}
        return params

    @property
    def _seeds_requests(self) -> bool:
        """vLLM's CPU sampler cannot rewind a request's generator after a partial prefill."""
        return not (is_cpu_build() and self.config.scheduler_config.enable_chunked_prefill)

    def _run(
        self, prompts: list[list[int]], params: list[Any], progress: Progress
    ) -> list[tuple[str, Any]]:
        """Run requests to their end: (vLLM's request id, output) in the order of the prompts."""
        engine = attribute(self.llm, private.ENGINE)
        order: dict[str, tuple[int, str]] = {}
        for index, (ids, param) in enumerate(zip(prompts, params, strict=True)):
            request, self._next_id = str(self._next_id), self._next_id + 1
            internal = engine.add_request(
                request, {"prompt_token_ids": list(ids)}, param, lora_request=self.adapter
            )
            order[request] = (index, internal)
        done: dict[int, tuple[str, Any]] = {}
        tokens = 0
        while engine.has_unfinished_requests():
            finished: list[Any] = [output for output in engine.step() if output.finished]
            for output in finished:
                index, internal = order[output.request_id]
                done[index] = (internal, output)
                scored = output.prompt_logprobs or output.outputs[0].token_ids
                tokens += len(scored)
                progress(len(done), len(order), tokens)
        if len(done) != len(order):
            fault = f"vLLM finished {len(done)} of {len(order)} requests"
            raise MismatchError(fault, "look into the engine's log for the reason")
        return [done[index] for index in range(len(order))]

    def _captured(self, outputs: list[tuple[str, Any]]) -> list[NDArray[Any] | None]:
        """Return experts of each request; None: there are none, refused once all is saved."""
        try:
            packed, failed = self._call("mismatch_stop_capture")[0]
        except Exception:  # a hole in the capture must not cost what was sampled
            traceback.print_exc()
            packed, failed = {}, ""
        if failed:
            self._refused, self._capture = failed, False
        return [unpack(packed[name]) if name in packed else None for name, _ in outputs]

    def _sample(
        self, request: str, output: Any, routed: NDArray[Any] | None, job: tuple[int, int]
    ) -> Sample:
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        # One after another, of each token: itself, then the likeliest.
        given: Any = completion.logprobs or ()
        if not ids or len(given) != len(ids):
            raise MismatchError(
                f"vLLM gave {len(given)} logprobs for {len(ids)} tokens "
                f"(prompt {job[0]}, sample {job[1]})",
                "look into the engine's log for an aborted request",
            )
        if completion.finish_reason not in ("stop", "length"):
            fault = f"vLLM ended prompt {job[0]}, sample {job[1]} with {completion.finish_reason!r}"
            raise MismatchError(fault, "look into the engine's log for the reason")
        tokens = np.asarray(given.token_ids).reshape(len(ids), -1)
        logprobs = np.asarray(given.logprobs, np.float64).reshape(len(ids), -1)
        if tokens[:, 0].tolist() != ids:
            fault = f"vLLM gave logprobs of other tokens (prompt {job[0]}, sample {job[1]})"
            raise MismatchError(fault, "use a version of vLLM that mismatch was tested with")
        layout, experts = self.experts(), getattr(completion, "routed_experts", None)
        if layout is not None and experts is not None:
            routed = layout.columns(np.asarray(experts))
        return Sample(
            token_ids=ids,
            logprobs=logprobs[:, 0],
            finish_reason=str(completion.finish_reason),
            routed=routed,
            likeliest=Likeliest.of(tokens[:, 1:], logprobs[:, 1:]) if tokens.shape[1] > 1 else None,
            cached=output.num_cached_tokens,
        )

    # ------------------------------------------------------------ whole distributions

    def capture_distributions(self, wanted: CaptureRequest | None) -> None:
        self._wanted = wanted

    def captured_distributions(self) -> dict[str, NDArray[Any]]:
        return self._distributions

    # ------------------------------------------------------------ prefill

    def prefill(
        self, sequences: TokenIds, starts: Sequence[int], temperature: float, progress: Progress
    ) -> list[Floats]:
        """See the protocol; vLLM skips its prefix cache for requests with prompt logprobs."""
        from vllm import SamplingParams

        require_starts(starts)
        # Greedy for the one token that vLLM insists on sampling; it is thrown away.
        arguments = sampling_arguments(Sampling(temperature=0.0, max_tokens=1))
        arguments |= {"logprobs": None, "prompt_logprobs": 0}
        self._prefill_temperature = temperature or 1.0
        if self._facts["lacking"][PREFILL] and self._prefill_temperature != 1.0:
            raise MismatchError(self._facts["lacking"][PREFILL])
        self._call("mismatch_set_temperature", self._prefill_temperature)
        try:
            params = [SamplingParams(**arguments)] * len(sequences)
            outputs = self._run([list(ids) for ids in sequences], params, progress)
        finally:
            self._call("mismatch_set_temperature", 1.0)
        return [
            np.asarray(
                [output.prompt_logprobs[t][ids[t]].logprob for t in range(start, len(ids))],
                np.float64,
            )
            for (_, output), ids, start in zip(outputs, sequences, starts, strict=True)
        ]

    def continue_greedily(
        self, contexts: TokenIds, max_tokens: int, read_cache: bool, progress: Progress
    ) -> list[Continued]:
        from vllm import SamplingParams

        arguments = sampling_arguments(Sampling(temperature=0.0, max_tokens=max_tokens))
        arguments |= {"logprobs": GREEDY_TOP, "ignore_eos": True}
        params = SamplingParams(**arguments, skip_reading_prefix_cache=not read_cache)
        outputs = self._run(list(contexts), [params] * len(contexts), progress)
        return [
            Continued(
                list(output.outputs[0].token_ids),
                [
                    {token: float(entry.logprob) for token, entry in row.items()}
                    for row in output.outputs[0].logprobs
                ],
                output.num_cached_tokens or 0,
            )
            for _, output in outputs
        ]

    # ------------------------------------------------------------ what ran

    def experts(self) -> ExpertLayout | None:
        if not self._capture:
            return None
        layers = tuple(self._facts["moe_layers"])
        return ExpertLayout(layers, self.info.num_experts, self.info.top_k)

    def weights(self) -> LoadedWeights:
        """Return digests summed over tensor-parallel ranks, under the checkpoint's names."""
        from mismatch.models.digests import combine

        total: dict[str, Any] = {}
        unmapped: set[str] = set()
        for digests, unknown in self._call("mismatch_digests", checkpoint_names(self.spec)):
            unmapped.update(unknown)
            for name, digest in digests.items():
                total[name] = combine([total[name], digest]) if name in total else digest
        loaded, base = LoadedWeights(total, tuple(sorted(unmapped))), model_directory(self.spec)
        if not self._applies or base is None:
            return loaded
        return as_merged(self.spec, base, loaded, self._call)

    def fingerprint(self, mode: Mode) -> SideFacts:
        config, model = self.config, self.config.model_config
        lacking = self._facts["lacking"]
        dtype = short_dtype(model.dtype)
        cache = str(config.cache_config.cache_dtype)
        processed = model.logprobs_mode == "processed_logprobs"
        decode = mode == "decode"
        temperature = (self.sampling.temperature or 1.0) if processed else 1.0
        missing = [NotTested(ROUTES, self._refused)] if self._refused else []
        if self._untaken:
            missing.append(NotTested(EXACT_KL, self._untaken))
        if dtype == "fp32" and NO_MLA in self.spec.env:
            missing.append(WITHOUT_MLA)
        facts: SideFacts = {
            **model_facts(self.spec),
            "mode": mode,
            "engine": self.name,
            "dtype": dtype,
            "kv_cache_dtype": dtype if cache == "auto" else cache,
            "quantization": model.quantization,
            "logprobs_mode": model.logprobs_mode if decode else "prompt_logprobs",
            "logprobs_temperature": temperature if decode else self._prefill_temperature,
            "logprobs_truncated": decode and processed and self.sampling.truncates,
            "logprobs_penalised": decode and processed and self.sampling.penalises,
            "moe": self.info.moe,
            "attention": self._facts["attention"],
            "moe_backend": self._facts["moe_backend"],
            "device": self._facts["device"],
            "model_runner": self._facts["model_runner"],
            "model_class": self._facts["model_class"],
            "config": self._facts["config"] | {"head_dtype": short_dtype(model.head_dtype)},
            "enforce_eager": model.enforce_eager,
            "cudagraph_capture_sizes": config.compilation_config.cudagraph_capture_sizes or [],
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "block_size": config.cache_config.block_size,
            "sliding_window": model.get_sliding_window(),
            "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "max_model_len": model.max_model_len,
            "rope_switch": self.info.rope_switch,
            "seed": model.seed,
            "seeding": "per sample" if self._seeds_requests else "engine",
            "generation_config": model.generation_config,
            "sampling": self._sent,
            "engine_args": dict(self.spec.args),
        }
        if lacking[PREFILL] and self.spec.prefill and self.sampling.temperature not in (0.0, 1.0):
            facts["prefill"] = False
            missing.append(NotTested(PREFILL, lacking[PREFILL]))
        if lacking[private.WEIGHTS]:
            facts["weights_not_comparable"] = lacking[private.WEIGHTS]
        named = [replace(each, reason=f"{self.name}: {each.reason}") for each in missing]
        facts["not_tested"] = to_json(named)
        return facts

    def _call(self, method: str, *args: Any) -> list[Any]:
        call: Callable[..., list[Any]] = self.llm.collective_rpc
        return call(method, args=args)


def started(arguments: dict[str, Any]) -> Any:
    """Start vLLM; where a model keeps states, without reuse of prefixes if it asks for that.

    Prefills stay whole on a CPU (arguments.py), and states can only be reused with prefills in
    chunks. Which models keep states, vLLM alone knows.
    """
    from vllm import LLM

    try:
        return LLM(**arguments)
    except Exception as error:
        if STATES not in str(error) or "enable_prefix_caching" in arguments:
            raise
        return LLM(**arguments, enable_prefix_caching=False)
