"""SGLang's own server (written against 0.5.23): ``/generate`` with token ids."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from mismatch.engines.base import Sample
from mismatch.engines.registry import short_dtype
from mismatch.engines.servers.client import (
    LARGEST_ANSWER,
    Client,
    RequestFailed,
    answer_bytes,
    usable_answer,
)
from mismatch.engines.servers.server import Ids, Server, Settings, checked, context_length
from mismatch.engines.sglang import wire
from mismatch.facts import SideFacts, known
from mismatch.types import Floats

A_SEQUENCE = "the request"


class SglangServer(Server):
    kind: ClassVar[str] = "sglang"
    spare: ClassVar[int] = wire.SPARE_TOKENS
    settings = staticmethod(wire.sampling_parameters)

    @classmethod
    async def recognised(cls, client: Client, served: str | None) -> Self | None:
        """Read ``/model_info``, which only SGLang has, and the settings in ``/server_info``."""
        with usable_answer():
            model = await client.get("/model_info")
            info = await client.get("/server_info")
            if not (isinstance(info, dict) and "version" in info and "model_path" in model):
                return None
            names = (model.get("served_model_name"), model["model_path"], info.get("model_path"))
            dtype = info.get("dtype")  # "auto": it does not say what that became
            try:  # says it whatever the flags were
                context = (await client.get("/v1/models"))["data"][0].get("max_model_len")
            except (RequestFailed, KeyError, IndexError):
                context = info.get("context_length")
            return cls(
                client,
                version=str(info["version"]),
                names=tuple(dict.fromkeys(str(name) for name in names if name)),
                max_model_len=context_length(context),
                dtype=None if dtype in (None, "", "auto") else short_dtype(dtype),
                details=known(_settings(info)),
            )

    async def generate(
        self, ids: Ids, settings: Settings, seed: int | None = None, likeliest: int = 0
    ) -> tuple[Sample, str | None]:
        layout = self.layout

        def read(answer: Any) -> tuple[Sample, str | None]:
            routed = None
            if layout is not None and wire.has_routes(answer):
                forwarded = len(ids) + len(answer["output_ids"]) - 1
                routed = wire.parse_routes(
                    answer, forwarded, layout.layers, layout.top_k, A_SEQUENCE
                )
            sample = wire.parse_sample(answer, A_SEQUENCE, routed)
            version = answer["meta_info"].get("weight_version")
            return checked(sample), None if version is None else str(version)

        body = wire.generate_request(
            ids, settings, routes=layout is not None, seed=seed, likeliest=likeliest
        )
        most = answer_bytes(int(settings["max_new_tokens"]), 1 + likeliest)
        most = most if layout is None else LARGEST_ANSWER
        return await self.client.post("/generate", body, read, most)

    async def score(self, ids: Ids, start: int) -> Floats:
        def read(answer: Any) -> Floats:
            return wire.parse_prefill(answer, ids, start, A_SEQUENCE)

        body = wire.prefill_request(ids, start)
        return await self.client.post("/generate", body, read, answer_bytes(len(ids)))


def _settings(info: Any) -> SideFacts:
    """Return the settings that are facts; the server's whole answer may hold its API key."""
    return {
        "device": info.get("device"),
        "tensor_parallel_size": info.get("tp_size"),
        "kv_cache_dtype": info.get("kv_cache_dtype"),
        "quantization": info.get("quantization"),
        "attention": info.get("attention_backend"),
        "moe_backend": info.get("moe_runner_backend"),
        "block_size": info.get("page_size"),
        "max_num_batched_tokens": info.get("chunked_prefill_size"),
        "deterministic": info.get("enable_deterministic_inference"),
        "returns_routes": info.get("enable_return_routed_experts"),
    }
