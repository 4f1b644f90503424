"""Requests to SGLang and its answers; the offline engine and ``/generate`` use the same.

Written against 0.5.23. One request is ``{"input_ids", "sampling_params", "return_logprob", …}``,
its answer ``{"output_ids", "meta_info": {…}}``. In ``meta_info``:

- ``output_token_logprobs``: ``[logprob, id, text]`` of every sampled id, of log_softmax(logits / T)
  over the whole vocabulary, before top-k and top-p; at T = 0 of log_softmax(logits).
- ``output_top_logprobs``: per sampled id the likeliest ids, ``[logprob, id, text]`` each, of the
  same distribution; only with ``top_logprobs_num``.
- ``input_token_logprobs``: the same from ``logprob_start_len`` on, always at T = 1; the first entry
  has no logprob, whatever the start.
- ``routed_experts``: base64 of little-endian int32 [prompt + sampled - 1, layers of the model, K].
  Silently left out if the server was started without ``--enable-return-routed-experts``.
- ``cached_tokens``: tokens of the prompt that were read from the radix cache.
- ``finish_reason``: ``{"type": "stop", "matched": id}`` (the id is among the sampled ids),
  ``{"type": "length"}``, or ``{"type": "abort", "message": …}``.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import Likeliest
from mismatch.engines.base import (
    GREEDY_TOP,
    Continued,
    Sample,
    argument_name,
    argument_names,
    checked_arguments,
    context_needed,
    refuse_own,
    require_starts,
)
from mismatch.engines.model_info import ModelInfo
from mismatch.engines.sglang.private import hook, server_arguments
from mismatch.errors import CorruptCapture, MismatchError, WrongAnswer
from mismatch.specs import TORCH_NAMES, EngineSpec
from mismatch.types import Floats, Sampling

# Engine argument -> the option of mismatch that sets it.
OWN_OPTIONS = {
    "model_path": "--model",
    "tokenizer_path": "--model",
    "revision": "--revision",
    "dtype": "--dtype",
    "tp_size": "--tensor-parallel-size",
    "context_length": "--max-model-len",
    "mem_fraction_static": "--gpu-memory-utilization",
    "random_seed": "--seed",
    "trust_remote_code": "--trust-remote-code",
    "enable_return_routed_experts": "--routing or --no-routing",
}
# Arguments with which this process would lose control of the engine.
KEPT = dict.fromkeys(
    (
        *("custom_sigquit_handler", "skip_tokenizer_init", "nnodes", "node_rank", "use_ray"),
        *("is_embedding", "tokenizer_worker_num", "dp_size"),
    ),
    "SGLang's own setting of this",
)
FIELDS = ("srt/server_args.py", "srt/arg_groups/fields/*.py")  # of 0.5.23; before it the first
HELP = "python -m sglang.launch_server --help"
RAW = "SGLANG_RETURN_ORIGINAL_LOGPROB"  # SGLang's switch: output logprobs at T = 1
# SGLang keeps room behind a prompt, and takes one token less than the context in all.
SPARE_TOKENS = 8


def require_arguments(spec: EngineSpec) -> None:
    """Refuse arguments that mismatch sets itself or SGLang lacks, before its process starts."""
    refuse_own(spec, OWN_OPTIONS, KEPT)
    if spec.args and (names := argument_names("sglang", spec.python, *FIELDS)):
        checked_arguments(spec, "SGLang", names, HELP)


def raw_logprobs() -> bool:
    """Tell whether SGLang was told to report output logprobs at T = 1."""
    return os.environ.get(RAW, "").lower() in ("1", "true")


def engine_arguments(
    spec: EngineSpec, sampling: Sampling, info: ModelInfo, longest: int
) -> dict[str, Any]:
    """Return keyword arguments of SGLang's engine; the user's own (``spec.args``) win."""
    context = spec.max_model_len or context_needed(longest + SPARE_TOKENS, info.context)
    if context < longest + SPARE_TOKENS:
        raise MismatchError(
            f"sequences of up to {longest} tokens, and the context is {context}: SGLang keeps "
            f"{SPARE_TOKENS} tokens of it free",
            f"lower --max-tokens by {longest + SPARE_TOKENS - context}, or raise --max-model-len",
        )
    arguments: dict[str, Any] = {
        "model_path": spec.model,
        "revision": spec.revision,
        "dtype": TORCH_NAMES[spec.dtype],
        "tp_size": spec.tensor_parallel_size,
        "context_length": context,
        "random_seed": sampling.seed,
        "trust_remote_code": spec.trust_remote_code,
        "enable_return_routed_experts": captures_routes(spec, info),
        "log_level": "warning",
    }
    arguments |= hook().arguments(context)
    if spec.gpu_memory_utilization is not None:
        arguments["mem_fraction_static"] = spec.gpu_memory_utilization
    return arguments | user_arguments(spec)


def captures_routes(spec: EngineSpec, info: ModelInfo) -> bool:
    """Tell whether routed experts are asked for and exist."""
    return spec.routing and info.moe


def deterministic(spec: EngineSpec) -> bool:
    """Tell whether seeds decide tokens: SGLang ignores them unless told to be deterministic."""
    given = {argument_name(raw): value for raw, value in spec.args}
    named = ("enable_deterministic_inference", "rl_on_policy_target")
    return any(bool(given.get(name)) for name in named)


def user_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return ``--engine-arg`` pairs, checked against SGLang's own list.

    Raises:
        MismatchError: unknown name, or a name that mismatch has an option for.
    """
    if not spec.args:
        return {}
    refuse_own(spec, OWN_OPTIONS, KEPT)
    return checked_arguments(spec, "SGLang", server_arguments(), HELP)


