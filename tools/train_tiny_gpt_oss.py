"""Train an embedded model: tokenizer, weights, model card.

    python tools/train_tiny_gpt_oss.py --out mismatch/models/tiny-gpt-oss
    python tools/train_tiny_gpt_oss.py --tools --out mismatch/models/tiny-gpt-oss-tools

The first from nothing, the second from the first as it is shipped. A fixed number of steps on text
that tiny_gpt_oss_corpus and tiny_gpt_oss_tools generate, all seeds fixed, one thread: the same
machine and versions give the same bytes.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import (
    AutoTokenizer,
    GptOssForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mismatch.models import EMBEDDED
from mismatch.prompts.arithmetic import Story, arithmetic_problems, long_story
from tools.tiny_gpt_oss_card import (
    arithmetic_accuracy,
    sinks_of,
    tool_accuracy,
    write_card,
)
from tools.tiny_gpt_oss_corpus import Chat, chats
from tools.tiny_gpt_oss_model import (
    CALL,
    CHAT_TEMPLATE,
    MESSAGE,
    PAD,
    RETURN,
    SPECIAL,
    VOCABULARY,
    build_model,
    chat_texts,
    train_tokenizer,
)
from tools.tiny_gpt_oss_tools import (
    TOOL_SPECIAL,
    TOOL_TEMPLATE,
    spoken_tokens,
    tool_chats,
    tool_texts,
)

SEEDS = {"weights": 0, "tokenizer_text": 1, "training_text": 2, "held_out_text": 3}
BATCH_TOKENS = 2048  # padded tokens per step
PEAK_LR = 3e-3
PROMPT_WEIGHT = 0.2  # of a prompt's tokens in the loss: the model is never asked to say them
AUX_WEIGHT = 0.005  # load balance: enough to keep every expert alive, not to flatten the router
# The matrices are small: a second thread gains little, and loses a lot on a busy machine.
THREADS = 1
OPTIMIZER = (
    f"AdamW (0.9, 0.98), weight decay 0.05, peak learning rate {PEAK_LR}, cosine, clip 1.0, "
    f"{BATCH_TOKENS} padded tokens per step, float32"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What differs between the embedded models.

    Attributes:
        context: longest training document, in tokens.
        texts: of a conversation, for the tokenizer.
        spoken: mask [rows, T] of what the assistant says.
        accuracy: what the card says of the task, on so many problems of a seed.
        card_prompts: default prompts that the card's accuracy is measured on.
        base: the embedded model whose training goes on; None: from nothing.
    """

    name: str
    steps: int
    context: int
    chats: Callable[[int], Iterator[Chat]]
    texts: Callable[[Chat], Iterator[str]]
    special: tuple[str, ...]
    template: str
    spoken: Callable[[torch.Tensor, PreTrainedTokenizerFast], torch.Tensor]
    accuracy: Callable[[GptOssForCausalLM, PreTrainedTokenizerBase, list[Story]], dict[str, Any]]
    problems: Callable[[int, int], list[Story]]
    card_prompts: int = 512
    base: str | None = None

    def train_tokenizer(self) -> PreTrainedTokenizerFast:
        """On the texts of 20,000 conversations."""
        read = islice(self.chats(SEEDS["tokenizer_text"]), 20_000)
        texts = (text for chat in read for text in self.texts(chat))
        return train_tokenizer(texts, self.special, self.template)


def documents(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    prompts: set[str] | None = None,
) -> Iterator[list[int]]:
    """Token ids of one conversation at a time, as the chat template renders it.

    Args:
        prompts: collects the first user turns, to count test prompts that were trained on.
    """
    for chat in recipe.chats(seed):
        if prompts is not None:
            prompts.add(chat["messages"][0]["content"])
        ids: Any = tokenizer.apply_chat_template(
            chat["messages"], tools=chat["tools"], return_dict=False
        )
        if len(ids) <= recipe.context:
            yield ids


