"""The tokens that a kernel's harm is measured on: a run's rollout, or a few that the model samples.

Rows run one by one, without padding: a kernel may give a padding token with nothing to look at any
number or none, and it would not be the kernel's harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mismatch.processes.kernels.model_impact import Source

NEW_TOKENS = 64
LONGEST = 2048  # tokens of a row: eager attention holds its square


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence.

    Attributes:
        ids: [S] int64.
        acting: [S] bool, sampled by the policy; never the first.
        temperature: of the law whose logprobs are taken.
    """

    ids: torch.Tensor
    acting: torch.Tensor
    temperature: float = 1.0

    @classmethod
    def of(cls, ids: torch.Tensor, acting: torch.Tensor, temperature: float = 1.0) -> Row:
        """Not longer than the float32 reference can hold; nothing predicts a first token."""
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


def sampled(model: Any, source: Source) -> list[Row]:
    """Answers of the model to prompts of the built-in task, or to random tokens where it has no
    chat template; at temperature 1.
    """
    prompts = _prompts(model, source)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    real = torch.arange(width) >= torch.tensor([[width - len(row)] for row in prompts])
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(source.seed)
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


def _prompts(model: Any, source: Source) -> list[list[int]]:
    from transformers import AutoTokenizer

    from mismatch.errors import MismatchError
    from mismatch.prompts.sources import read_prompts, render_prompts
    from mismatch.specs import PromptSpec

    vocabulary = int(model.config.get_text_config().vocab_size)
    count = -(-source.tokens // NEW_TOKENS)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.model, revision=source.revision)
        prompts = read_prompts(PromptSpec(num_prompts=count, seed=source.seed))
        return render_prompts(prompts, tokenizer, vocabulary)
    except (MismatchError, OSError, ValueError):
        draw = torch.Generator().manual_seed(source.seed)
        drawn: list[list[int]] = torch.randint(vocabulary, (count, 16), generator=draw).tolist()
        return drawn