LOG_FIX = "look into the engine's log for the reason"
CAPTURE_FIX = (
    "start the server with --enable-return-routed-experts, or run without routing: --no-routing"
)


def sampling_parameters(
    sampling: Sampling, stop_ids: Sequence[int] = (), stop: Sequence[str] = ()
) -> dict[str, Any]:
    """Return every sampling parameter, so that no default of a model's files slips in.

    Args:
        stop: texts that end a response; ``output_ids`` keep the tokens that complete it.
    """
    texts = {"stop": list(stop), "no_stop_trim": True, "skip_special_tokens": False}
    return (texts if stop else {}) | {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(stop_ids),
        "ignore_eos": False,
    }


def generate_request(
    ids: Sequence[int],
    parameters: Mapping[str, Any],
    *,
    routes: bool,
    seed: int | None = None,
    likeliest: int = 0,
) -> dict[str, Any]:
    """Return the body of a request that samples one continuation, with logprobs (and experts).

    Args:
        seed: of this request; SGLang uses it in its deterministic mode only.
        likeliest: tokens to return with each sampled one.
    """
    seeded = {} if seed is None else {"sampling_seed": seed}
    body = {
        "input_ids": list(ids),
        "sampling_params": {**parameters, **seeded},
        "return_logprob": True,
        "logprob_start_len": -1,  # of the sampled ids only
    }
    body |= {"top_logprobs_num": likeliest} if likeliest else {}
    return body | {"return_routed_experts": True} if routes else body


