"""Pairs of scorings drawn from known laws, with known faults: what detectors of causes are held to.

Every position has a law over ``VOCABULARY`` tokens. Both sides see its logits with a rounding of
their own; the engine's law samples. A fault changes what one side reports, at a given strength.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mismatch.analysis.diagnosis.case import Case
from mismatch.types import Floats, Rollout, Sampling, Scoring

VOCABULARY, PROMPT = 24, 12
END = VOCABULARY  # id that ends a turn; those above it name a prompt
Array = NDArray[np.float64]


@dataclass
class Draw:
    """Logits of every action token, [A, V], as each side computes them, before a fault.

    Attributes:
        report: engine's and trainer's logits -> log-laws, [A, V] each.
    """

    rng: np.random.Generator
    logits: Array
    engine: Array
    trainer: Array
    position: NDArray[np.int64]
    lengths: NDArray[np.int64]
    prompt: NDArray[np.int64]
    temperature: float = 1.0
    rounding: float = 0.02
    sampled: Array | None = None
    engine_facts: dict[str, object] = field(default_factory=dict)
    trainer_facts: dict[str, object] = field(default_factory=dict)

    def case(self, change: Callable[[Array, Array], tuple[Array, Array]] | None = None) -> Case:
        """Sample from the engine's law and score the tokens; ``change`` alters the two [A]."""
        engine, trainer = log_law(self.engine), log_law(self.trainer)
        law = log_law(self.engine / self.temperature) if self.sampled is None else self.sampled
        ids = gumbel(self.rng, law)
        rows = np.arange(len(ids))
        left, right = engine[rows, ids], trainer[rows, ids]
        if change is not None:
            left, right = change(left, right)
        exact = log_law(self.logits)
        noise = rounded(np.random.default_rng(len(ids)), self.logits, self.rounding)
        others = {
            "reference:fp32": (exact, -(np.exp(exact) * exact).sum(axis=1)),
            "plain:bf16": (log_law(self.logits + noise), None),
        }
        entropy = -(np.exp(trainer) * trainer).sum(axis=1)
        rollout = rollout_of(ids, self.lengths, self.prompt, self.temperature)
        facts = {"engine": {"dtype": "bf16", **self.engine_facts},
                 "trainer": {"dtype": "bf16", **self.trainer_facts}}  # fmt: skip
        return Case.of(
            rollout,
            Scoring("vllm:decode", ids, left, facts["engine"]),
            Scoring("fsdp", ids, right, facts["trainer"], entropy=entropy),
            {
                name: Scoring(name, ids, side[rows, ids], {}, entropy=entropies)
                for name, (side, entropies) in others.items()
            },
        )


