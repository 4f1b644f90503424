"""Running vLLM and SGLang servers as an engine: token ids in, token ids and logprobs out."""

from mismatch.engines.registry import EngineInfo

INFO = EngineInfo(
    engine="mismatch.engines.servers.engine:ServerEngine",
    preflight="mismatch.engines.servers.discovery:recognise",
    started=False,
)
