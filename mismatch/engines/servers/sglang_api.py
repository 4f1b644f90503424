"""SGLang's own server (written against 0.5.23): ``/generate`` with token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from mismatch.engines.base import ExpertLayout
from mismatch.engines.registry import short_dtype
from mismatch.engines.servers.http import Refused, RetryingClient, Unavailable, usable_answer
from mismatch.engines.servers.server_api import (
    Answer,
    ServerAPI,
    ServerFacts,
    checked,
    context_length,
)
from mismatch.engines.sglang import wire
from mismatch.engines.sglang.wire import SPARE_TOKENS
from mismatch.errors import MismatchError
from mismatch.types import Floats, Sampling

DESCRIBE_S = 30.0
IDLE_S = 10.0  # that the server may wait for its requests to end before it drops its cache
# Settings that belong into a fingerprint; the server's whole answer may hold its API key.
SETTINGS = {
    "device": "device",
    "tp_size": "tensor_parallel_size",
    "kv_cache_dtype": "kv_cache_dtype",
    "quantization": "quantization",
    "attention_backend": "attention",
    "moe_runner_backend": "moe_backend",
    "page_size": "block_size",
    "chunked_prefill_size": "max_num_batched_tokens",
    "enable_deterministic_inference": "deterministic",
    "enable_return_routed_experts": "returns_routes",
}
A_SEQUENCE = "the request"


class SglangAPI(ServerAPI):
    kind: ClassVar[str] = "sglang"
    allow: ClassVar[str] = "these endpoints may ask for the admin key: see the server's log"

    @classmethod
    @usable_answer()
    def describe(cls, client: RetryingClient, served: str | None) -> ServerFacts | None:
        """``/model_info`` is SGLang's alone; ``/server_info`` has its settings."""
        try:
            model = client.get("/model_info", DESCRIBE_S)
            info = client.get("/server_info", DESCRIBE_S)
        except Refused:
            return None
        if not (isinstance(model, dict) and isinstance(info, dict)):
            return None
        if "model_path" not in model or "version" not in info:
            return None
        if not model.get("is_generation", True):
            raise MismatchError(
                f"{client.address.text} serves a model that generates no text",
                "give the address of a server for generation",
            )
        names = (model.get("served_model_name"), model["model_path"], info.get("model_path"))
        served_names = tuple(dict.fromkeys(str(name) for name in names if name))
        return ServerFacts(
            kind=cls.kind,
            version=str(info["version"]),
            model=served_names[0],
            names=served_names,
            max_model_len=_context(client, info),
            spare=SPARE_TOKENS,
            dtype=_dtype(info.get("dtype")),
            started=_started(info.get("startup_time")),
            weight_version=_text(model.get("weight_version")),
            details={
                name: info[key] for key, name in SETTINGS.items() if info.get(key) is not None
            },
        )

    def settings(
        self, law: Sampling, stop_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> dict[str, Any]:
        return wire.sampling_parameters(law, stop_ids, stop)

    @usable_answer()
    def generate(
        self,
        ids: Sequence[int],
        settings: dict[str, Any],
        seed: int | None,
        layout: ExpertLayout | None,
        likeliest: int = 0,
    ) -> Answer:
        routes = layout is not None
        body = wire.generate_request(ids, settings, routes=routes, seed=seed, likeliest=likeliest)
        answer = _one(self.client.post("/generate", body))
        routed = None
        if layout is not None and wire.has_routes(answer):
            forwarded = len(ids) + len(answer["output_ids"]) - 1
            routed = wire.parse_routes(answer, forwarded, layout.layers, layout.top_k, A_SEQUENCE)
        with _again_elsewhere():
            sample = wire.parse_sample(answer, A_SEQUENCE, routed)
        return Answer(checked(sample), _text(answer["meta_info"].get("weight_version")))

    @usable_answer()
    def score(self, ids: Sequence[int], start: int) -> Floats:
        answer = _one(self.client.post("/generate", wire.prefill_request(ids, start)))
        with _again_elsewhere():
            return wire.parse_prefill(answer, ids, start, A_SEQUENCE)

    @usable_answer()
    def top_logprobs(
        self, ids: Sequence[int], settings: dict[str, Any], count: int
    ) -> dict[int, float]:
        body = wire.generate_request(ids, settings | {"max_new_tokens": 1}, routes=False)
        answer = _one(self.client.post("/generate", body | {"top_logprobs_num": count}))
        entries = answer["meta_info"]["output_top_logprobs"][0]
        return {int(entry[1]): float(entry[0]) for entry in entries if entry[0] is not None}

    @usable_answer()
    def update_weights(self, directory: Path) -> None:
        body = {"model_path": str(directory), "flush_cache": False}
        answer = self.client.post("/update_weights_from_disk", body)
        if not answer["success"]:
            raise Unavailable("the weights were not loaded: the server's log says why")

    def drop_caches(self) -> None:
        self.client.text(f"/flush_cache?timeout={IDLE_S}")


@contextmanager
def _again_elsewhere() -> Iterator[None]:
    """What ends an engine of ours is, of a server, an answer to be had from another one."""
    try:
        yield
    except MismatchError as error:
        raise Unavailable(error.headline) from error


def _one(answer: Any) -> dict[str, Any]:
    """The answer to one request: a dictionary, or a list of one."""
    entry = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    if not isinstance(entry, dict):
        raise Unavailable("an answer that is no sample")
    return entry


def _context(client: RetryingClient, info: dict[str, Any]) -> int | None:
    """Tokens of the longest sequence; /v1/models says it, whatever the flags were."""
    try:
        length = client.get("/v1/models", DESCRIBE_S)["data"][0].get("max_model_len")
    except (Refused, Unavailable, KeyError, IndexError):
        length = info.get("context_length")
    return context_length(length)


def _dtype(name: Any) -> str | None:
    """None for "auto": what that became it does not say."""
    return None if name in (None, "", "auto") else short_dtype(name)


def _started(took: Any) -> float | None:
    """What starting took, to the microsecond: another number after a restart."""
    value = took.get("tokenizer_e2e") if isinstance(took, dict) else took
    return float(value) if isinstance(value, int | float) else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
