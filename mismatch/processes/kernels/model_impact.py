"""What an attention kernel does to the model as a whole: its logprobs and its gradient.

The model runs once in float32 with its own eager attention: the reference. Then it runs on the same
tokens in bfloat16, as in training, with the kernel, and with the one that the trainer would take.
All else is the same, so what the trainer's own kernel shows is the error that a run has in any
case. Gradients are summed over sequences in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mismatch.errors import MismatchError
from mismatch.experiments.kernel_audit import ModelImpact
from mismatch.processes.kernels.cases import Candidate
from mismatch.processes.kernels.isolation import AuditSpec
from mismatch.training.packing import Batch

REFERENCE = "eager"
DTYPE = torch.bfloat16
BYTES = 2 + 2 + 4 + 4  # per weight: weights, a gradient, its sum, the reference's sum
AT_ONCE = 1024  # tokens that run together, or one row
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ImpactSource:
    """The model and the tokens it is run on; equal sources share one reference.

    Attributes:
        spec: names the model, and the run whose rollout gives the tokens; without one the model
            samples some itself.
        tokens: minimum number of action tokens.
    """

    spec: AuditSpec
    device: str = "cpu"
    tokens: int = 2048


def measure_impact(
    source: ImpactSource, candidate: Candidate, chosen: str, packed: bool = False
) -> ModelImpact:
    """Run the model with a kernel, and with the trainer's own for comparison.

    Args:
        candidate: a kernel that runs here, even if the model refuses it.
        chosen: registered name of what ``--attention auto`` resolves to.
        packed: put several sequences into one row, as with ``--layout packing``: only then a kernel
            that lets documents attend to each other has an effect.

    Raises:
        MismatchError: weights that cannot be loaded, are quantised, or do not fit beside their
            gradients; a run that cannot be read.
    """
    bench = _bench(source)
    harm = bench.measure(candidate.registered, packed)
    if candidate.registered == chosen:
        return harm
    return replace(harm, baseline=bench.measure(chosen, packed))


@lru_cache(maxsize=1)
def _bench(source: ImpactSource) -> Bench:
    return Bench.of(source)


@dataclass
class Bench:
    """A model and its float32 reference.

    Attributes:
        model: converted to bfloat16 after the reference.
        logprobs: [A] float64, of the action tokens.
        gradients: of their mean, by parameter, float32.
    """

    model: Any
    rows: list[Row]
    logprobs: np.ndarray
    gradients: Gradients
    sinks: frozenset[str]
    measured: dict[tuple[str, bool], ModelImpact]

    @classmethod
    def of(cls, source: ImpactSource) -> Bench:
        """Load the model and measure the reference."""
        model = _load(source)
        rows = _first_rows(
            from_run(source.spec.run) if source.spec.run else sampled(model, source), source
        )
        with _attention(model, REFERENCE):
            logprobs, gradients = _run(model, rows)
        model.to(DTYPE)
        names = (name for name in gradients if "sink" in name.rpartition(".")[2])
        return cls(model, rows, logprobs, gradients, frozenset(names), {})

    def measure(self, registered: str, packed: bool) -> ModelImpact:
        """The differences from the reference under one kernel, measured once."""
        if (registered, packed) not in self.measured:
            self.measured[registered, packed] = self._measure(registered, packed)
        return self.measured[registered, packed]

    def _measure(self, registered: str, packed: bool) -> ModelImpact:
        from mismatch.metrics.token import k3_kl

        with _attention(self.model, registered):
            logprobs, gradients = _run(self.model, self.rows, packed)
        _require_finite(logprobs)
        delta = logprobs - self.logprobs
        error, cosine = _distance(gradients, self.gradients, frozenset(self.gradients))
        sinks = _distance(gradients, self.gradients, self.sinks)[0] if self.sinks else None
        return ModelImpact(
            tokens=len(delta),
            mean_abs_delta=float(np.abs(delta).mean()),
            k3_kl=float(k3_kl(delta)),
            gradient_error=error,
            gradient_cosine=cosine,
            sink_gradient_error=sinks,
        )


def _load(source: ImpactSource) -> Any:
    from transformers import AutoModelForCausalLM

    from mismatch.errors import first_line
    from mismatch.processes.kernels.geometry import config_of
    from mismatch.training.source import skeleton

    config, _ = config_of(source.spec.model, source.spec.revision, source.spec.trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise MismatchError(
            f"{source.spec.model} is stored quantised, and its float32 reference is not made here",
            "give the unquantised checkpoint to see what the kernel does to the model",
        )
    _require_memory(skeleton(config, source.spec.trust_remote_code), source.device)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            source.spec.model,
            revision=source.spec.revision,
            dtype=torch.float32,
            attn_implementation=REFERENCE,
            trust_remote_code=source.spec.trust_remote_code,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise MismatchError(
            f"cannot load {source.spec.model}: {first_line(error)}",
            "check that its weights are there",
        ) from error
    return model.to(source.device).eval()  # no dropout; gradients flow all the same


def _require_memory(bare: Any, device: str) -> None:
    from mismatch.processes.kernels.costs import free_bytes

    weights = sum(parameter.numel() for parameter in bare.parameters())
    free = free_bytes(device)
    if weights * BYTES > free:
        raise MismatchError(
            f"the model in float32 with two gradients takes {weights * BYTES / 2**30:.3g} GiB, and "
            f"{free / 2**30:.3g} GiB are free on {device}",
            "audit a smaller model of the same family, or leave it out: --no-harm",
        )


@contextmanager
def _attention(model: Any, registered: str) -> Iterator[None]:
    """Within the block the model runs this kernel, without transformers' checks."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        for config in configs.values():
            config._attn_implementation_internal = registered
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