def batches(
    docs: Iterator[list[int]], shuffle: random.Random
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Endless (ids [rows, T], mask [rows, T]) of about BATCH_TOKENS tokens each.

    One document per row, from position 0, as in use: gpt-oss leaks across packed documents.
    Documents of like length share a batch, so that little is padding.
    """
    while True:
        pool = sorted(islice(docs, 512), key=len)
        grouped: list[list[list[int]]] = [[]]
        for ids in pool:
            if (len(grouped[-1]) + 1) * len(ids) > BATCH_TOKENS:
                grouped.append([])
            grouped[-1].append(ids)
        shuffle.shuffle(grouped)
        for rows in grouped:
            width = max(map(len, rows))
            padded = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
            yield padded, (padded != PAD).long()


def assistant_tokens(ids: torch.Tensor, _: PreTrainedTokenizerFast) -> torch.Tensor:
    """Mask [rows, T] of the tokens that the assistant says, its closing token included.

    Only assistant turns close with <|return|> or <|call|>: from there back to <|message|>.
    """
    said = torch.zeros_like(ids, dtype=torch.bool)
    inside = torch.zeros(len(ids), dtype=torch.bool)
    for t in range(ids.shape[1] - 1, -1, -1):
        inside = (inside & (ids[:, t] != MESSAGE)) | (ids[:, t] == RETURN) | (ids[:, t] == CALL)
        said[:, t] = inside
    return said


def loss_of(
    model: GptOssForCausalLM, ids: torch.Tensor, mask: torch.Tensor, spoken: torch.Tensor
) -> torch.Tensor:
    """Weighted next-token cross entropy (nats per token) plus the load-balance loss.

    No attention mask: with causal attention, padding on the right cannot reach a real token.
    """
    out = model(input_ids=ids, use_cache=False, output_router_logits=True)
    weight = torch.where(spoken, 1.0, PROMPT_WEIGHT) * mask
    losses = F.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    weight = weight[:, 1:].flatten()
    aux = load_balance(out.router_logits, mask)
    return (losses * weight).sum() / weight.sum() + AUX_WEIGHT * aux


def load_balance(router_logits: tuple[torch.Tensor, ...], mask: torch.Tensor) -> torch.Tensor:
    """Switch Transformer's balance loss, mean over layers; 1.0 where all experts work alike."""
    keep = mask.flatten().bool()
    losses = []
    for logits in router_logits:
        probs = logits.reshape(-1, logits.shape[-1])[keep].softmax(-1)
        chosen = torch.zeros_like(probs).scatter_(1, probs.topk(2, dim=-1).indices, 0.5)
        losses.append(probs.shape[-1] * (chosen.mean(0) * probs.mean(0)).sum())
    return torch.stack(losses).mean()


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over 50 steps, then a cosine down to 2 % of the peak."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return PEAK_LR * min(1.0, (step + 1) / 50) * (0.02 + 0.98 * cosine)


@dataclass(slots=True)
class Progress:
    """What training has done so far; prints a line every 25 steps."""

    steps: int
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def recent_loss(self) -> float:
        recent = self.losses[-50:]
        return sum(recent) / len(recent)

    def add(self, tokens: int, loss: float) -> None:
        self.done += 1
        self.tokens += tokens
        self.losses.append(loss)
        if self.done % 25 == 0 or self.done == self.steps:
            speed = self.tokens / self.seconds
            line = f"step {self.done}/{self.steps}  loss {self.recent_loss:.4f}  {speed:.0f} tok/s"
            print(line, flush=True)


def continue_from(model: GptOssForCausalLM, tokenizer: PreTrainedTokenizerFast, base: Path) -> None:
    """Take the weights of another model over; rows of the vocabulary by the text of their token."""
    before = GptOssForCausalLM.from_pretrained(base, dtype=torch.float32)
    known = AutoTokenizer.from_pretrained(base).get_vocab()
    both = [(row, known[text]) for text, row in tokenizer.get_vocab().items() if text in known]
    mine, theirs = (list(rows) for rows in zip(*both, strict=True))
    state = before.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = model.state_dict()[name].clone()
        rows[mine] = state[name][theirs]
        state[name] = rows
    model.load_state_dict(state)


def make_optimizer(model: GptOssForCausalLM) -> torch.optim.Optimizer:
    """AdamW; biases, norms and sinks do not decay."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), fused=True)


def train(
    recipe: Recipe, model: GptOssForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int
) -> dict[str, Any]:
    """Run `steps` optimiser steps; returns what the model card says about them."""
    optimizer = make_optimizer(model)
    prompts: set[str] = set()
    read = documents(recipe, tokenizer, SEEDS["training_text"], prompts)
    stream = batches(read, random.Random(0))
    progress = Progress(steps)
    for step, (ids, mask) in enumerate(islice(stream, steps)):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = loss_of(model, ids, mask, recipe.spoken(ids, tokenizer))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.add(int(mask.sum()), loss.item())
        if progress.done % 500 == 0:
            task = recipe.accuracy(model, tokenizer, recipe.problems(64, 7))
            print(f"  {100 * task['accuracy']:.0f} % of 64 other problems right", flush=True)
    return {
        "steps": steps,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "loss": round(progress.recent_loss, 5),
        "default_prompts_in_training_text": sum(
            problem.prompt in prompts for problem in recipe.problems(recipe.card_prompts, 0)
        ),
    }


def held_out_batches(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast
) -> list[tuple[torch.Tensor, ...]]:
    """Eight batches (ids, mask, assistant mask) of conversations from a separate seed."""
    stream = batches(documents(recipe, tokenizer, SEEDS["held_out_text"]), random.Random(0))
    return [(ids, mask, recipe.spoken(ids, tokenizer)) for ids, mask in islice(stream, 8)]


PLAIN = Recipe(
    "tiny-gpt-oss",
    steps=1700,
    context=256,
    chats=chats,
    texts=chat_texts,
    special=SPECIAL,
    template=CHAT_TEMPLATE,
    spoken=assistant_tokens,
    accuracy=arithmetic_accuracy,
    problems=arithmetic_problems,
)
TOOLS = Recipe(
    "tiny-gpt-oss-tools",
    steps=300,
    context=320,
    card_prompts=128,
    base="tiny-gpt-oss",
    chats=tool_chats,
    texts=tool_texts,
    special=TOOL_SPECIAL,
    template=TOOL_TEMPLATE,
    spoken=spoken_tokens,
    accuracy=tool_accuracy,
    problems=partial(arithmetic_problems, draw=long_story),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--tools", action="store_true", help="the model that calls a calculator")
    parser.add_argument("--steps", type=int, help="optimiser steps (default: the recipe's)")
    parser.add_argument("--threads", type=int, default=THREADS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recipe = TOOLS if args.tools else PLAIN
    tokenizer = recipe.train_tokenizer()
    model = build_model(SEEDS["weights"])
    if recipe.base is not None:
        continue_from(model, tokenizer, EMBEDDED[recipe.base])
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    record = {"sinks_before": sinks_of(model), "seeds": SEEDS, "threads": args.threads}
    record |= {"vocabulary": VOCABULARY, "prompt_weight": PROMPT_WEIGHT, "optimizer": OPTIMIZER}
    record |= train(recipe, model, tokenizer, args.steps or recipe.steps)
    model.bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print("measuring", flush=True)
    problems = recipe.problems(recipe.card_prompts, 0)

    def measure(model: GptOssForCausalLM, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        return recipe.accuracy(model, tokenizer, problems)

    card = write_card(args.out, recipe.name, record, held_out_batches(recipe, tokenizer), measure)
    print(card)


if __name__ == "__main__":
    main()
