"""Who the servers are and what they can do: asked before anything is sampled, and again later.

What a server does not say is found out by probe prompts: whether it gives logprobs, prompt logprobs
and routes, which law its logprobs are of (by how they change with temperature and top-k), and
whether its weights are still those of the start (by scoring the same tokens again).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mismatch.engines.base import ExpertLayout
from mismatch.engines.model_info import read_model_info
from mismatch.engines.servers.dialect import Dialect, Facts
from mismatch.engines.servers.http import Client, Refused, Unavailable
from mismatch.engines.servers.layout import expert_layout
from mismatch.engines.servers.member import Changed
from mismatch.engines.servers.probes import (
    TEXTS,
    TOP,
    Law,
    Probes,
    make_probes,
    reported_law,
    require_said,
)
from mismatch.engines.servers.recognise import recognise
from mismatch.errors import MismatchError
from mismatch.specs import EngineSpec
from mismatch.types import Floats, Sampling

# Mean |difference| of probe logprobs up to which two looks are of the same weights. On the embedded
# model two engines in bf16 differ by 0.011, an 8-bit KV cache makes it 0.046.
SAME = 0.03
NOISE_FACTOR = 5.0
NO_ROUTES = (
    "routing disagreement: the {kind} server returns no routed experts; start it with "
    "--enable-return-routed-experts"
)
NO_PREFILL = "decode against prefill: the {kind} server gives no prompt logprobs ({error})"


@dataclass(frozen=True, slots=True)
class Server:
    """One server with all that is known about it.

    Attributes:
        prefill: it scores given tokens.
        routes: it returns routed experts.
        probe: logprobs of the probe tokens at the start; ``noise``: mean |difference| of two looks.
    """

    client: Client
    dialect: Dialect
    facts: Facts
    law: Law
    prefill: bool
    routes: bool
    probe: Floats
    noise: float
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.client.address.text


# ---------------------------------------------------------------- probing


@dataclass(frozen=True, slots=True)
class Fleet:
    """All servers of a run, and what they are probed with."""

    servers: tuple[Server, ...]
    probes: Probes
    layout: ExpertLayout | None


@functools.lru_cache(maxsize=4)
def survey(spec: EngineSpec) -> Fleet:
    """Recognise and probe all servers of a spec; asked once in a process.

    Raises:
        MismatchError: as :func:`mismatch.engines.servers.recognise.recognise`; or a server that
            gives no logprobs of sampled tokens, or has another tokenizer, or other weights than the
            first.
    """
    probes, info = make_probes(spec), read_model_info(spec)
    layout = expert_layout(spec, info) if spec.routing else None
    made = []
    for client, dialect, facts in recognise(spec):
        url = client.address.text
        try:
            require_tokens(client, facts, spec, probes)
            server = examine(client, dialect, facts, probes, layout)
            made.append(replace(server, client=client.plain()))
        except Unavailable as error:
            raise MismatchError(
                f"{url}: {error.reason}",
                "look into the server's log; --server-timeout gives a request more time",
            ) from error
        except Refused as error:
            raise MismatchError(
                f"{url} refuses a probe (HTTP {error.status}): {error.reason}",
                "is it another model? compare --model with what the server loaded",
            ) from error
    for server in made[1:]:
        _require_same_answers(made[0], server)
    return Fleet(tuple(made), probes, layout)


def require_tokens(client: Client, facts: Facts, spec: EngineSpec, probes: Probes) -> None:
    """The server's tokenizer is the model's, where it can be asked.

    Raises:
        MismatchError: other ids for the same text.
    """
    body = {"model": facts.model, "prompt": TEXTS[1], "add_special_tokens": True}
    try:
        theirs = client.post("/tokenize", body).get("tokens")
    except (Refused, Unavailable, AttributeError):
        return
    ours = list(probes.whole[1])
    if isinstance(theirs, list) and theirs[: len(ours)] != ours:
        raise MismatchError(
            f"{client.address.text} has another tokenizer than {spec.model}: the wrong model",
            "give the model that the server loaded: --model",
        )


def examine(
    client: Client, dialect: Dialect, facts: Facts, probes: Probes, layout: ExpertLayout | None
) -> Server:
    """What one server can do, by asking it for that.

    Raises:
        MismatchError: it gives no logprobs of sampled tokens, or logits for logprobs.
        Unavailable: it has no time, or is gone: that tells nothing of what it can do.
    """
    url, reasons = client.address.text, {}
    settings = dialect.settings(Sampling(max_tokens=2), ())
    try:
        answer = dialect.sample(client, facts, probes.whole[0], settings, None, layout)
    except (Unavailable, Refused) as error:
        require_said(error)
        raise MismatchError(
            f"{url} gives no logprobs of the tokens that it samples ({error}): nothing can be "
            "measured",
            "start it so that it returns logprobs and token ids; a proxy may cut them out",
        ) from error
    facts = replace(facts, configuration=answer.identity)
    routes = answer.sample.routed is not None
    if not routes:
        reasons["routed_experts"] = NO_ROUTES.format(kind=facts.kind)
    prefill = True
    try:
        dialect.score(client, facts, probes.whole[0], 1)
    except (Unavailable, Refused) as error:
        require_said(error)
        prefill = False
        reasons["prefill"] = NO_PREFILL.format(kind=facts.kind, error=error)
    law = reported_law(client, dialect, facts, probes)
    bare = Server(client, dialect, facts, law, prefill, routes, np.empty(0), 0.0, reasons)
    first, second = look(bare, probes), look(bare, probes)
    noise = gap(first, second)
    if not np.isfinite(noise):
        raise MismatchError(
            f"{url} gives probe logprobs that are no finite numbers",
            "look into the server's log: its model may overflow in its dtype",
        )
    return replace(bare, probe=first, noise=noise)


# ---------------------------------------------------------------- the same weights still?


def look(server: Server, probes: Probes) -> Floats:
    """Logprobs of the probe tokens, now: by prefill, or of the most likely next tokens."""
    client, dialect, facts = server.client, server.dialect, server.facts
    if server.prefill:
        found = [dialect.score(client, facts, ids, 1) for ids in probes.whole if len(ids) > 1]
        return np.concatenate(found)
    settings = dialect.settings(Sampling(max_tokens=1), ())
    values: list[float] = []
    for ids in probes.openings:
        top = dialect.top(client, facts, ids, settings, TOP)
        values += sorted(top.values(), reverse=True)[:TOP]
    return np.asarray(values, np.float64)


def verify(server: Server, probes: Probes, at_work: dict[str, Any]) -> None:
    """Whether a server is still what it was when it was surveyed.

    Args:
        at_work: what is noted about it: ``restarts``, ``drift``.

    Raises:
        Changed: it is not.
        Unavailable: it does not answer.
    """
    try:
        facts = server.dialect.look(server.client, server.facts.model)
        if facts is None:
            raise Changed("another program answers at its address")
        for name in ("version", "model", "max_model_len", "dtype", "weight_version"):
            before, now = getattr(server.facts, name), getattr(facts, name)
            if before != now:
                raise Changed(f"its {name.replace('_', ' ')} was {before} and is {now}")
        moved = gap(server.probe, look(server, probes))
    except Refused as error:
        raise Changed(f"it refuses a probe that it answered before ({error})") from error
    at_work["drift"] = max(moved, at_work.get("drift", 0.0))
    if facts.started != server.facts.started and facts.started not in at_work["restarts"]:
        at_work["restarts"].append(facts.started)
    if moved > allowed(server.noise):
        raise Changed(
            f"its probe logprobs moved by {moved:.3g} on average (noise {server.noise:.2g}): other "
            "weights or settings"
        )


def allowed(noise: float) -> float:
    """Mean |difference| that two looks at the same weights may have."""
    return max(SAME, NOISE_FACTOR * noise)


def _require_same_answers(first: Server, other: Server) -> None:
    apart = gap(first.probe, other.probe)
    if apart > allowed(max(first.noise, other.noise)):
        raise MismatchError(
            f"the servers have other weights or settings: probe logprobs of {first.url} and "
            f"{other.url} are {apart:.3g} apart on average",
            "give servers that loaded the same checkpoint in the same way",
        )
    if first.law != other.law:
        raise MismatchError(
            f"the servers differ: logprobs are {first.law.name} at {first.url}, "
            f"{other.law.name} at {other.url}",
            "start them with the same logprobs mode",
        )


def gap(one: Floats, other: Floats) -> float:
    """Mean |difference| of two looks; infinite where shapes differ or a value is not finite."""
    if one.shape != other.shape or not np.isfinite([one, other]).all():
        return float("inf")
    return float(np.abs(one - other).mean())
