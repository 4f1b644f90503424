"""A module ``sgl_kernel`` for a CPU without SGLang's kernels.

SGLang 0.5.23 imports a number of names from it whatever the model, and calls one of them in plain
decoding: that one is here, in torch. Every other name can be imported and refuses to be called, so
that nothing is ever computed in another way without a word.

A sink is one logit per head that joins the softmax and belongs to no token: it takes its share of
the mass away. SGLang's ``torch_native`` backend has no parameter for it, so gpt-oss cannot run
there. This one reads keys and values from SGLang's cache, as the portable backend does, one request
at a time.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

import torch


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return softmax attention of one request, scores and softmax in float32.

    Args:
        query: [T, Q heads, D] of the new tokens.
        keys, values: [S, KV heads, D] of all tokens so far; query heads share them in order.
        visible: [T, S] bool, what each new token may see.
        sinks: [Q heads] logits, or None.

    Returns:
        [T, Q heads, D] in the dtype of the values.
    """
    share = query.shape[1] // keys.shape[1]
    q = query.transpose(0, 1)
    k = keys.transpose(0, 1).repeat_interleave(share, dim=0)
    v = values.transpose(0, 1).repeat_interleave(share, dim=0)
    scores = (q @ k.transpose(1, 2).to(q.dtype)).float() * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.float().reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[1]]
    return (weights.to(v.dtype) @ v).transpose(0, 1)


def visible_tokens(computed: int, total: int, window: int | None) -> torch.Tensor:
    """Return [total - computed, total]: new tokens see themselves and ``window`` tokens before."""
    new = torch.arange(computed, total).unsqueeze(1)
    token = torch.arange(total).unsqueeze(0)
    seen = token <= new
    return seen if window is None else seen & (token >= new - window)


@lru_cache(1)
def backend_class() -> Any:
    """Return SGLang's portable backend with sinks; made late, as SGLang takes seconds to import."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    class SinkAttention(TorchNativeAttnBackend):  # type: ignore[misc]
        """See the module."""

        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *rest: Any, **more: Any
        ) -> Any:
            computed = [int(count) for count in forward_batch.extend_prefix_lens]
            return self._forward(q, k, v, layer, forward_batch, computed, *rest, **more)

        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *rest: Any, **more: Any
        ) -> Any:
            computed = [int(count) - 1 for count in forward_batch.seq_lens]
            return self._forward(q, k, v, layer, forward_batch, computed, *rest, **more)

        def _forward(
            self,
            q: Any,
            k: Any,
            v: Any,
            layer: Any,
            batch: Any,
            computed: list[int],
            save_kv_cache: bool = True,
            sinks: Any = None,
            **more: Any,
        ) -> Any:
            q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            pool = self.token_to_kv_pool
            if save_kv_cache and k is not None:
                places = KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc)
                pool.set_kv_buffer(layer, places, k, v)
            cached = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
            window = layer.sliding_window_size
            window = window if window is not None and window > -1 else None
            out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
            done = 0
            for row, before in enumerate(computed):
                total = int(batch.seq_lens[row])
                slots = self.req_to_token_pool.req_to_token[batch.req_pool_indices[row], :total]
                if window is not None and self.use_sliding_window_kv_pool:
                    slots = pool.translate_loc_from_full_to_swa(slots)
                part = slice(done, done + total - before)
                keys, values = (cache[slots] for cache in cached)
                seen = visible_tokens(before, total, window)
                out[part] = attend(q[part], keys, values, seen, layer.scaling, sinks)
                done = part.stop
            return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    return SinkAttention


PORTABLE = "torch_native"  # SGLang's attention backend where there are no kernels
WITH_SINKS = frozenset({"GptOssForCausalLM"})


def register(used: list[str], sinks: str) -> None:
    """Give SGLang plain memory and attention with sinks; a second call changes nothing.

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
        used.append(sinks)
        return backend_class()(runner)

    backend.mismatch = True  # type: ignore[attr-defined]
    attention_registry.ATTENTION_BACKENDS[PORTABLE] = backend


def _plain_memory(
    dims: Any, dtype: Any, device: Any, pin_memory: bool, allocator: Any, *rest: Any, **more: Any
) -> Any:
    """Allocate host memory that no GPU has to reach, as SGLang does but for its registration."""
    return allocator.allocate(dims, dtype=dtype, device=device)


NAME = "sgl_kernel"
MARK = "mismatch's stand-in for SGLang's CPU kernels"


def install() -> None:
    """Put the module where ``import sgl_kernel`` finds it."""
    if NAME in sys.modules:
        return
    module = types.ModuleType(NAME, MARK)
    module.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    vars(module)["assign_req_to_token_pool_cpu"] = assign_req_to_token_pool_cpu
    vars(module)["__getattr__"] = refusing
    sys.modules[NAME] = module


def refusing(name: str) -> Callable[..., NoReturn]:
    """Return a function of that name which only says that it is missing.

    Raises:
        AttributeError: a name that Python itself asks for.
    """
    if name.startswith("_"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's own CPU kernels")

    missing.__name__ = name
    return missing


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Note in each request's row where the keys of its new tokens lie.

    Args:
        req_pool_indices: [R] rows of ``req_to_token``.
        req_to_token: [requests, pool_len] cache slot of every token; written in place.
        start_offset, end_offset: [R] first new token, and the one behind the last.
        out_cache_loc: slots of all new tokens, request by request.
    """
    taken = 0
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in bounds:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start