def _run(model: Any, rows: list[Row], packed: bool = False) -> tuple[np.ndarray, Gradients]:
    """Logprobs of all action tokens, and the gradient of their mean, float32."""
    model.zero_grad(set_to_none=True)
    count = sum(int(row.acting.sum()) for row in rows)
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    parts = []
    for batch, acting in _batches(rows, packed, model.device):
        logprobs = _logprobs(model, batch, acting, rows[0].temperature)
        torch.autograd.backward(logprobs.sum() / count)
        parts.append(logprobs.detach().double().cpu().numpy())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] += parameter.grad
        model.zero_grad(set_to_none=True)
    return np.concatenate(parts), sums


def _batches(
    rows: list[Row], packed: bool, device: torch.device
) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Batches of rows of equal length, or packed in one row, with the mask [B, S] of action tokens.

    Nothing is padded, and the order of the action tokens is the same either way.
    """
    ordered = sorted(rows, key=lambda row: len(row.ids))
    join: Any = torch.cat if packed else torch.stack
    while ordered:
        group = [ordered.pop(0)]
        while ordered and (packed or len(ordered[0].ids) == len(group[0].ids)):
            if sum(len(row.ids) for row in (*group, ordered[0])) > AT_ONCE:
                break
            group.append(ordered.pop(0))
        width = sum(len(row.ids) for row in group) if packed else len(group[0].ids)
        ids, positions, acting = (
            join(parts).view(-1, width).to(device)
            for parts in (
                [row.ids for row in group],
                [torch.arange(len(row.ids)) for row in group],
                [row.acting for row in group],
            )
        )
        rows_of = torch.arange(ids.numel(), device=device)
        yield Batch(ids, None, positions if packed else None, rows_of), acting


def _logprobs(model: Any, batch: Batch, acting: torch.Tensor, temperature: float) -> torch.Tensor:
    """[a] of the action tokens, as the trainer scores them; no first token of a row is one."""
    from mismatch.training.scorer import Scorer, finish_logits

    scorer, acting = Scorer(model), acting[:, 1:]
    hidden = scorer.hidden(batch)[:, :-1][acting]
    logits = finish_logits(model.get_output_embeddings()(hidden), scorer.decoder_config)
    targets = batch.input_ids[:, 1:][acting]
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0]


def _require_finite(logprobs: np.ndarray) -> None:
    bad = int((~np.isfinite(logprobs)).sum())
    if bad:
        raise MismatchError(
            f"with this kernel the model gives no number at {bad} of {len(logprobs)} tokens",
            "look at the kernel's output for inf and NaN",
        )


def _distance(
    gradients: Gradients, reference: Gradients, names: frozenset[str]
) -> tuple[float | None, float | None]:
    """Relative error in the 2-norm and cosine; None where the reference's gradient is 0."""
    gap = dot = size = length = 0.0
    for name in names:
        ours, theirs = gradients[name].double(), reference[name].double()
        gap += float((ours - theirs).square().sum())
        dot += float((ours * theirs).sum())
        size += float(theirs.square().sum())
        length += float(ours.square().sum())
    if size == 0.0:
        return None, None
    cosine = dot / (size * length) ** 0.5 if length > 0 else None
    return (gap / size) ** 0.5, cosine


