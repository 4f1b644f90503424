"""vLLM's OpenAI-compatible server (written against 0.32): ``/v1/completions`` with token ids."""

from __future__ import annotations

import base64
import io
import re
from contextlib import suppress
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import Likeliest
from mismatch.engines.base import ExpertLayout, Sample
from mismatch.engines.registry import short_dtype
from mismatch.engines.servers.client import (
    LARGEST_ANSWER,
    Client,
    RequestFailed,
    answer_bytes,
    usable_answer,
)
from mismatch.engines.servers.server import Ids, Server, Settings, checked, context_length
from mismatch.engines.vllm.arguments import request_law
from mismatch.facts import SideFacts, known
from mismatch.types import Floats, Sampling

COMPLETIONS = "/v1/completions"
# Values of room per token: a server that captures experts also sends them to who did not ask.
UNASKED = 16
CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
ID_TEXT = "token_id:"  # how ids are written where texts are usual (return_tokens_as_token_ids)


class VllmServer(Server):
    kind: ClassVar[str] = "vllm"
    settings = staticmethod(request_law)

    @classmethod
    async def recognised(cls, client: Client, served: str | None) -> Self | None:
        """Read ``/v1/models``, and what ``/metrics`` and ``/server_info`` add where they are."""
        with usable_answer():
            cards = list((await client.get("/v1/models"))["data"])
            version = str((await client.get("/version"))["version"])
            if not cards or any(card.get("owned_by") != "vllm" for card in cards):
                return None
            base = [card for card in cards if not card.get("parent")] or cards
            card = next((candidate for candidate in cards if candidate["id"] == served), base[0])
            context = card.get("max_model_len") or base[0].get("max_model_len")
            details = await _details(client)
            return cls(
                client,
                version=version,
                names=tuple(str(card[key]) for key in ("id", "root") if card.get(key)),
                max_model_len=context_length(context),
                dtype=details.pop("dtype", None),
                details=known(details),
            )

    async def generate(
        self, ids: Ids, settings: Settings, seed: int | None = None, likeliest: int = 0
    ) -> tuple[Sample, str | None]:
        """Sample; vLLM adds routes by itself where it was told to capture them."""

        def read(answer: Any) -> tuple[Sample, str | None]:
            choice = _choice(answer, ids)
            logs, tokens = choice.get("logprobs") or {}, choice.get("token_ids") or []
            logprobs = logs.get("token_logprobs") or []
            if not tokens or len(logprobs) != len(tokens) or None in logprobs:
                raise RequestFailed(f"{len(logprobs)} logprobs for {len(tokens)} token ids")
            if choice.get("finish_reason") not in ("stop", "length"):
                raise RequestFailed(f"a response ended with {choice.get('finish_reason')!r}")
            # Counted by a server with --enable-prompt-tokens-details.
            counted = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = counted.get("cached_tokens")
            sample = Sample(
                token_ids=list(tokens),
                logprobs=np.asarray([float(value) for value in logprobs], np.float64),
                finish_reason=str(choice["finish_reason"]),
                routed=_experts(choice.get("routed_experts"), self.layout),
                likeliest=_likeliest(logs.get("top_logprobs"), likeliest),
                cached=None if cached is None else int(cached),
            )
            identity = answer.get("system_fingerprint")
            return checked(sample), None if identity is None else str(identity)

        body = self._body(ids) | settings | {"logprobs": likeliest}
        if seed is not None:
            body["seed"] = seed
        most = answer_bytes(len(ids) + int(settings["max_tokens"]), UNASKED + likeliest)
        most = most if self.layout is None else LARGEST_ANSWER
        return await self.client.post(COMPLETIONS, body, read, most)

    async def score(self, ids: Ids, start: int) -> Floats:
        """Score; vLLM samples one token at least, which is thrown away."""

        def read(answer: Any) -> Floats:
            rows = _choice(answer, ids).get("prompt_logprobs")
            if not isinstance(rows, list) or len(rows) != len(ids):
                raise RequestFailed("an answer without prompt_logprobs")
            scored = [float(rows[at][str(ids[at])]["logprob"]) for at in range(start, len(ids))]
            return np.asarray(scored, np.float64)

        settings = self.settings(Sampling(temperature=0.0, max_tokens=1))
        body = self._body(ids) | settings | {"prompt_logprobs": 0}
        return await self.client.post(COMPLETIONS, body, read, answer_bytes(len(ids)))

    def _body(self, ids: Ids) -> dict[str, Any]:
        return {
            "model": self.names[0],
            "prompt": list(ids),
            "n": 1,
            "stream": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }


def _choice(answer: Any, ids: Ids) -> dict[str, Any]:
    """Return the one choice of an answer to these prompt tokens."""
    (choice,) = answer["choices"]
    prompt = choice.get("prompt_token_ids")
    if prompt is not None and list(prompt) != list(ids):
        used = f"{len(ids)} tokens sent, {len(prompt)} used"
        raise RequestFailed(f"the server, or a proxy, changed the prompt: {used}", "refused")
    return dict(choice)


def _likeliest(tops: Any, count: int) -> Likeliest | None:
    """Return the ``count`` likeliest ids of every sampled token; None: the server does not say.

    Each entry also has the sampled token, which may be less likely than all of them.
    """
    if not count or not isinstance(tops, list):
        return None
    rows = [sorted(top.items(), key=lambda item: -float(item[1]))[:count] for top in tops]
    ids = [[int(text.removeprefix(ID_TEXT)) for text, _ in row] for row in rows]
    return Likeliest.of(ids, [[float(logprob) for _, logprob in row] for row in rows])


def _experts(packed: str | None, layout: ExpertLayout | None) -> NDArray[Any] | None:
    """Return routed experts [rows, L, K] of an .npy file in base64, which has all layers."""
    if packed is None or layout is None:
        return None
    data = io.BytesIO(base64.b64decode(packed, validate=True))
    return layout.columns(np.asarray(np.load(data, allow_pickle=False)))


async def _details(client: Client) -> SideFacts:
    """Return what the development mode shows, if it is on, and the metrics say of the KV cache."""
    config: dict[str, Any] = {}
    labels: dict[str, str] = {}
    with suppress(RequestFailed):
        config = dict((await client.get("/server_info?config_format=json"))["vllm_config"])
    with suppress(RequestFailed):
        if match := CACHE.search(await client.get("/metrics", bytes.decode)):
            labels = dict(LABEL.findall(match[1]))
    parts = ("model_config", "parallel_config", "device_config")
    model, parallel, device = (config.get(name) or {} for name in parts)
    return {
        "dtype": short_dtype(model["dtype"]) if model.get("dtype") else None,
        "logprobs_mode": model.get("logprobs_mode"),
        "quantization": model.get("quantization"),
        "tensor_parallel_size": parallel.get("tensor_parallel_size"),
        "device": device.get("device_type"),
        "kv_cache_dtype": labels.get("cache_dtype"),
        "prefix_caching": {"True": True, "False": False}.get(
            labels.get("enable_prefix_caching", "")
        ),
        "block_size": int(block) if (block := labels.get("block_size", "")).isdigit() else None,
    }
