"""What a server can do and which weights it has, found out by probe prompts.

Probes show whether it returns logprobs, prompt logprobs and routed experts, and which distribution
its logprobs are of. Asked again later, they show whether its weights are still the same. They do
not show the weights themselves: a change below 0.03 nats goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TypeVar

import numpy as np

from mismatch.engines.base import ExpertLayout
from mismatch.engines.model_info import ModelInfo, load_tokenizer
from mismatch.engines.servers.client import RequestFailed
from mismatch.engines.servers.server import Server
from mismatch.errors import MismatchError
from mismatch.specs import EngineSpec
from mismatch.types import Floats, Sampling

T = TypeVar("T")
# Probe prompts: prose, numbers, code; their prefixes have open continuations.
TEXTS = (
    "The train had left before the old clock in the hall struck nine, and nobody was",
    "17 + 25 = 42, 42 - 9 = 33, 33 + 128 = 161, so the next sum in this list is",
    "def mean(values):\n    total = sum(values)\n    return total / len(values)\n\n\nclass",
    "Dear all, thank you for coming. Before we begin, here are three things to keep in mind: first",
)
# The MXFP4 kernel of a Hopper or Ampere GPU gives no routes unless our extension is imported.
EXTENDED = (
    " (for gpt-oss on a GPU also --worker-extension-cls "
    "mismatch.engines.vllm.worker.WorkerExtension, or --moe-backend marlin)"
)
TOP = 5
PROBE_TOKENS = 64  # of each text at most
COLD = 0.5  # temperature at which tempered logprobs are distinguished from raw logprobs
# Mean |difference| of probe logprobs up to which two probes are of the same weights. On the
# embedded model two engines in bf16 differ by 0.011, an 8-bit KV cache makes it 0.046.
SAME_WEIGHTS = 0.03
NOISE_FACTOR = 5.0


def probe_texts(spec: EngineSpec, info: ModelInfo) -> tuple[tuple[int, ...], ...]:
    """Return probe tokens by the model's own tokenizer, cut to its context and vocabulary."""
    tokenizer = load_tokenizer(spec)
    limit = min(PROBE_TOKENS, (info.context or PROBE_TOKENS + 2) - 2)
    encoded = [tokenizer(text, add_special_tokens=True)["input_ids"] for text in TEXTS]
    return tuple(tuple(int(i) for i in ids[:limit] if i < info.vocab_size) for ids in encoded)


