"""vLLM's OpenAI-compatible server (written against 0.32): ``/v1/completions`` with token ids."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import Likeliest
from mismatch.engines.base import ExpertLayout, Sample
from mismatch.engines.registry import short_dtype
from mismatch.engines.servers.http import Refused, RetryingClient, Unavailable, usable_answer
from mismatch.engines.servers.server_api import (
    Answer,
    ServerAPI,
    ServerFacts,
    checked,
    context_length,
)
from mismatch.engines.sync_drivers import Held
from mismatch.engines.vllm.arguments import WITH_STOP
from mismatch.errors import MismatchError
from mismatch.models.weight_states import Prints
from mismatch.types import Floats, Sampling

DESCRIBE_S = 30.0
STARTED = re.compile(r"^process_start_time_seconds (\S+)", re.MULTILINE)
CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
ID_TEXT = "token_id:"  # how ids are written where texts are usual (return_tokens_as_token_ids)


class VllmAPI(ServerAPI):
    kind: ClassVar[str] = "vllm"
    allow: ClassVar[str] = "start the server with VLLM_SERVER_DEV_MODE=1 in its environment"

    @classmethod
    @usable_answer()
    def describe(cls, client: RetryingClient, served: str | None) -> ServerFacts | None:
        """``/v1/models`` says whose it is; ``/metrics`` and ``/server_info`` may say more."""
        try:
            cards = list(client.get("/v1/models", DESCRIBE_S)["data"])
            version = str(client.get("/version", DESCRIBE_S)["version"])
        except Refused:
            return None
        if not cards or not all(isinstance(card, dict) and "id" in card for card in cards):
            return None
        if any(card.get("owned_by") != "vllm" for card in cards):
            return None
        base = [card for card in cards if not card.get("parent")] or cards
        card = next((candidate for candidate in cards if candidate["id"] == served), base[0])
        info = _server_info(client)
        model, parallel = info.get("model_config") or {}, info.get("parallel_config") or {}
        metrics = _metrics(client)
        started = STARTED.search(metrics)
        details = _cache(metrics) | {
            "logprobs_mode": model.get("logprobs_mode"),
            "quantization": model.get("quantization"),
            "tensor_parallel_size": parallel.get("tensor_parallel_size"),
            "device": (info.get("device_config") or {}).get("device_type"),
        }
        return ServerFacts(
            kind=cls.kind,
            version=version,
            model=str(card["id"]),
            names=tuple(str(card[key]) for key in ("id", "root") if card.get(key)),
            max_model_len=context_length(card.get("max_model_len") or base[0].get("max_model_len")),
            dtype=short_dtype(model["dtype"]) if model.get("dtype") else None,
            started=float(started[1]) if started else None,
            details={key: value for key, value in details.items() if value is not None},
        )

    def settings(
        self, law: Sampling, stop_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> dict[str, Any]:
        return {
            "temperature": law.temperature,
            "top_p": law.top_p,
            "top_k": law.top_k,
            "min_p": 0.0,
            "max_tokens": law.max_tokens,
            "min_tokens": 0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop": list(stop),
            "stop_token_ids": list(stop_ids),
            "ignore_eos": False,
        } | (WITH_STOP if stop else {})

    @usable_answer()
    def generate(
        self,
        ids: Sequence[int],
        settings: dict[str, Any],
        seed: int | None,
        layout: ExpertLayout | None,
        likeliest: int = 0,
    ) -> Answer:
        """vLLM adds routes by itself where it was told to capture them."""
        body = _body(self.facts, ids) | settings | {"logprobs": likeliest}
        if seed is not None:
            body["seed"] = seed
        answer = self.client.post("/v1/completions", body)
        choice = _choice(answer, ids)
        tokens, logprobs = _sampled(choice)
        if choice.get("finish_reason") not in ("stop", "length"):
            raise Unavailable(f"a response ended with {choice.get('finish_reason')!r}")
        sample = Sample(
            token_ids=tokens,
            logprobs=np.asarray(logprobs, np.float64),
            finish_reason=str(choice.get("finish_reason")),
            routed=_experts(choice.get("routed_experts"), layout),
            likeliest=_likeliest(choice, likeliest),
            cached=_cached(answer),
        )
        identity = answer.get("system_fingerprint")
        return Answer(checked(sample), None if identity is None else str(identity))

    @usable_answer()
    def score(self, ids: Sequence[int], start: int) -> Floats:
        """vLLM samples one token at least; it is thrown away."""
        settings = self.settings(Sampling(temperature=0.0, max_tokens=1), ())
        body = _body(self.facts, ids) | settings | {"prompt_logprobs": 0}
        choice = _choice(self.client.post("/v1/completions", body), ids)
        rows = choice.get("prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(ids):
            raise Unavailable("an answer without prompt_logprobs")
        scored = [float(rows[at][str(ids[at])]["logprob"]) for at in range(start, len(ids))]
        return np.asarray(scored, np.float64)

    @usable_answer()
    def top_logprobs(
        self, ids: Sequence[int], settings: dict[str, Any], count: int
    ) -> dict[int, float]:
        body = _body(self.facts, ids) | settings | {"logprobs": count, "max_tokens": 1}
        choice = _choice(self.client.post("/v1/completions", body), ids)
        return _named(choice["logprobs"]["top_logprobs"][0])

    def update_weights(self, directory: Path) -> None:
        given = {"weights_path": str(directory)}
        self.client.post("/collective_rpc", {"method": "reload_weights", "kwargs": given})

    @usable_answer()
    def drop_caches(self) -> None:
        if not self.client.post("/reset_prefix_cache", {})["success"]:
            raise Unavailable("blocks of the prefix cache are in use", "busy")

    def held(self, names: list[str], transposed: list[str]) -> Held | None:
        return held_by(self.client, names, transposed)


@usable_answer()
def held_by(client: RetryingClient, names: list[str], transposed: list[str]) -> Held | None:
    """Of a server whose workers have :class:`mismatch.engines.vllm.weight_sync.WeightSync`.

    None: they have not, or the server is not in its development mode.
    """
    body = {"method": "mismatch_held_json", "args": [names, transposed]}
    try:
        answer = client.post("/collective_rpc", body)
    except (Refused, Unavailable):
        return None
    prints, missing = json.loads(answer["results"][0])
    return {name: Prints.from_plain(plain) for name, plain in prints.items()}, missing


def _body(facts: ServerFacts, ids: Sequence[int]) -> dict[str, Any]:
    return {
        "model": facts.model,
        "prompt": list(ids),
        "n": 1,
        "stream": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def _choice(answer: Any, ids: Sequence[int]) -> dict[str, Any]:
    """The one choice of an answer to these prompt tokens."""
    (choice,) = answer["choices"]
    prompt = choice.get("prompt_token_ids")
    if prompt is not None and list(prompt) != list(ids):
        raise MismatchError(
            f"the server changed the prompt: {len(ids)} tokens sent, {len(prompt)} used",
            "look for a proxy, or for a setting of the server that truncates prompts",
        )
    return dict(choice)


def _sampled(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Ids and logprobs of what was sampled; ids also from a server that only names them."""
    logs = choice.get("logprobs") or {}
    names, logprobs = logs.get("tokens") or [], logs.get("token_logprobs") or []
    tokens = choice.get("token_ids")
    if tokens is None:
        if not names or not all(str(name).startswith(ID_TEXT) for name in names):
            raise Unavailable("an answer without token ids")
        tokens = [int(str(name).removeprefix(ID_TEXT)) for name in names]
    if not tokens or len(logprobs) != len(tokens) or None in logprobs:
        raise Unavailable(f"{len(logprobs)} logprobs for {len(tokens)} tokens")
    return list(tokens), [float(value) for value in logprobs]


