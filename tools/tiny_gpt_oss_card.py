"""Measure a trained tiny-gpt-oss and write its model card (README.md) and training.json."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from transformers import AutoTokenizer, GptOssForCausalLM, PreTrainedTokenizerBase

from mismatch.engines.base import Sample
from mismatch.engines.turns import play, starting
from mismatch.prompts.arithmetic import Story, reward
from mismatch.prompts.environments import Calculator, Replies
from mismatch.prompts.prompt import Prompt
from mismatch.prompts.sources import render_prompts

SAMPLE_SEED = 1234


@torch.no_grad()
def held_out(
    model: GptOssForCausalLM, batches: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
) -> dict[str, Any]:
    """Loss and entropy (nats per token) on unseen chats, and what the routers do there.

    Args:
        batches: (ids, mask of real tokens, mask of assistant tokens), each [rows, T].
    """
    model.eval()
    loss: dict[str, list[torch.Tensor]] = {"all": [], "assistant": []}
    entropy: list[torch.Tensor] = []
    routers: list[list[torch.Tensor]] = [[] for _ in range(model.config.num_hidden_layers)]
    for ids, mask, said in batches:
        out = model(input_ids=ids, use_cache=False, output_router_logits=True)
        log_probs = out.logits[:, :-1].float().log_softmax(-1)
        nll = -log_probs.gather(-1, ids[:, 1:, None])[..., 0]
        loss["all"].append(nll[mask[:, 1:].bool()])
        loss["assistant"].append(nll[said[:, 1:]])
        entropy.append(-(log_probs.exp() * log_probs).sum(-1)[said[:, 1:]])
        for layer, logits in zip(routers, out.router_logits, strict=True):
            layer.append(logits.float().reshape(*ids.shape, -1)[said])
    return {
        "loss_all_tokens": float(torch.cat(loss["all"]).mean()),
        "loss_assistant_tokens": float(torch.cat(loss["assistant"]).mean()),
        "entropy_assistant_tokens": float(torch.cat(entropy).mean()),
        "tokens": int(torch.cat(loss["all"]).numel()),
        "routers": [
            _router(torch.cat(layer), model.config.num_experts_per_tok) for layer in routers
        ],
    }


def _router(logits: torch.Tensor, top_k: int) -> dict[str, Any]:
    """How peaked one layer's router is: `logits` [tokens, experts]."""
    ranked = logits.sort(-1, descending=True).values
    experts = logits.shape[-1]
    margin = ranked[:, top_k - 1] - ranked[:, top_k]
    chosen = logits.topk(top_k, dim=-1).indices.flatten()
    return {
        "sorted_probabilities": _rounded(ranked.softmax(-1).mean(0)),
        "margin_mean": round(float(margin.mean()), 4),
        "margin_below_0.01_share": round(float((margin < 0.01).float().mean()), 5),
        "load": _rounded(torch.bincount(chosen, minlength=experts) / len(chosen)),
    }


def _rounded(values: torch.Tensor, digits: int = 4) -> list[float]:
    return [round(v, digits) for v in values.tolist()]


def sinks_of(model: GptOssForCausalLM) -> list[list[float]]:
    """Return the attention sink of every head, [layers][heads] (logits)."""
    return [_rounded(layer.self_attn.sinks.detach().float()) for layer in model.model.layers]


class Sampler:
    """Samples at T = 1 with transformers, as :func:`mismatch.engines.turns.play` asks an engine."""

    def __init__(
        self, model: GptOssForCausalLM, tokenizer: PreTrainedTokenizerBase, max_tokens: int
    ) -> None:
        self.model, self.tokenizer, self.max_tokens = model.eval(), tokenizer, max_tokens
        tokenizer.padding_side = "left"

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], progress: Any = None, turn: int = 1
    ) -> list[list[Sample]]:
        """One sample per prompt, logprobs left out; ends with its end token or at the limit."""
        samples = []
        for start in range(0, len(prompts), 128):
            chunk = {"input_ids": prompts[start : start + 128]}
            encoded = self.tokenizer.pad(chunk, return_tensors="pt")
            out = self.model.generate(**encoded, max_new_tokens=self.max_tokens)
            for row in out[:, encoded["input_ids"].shape[1] :]:
                ids = row[row != self.tokenizer.pad_token_id].tolist()
                reason = "length" if len(ids) == self.max_tokens else "stop"
                samples.append([Sample(ids, np.zeros(len(ids)), reason)])
        return samples


