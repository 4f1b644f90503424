"""Probe prompts, and what their answers tell about the logprobs of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatch.engines.model_info import load_tokenizer, read_model_info
from mismatch.engines.servers.dialect import ABSENT_LOGPROB, Dialect, Facts
from mismatch.engines.servers.http import Client, Refused, Unavailable
from mismatch.errors import MismatchError
from mismatch.specs import EngineSpec
from mismatch.types import Sampling

# What probe prompts are made of: prose, numbers, code; their prefixes have open continuations.
TEXTS = (
    "The train had left before the old clock in the hall struck nine, and nobody was",
    "17 + 25 = 42, 42 - 9 = 33, 33 + 128 = 161, so the next sum in this list is",
    "def mean(values):\n    total = sum(values)\n    return total / len(values)\n\n\nclass",
    "Dear all, thank you for coming. Before we begin, here are three things to keep in mind: first",
)
TOP = 5
PROBE_TOKENS = 64  # of each text at most
COLD = 0.5  # temperature at which tempered logprobs are told from raw ones


@dataclass(frozen=True, slots=True)
class Law:
    """Which law the logprobs of sampled tokens are of; None: could not be found out.

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


def make_probes(spec: EngineSpec) -> Probes:
    """Probe tokens by the model's own tokenizer, its last id among them: the largest it may get."""
    tokenizer, info = load_tokenizer(spec), read_model_info(spec)
    limit = min(PROBE_TOKENS, (info.context or PROBE_TOKENS + 2) - 2)
    whole = []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=True)["input_ids"]
        whole.append(tuple(int(i) for i in ids[:limit] if i < info.vocab_size))
    openings = [ids[: max(1, (len(ids) * part) // 4)] for ids in whole for part in (2, 4)]
    return Probes(tuple(whole), tuple(openings))


def reported_law(client: Client, dialect: Dialect, facts: Facts, probes: Probes) -> Law:
    """Find out which law the logprobs are of.

    At T = 0.5 distances between logprobs double if they are of the tempered law, and stay if they
    are raw. With top-k = 2 those of the two kept tokens rise, to a sum of one, if they are
    renormalised.

    Raises:
        MismatchError: they are no logprobs: two of them sum to more than one.
        Unavailable: the server has no time, or is gone.
    """

    def ask(ids: Sequence[int], law: Sampling) -> dict[int, float]:
        found = dialect.top(client, facts, ids, dialect.settings(law, ()), TOP)
        return {token: lp for token, lp in found.items() if lp > ABSENT_LOGPROB}

    pairs, cuts = [], []
    try:
        for ids in probes.openings:
            plain, cold = ask(ids, Sampling(max_tokens=1)), ask(ids, Sampling(COLD, max_tokens=1))
            if plain and sum(np.exp(list(plain.values()))) > 1.01:
                raise MismatchError(
                    f"{client.address.text} reports logits, not logprobs",
                    "vLLM: --logprobs-mode raw_logprobs or processed_logprobs",
                )
            pairs += _distances(plain, cold)
            cut = ask(ids, Sampling(top_k=2, max_tokens=1))
            cuts += _renormalised(plain, cut)
    except (Refused, Unavailable) as error:
        require_said(error)
        return Law(None, None)
    return Law(_ratio_says(pairs), _majority(cuts))


def require_said(error: Unavailable | Refused) -> None:
    """A failure that says what the server cannot do; a busy or lost one says nothing: raised."""
    if isinstance(error, Unavailable) and error.says_nothing:
        raise error


def _distances(plain: dict[int, float], cold: dict[int, float]) -> list[tuple[float, float]]:
    """Distances to the most likely token, before and after, of all tokens in both."""
    best = max(plain, key=plain.__getitem__, default=None)
    if best is None or best not in cold:
        return []
    return [
        (plain[best] - plain[token], cold[best] - cold[token])
        for token in plain
        if token != best and token in cold
    ]


def _renormalised(plain: dict[int, float], cut: dict[int, float]) -> list[bool]:
    """Whether the two kept tokens have all the mass; () where they had nearly all before."""
    kept = sorted(plain, key=plain.__getitem__)[-2:]
    mass = float(sum(np.exp(plain[token]) for token in kept))
    if len(kept) < 2 or mass > 0.98 or not all(token in cut for token in kept):
        return []
    rise = float(np.mean([cut[token] - plain[token] for token in kept]))
    return [bool(rise > -np.log(mass) / 2)]


def _ratio_says(pairs: Sequence[tuple[float, float]]) -> bool | None:
    if not pairs:
        return None
    one, other = np.asarray(pairs, np.float64).T
    total = float(one @ one)
    if total == 0.0:
        return None
    ratio = float(one @ other) / total
    tempered = abs(ratio - 1 / COLD) < abs(ratio - 1.0)
    nearest = 1 / COLD if tempered else 1.0
    return tempered if abs(ratio - nearest) < 0.25 else None


def _majority(votes: Sequence[bool]) -> bool | None:
    return None if not votes else 2 * sum(votes) > len(votes)