def _first_rows(rows: list[Row], source: ImpactSource) -> list[Row]:
    """The first rows that together have ``source.tokens`` action tokens.

    Raises:
        MismatchError: none has an action token.
    """
    taken, count = [], 0
    for row in rows:
        acting = int(row.acting.sum())
        if acting and count < source.tokens:
            taken.append(row)
            count += acting
    if not taken:
        raise MismatchError("there is no action token to measure the kernel's harm on")
    return taken


# ---------------------------------------------------------------- tokens

NEW_TOKENS = 64
LONGEST = 2048  # tokens of a row: eager attention holds its square


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence.

    Attributes:
        ids: [S] int64.
        acting: [S] bool, tokens sampled by the policy; never the first.
        temperature: that the logits are divided by.
    """

    ids: torch.Tensor
    acting: torch.Tensor
    temperature: float = 1.0

    @classmethod
    def of(cls, ids: torch.Tensor, acting: torch.Tensor, temperature: float = 1.0) -> Row:
        """Cut to LONGEST tokens, which the reference can hold; the first token is not predicted."""
        acting = acting[:LONGEST].clone()
        acting[0] = False
        return cls(ids[:LONGEST], acting, temperature)


def from_run(run: str) -> list[Row]:
    """All sequences of a run's rollout.

    Raises:
        MismatchError: no rollout there.
    """
    from mismatch.run.store import load_rollout

    rollout = load_rollout(Path(run))
    temperature = rollout.sampling.temperature or 1.0
    parts = zip(rollout.offsets[:-1], rollout.offsets[1:], strict=True)
    return [
        Row.of(
            torch.from_numpy(rollout.token_ids[a:b]),
            torch.from_numpy(rollout.action_mask[a:b]),
            temperature,
        )
        for a, b in parts
    ]


def sampled(model: Any, source: ImpactSource) -> list[Row]:
    """Answers of the model to prompts of the built-in task, or to random tokens where it has no
    chat template; at temperature 1.
    """
    prompts = _prompts(model, source)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    real = torch.arange(width) >= torch.tensor([[width - len(row)] for row in prompts])
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(source.spec.seed)
        full = model.generate(
            ids.to(source.device),
            attention_mask=real.long().to(source.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        ).cpu()
    ends = ends_of(full[:, width:], model.generation_config.eos_token_id)
    starts = [width - len(prompt) for prompt in prompts]
    return [
        Row.of(row[start : width + end], torch.arange(start, width + end) >= width)
        for row, start, end in zip(full, starts, ends, strict=True)
    ]


def ends_of(new: torch.Tensor, stops: int | list[int] | None) -> list[int]:
    """Length of each answer of [N, S] new tokens, with the token that ends it."""
    if stops is None:
        return [new.shape[1]] * len(new)
    stopped = torch.isin(new, torch.tensor(stops))
    first = torch.where(stopped.any(1), stopped.long().argmax(1) + 1, new.shape[1])
    return [int(end) for end in first]


def _prompts(model: Any, source: ImpactSource) -> list[list[int]]:
    from transformers import AutoTokenizer

    from mismatch.prompts.sources import read_prompts, render_prompts
    from mismatch.specs import PromptSpec

    vocabulary = int(model.config.get_text_config().vocab_size)
    count = -(-source.tokens // NEW_TOKENS)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.spec.model, revision=source.spec.revision)
        prompts = read_prompts(PromptSpec(num_prompts=count, seed=source.spec.seed))
        return render_prompts(prompts, tokenizer, vocabulary)
    except (MismatchError, OSError, ValueError):
        draw = torch.Generator().manual_seed(source.spec.seed)
        drawn: list[list[int]] = torch.randint(vocabulary, (count, 16), generator=draw).tolist()
        return drawn
