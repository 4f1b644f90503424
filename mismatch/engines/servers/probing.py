"""What a server can do and which weights it has, found out by probe prompts.

Probes show whether it gives logprobs, prompt logprobs and routed experts, which logprobs it reports
(by how they change with temperature and top-k), and, asked again later, whether its weights are
still those of the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mismatch.captures import ABSENT_LOGPROB
from mismatch.engines.base import ExpertLayout
from mismatch.engines.model_info import ModelInfo, load_tokenizer, read_model_info
from mismatch.engines.servers.http import Refused, Unavailable
from mismatch.engines.servers.scheduler import ServerChanged
from mismatch.engines.servers.server_api import ServerAPI, ServerFacts
from mismatch.errors import MismatchError
from mismatch.specs import EngineSpec
from mismatch.types import Floats, Sampling

# Probe prompts: prose, numbers, code; their prefixes have open continuations.
TEXTS = (
    "The train had left before the old clock in the hall struck nine, and nobody was",
    "17 + 25 = 42, 42 - 9 = 33, 33 + 128 = 161, so the next sum in this list is",
    "def mean(values):\n    total = sum(values)\n    return total / len(values)\n\n\nclass",
    "Dear all, thank you for coming. Before we begin, here are three things to keep in mind: first",
)
TOP = 5
PROBE_TOKENS = 64  # of each text at most
COLD = 0.5  # temperature at which tempered logprobs are told from raw ones
# Mean |difference| of probe logprobs up to which two probes are of the same weights. On the
# embedded model two engines in bf16 differ by 0.011, an 8-bit KV cache makes it 0.046.
SAME_WEIGHTS = 0.03
NOISE_FACTOR = 5.0
NO_ROUTES = (
    "the {kind} server returns no routed experts; start it with --enable-return-routed-experts"
)
NO_PREFILL = "the {kind} server gives no prompt logprobs ({error})"


@dataclass(frozen=True, slots=True)
class LogprobsMode:
    """Which distribution the logprobs of sampled tokens are of; None: could not be found out.

    Attributes:
        tempered: after the temperature.
        truncated: renormalised over what top-p and top-k keep.
    """

    tempered: bool | None
    truncated: bool | None

    @property
    def name(self) -> str:
        if self.tempered is None:
            return "not known"
        if not self.tempered:
            return "raw"
        return "processed" if self.truncated else "tempered"


@dataclass(frozen=True, slots=True)
class Probes:
    """Token ids that are asked about: ``whole`` texts, and ``openings`` of them."""

    whole: tuple[tuple[int, ...], ...]
    openings: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Server:
    """One server with all that is known about it.

    Attributes:
        prefill: it scores given tokens.
        routes: it returns routed experts.
        probe: logprobs of the probe tokens at the start.
        noise: mean |difference| of two probes then.
    """

    api: ServerAPI
    mode: LogprobsMode
    prefill: bool
    routes: bool
    probe: Floats
    noise: float
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.api.client.address.text

    @property
    def facts(self) -> ServerFacts:
        return self.api.facts


def make_probes(spec: EngineSpec) -> Probes:
    """Probe tokens by the model's own tokenizer, cut to its context and vocabulary."""
    tokenizer, info = load_tokenizer(spec), read_model_info(spec)
    limit = min(PROBE_TOKENS, (info.context or PROBE_TOKENS + 2) - 2)
    whole = []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=True)["input_ids"]
        whole.append(tuple(int(i) for i in ids[:limit] if i < info.vocab_size))
    openings = [ids[: max(1, (len(ids) * part) // 4)] for ids in whole for part in (2, 4)]
    return Probes(tuple(whole), tuple(openings))


def expert_layout(spec: EngineSpec, info: ModelInfo) -> ExpertLayout | None:
    """The experts of a model, from transformers' own modules without any weight; None: dense.

    Servers answer with a column for every decoder layer, this says which of them hold experts.
    """
    if not info.moe:
        return None
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from mismatch.training.routing.capture import moe_layers

    config = AutoConfig.from_pretrained(
        spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code
    )
    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = build(config, trust_remote_code=spec.trust_remote_code)
    layers = tuple(layer.index for layer in moe_layers(model.get_decoder()))
    return ExpertLayout(layers, info.num_experts, info.top_k) if layers else None


# ---------------------------------------------------------------- at the start


def examine(api: ServerAPI, probes: Probes, layout: ExpertLayout | None) -> Server:
    """What one server can do, by asking it for that.

    Raises:
        MismatchError: it gives no logprobs of sampled tokens, or logits for logprobs.
        Unavailable: it has no time, or is gone: that says nothing about what it can do.
    """
    url, kind = api.client.address.text, api.facts.kind
    reasons = {}
    settings = api.settings(Sampling(max_tokens=2), ())
    try:
        answer = api.generate(probes.whole[0], settings, None, layout)
    except (Unavailable, Refused) as error:
        _require_conclusive(error)
        raise MismatchError(
            f"{url} gives no logprobs of the tokens that it samples ({error}): nothing can be "
            "measured",
            "start it so that it returns logprobs and token ids; a proxy may cut them out",
        ) from error
    api = replace(api, facts=replace(api.facts, configuration=answer.identity))
    routes = answer.sample.routed is not None
    if not routes:
        reasons["routed_experts"] = NO_ROUTES.format(kind=kind)
    prefill = True
    try:
        api.score(probes.whole[0], 1)
    except (Unavailable, Refused) as error:
        _require_conclusive(error)
        prefill = False
        reasons["prefill"] = NO_PREFILL.format(kind=kind, error=error)
    mode = _logprobs_mode(api, probes)
    bare = Server(api, mode, prefill, routes, np.empty(0), 0.0, reasons)
    first, second = probe_logprobs(bare, probes), probe_logprobs(bare, probes)
    noise = mean_abs_diff(first, second)
    if not np.isfinite(noise):
        raise MismatchError(
            f"{url} gives probe logprobs that are no finite numbers",
            "look into the server's log: its model may overflow in its dtype",
        )
    return replace(bare, probe=first, noise=noise)


def _require_conclusive(error: Unavailable | Refused) -> None:
    """Raise again what says nothing about what the server can do: it is busy, slow or gone."""
    if isinstance(error, Unavailable) and error.kind != "failed":
        raise error


def _logprobs_mode(api: ServerAPI, probes: Probes) -> LogprobsMode:
    """Find out which distribution the logprobs are of.

    At T = 0.5 distances between logprobs double if they are tempered, and stay if they are raw.
    With top-k = 2 the two kept tokens' probabilities rise to a sum of one if renormalised.

    Raises:
        MismatchError: they are no logprobs: two of them sum to more than one.
        Unavailable: the server has no time, or is gone.
    """

    def ask(ids: Sequence[int], sampling: Sampling) -> dict[int, float]:
        top = api.top_logprobs(ids, api.settings(sampling, ()), TOP)
        return {token: lp for token, lp in top.items() if lp > ABSENT_LOGPROB}

    distances: list[tuple[float, float]] = []
    renormalised: list[bool] = []
    try:
        for ids in probes.openings:
            plain, cold = ask(ids, Sampling(max_tokens=1)), ask(ids, Sampling(COLD, max_tokens=1))
            if plain and sum(np.exp(list(plain.values()))) > 1.01:
                raise MismatchError(
                    f"{api.client.address.text} reports logits, not logprobs",
                    "vLLM: --logprobs-mode raw_logprobs or processed_logprobs",
                )
            distances += _distances(plain, cold)
            renormalised += _is_renormalised(plain, ask(ids, Sampling(top_k=2, max_tokens=1)))
    except (Refused, Unavailable) as error:
        _require_conclusive(error)
        return LogprobsMode(None, None)
    truncated = 2 * sum(renormalised) > len(renormalised) if renormalised else None
    return LogprobsMode(_is_tempered(distances), truncated)


def _distances(plain: dict[int, float], cold: dict[int, float]) -> list[tuple[float, float]]:
    """Distances to the most likely token at T = 1 and at T = 0.5, of all tokens in both."""
    best = max(plain, key=plain.__getitem__, default=None)
    if best is None or best not in cold:
        return []
    others = [token for token in plain if token != best and token in cold]
    return [(plain[best] - plain[token], cold[best] - cold[token]) for token in others]


def _is_renormalised(plain: dict[int, float], cut: dict[int, float]) -> list[bool]:
    """Whether the two kept tokens have all the mass; [] where they had nearly all before."""
    kept = sorted(plain, key=plain.__getitem__)[-2:]
    mass = float(sum(np.exp(plain[token]) for token in kept))
    if len(kept) < 2 or mass > 0.98 or not all(token in cut for token in kept):
        return []
    rise = float(np.mean([cut[token] - plain[token] for token in kept]))
    return [bool(rise > -np.log(mass) / 2)]


def _is_tempered(distances: Sequence[tuple[float, float]]) -> bool | None:
    """Whether the least-squares ratio of distances is near 1 / COLD or near 1; None: neither."""
    if not distances:
        return None
    plain, cold = np.asarray(distances, np.float64).T
    squares = float(plain @ plain)
    if squares == 0.0:
        return None
    ratio = float(plain @ cold) / squares
    tempered = abs(ratio - 1 / COLD) < abs(ratio - 1.0)
    nearest = 1 / COLD if tempered else 1.0
    return tempered if abs(ratio - nearest) < 0.25 else None


# ---------------------------------------------------------------- the same weights still?


def probe_logprobs(server: Server, probes: Probes) -> Floats:
    """Logprobs of the probe tokens, now: by prefill, or of the most likely next tokens."""
    api = server.api
    if server.prefill:
        scored = [api.score(ids, 1) for ids in probes.whole if len(ids) > 1]
        return np.concatenate(scored)
    settings = api.settings(Sampling(max_tokens=1), ())
    values: list[float] = []
    for ids in probes.openings:
        top = api.top_logprobs(ids, settings, TOP)
        values += sorted(top.values(), reverse=True)[:TOP]
    return np.asarray(values, np.float64)


def verify(server: Server, probes: Probes, notes: dict[str, Any]) -> None:
    """Whether a server is still what it was when it was discovered.

    Args:
        notes: about it: ``restarts``, ``drift``; updated.

    Raises:
        ServerChanged: it is not.
        Unavailable: it does not answer.
    """
    try:
        facts = server.api.describe(server.api.client, server.facts.model)
        if facts is None:
            raise ServerChanged("another program answers at its address")
        for name in ("version", "model", "max_model_len", "dtype", "weight_version"):
            before, now = getattr(server.facts, name), getattr(facts, name)
            if before != now:
                raise ServerChanged(f"its {name.replace('_', ' ')} was {before} and is {now}")
        drift = mean_abs_diff(server.probe, probe_logprobs(server, probes))
    except Refused as error:
        raise ServerChanged(f"it refuses a probe that it answered before ({error})") from error
    notes["drift"] = max(drift, notes["drift"])
    if facts.started != server.facts.started and facts.started not in notes["restarts"]:
        notes["restarts"].append(facts.started)
    if drift > allowed_drift(server.noise):
        raise ServerChanged(
            f"its probe logprobs moved by {drift:.3g} on average (noise {server.noise:.2g}): other "
            "weights or settings"
        )


def allowed_drift(noise: float) -> float:
    """Mean |difference| that two probes of the same weights may have."""
    return max(SAME_WEIGHTS, NOISE_FACTOR * noise)


def mean_abs_diff(before: Floats, now: Floats) -> float:
    """Of two probes, in nats; infinite where shapes differ or a value is not finite."""
    if before.shape != now.shape or not np.isfinite([before, now]).all():
        return float("inf")
    return float(np.abs(before - now).mean())
