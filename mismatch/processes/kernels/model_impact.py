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
from typing import Any

import numpy as np
import torch

from mismatch.errors import MismatchError
from mismatch.experiments.kernels.types import Harm
from mismatch.processes.kernels.candidates import Candidate
from mismatch.processes.kernels.impact_tokens import Row, from_run, sampled
from mismatch.training.packing import Batch

REFERENCE = "eager"
DTYPE = torch.bfloat16
BYTES = 2 + 2 + 4 + 4  # per weight: weights, a gradient, its sum, the reference's sum
AT_ONCE = 1024  # tokens that run together, or one row
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Source:
    """The model and the tokens it is run on; equal ones share one reference.

    Attributes:
        model: directory or hub id.
        run: directory of a run whose rollout gives the tokens; None: the model samples some itself.
        tokens: action tokens, about.
    """

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    run: str | None = None
    device: str = "cpu"
    seed: int = 0
    tokens: int = 2048


def measure_harm(source: Source, candidate: Candidate, chosen: str, packed: bool = False) -> Harm:
    """Run the model with a kernel, and with the trainer's own for comparison.

    Args:
        candidate: one that runs here; whether the model would refuse it does not matter.
        chosen: registered name of what ``--attention auto`` comes to.
        packed: put several sequences into one row, as with ``--layout packing``: else a kernel that
            lets documents see each other does no harm.

    Raises:
        MismatchError: weights that cannot be loaded, are quantised, or do not fit beside their
            gradients; a run that cannot be read.
    """
    bench = _bench(source)
    harm = bench.measure(candidate.registered, packed)
    if candidate.registered == chosen:
        return harm
    return replace(harm, baseline=bench.baseline(chosen, packed))


@lru_cache(maxsize=1)
def _bench(source: Source) -> Bench:
    return Bench.of(source)


@dataclass
class Bench:
    """A model, and what it gave in float32.

    Attributes:
        model: in bfloat16 by now.
        logprobs: [A] float64, of the action tokens.
        gradients: of their mean, by parameter, float32.
    """

    model: Any
    rows: list[Row]
    logprobs: np.ndarray
    gradients: Gradients
    sinks: frozenset[str]
    found: dict[tuple[str, bool], Harm]

    @classmethod
    def of(cls, source: Source) -> Bench:
        """Load the model and measure the reference."""
        model = _load(source)
        rows = _enough(from_run(source.run) if source.run else sampled(model, source), source)
        with _attention(model, REFERENCE):
            logprobs, gradients = _run(model, rows)
        model.to(DTYPE)
        names = (name for name in gradients if "sink" in name.rpartition(".")[2])
        return cls(model, rows, logprobs, gradients, frozenset(names), {})

    def baseline(self, registered: str, packed: bool) -> Harm:
        """:meth:`measure`, once per kernel."""
        key = registered, packed
        if key not in self.found:
            self.found[key] = self.measure(registered, packed)
        return self.found[key]

    def measure(self, registered: str, packed: bool) -> Harm:
        """The model's distance from the reference under one kernel."""
        from mismatch.metrics.token import k3_kl

        with _attention(self.model, registered):
            logprobs, gradients = _run(self.model, self.rows, packed)
        _require_numbers(logprobs)
        delta = logprobs - self.logprobs
        error, cosine = _distance(gradients, self.gradients, frozenset(self.gradients))
        sinks = _distance(gradients, self.gradients, self.sinks)[0] if self.sinks else None
        return Harm(
            tokens=len(delta),
            mean_abs_delta=float(np.abs(delta).mean()),
            k3_kl=float(k3_kl(delta)),
            gradient_error=error,
            gradient_cosine=cosine,
            sink_gradient_error=sinks,
        )


def _load(source: Source) -> Any:
    from transformers import AutoModelForCausalLM

    from mismatch.processes.kernels.geometry import config_of
    from mismatch.training.source import first_line, skeleton

    config, _ = config_of(source.model, source.revision, source.trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise MismatchError(
            f"{source.model} is stored quantised, and its float32 reference is not made here",
            "give the unquantised checkpoint to see what the kernel does to the model",
        )
    _require_room(skeleton(config, source.trust_remote_code), source.device)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            source.model,
            revision=source.revision,
            dtype=torch.float32,
            attn_implementation=REFERENCE,
            trust_remote_code=source.trust_remote_code,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise MismatchError(
            f"cannot load {source.model}: {first_line(error)}", "check that its weights are there"
        ) from error
    return model.to(source.device).eval()  # no dropout; gradients flow all the same


def _require_room(bare: Any, device: str) -> None:
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
    """Within the block the model runs the kernel, also one that it would refuse by name."""
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
    found = []
    for batch, acting in _laid(rows, packed, model.device):
        logprobs = _logprobs(model, batch, acting, rows[0].temperature)
        torch.autograd.backward(logprobs.sum() / count)
        found.append(logprobs.detach().double().cpu().numpy())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] += parameter.grad
        model.zero_grad(set_to_none=True)
    return np.concatenate(found), sums


def _laid(
    rows: list[Row], packed: bool, device: torch.device
) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Rows of one length side by side, or any behind each other, with [B, S] their action tokens.

    Nothing is padded, and the action tokens come in the same order either way.
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
        ids, places, acting = (
            join(parts).view(-1, width).to(device)
            for parts in (
                [row.ids for row in group],
                [torch.arange(len(row.ids)) for row in group],
                [row.acting for row in group],
            )
        )
        rows_of = torch.arange(ids.numel(), device=device)
        yield Batch(ids, None, places if packed else None, rows_of), acting


def _logprobs(model: Any, batch: Batch, acting: torch.Tensor, temperature: float) -> torch.Tensor:
    """[a] of the action tokens, as the trainer scores them; no first token of a row is one."""
    from mismatch.training.scorer import Scorer, finish_logits

    scorer, acting = Scorer(model), acting[:, 1:]
    hidden = scorer.hidden(batch)[:, :-1][acting]
    logits = finish_logits(model.get_output_embeddings()(hidden), scorer.decoder_config)
    wanted = batch.input_ids[:, 1:][acting]
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return logprobs.gather(-1, wanted[:, None])[:, 0]


def _require_numbers(logprobs: np.ndarray) -> None:
    bad = int((~np.isfinite(logprobs)).sum())
    if bad:
        raise MismatchError(
            f"with this kernel the model gives no number at {bad} of {len(logprobs)} tokens",
            "look at the kernel's output for inf and NaN",
        )


def _distance(
    one: Gradients, other: Gradients, names: frozenset[str]
) -> tuple[float | None, float | None]:
    """Relative error in the 2-norm and cosine; None where the reference's gradient is 0."""
    gap = dot = size = length = 0.0
    for name in names:
        ours, theirs = one[name].double(), other[name].double()
        gap += float((ours - theirs).square().sum())
        dot += float((ours * theirs).sum())
        size += float(theirs.square().sum())
        length += float(ours.square().sum())
    if size == 0.0:
        return None, None
    cosine = dot / (size * length) ** 0.5 if length > 0 else None
    return (gap / size) ** 0.5, cosine


def _enough(rows: list[Row], source: Source) -> list[Row]:
    """The first so many that there are enough action tokens.

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