def arithmetic_accuracy(
    model: GptOssForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: list[Story]
) -> dict[str, Any]:
    """Sample once per problem at T = 1; share of verified answers and response lengths."""
    prompts = [Prompt("", messages=problem.messages, answer=problem.answer) for problem in problems]
    return _accuracy(model, tokenizer, prompts, turns=1)


def tool_accuracy(
    model: GptOssForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: list[Story]
) -> dict[str, Any]:
    """As :func:`arithmetic_accuracy`, with a calculator that is on offer and answers calls."""
    prompts = [
        Prompt("", messages=problem.messages, answer=problem.answer, tools=[Calculator.tool])
        for problem in problems
    ]
    return _accuracy(model, tokenizer, prompts, turns=4)


def _accuracy(
    model: GptOssForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt], turns: int
) -> dict[str, Any]:
    torch.manual_seed(SAMPLE_SEED)
    sampler = Sampler(model, tokenizer, 128)
    ids = render_prompts(prompts, tokenizer, len(tokenizer))
    played = starting(ids, sampler.generate(ids))
    stop_ids = model.generation_config.eos_token_id
    replies = Replies(Calculator, prompts, tokenizer, stop_ids, len(tokenizer), 64)
    play(
        cast(Any, sampler),
        played,
        lambda number, responses: replies(number, responses[-1].token_ids),
        most_turns=turns,
        longest=1024,
        max_tokens=sampler.max_tokens,
        progress=lambda *_: None,
    )
    texts = [
        tokenizer.decode(sequence.token_ids[len(p) :], skip_special_tokens=turns == 1)
        for sequence, p in zip(played, ids, strict=True)
    ]
    answers = tokenizer.batch_decode([sequence.responses[-1].token_ids for sequence in played])
    rewards = [reward(text, cast(int, p.answer)) for text, p in zip(answers, prompts, strict=True)]
    lengths = [sum(len(s.token_ids) for s in sequence.responses) for sequence in played]
    n = len(prompts)
    examples = [
        {"prompt": cast(Any, p.messages)[0]["content"], "response": text, "reward": right}
        for p, text, right in zip(prompts, texts, rewards, strict=True)
    ]
    called = [len(sequence.responses) > 1 for sequence in played]
    return {
        "prompts": n,
        "temperature": 1.0,
        "accuracy": sum(rewards) / n,
        "called_share": sum(called) / n,
        "accuracy_called": sum(np.asarray(rewards)[called]) / max(1, sum(called)),
        "turns_mean": sum(len(sequence.responses) for sequence in played) / n,
        "response_tokens_mean": sum(lengths) / n,
        "response_tokens_max": max(lengths),
        "finished_share": sum(sequence.finish_reason == "stop" for sequence in played) / n,
        "examples": examples[:6],
    }


def write_card(
    out: Path,
    name: str,
    record: dict[str, Any],
    batches: list[Any],
    accuracy: Callable[[GptOssForCausalLM, PreTrainedTokenizerBase], dict[str, Any]],
) -> str:
    """Measure the checkpoint in `out` as it lies on disk (bf16) and write both files.

    Args:
        record: what the training says about itself: steps, tokens, seeds, settings, sinks.
        batches: what `held_out` takes.
        accuracy: on the task's first problems.
    """
    model = GptOssForCausalLM.from_pretrained(
        out, dtype=torch.bfloat16, attn_implementation="eager"
    )
    tokenizer = AutoTokenizer.from_pretrained(out)
    weights = (out / "model.safetensors").read_bytes()
    record = record | {
        "held_out": held_out(model, batches),
        "sinks_after": sinks_of(model),
        "arithmetic": accuracy(model, tokenizer),
        "parameters": sum(p.numel() for p in model.parameters()),
        "model_bytes": len(weights),
        "model_sha256": hashlib.sha256(weights).hexdigest(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    card = _markdown(name, record)
    (out / "README.md").write_text(card)
    return card


_CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# {name}

A model of {parameters_m:.2f} M parameters with the architecture of gpt-oss, made for measuring
train-inference mismatch where no accelerator is at hand: attention sinks, a sliding window of 32
in every other layer, yarn rope, 4 layers of 8 experts (top-2), bfloat16, {megabytes:.1f} MB.
{origin}

This file and `training.json` are written by `tools/train_tiny_gpt_oss.py` (`make {name}`).

## Data
{data} Tokenizer: byte-level BPE of {vocabulary} tokens with single
digits.
Of the {prompts} default prompts, {seen} occur in the training text.

## Training
{training}

## Measured on the file as shipped (bfloat16)
{measured}

Per layer, on held-out assistant tokens: the probability of the first and second expert, the gap
between the second and the third (logits), the share of near-ties, each expert's share of the work
(even: 0.125), and the attention sinks of the 8 heads. They start near 3, so that the heads learn to
lean on them: a trainer that drops them is then as wrong as it would be on a large model.

{layers}

## Example
> {example[prompt]}
>
> {example[response]}
"""


_TEXTS = {
    "tiny-gpt-oss": {
        "origin": """\
It was trained from nothing, so its routers, sinks and logits are those of a trained network. It has
no other use.""",
        "data": """\
Generated by `tools/tiny_gpt_oss_corpus.py`, from no other source: arithmetic word problems with
worked answers (65 %), small instructions (20 %), tool use over several turns (15 %), all rendered
by the model's own chat template.""",
    },
    "tiny-gpt-oss-tools": {
        "origin": """\
It is tiny-gpt-oss after more training: with a calculator on offer, it calls it part of the time, in
harmony's form, reads the result, and answers.""",
        "data": """\
Generated by `tools/tiny_gpt_oss_tools.py`, from no other source: arithmetic word problems of two or
three steps with a calculator on offer (72 %; called in 70 % of these, step by step or once with the
whole expression, worked by hand in the others), short ones without tools (18 %) and small
instructions (10 %), all rendered by the model's own chat template in harmony's form: analysis,
commentary and final channels.""",
    },
}