def _cached(answer: Any) -> int | None:
    """Prompt tokens from the prefix cache, of a server with ``--enable-prompt-tokens-details``."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return None if cached is None else int(cached)


def _named(top: dict[str, Any]) -> dict[int, float]:
    """Token id -> logprob of an entry of ``top_logprobs``."""
    return {int(text.removeprefix(ID_TEXT)): float(lp) for text, lp in top.items()}


def _likeliest(choice: dict[str, Any], count: int) -> Likeliest | None:
    """The ``count`` likeliest ids of every sampled token; None where a server does not name them.

    Each entry also has the sampled token, which may be less likely than all of them.
    """
    tops = (choice.get("logprobs") or {}).get("top_logprobs")
    if not count or not isinstance(tops, list):
        return None
    rows = [sorted(_named(top).items(), key=lambda item: -item[1])[:count] for top in tops]
    return Likeliest.of(
        [[i for i, _ in row] for row in rows], [[x for _, x in row] for row in rows]
    )


def _experts(packed: str | None, layout: ExpertLayout | None) -> NDArray[Any] | None:
    """Routed experts [rows, L, K]: an .npy file in base64, with a column for every layer."""
    if packed is None or layout is None:
        return None
    data = io.BytesIO(base64.b64decode(packed, validate=True))
    experts = np.asarray(np.load(data, allow_pickle=False))
    if experts.ndim == 3 and experts.shape[1] > max(layout.layers):
        return experts[:, list(layout.layers)]
    return experts  # another shape is refused once all is saved


# ---------------------------------------------------------------- what only some servers say


def _server_info(client: RetryingClient) -> dict[str, Any]:
    """The whole configuration, which vLLM shows in its development mode alone."""
    try:
        answer = client.get("/server_info?config_format=json", DESCRIBE_S)
    except (Refused, Unavailable):
        return {}
    return dict(answer["vllm_config"])


def _metrics(client: RetryingClient) -> str:
    try:
        return client.text("/metrics", DESCRIBE_S)
    except (Refused, Unavailable):
        return ""


def _cache(metrics: str) -> dict[str, Any]:
    match = CACHE.search(metrics)
    labels = dict(LABEL.findall(match[1])) if match else {}
    caching = {"True": True, "False": False}
    return {
        "kv_cache_dtype": labels.get("cache_dtype"),
        "prefix_caching": caching.get(labels.get("enable_prefix_caching", "")),
        "block_size": labels.get("block_size"),
    }