def draw(
    seed: int, prompts: int = 64, rounding: float = 0.02, sharpness: float = 3.0, length: int = 40
) -> Draw:
    """A healthy pair: two samples a prompt, about ``2 * prompts * length`` tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(length // 2, length * 3 // 2, 2 * prompts)
    count = int(lengths.sum())
    sharp = sharpness * rng.gamma(2.0, 0.5, (count, 1))
    logits = sharp * rng.standard_normal((count, VOCABULARY))
    engine, trainer = (logits + rounded(rng, logits, rounding) for _ in range(2))
    position = np.concatenate([PROMPT + np.arange(n) for n in lengths])
    prompt = np.repeat(np.arange(prompts), 2)
    return Draw(rng, logits, engine, trainer, position, lengths, prompt, rounding=rounding)


def rounded(rng: np.random.Generator, logits: Array, size: float) -> Array:
    """What rounding in the trunk adds, with the heavier tails of real runs."""
    scale = size * np.exp(0.4 * rng.standard_normal((len(logits), 1)))
    return np.asarray(scale * rng.standard_normal(logits.shape))


def log_law(logits: Array) -> Array:
    top = logits.max(axis=1, keepdims=True)
    return np.asarray(logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True)))


def gumbel(rng: np.random.Generator, law: Array) -> NDArray[np.int64]:
    return np.asarray((law + rng.gumbel(size=law.shape)).argmax(axis=1), np.int64)


def begin_of(prompt: int) -> list[int]:
    """A prompt's ids; all end in the template's last token."""
    return [END + 1 + prompt] * (PROMPT - 1) + [0]


def rollout_of(
    ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    prompt: NDArray[np.int64],
    temperature: float,
) -> Rollout:
    sequences = np.split(ids, np.cumsum(lengths)[:-1])
    begins = [begin_of(int(number)) for number in prompt]
    tokens = np.concatenate([part for both in zip(begins, sequences, strict=True) for part in both])
    mask = np.concatenate([np.arange(PROMPT + n) >= PROMPT for n in lengths])
    return Rollout(
        tokens, np.cumsum([0, *(lengths + PROMPT)]), mask, mask.astype(np.int64), prompt,
        ("length",) * len(lengths), Sampling(temperature=temperature, samples_per_prompt=2), {},
    )  # fmt: skip


# ---------------------------------------------------------------- faults, at a strength each


def raw_logprobs(seed: int, temperature: float) -> Case:
    """The engine samples at a temperature and reports the raw law; the trainer divides."""
    return _raw(draw(seed), temperature, untempered=False)


def raw_logprobs_and_noise(seed: int, temperature: float, times: float) -> Case:
    """The same, and the engine's rounding is several times what it should be."""
    pair = draw(seed)
    pair.engine = pair.engine + rounded(pair.rng, pair.logits, times * pair.rounding)
    return _raw(pair, temperature, untempered=True)


def _raw(pair: Draw, temperature: float, untempered: bool) -> Case:
    """As a run at a temperature leaves it: trainer and float32 reference are at it."""
    plain, pair.temperature = pair.trainer, temperature
    pair.trainer = pair.trainer / temperature
    case = pair.case()
    at = np.arange(len(pair.logits)), case.engine.token_ids
    reference = replace(
        case.others["reference:fp32"], logprobs=log_law(pair.logits / temperature)[at]
    )
    extra = {"logprobs_untempered": log_law(plain)[at]} if untempered else {}
    exact = {"logprobs_untempered": log_law(pair.logits)[at]} if untempered else {}
    return replace(
        case,
        others={reference.name: replace(reference, extra=exact)},
        trainer=replace(case.trainer, extra=extra),
    )


def top_k(seed: int, k: int) -> Case:
    """The engine samples and normalises over its k most likely tokens; the trainer over all."""
    pair = draw(seed)
    law = log_law(pair.engine)
    cut = np.sort(law, axis=1)[:, -k][:, None]
    pair.engine = np.where(law >= cut, law, -60.0)
    return pair.case()


def shifted(seed: int, lag: int) -> Case:
    """The trainer's log-probabilities are of tokens ``lag`` further on (by rows)."""
    pair = draw(seed)
    edges = np.cumsum(pair.lengths)[:-1]
    return pair.case(
        lambda left, right: (
            left,
            np.concatenate([np.roll(r, -lag) for r in np.split(right, edges)]),
        )
    )


def swapped_rows(seed: int, count: int) -> Case:
    """So many rows carry each other's log-probabilities, cut or repeated to their length."""
    pair = draw(seed)
    edges = np.cumsum(pair.lengths)[:-1]
    chosen = pair.rng.permutation(len(pair.lengths))[:count]

    def change(left: Array, right: Array) -> tuple[Array, Array]:
        rows = np.split(right, edges)
        other = dict(zip(chosen, np.roll(chosen, 1), strict=True))
        return left, np.concatenate(
            [np.resize(rows[other.get(n, n)], len(row)) for n, row in enumerate(rows)]
        )

    return pair.case(change)


def onset(seed: int, times: float, at: int = 40) -> Case:
    """From one absolute position on the engine's error is several times its rounding."""
    pair = draw(seed, length=60)
    later = (pair.position >= at)[:, None]
    pair.engine = pair.engine + later * rounded(pair.rng, pair.logits, times * pair.rounding)
    return pair.case()


