"""transformers as an engine: sampling with its key-value cache, in a loop of our own.

Sequences that decode together have prompts of one length (samples of one prompt always do), so that
no row is ever padded: left padding alone moves logprobs by 1e-3 in bf16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import Likeliest
from mismatch.engines.base import (
    Capabilities,
    Engine,
    ExpertLayout,
    LoadedWeights,
    Mode,
    Progress,
    Sample,
    TokenIds,
    requests_of,
    require_starts,
    sample_seed,
)
from mismatch.engines.distribution_capture import CaptureRequest, DistributionRecorder, law_logprobs
from mismatch.engines.model_info import ModelInfo, load_fix, load_tokenizer, read_model_info
from mismatch.engines.registry import model_facts, short_dtype
from mismatch.errors import MismatchError, first_line
from mismatch.models.auto_class import auto_class
from mismatch.models.resolved import resolved
from mismatch.specs import TORCH_NAMES, EngineSpec
from mismatch.types import Floats, Sampling, SideFacts

if TYPE_CHECKING:
    import torch

    from mismatch.training.routing.keys import KeyRecorder


# An expert that a token went to: its id, and its weight among the token's experts.
EXPERT = np.dtype([("id", np.uint16), ("weight", np.float32)])


@dataclass
class SequenceState:
    """One sequence, with the generator that all its draws come from.

    Attributes:
        job: (prompt, sample).
        routed: experts [tokens, L, K] of every forward so far, as ``EXPERT``.
        keys: sparse selections [tokens, L, K] of every forward so far, as ``Sample.keys``.
        likeliest: ids and logprobs [k] each of every sampled token, where they are kept.
    """

    job: tuple[int, int]
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routed: list[NDArray[Any]] = field(default_factory=list)
    keys: list[NDArray[Any]] = field(default_factory=list)
    likeliest: list[tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=list)

    @classmethod
    def seeded(cls, seed: int, job: tuple[int, int]) -> SequenceState:
        """Return a row that depends on the run's seed and the row's place, not on the batch."""
        import torch

        prompt, sample = job
        return cls(job, torch.Generator().manual_seed(sample_seed(seed, prompt, sample)))

    def finish(self, reason: str) -> Sample:
        logprobs = np.asarray(self.logprobs, np.float64)
        top = Likeliest.of(*zip(*self.likeliest, strict=True)) if self.likeliest else None
        keys = np.concatenate(self.keys) if self.keys else None
        if not self.routed:
            return Sample(self.ids, logprobs, reason, likeliest=top, cached=0, keys=keys)
        routed = np.concatenate(self.routed)
        experts = routed["id"], routed["weight"]
        return Sample(self.ids, logprobs, reason, *experts, top, cached=0, keys=keys)


def draw(rows: Sequence[SequenceState], logprobs: torch.Tensor, greedy: bool) -> None:
    """Append one token to every row: argmax of p / q with exponential q, which samples p.

    Args:
        logprobs: [rows, V] of the distribution.
        greedy: argmax of p alone.
    """
    import torch

    if greedy:
        chosen = logprobs.argmax(dim=-1)
    else:
        # On the CPU, row by row: the same draws on every device.
        size = logprobs.shape[-1]
        noise = [torch.empty(size).exponential_(generator=row.generator) for row in rows]
        chosen = (logprobs - torch.stack(noise).to(logprobs.device).log()).argmax(dim=-1)
    values = logprobs.gather(1, chosen[:, None])[:, 0].double().tolist()
    for row, token, value in zip(rows, chosen.tolist(), values, strict=True):
        row.ids.append(token)
        row.logprobs.append(value)


TAIL = 8  # tokens
ARGUMENTS = {"attention": "auto", "experts_implementation": None, "max_num_seqs": 64}


class TransformersEngine(Engine):
    """A plain transformers model; see :class:`mismatch.engines.base.Engine`."""

    name: ClassVar[str] = "transformers"

    def __init__(self, spec: EngineSpec, sampling: Sampling, longest: int) -> None:
        self.spec = spec
        self.sampling = sampling
        self.info: ModelInfo = read_model_info(spec)
        self.options: dict[str, Any] = dict(ARGUMENTS)
        for name, value in spec.args:
            if name not in self.options:
                fault = f"--engine-arg {name}: the transformers engine has no such argument"
                raise MismatchError(fault, f"it has {', '.join(self.options)}")
            self.options[name] = value
        if spec.tensor_parallel_size != 1:
            fault = "the transformers engine runs on one device"
            raise MismatchError(fault, "drop --tensor-parallel-size, or use --engine vllm")
        self._prefill_temperature = 1.0
        self._stop: tuple[str, ...] = ()
        self._recorder: DistributionRecorder | None = None
        self._places: dict[tuple[int, int], int] = {}  # of jobs among those of this generate

    @classmethod
    def capabilities(cls, spec: EngineSpec, sampling: Sampling) -> Capabilities:
        """See the protocol; it can do all of it."""
        return Capabilities(distributions=True)

    def __enter__(self) -> TransformersEngine:
        import torch
        from transformers import AutoConfig

        from mismatch.training.attention.resolve import resolve_for
        from mismatch.training.routing.capture import moe_layers, require_readable
        from mismatch.training.routing.keys import key_layers
        from mismatch.training.source import skeleton

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = AutoConfig.from_pretrained(
            self.spec.model,
            revision=self.spec.revision,
            trust_remote_code=self.spec.trust_remote_code,
        )
        bare = skeleton(config, self.spec.trust_remote_code)
        self._attention = resolve_for(str(self.options["attention"]), bare)
        if self.spec.routing:
            require_readable(config, bare)
        self.model = self._load(config)
        self._moe = moe_layers(self.model) if self.spec.routing and self.info.moe else []
        self._sparse = key_layers(self.model) if self.spec.routing else []
        return self

    def __exit__(self, *exc: object) -> None:
        del self.model

    def _load(self, config: Any) -> Any:
        import torch

        from mismatch.training.source import dequantising

        chosen = self.options["experts_implementation"]
        extra = {} if chosen is None else {"experts_implementation": chosen}
        if self.device.type == "cuda" and find_spec("accelerate") is not None:
            extra["device_map"] = self.device  # MXFP4 is dequantised there, not on the host
        try:
            model: Any = auto_class(config.model_type).from_pretrained(
                self.spec.model,
                config=config,
                revision=self.spec.revision,
                dtype=getattr(torch, TORCH_NAMES[self.spec.dtype]),
                attn_implementation=self._attention.implementation,
                trust_remote_code=self.spec.trust_remote_code,
                **extra,
                **dequantising(config),
            )
            return model.to(self.device).eval()
        except Exception as error:  # transformers and safetensors raise many kinds here
            fault = f"transformers cannot load {self.spec.model}: {first_line(error)}"
            raise MismatchError(fault, load_fix(error)) from error

    # ------------------------------------------------------------ decode

    def generate(self, prompts: TokenIds, progress: Progress, turn: int = 1) -> list[list[Sample]]:
        import torch

        jobs = requests_of(len(prompts), self.sampling, turn)
        self._places = {job: index for index, job in enumerate(jobs)}
        samples = [sample for context, sample in jobs if context == 0]
        done: dict[tuple[int, int], Sample] = {}
        tokens = 0
        with torch.inference_mode():
            for group in self._groups(prompts, len(samples)):
                rows = [(p, s) for p in group for s in samples]
                for job, sample in self._decode([prompts[p] for p in group], rows):
                    done[job] = sample
                    tokens += len(sample.token_ids)
                    progress(len(done), len(jobs), tokens)
        return [[done[p, s] for s in samples] for p in range(len(prompts))]

    def _groups(self, prompts: Sequence[list[int]], count: int) -> Iterator[list[int]]:
        """Yield prompts that decode together: of one length, with at most max_num_seqs samples."""
        width = max(1, int(self.options["max_num_seqs"]) // count)
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(prompts):
            by_length.setdefault(len(ids), []).append(index)
        for same in by_length.values():
            for start in range(0, len(same), width):
                yield same[start : start + width]

    def _decode(
        self, prompts: list[list[int]], jobs: list[tuple[int, int]]
    ) -> Iterator[tuple[tuple[int, int], Sample]]:
        """Sample all continuations of prompts of one length; each as soon as it ends."""
        import torch
        from transformers import DynamicCache, RepetitionPenaltyLogitsProcessor

        count = len(jobs) // len(prompts)
        cache: Any = DynamicCache(config=self.model.config)
        logits, routed, keys = self._forward(torch.tensor(prompts, device=self.device), cache)
        # Every kind of layer can be reordered; those with a recurrent state know nothing else.
        cache.reorder_cache(torch.arange(len(prompts), device=self.device).repeat_interleave(count))
        logits = logits.repeat_interleave(count, dim=0)
        rows = [SequenceState.seeded(self.sampling.seed, job) for job in jobs]
        penalise = RepetitionPenaltyLogitsProcessor(self.sampling.repetition_penalty)
        prompt_of = {job[0]: prompts[n // count] for n, job in enumerate(jobs)}
        if routed is not None:
            routed = routed.repeat(count, axis=0)
        if keys is not None:
            keys = keys.repeat(count, axis=0)
        while True:
            if routed is not None:
                for row, part in zip(rows, routed, strict=True):
                    row.routed.append(part)
            if keys is not None:
                for row, part in zip(rows, keys, strict=True):
                    row.keys.append(part)
            if self._recorder is not None:
                places = [self._places[row.job] for row in rows]
                taken = [len(row.ids) for row in rows]
                self._recorder.take(np.asarray(places), np.asarray(taken), logits)
            if self.sampling.penalises:
                before = [prompt_of[row.job[0]] + row.ids for row in rows]  # of one length
                logits = penalise(torch.tensor(before, device=self.device), logits)
            law = law_logprobs(logits, self.sampling)
            draw(rows, law, self.sampling.temperature == 0)
            if self.likeliest:
                top = law.topk(min(self.likeliest, law.shape[-1]), dim=-1)
                pairs = zip(top.indices.cpu().numpy(), top.values.cpu().numpy(), strict=True)
                for row, pair in zip(rows, pairs, strict=True):
                    row.likeliest.append(pair)
            keep = []
            for index, row in enumerate(rows):
                stopped = row.ids[-1] in self.info.stop_ids or self._ends_at_text(row.ids)
                if stopped or len(row.ids) == self.sampling.max_tokens:
                    yield row.job, row.finish("stop" if stopped else "length")
                else:
                    keep.append(index)
            if not keep:
                return
            if len(keep) < len(rows):
                cache.reorder_cache(torch.tensor(keep, device=self.device))
                rows = [rows[index] for index in keep]
            last = torch.tensor([[row.ids[-1]] for row in rows], device=self.device)
            logits, routed, keys = self._forward(last, cache)

    def stop_at(self, texts: Sequence[str]) -> None:
        self._stop = tuple(texts)
        self._tokenizer = load_tokenizer(self.spec)

    def _ends_at_text(self, ids: list[int]) -> bool:
        """Tell whether the last token of a response completes a text that ends it."""
        if not self._stop:
            return False
        tail = ids[-TAIL - max(map(len, self._stop)) :]  # a token may be a part of a character
        text = self._tokenizer.decode(tail, skip_special_tokens=False)
        return any(each in text for each in self._stop)

    def capture_distributions(self, wanted: CaptureRequest | None) -> None:
        self._recorder = None if wanted is None else DistributionRecorder(wanted)

    def captured_distributions(self) -> dict[str, NDArray[Any]]:
        return self._recorder.collected() if self._recorder else {}

    def _forward(
        self, ids: torch.Tensor, cache: Any
    ) -> tuple[torch.Tensor, NDArray[Any] | None, NDArray[Any] | None]:
        """Return logits after the last token, [B, V], and the choices of all tokens.

        Those are experts, [B, tokens, L, K], and keys of sparse attention, as ``Sample.keys``.
        """
        from mismatch.training.routing.capture import recording

        selecting = self._selections(ids, cache)
        with contextlib.ExitStack() as stack:
            recorder = stack.enter_context(recording(self._moe)) if self._moe else None
            if selecting is not None:
                stack.enter_context(selecting.recording())
            out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits, keys = out.logits[:, -1], None
        if selecting is not None:
            shape = (
                len(ids),
                len(selecting.rows.flat) // len(ids),
                len(self._sparse),
                self._sparse[0].top_k,
            )
            if not shape[1]:
                keys = np.zeros(shape, np.uint16)
            elif (seen := selecting.finished()) is not None:
                keys = seen.ids.cpu().numpy().astype(np.uint16).reshape(shape)
        if recorder is None:
            return logits, None, keys
        layers = recorder.finished()
        experts = np.empty((*ids.shape, len(layers), layers[0].ids.shape[-1]), EXPERT)
        for column, routes in enumerate(layers):
            shape = (*ids.shape, -1)
            experts["id"][:, :, column] = routes.ids.cpu().numpy().reshape(shape)
            experts["weight"][:, :, column] = routes.weights.cpu().numpy().reshape(shape)
        return logits, experts, keys

    def _selections(self, ids: torch.Tensor, cache: Any) -> KeyRecorder | None:
        """Return what records the keys of those tokens that have more than K to choose from."""
        import torch

        from mismatch.training.routing.keys import KeyRecorder, KeyRows

        if not self._sparse:
            return None
        past, (rows, tokens) = int(cache.get_seq_length()), ids.shape
        first = min(max(self._sparse[0].top_k - past, 0), tokens)
        flat = torch.arange(rows * tokens, device=self.device).reshape(rows, tokens)[:, first:]
        flat = flat.reshape(-1)
        return KeyRecorder(self._sparse, KeyRows(flat, torch.zeros_like(flat)))

    # ------------------------------------------------------------ prefill

    def prefill(
        self, sequences: TokenIds, starts: Sequence[int], temperature: float, progress: Progress
    ) -> list[Floats]:
        """See the protocol; one forward per sequence, without a cache."""
        import torch

        require_starts(starts)
        self._prefill_temperature = temperature or 1.0
        scores: list[Floats] = []
        tokens = 0
        with torch.inference_mode():
            for ids, start in zip(sequences, starts, strict=True):
                given = torch.tensor([ids], device=self.device)
                count = len(ids) - start
                out = self.model(input_ids=given, use_cache=False, logits_to_keep=count + 1)
                logits = out.logits[0, :-1].float() / self._prefill_temperature
                logprobs = logits.log_softmax(dim=-1).gather(1, given[0, start:, None])[:, 0]
                scores.append(logprobs.double().cpu().numpy())
                tokens += count
                progress(len(scores), len(sequences), tokens)
        return scores

    # ------------------------------------------------------------ what ran

    def key_layers(self) -> tuple[int, ...]:
        return tuple(layer.index for layer in self._sparse)

    def experts(self) -> ExpertLayout | None:
        if not self._moe:
            return None
        layers = tuple(layer.index for layer in self._moe)
        return ExpertLayout(layers, self._moe[0].num_experts, self.info.top_k)

    def weights(self) -> LoadedWeights:
        from mismatch.models.digests import digest_tensor

        tensors = self.model.state_dict().items()
        digests = {n: digest_tensor(t) for n, t in tensors if t.is_floating_point()}
        return LoadedWeights(digests, in_memory=True)

    def fingerprint(self, mode: Mode) -> SideFacts:
        law, decode = self.sampling, mode == "decode"
        temperature = (law.temperature or 1.0) if decode else self._prefill_temperature
        dtype = short_dtype(self.model.dtype)
        config = self.model.config
        quantization = getattr(config, "quantization_config", None)
        return {
            **model_facts(self.spec),
            "mode": mode,
            "engine": self.name,
            "dtype": dtype,
            "kv_cache_dtype": dtype,
            "quantization": getattr(quantization, "quant_method", None),
            "logprobs_mode": "processed_logprobs" if decode else "raw_logprobs",
            "logprobs_temperature": temperature,
            "logprobs_truncated": decode and law.truncates and law.temperature > 0,
            "logprobs_penalised": decode and law.penalises,
            "attention": self._attention.label,
            "honours_sinks": self._attention.honours_sinks,
            "moe": self.info.moe,
            "moe_backend": config._experts_implementation if self.info.moe else None,
            "device": str(self.device),
            "model_class": type(self.model).__name__,
            "config": resolved(self.model, self._attention.honours_sinks) | {"head_dtype": dtype},
            "enforce_eager": True,
            "prefix_caching": False,
            "tensor_parallel_size": 1,
            "max_model_len": self.info.context,
            "seed": law.seed,
            "seeding": "per sample",
            "generation_config": None,
            "sampling": {
                "temperature": law.temperature,
                "top_p": law.top_p,
                "top_k": law.top_k,
                "min_p": law.min_p,
                "repetition_penalty": law.repetition_penalty,
                "max_tokens": law.max_tokens,
                "stop_token_ids": list(self.info.stop_ids),
                "stop": list(self._stop),
            },
            "engine_args": dict(self.spec.args),
        }