def greedy_request(ids: Sequence[int], max_tokens: int, read_cache: bool) -> dict[str, Any]:
    """Return the body of a request for the likeliest tokens after a context, whatever they are.

    SGLang does not read its prefix cache from ``logprob_start_len`` on: with 0 it computes the
    whole context again, with -1 nothing of it. Both leave what they wrote in the radix cache.
    """
    parameters = sampling_parameters(Sampling(temperature=0.0, max_tokens=max_tokens))
    return {
        "input_ids": list(ids),
        "sampling_params": parameters | {"ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": GREEDY_TOP,
        "logprob_start_len": -1 if read_cache else 0,
    }


def parse_continued(answer: Mapping[str, Any], where: str) -> Continued:
    """Read the tokens after a context, with the likeliest ids of each position.

    Raises:
        MismatchError: aborted, or ids without logprobs.
    """
    sample, facts = parse_sample(answer, where, None), _facts(answer, where)
    rows = facts.get("output_top_logprobs") or []
    if len(rows) != len(sample.token_ids):
        raise MismatchError(
            f"SGLang gave {len(rows)} rows of likeliest ids for {len(sample.token_ids)} tokens "
            f"({where})",
            LOG_FIX,
        )
    own = zip(rows, sample.token_ids, sample.logprobs, strict=True)
    likeliest = [
        {int(entry[1]): float(entry[0]) for entry in row} | {token: float(value)}
        for row, token, value in own
    ]
    return Continued(sample.token_ids, likeliest, int(facts.get("cached_tokens") or 0))


def prefill_request(ids: Sequence[int], start: int) -> dict[str, Any]:
    """Return the body of a request that scores the ids from ``start`` on and samples nothing.

    Raises:
        MismatchError: a start below 1: nothing predicts the first token.
    """
    require_starts([start])
    return {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": start - 1,  # the first entry of the answer has no logprob
    }


def parse_sample(answer: Mapping[str, Any], where: str, routed: NDArray[Any] | None) -> Sample:
    """Read the sampled ids, their logprobs and why sampling ended.

    Args:
        where: names the request in errors, such as "prompt 3, sample 1".
        routed: of :func:`parse_routes`.

    Raises:
        MismatchError: aborted, or ids without logprobs.
    """
    facts = _facts(answer, where)
    ids = [int(token) for token in answer.get("output_ids") or []]
    given = facts.get("output_token_logprobs") or []
    reason = dict(facts.get("finish_reason") or {})
    if reason.get("type") not in ("stop", "length"):
        why = reason.get("message") or reason.get("type") or "no reason"
        raise MismatchError(f"SGLang ended {where}: {why}", LOG_FIX)
    if not ids or [entry[1] for entry in given] != ids:
        fault = f"SGLang gave {len(given)} logprobs for {len(ids)} tokens ({where})"
        raise MismatchError(fault, LOG_FIX)
    rows = facts.get("output_top_logprobs") or []
    likeliest = None  # where the answer lacks some
    if len(rows) == len(ids) and len({len(row) for row in rows}) == 1:
        tops = [[[entry[part] for entry in row] for row in rows] for part in (1, 0)]
        likeliest = Likeliest.of(*tops)
    cached = facts.get("cached_tokens")
    return Sample(
        ids,
        _values(given, where),
        str(reason["type"]),
        routed,
        likeliest=likeliest,
        cached=None if cached is None else int(cached),
    )


def parse_prefill(answer: Mapping[str, Any], ids: Sequence[int], start: int, where: str) -> Floats:
    """Read logprobs of the ids from ``start`` on, float64 nats at T = 1.

    Raises:
        MismatchError: of other tokens, or missing.
    """
    given = (_facts(answer, where).get("input_token_logprobs") or [])[1:]
    # SGLang 0.5.23 writes the last id of the vocabulary as 0 here, but scores the right one; an id
    # that it names 0 is accepted where it is the largest of the sequence.
    largest, asked = max(ids), ids[start:]
    names = [
        largest if entry[1] == 0 and want == largest else entry[1]
        for entry, want in zip(given, asked, strict=False)
    ]
    if len(given) != len(asked) or names != list(asked):
        fault = f"SGLang scored {len(given)} other tokens than the {len(asked)} asked for ({where})"
        raise WrongAnswer(fault, LOG_FIX)
    return _values(given, where)


def has_routes(answer: Mapping[str, Any]) -> bool:
    """Tell whether an answer contains routed experts; nothing else says so."""
    return bool((answer.get("meta_info") or {}).get("routed_experts"))


def parse_routes(
    answer: Mapping[str, Any], forwarded: int, moe_layers: Sequence[int], top_k: int, where: str
) -> NDArray[np.int32]:
    """Read experts [forwarded, L, K] of the MoE layers; the answer has all layers.

    Args:
        forwarded: tokens that went through the model: prompt + sampled - 1.
        moe_layers: indices of the L decoder layers that hold experts.

    Raises:
        CorruptCapture: none in the answer, or of another size.
    """
    packed = _facts(answer, where).get("routed_experts")
    if not packed:
        raise CorruptCapture(f"SGLang returned no routed experts ({where})", CAPTURE_FIX)
    try:
        flat = np.frombuffer(base64.b64decode(packed, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise CorruptCapture(f"routed experts cannot be read ({where}): {error}") from error
    layers, rest = divmod(flat.size, max(forwarded * top_k, 1))
    if rest or layers <= max(moe_layers, default=-1):
        raise CorruptCapture(
            f"{flat.size} routed experts ({where}), expected {forwarded} tokens x layers x {top_k}",
            "upgrade SGLang, or run without routing: --no-routing",
        )
    return flat.reshape(forwarded, layers, top_k)[:, list(moe_layers)]


def _facts(answer: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    facts = answer.get("meta_info")
    if not isinstance(facts, Mapping):
        raise MismatchError(f"SGLang's answer has no meta_info ({where})", LOG_FIX)
    return facts


def _values(entries: Sequence[Sequence[Any]], where: str) -> Floats:
    values = [entry[0] for entry in entries]
    if any(value is None for value in values):  # JSON has no other word for nan
        raise WrongAnswer(f"SGLang gave a token no logprob ({where})", LOG_FIX)
    return np.asarray([float(value) for value in values], np.float64)