def other_weights(seed: int, times: float) -> Case:
    """The trainer's logits are off in every direction alike."""
    pair = draw(seed)
    pair.trainer = pair.trainer + times * pair.rounding * pair.rng.standard_normal(
        pair.logits.shape
    )
    return pair.case()


def other_function(seed: int, strength: float) -> Case:
    """The trainer's law changes where it is confident, as measured of sinks, rope and windows."""
    pair = draw(seed)
    confident = np.exp(log_law(pair.logits)).max(axis=1, keepdims=True) ** 3
    pair.trainer = pair.trainer + strength * confident * pair.rng.standard_normal(pair.logits.shape)
    return pair.case()


def softcapped(seed: int, cap: float, side: str = "trainer", rounding: float = 0.2) -> Case:
    """One side puts its logits through a softcap."""
    pair = draw(seed, rounding=rounding)
    setattr(pair, side, cap * np.tanh(getattr(pair, side) / cap))
    return pair.case()


def first_tokens(seed: int, times: float) -> Case:
    """The first tokens of the trainer's rows are far off."""
    pair = draw(seed)
    early = (pair.position - PROMPT < 2)[:, None]
    pair.trainer = pair.trainer + early * rounded(pair.rng, pair.logits, times * pair.rounding)
    return pair.case()


def rounded_logprobs(seed: int, bits: int) -> Case:
    """The engine's log-probabilities are sent in a format of so many significant bits."""
    pair = draw(seed, rounding=0.002)

    def change(left: Array, right: Array) -> tuple[Array, Array]:
        fraction, exponent = np.frexp(left)
        return np.ldexp(np.round(fraction * 2.0**bits) / 2.0**bits, exponent), right

    return pair.case(change)


def appended_ends(seed: int, share: float) -> Case:
    """Some rows end in a token that nobody sampled, at log-probability 0."""
    pair = draw(seed)
    last = np.cumsum(pair.lengths) - 1
    last = last[: max(1, int(share * len(last)))]

    def change(left: Array, right: Array) -> tuple[Array, Array]:
        left = left.copy()
        left[last] = 0.0
        return left, right

    return pair.case(change)


# ---------------------------------------------------------------- several turns

GAP = 5  # tokens of an observation


def turned(case: Case, turns: int = 3) -> Case:
    """The same action tokens in several turns: each ends in ``END``, ``GAP`` others follow it."""
    ids, mask, turn, offsets, sampled = [], [], [], [0], []
    own = case.rollout.token_ids[case.rollout.actions]
    for prompt, row in zip(case.rollout.prompt_index.tolist(), case.rows, strict=True):
        parts = np.array_split(own[row], turns)
        for part in parts:
            part[-1] = END
        ids += begin_of(prompt)
        mask += [False] * PROMPT
        turn += [0] * PROMPT
        for number, part in enumerate(parts, 1):
            gap = GAP if number < turns else 0
            ids += [*part.tolist(), *range(gap)[::-1]]
            mask += [True] * len(part) + [False] * gap
            turn += [number] * (len(part) + gap)
        sampled.append(np.concatenate(parts))
        offsets.append(len(ids))
    rollout = replace(
        case.rollout, token_ids=np.array(ids), action_mask=np.array(mask), turn=np.array(turn),
        offsets=np.array(offsets), finish_reason=("stop",) * len(case.rows),
    )  # fmt: skip
    new = np.concatenate(sampled)
    facts = case.engine.fingerprint | {"stop_token_ids": [END]}
    return replace(
        case,
        rollout=rollout,
        engine=replace(case.engine, token_ids=new, fingerprint=facts),
        trainer=replace(case.trainer, token_ids=new),
        others={name: replace(each, token_ids=new) for name, each in case.others.items()},
    )


def scored(case: Case, left: Floats | None = None, right: Floats | None = None) -> Case:
    """The case with other numbers of a side, in its scoring as well."""
    engine = replace(case.engine, logprobs=case.left if left is None else left)
    trainer = replace(case.trainer, logprobs=case.right if right is None else right)
    return Case.of(case.rollout, engine, trainer, case.others)
