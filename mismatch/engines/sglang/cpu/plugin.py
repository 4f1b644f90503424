"""Two changes to SGLang in its scheduler: where routes are kept, and the attention of gpt-oss."""

from __future__ import annotations

from typing import Any

PORTABLE = "torch_native"  # SGLang's attention backend where there are no kernels
WITH_SINKS = frozenset({"GptOssForCausalLM"})


def register(used: list[str], sinks: str) -> None:
    """Apply both; a second call changes nothing.

    Args:
        used: where ``sinks`` is noted once the attention is built.
    """
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory
    portable = attention_registry.ATTENTION_BACKENDS[PORTABLE]
    if getattr(portable, "mismatch", False):
        return

    def backend(runner: Any) -> Any:
        names = set(runner.model_config.hf_config.architectures or ())
        if not names & WITH_SINKS:
            return portable(runner)
        from mismatch.engines.sglang.cpu.attention import backend_class

        used.append(sinks)
        return backend_class()(runner)

    backend.mismatch = True  # type: ignore[attr-defined]
    attention_registry.ATTENTION_BACKENDS[PORTABLE] = backend


def _plain_memory(
    dims: Any, dtype: Any, device: Any, pin_memory: bool, allocator: Any, *rest: Any, **more: Any
) -> Any:
    """Host memory that no GPU has to reach: SGLang's own allocation without its registration."""
    return allocator.allocate(dims, dtype=dtype, device=device)