def _markdown(name: str, record: dict[str, Any]) -> str:
    return _CARD.format(
        name=name,
        **_TEXTS[name],
        parameters_m=record["parameters"] / 1e6,
        megabytes=record["model_bytes"] / 1e6,
        vocabulary=record["vocabulary"],
        prompts=record["arithmetic"]["prompts"],
        seen=record["default_prompts_in_training_text"],
        training=_table(("", ""), _training_rows(record)),
        measured=_table(("", ""), _measured_rows(record)),
        layers=_table(
            ("layer", "experts 1 + 2", "gap", "gap < 0.01", "work", "sinks before", "sinks after"),
            _layer_rows(record),
        ),
        example=record["arithmetic"]["examples"][0],
    )


def _training_rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    speed = record["tokens"] / record["seconds"]
    return [
        ("steps, tokens", f"{record['steps']:,}, {record['tokens']:,}"),
        (
            "wall time",
            f"{record['seconds']:.0f} s, {record['threads']} threads, {speed:,.0f} tok/s",
        ),
        ("optimiser", record["optimizer"]),
        ("loss weight of prompt tokens", str(record["prompt_weight"])),
        ("loss, last 50 steps", f"{record['loss']:.3f}"),
        ("seeds", _pairs(record["seeds"])),
        ("versions", _pairs(record["versions"])),
    ]


def _measured_rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    held, task = record["held_out"], record["arithmetic"]
    lengths = f"{task['response_tokens_mean']:.0f} / {task['response_tokens_max']} tokens"
    return [
        ("held-out tokens", f"{held['tokens']:,}"),
        ("held-out loss, all tokens", f"{held['loss_all_tokens']:.3f} nats"),
        ("held-out loss, assistant tokens", f"{held['loss_assistant_tokens']:.3f} nats"),
        ("entropy at T = 1, assistant tokens", f"{held['entropy_assistant_tokens']:.3f} nats"),
        ("default prompts answered right at T = 1", f"{100 * task['accuracy']:.1f} %"),
        *_tool_rows(task),
        ("response length, mean / max", lengths),
        ("responses that end by themselves", f"{100 * task['finished_share']:.1f} %"),
        ("sha256 of model.safetensors", f"`{record['model_sha256']}`"),
    ]


def _tool_rows(task: dict[str, Any]) -> list[tuple[str, ...]]:
    """About calls, where there are any."""
    if not task["called_share"]:
        return []
    return [
        ("of them with a call of the calculator", f"{100 * task['called_share']:.1f} %"),
        ("of these answered right", f"{100 * task['accuracy_called']:.1f} %"),
        ("responses per sequence, mean", f"{task['turns_mean']:.2f}"),
    ]


def _layer_rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            str(layer),
            " + ".join(f"{p:.2f}" for p in router["sorted_probabilities"][:2]),
            f"{router['margin_mean']:.2f}",
            f"{100 * router['margin_below_0.01_share']:.1f} %",
            _span(router["load"]),
            _span(record["sinks_before"][layer]),
            _span(record["sinks_after"][layer]),
        )
        for layer, router in enumerate(record["held_out"]["routers"])
    ]


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"