def openings(server: Server) -> list[tuple[int, ...]]:
    """Return the first half of every probe text, and the text: what comes next is open."""
    return [ids[: max(1, (len(ids) * part) // 4)] for ids in server.texts for part in (2, 4)]


def expert_layout(spec: EngineSpec, info: ModelInfo) -> ExpertLayout | None:
    """Find the layers with experts in transformers' own modules without weights; None: dense.

    Servers answer with a column for every decoder layer.
    """
    if not info.moe:
        return None
    from transformers import AutoConfig

    from mismatch.training.routing.capture import moe_layers
    from mismatch.training.source import skeleton

    config = AutoConfig.from_pretrained(
        spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code
    )
    decoder = skeleton(config, spec.trust_remote_code).get_decoder()
    layers = tuple(layer.index for layer in moe_layers(decoder))
    return ExpertLayout(layers, info.num_experts, info.top_k) if layers else None


# ---------------------------------------------------------------- at the start


async def examine(server: Server, layout: ExpertLayout | None) -> None:
    """Find out what a server can do, by asking for it.

    Raises:
        MismatchError: it returns no logprobs of sampled tokens, or logits for logprobs.
        RequestFailed: it has no time, or is gone: that says nothing about what it can do.
    """
    server.layout = layout
    ids, settings = server.texts[0], server.settings(Sampling(max_tokens=2))
    answer = await conclusive(server.generate(ids, settings))
    if isinstance(answer, RequestFailed):
        raise MismatchError(
            f"{server.url} gives no logprobs of the tokens that it samples ({answer}): nothing can "
            "be measured",
            "start it so that it returns logprobs and token ids; a proxy may cut them out",
        ) from answer
    sample, server.configuration = answer
    if sample.routed is None:
        server.layout = None
        server.reasons["routed_experts"] = (
            f"the {server.kind} server returns no routed experts; start it with "
            "--enable-return-routed-experts" + EXTENDED * (server.kind == "vllm")
        )
    scored = await conclusive(server.score(ids, 1))
    if isinstance(scored, RequestFailed):
        server.prefill = False
        server.reasons["prefill"] = f"the {server.kind} server gives no prompt logprobs ({scored})"
    await conclusive(_probe_mode(server))
    server.probe = await probe_logprobs(server)
    server.noise = mean_abs_diff(server.probe, await probe_logprobs(server))
    if not np.isfinite(server.noise):
        fault = f"{server.url} gives probe logprobs that are no finite numbers"
        fix = "look into the server's log: its model may overflow in its dtype"
        raise MismatchError(fault, fix)


async def conclusive(answer: Awaitable[T]) -> T | RequestFailed:
    """Return an answer, or why this server has none; raise where it is busy, slow or gone."""
    try:
        return await answer
    except RequestFailed as error:
        if error.kind not in ("failed", "refused"):
            raise
        return error


async def _likeliest(server: Server, ids: Sequence[int], law: Sampling) -> dict[int, float]:
    """Return id -> logprob of the likeliest next tokens, as decoding reports it."""
    sample, _ = await server.generate(ids, server.settings(law), likeliest=TOP)
    if (top := sample.likeliest) is None:
        raise RequestFailed("an answer without the likeliest tokens")
    pairs = zip(top.ids[0].tolist(), top.logprobs[0].tolist(), strict=True)
    return {token: logprob for token, logprob in pairs if logprob > -np.inf}


async def _probe_mode(server: Server) -> None:
    """Find out whether the logprobs are tempered, and whether they are truncated.

    At T = 0.5 distances between logprobs double if they are tempered, and stay if they are raw.
    With top-k = 2 the two kept tokens' probabilities rise to a sum of one if renormalised.

    Raises:
        MismatchError: they are no logprobs: their probabilities sum to more than one.
        RequestFailed: the server gives none of the likeliest tokens.
    """
    at_one: list[float] = []  # distances to the likeliest token
    at_cold: list[float] = []
    renormalised: list[bool] = []
    for ids in openings(server):
        plain = await _likeliest(server, ids, Sampling(max_tokens=1))
        cold = await _likeliest(server, ids, Sampling(COLD, max_tokens=1))
        cut = await _likeliest(server, ids, Sampling(top_k=2, max_tokens=1))
        if plain and sum(np.exp(list(plain.values()))) > 1.01:
            fault = f"{server.url} reports logits, not logprobs"
            raise MismatchError(fault, "vLLM: --logprobs-mode raw_logprobs or processed_logprobs")
        ranked = sorted(plain, key=plain.__getitem__, reverse=True)
        if ranked and ranked[0] in cold:
            others = [token for token in ranked[1:] if token in cold]
            at_one += [plain[ranked[0]] - plain[token] for token in others]
            at_cold += [cold[ranked[0]] - cold[token] for token in others]
        kept = ranked[:2]
        mass = float(sum(np.exp(plain[token]) for token in kept))
        # Where two tokens have nearly all the mass, renormalising changes nothing.
        if len(kept) == 2 and mass <= 0.98 and all(token in cut for token in kept):
            rise = float(np.mean([cut[token] - plain[token] for token in kept]))
            renormalised.append(bool(rise > -np.log(mass) / 2))
    if renormalised:
        server.truncated = 2 * sum(renormalised) > len(renormalised)
    squares = float(np.dot(at_one, at_one))
    ratio = float(np.dot(at_one, at_cold)) / (squares or np.nan)  # least squares
    tempered = abs(ratio - 1 / COLD) < abs(ratio - 1.0)
    if abs(ratio - (1 / COLD if tempered else 1.0)) < 0.25:
        server.tempered = tempered


# ---------------------------------------------------------------- the same weights still?


async def probe_logprobs(server: Server) -> Floats:
    """Return logprobs of the probe tokens by prefill, or of the likeliest next tokens."""
    if server.prefill:
        return np.concatenate([await server.score(ids, 1) for ids in server.texts if len(ids) > 1])
    tops = [await _likeliest(server, ids, Sampling(max_tokens=1)) for ids in openings(server)]
    return np.asarray([logprob for top in tops for logprob in top.values()], np.float64)


async def verify(server: Server) -> None:
    """Refuse a server whose weights or settings are not what they were at the start.

    Raises:
        MismatchError: they are others.
        RequestFailed: it does not answer.
    """
    try:
        drift = mean_abs_diff(server.probe, await probe_logprobs(server))
    except RequestFailed as error:
        if error.kind != "refused":
            raise
        raise changed(server, f"it refuses a probe that it answered before ({error})") from error
    server.drift = max(drift, server.drift)
    if drift > max(SAME_WEIGHTS, NOISE_FACTOR * server.noise):
        moved = f"its probe logprobs moved by {drift:.3g} on average (noise {server.noise:.2g})"
        raise changed(server, f"{moved}: other weights or settings")


def changed(server: Server, how: str) -> MismatchError:
    """Return the error that ends a run whose server became another."""
    fix = "keep its weights and settings until the run is complete, then sample again: --resume"
    return MismatchError(f"{server.url} changed during the run: {how}", fix)


def mean_abs_diff(before: Floats, now: Floats) -> float:
    """Compare two probes, in nats; infinite where shapes differ or a value is not finite."""
    if before.shape != now.shape or not np.isfinite([before, now]).all():
        return float("inf")
    return float(np.abs(before - now).mean())
