"""A trainer in plain PyTorch, right and with the bugs that such trainers have.

It loads a checkpoint with transformers, pads rows on the left, divides the logits by the sampling
temperature and takes a float32 log-softmax. A bug is one line of :func:`score_rows`. Every bug
comes as a class and as a function for ``--scorer``, and as numbers for a dump.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch

from mismatch.models import resolve_model
from mismatch.trainers.protocol import Facts, Scored, Tokens, TrainerJob, Variant

Bug = Literal[
    "",
    "no temperature",
    "mask of the other side",
    "no mask",
    "16-bit log-softmax",
    "first token early",
    "one late",
    "one early",
    "one token of context",
    "labels shifted twice",
    "another tokenisation",
    "experts not copied",
]
MODEL = "PLAIN_TRAINER_MODEL"  # environment variable: the checkpoint of the functions
ROWS = 8  # per forward pass
PAD = 0


def load(model: str, dtype: torch.dtype) -> Any:
    """Return a model with eager attention, which honours gpt-oss's sinks."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager")
    return loaded.eval()


@torch.no_grad()
def score_rows(
    model: Any,
    rows: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    temperature: float,
    bug: Bug = "",
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return log-probabilities and entropies [a] of each row's action tokens, in one pass."""
    if bug == "another tokenisation":
        rows = [tokenised_again(row, sampled) for row, sampled in zip(rows, masks, strict=True)]
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), PAD)
    real = torch.zeros(len(rows), longest, dtype=torch.long)
    for line, row in enumerate(rows):
        ids[line, longest - len(row) :] = torch.from_numpy(row)
        real[line, longest - len(row) :] = 1
    mask = {"mask of the other side": real.flip(1), "no mask": None}.get(bug, real)
    if bug == "one token of context":
        ids_alone = ids.reshape(-1, 1)
        logits = model(input_ids=ids_alone).logits.reshape(*ids.shape, -1)[:, :-1]
    else:
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    if bug != "16-bit log-softmax":
        logits = logits.float()
    if bug != "no temperature":
        logits = logits / temperature
    everything = logits.log_softmax(-1)
    entropy = -(everything.exp() * everything).sum(-1).float()
    labels = ids[:, 1:]
    if bug == "labels shifted twice":  # by the collator, and by the loss
        labels = torch.cat([ids[:, 2:], ids[:, -1:]], dim=1)
    given = everything.gather(-1, labels[..., None])[..., 0].float()
    if bug in ("one late", "one early"):
        given = given.roll(1 if bug == "one late" else -1, dims=1)
    scored = []
    for line, (row, sampled) in enumerate(zip(rows, masks, strict=True)):
        at = np.flatnonzero(sampled) + longest - len(row) - 1
        values = given[line, at].numpy().copy()
        if bug == "first token early":
            values[0] = given[line, at[0] - 1]
        scored.append((values, entropy[line, at].numpy()))
    return scored


def tokenised_again(row: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """Return ids of the same text in smaller tokens from the response on, as many as there were."""
    texts = [tokenizer().decode([int(token)]) for token in row[sampled]]
    ids = [n for text in texts for part in (text[:1], text[1:])
           for n in tokenizer().encode(part, add_special_tokens=False)]  # fmt: skip
    changed = row.copy()
    changed[sampled] = np.resize(ids, int(sampled.sum()))
    return changed


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve_model("tiny-gpt-oss"))


def lost_experts(model: Any) -> None:
    """Leave the experts as they are made."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.data = 0.02 * torch.randn(parameter.shape, generator=generator)
            parameter.data = parameter.data.to(next(model.parameters()).dtype)


def score_all(
    model: Any, tokens: Tokens, temperature: float, bug: Bug, rows: int, own: Sequence[int]
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return log-probabilities and entropies of these sequences, so many in a pass."""
    sequences, masks = tokens.sequences(), tokens.masks()
    scored: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for start in range(0, len(own), rows):
        group = own[start : start + rows]
        chosen = [sequences[n] for n in group], [masks[n] for n in group]
        scored |= dict(zip(group, score_rows(model, *chosen, temperature, bug), strict=True))
    return scored


class Plain:
    """The trainer as a class: it can score in float32."""

    bug: Bug = ""

    def __init__(self, job: TrainerJob) -> None:
        self.job = job
        self.dtype = torch.float32 if job.precision == "fp32" else torch.bfloat16
        self.model = load(job.model, self.dtype)
        if self.bug == "experts not copied":
            lost_experts(self.model)

    def score(self, tokens: Tokens, variant: Variant) -> Scored:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        own = list(range(rank, len(tokens.lengths), world))
        rows = {"alone": 1, "regrouped": ROWS // 2}.get(variant, ROWS)
        scored = score_all(self.model, tokens, self.job.temperature, self.bug, rows, own)
        logprobs, entropy = zip(*(scored[n] for n in own), strict=True)
        return Scored(tuple(own), logprobs, entropy)

    def facts(self) -> Facts:
        return Facts(
            code="a plain trainer",
            dtype="fp32" if self.dtype == torch.float32 else "bf16",
            attention="eager",
            micro_batch=f"{ROWS} rows",
        )


class NoTemperature(Plain):
    bug = "no temperature"


class OtherSide(Plain):
    bug = "mask of the other side"


class NoMask(Plain):
    bug = "no mask"


class SixteenBits(Plain):
    bug = "16-bit log-softmax"


class FirstEarly(Plain):
    bug = "first token early"


class OneLate(Plain):
    bug = "one late"


class OneEarly(Plain):
    bug = "one early"


class OneToken(Plain):
    bug = "one token of context"


class ShiftedTwice(Plain):
    bug = "labels shifted twice"


class Tokenised(Plain):
    bug = "another tokenisation"


class LostExperts(Plain):
    bug = "experts not copied"


CLASSES = (
    *(Plain, NoTemperature, OtherSide, NoMask, SixteenBits, FirstEarly, OneLate, OneEarly),
    *(OneToken, ShiftedTwice, Tokenised, LostExperts),
)


@cache
def _loaded() -> Any:
    return load(os.environ[MODEL], torch.bfloat16)


def _function(
    token_ids: np.ndarray,
    lengths: np.ndarray,
    mask: np.ndarray,
    temperature: float,
    bug: Bug = "",
) -> np.ndarray:
    tokens = Tokens(token_ids, np.cumsum([0, *lengths]), mask)
    own = list(range(len(lengths)))
    scored = score_all(_loaded(), tokens, temperature, bug, ROWS, own)
    return np.concatenate([scored[n][0] for n in own])


plain = _function
no_temperature = partial(_function, bug="no temperature")
other_side = partial(_function, bug="mask of the other side")
no_mask = partial(_function, bug="no mask")
sixteen_bits = partial(_function, bug="16-bit log-softmax")
first_early = partial(_function, bug="first token early")
one_late = partial(_function, bug="one late")
one_early = partial(_function, bug="one early")
one_token = partial(_function, bug="one token of context")
shifted_twice = partial(_function, bug="labels shifted twice")
tokenised = partial(_function, bug="another tokenisation")

NAMES: dict[str, dict[Bug, str]] = {  # of the classes and the functions above, as --scorer has them
    "class": {each.bug: each.__name__ for each in CLASSES},
    "function": {
        "": "plain",
        "no temperature": "no_temperature",
        "mask of the other side": "other_side",
        "no mask": "no_mask",
        "16-bit log-softmax": "sixteen_bits",
        "first token early": "first_early",
        "one late": "one_late",
        "one early": "one_early",
        "one token of context": "one_token",
        "labels shifted twice": "shifted_twice",
        "another tokenisation": "tokenised",
    },
}
