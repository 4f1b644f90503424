"""What the modules of vLLM and SGLang give, under canonical names, from hooks beside the model.

Both fuse query, key and value projections, add the residual inside their norms, and work in place:
inputs are copied before a module runs. Steps of one request are joined in their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mismatch.errors import MismatchError

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
ATTENTIONS = ("self_attn", "attn")
MLPS = ("mlp", "block_sparse_moe", "feed_forward")
GATES = ("router", "gate")
FURTHER_NORMS = (
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "post_self_attn_layernorm",
)


class ModuleCalls:
    """Calls of an engine for a recording; a part of what is called beside its model."""

    def mismatch_start_modules(self) -> str:
        """Record what every module gives from now on; why that is impossible, or ""."""
        self._mismatch_modules = ModuleCapture(self._mismatch_model())
        return self._mismatch_modules.obstacle

    def mismatch_take_modules(self, path: str) -> int:
        """Write what was recorded since the last time; how many tokens it has."""
        return self._mismatch_modules.take(path)

    def mismatch_stop_modules(self) -> None:
        """Stop it."""
        self._mismatch_modules.close()

    def _mismatch_model(self) -> Any:
        raise NotImplementedError


class ModuleCapture:
    """Hooks on one model; :meth:`take` gives what was seen since the last time."""

    def __init__(self, model: Any) -> None:
        self.parts: dict[str, list[torch.Tensor]] = {}
        self._handles: list[Any] = []
        self._ropes: set[int] = set()
        self._number = 0  # of the layer whose attention is at work
        layers = {
            int(match[1]): module
            for name, module in model.named_modules()
            if (match := LAYER.search(name)) and hasattr(module, "input_layernorm")
        }
        self.obstacle = _obstacle(model, layers)
        if self.obstacle:
            return
        for number, layer in sorted(layers.items()):
            self._layer(number, layer)
        decoder = model.model
        self._norm(decoder.norm, f"{len(layers) - 1}.residual", "final_norm")

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def take(self, path: str) -> int:
        """Write what was seen to a safetensors file; how many tokens it has."""
        from safetensors.torch import save_file

        joined = {key: torch.cat(parts) for key, parts in self.parts.items()}
        self.parts = {}
        tokens = len(joined["embedding"]) if "embedding" in joined else 0
        whole = {  # some modules show a row a head
            key: value.reshape(tokens, -1).contiguous()
            for key, value in joined.items()
            if tokens and value.numel() % tokens == 0
        }
        save_file(whole, Path(path))
        return tokens

    # ------------------------------------------------------------ hooks

    def _layer(self, number: int, layer: Any) -> None:
        before = "embedding" if number == 0 else f"{number - 1}.residual"
        attention = _child(layer, ATTENTIONS)
        mlp = _child(layer, MLPS)
        self._norm(layer.input_layernorm, before, f"{number}.input_norm")
        self._norm(
            layer.post_attention_layernorm, f"{number}.attention_residual", f"{number}.post_norm"
        )
        self._before(attention, partial(self._enter, number))
        if id(attention.rotary_emb) not in self._ropes:  # layers may share one
            self._ropes.add(id(attention.rotary_emb))
            self._before(attention.rotary_emb, self._unrotated)
            self._after(attention.rotary_emb, self._rotated)
        self._before(attention.attn, lambda args: self._keep(f"{number}.v", args[2]))
        self._after(attention.attn, lambda out: self._keep(f"{number}.attention", out))
        self._after(
            attention.o_proj, lambda out: self._keep(f"{number}.attention_output", _first(out))
        )
        gate = _child(mlp, GATES)
        if gate is not None:
            self._after(gate, lambda out: self._keep(f"{number}.router", _first(out)))
        self._after(mlp, lambda out: self._keep(f"{number}.mlp", _first(out)))

    def _norm(self, norm: Any, stream: str, normed: str) -> None:
        """A norm that adds the residual gives (normed, stream); one that does not is given it."""
        norms = {"alone": False}

        def before(args: Any) -> None:
            norms["alone"] = len(args) == 1 or args[1] is None
            if norms["alone"]:
                self._keep(stream, args[0])

        def after(out: Any) -> None:
            if norms["alone"]:
                self._keep(normed, _first(out))
                return
            self._keep(normed, out[0])
            self._keep(stream, out[1])

        self._before(norm, before)
        self._after(norm, after)

    def _enter(self, number: int, args: Any) -> None:
        self._number = number

    def _unrotated(self, args: Any) -> None:  # positions, queries, keys
        self._keep(f"{self._number}.q", args[1])
        self._keep(f"{self._number}.k", args[2])

    def _rotated(self, out: Any) -> None:
        self._keep(f"{self._number}.rope_q", out[0])
        self._keep(f"{self._number}.rope_k", out[1])

    def _keep(self, key: str, value: Any) -> None:
        flat = value.detach().reshape(len(value), -1).to("cpu", copy=True)
        self.parts.setdefault(key, []).append(flat)

    def _before(self, module: Any, keep: Callable[[Any], None]) -> None:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            keep((*args, *kwargs.values()))

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(self, module: Any, keep: Callable[[Any], None]) -> None:
        def hook(_: Any, args: Any, out: Any) -> None:
            keep(out)

        self._handles.append(module.register_forward_hook(hook))


def _obstacle(model: Any, layers: dict[int, Any]) -> str:
    """Why this model's modules cannot be told apart; "" where they can."""
    if not layers or not hasattr(getattr(model, "model", None), "norm"):
        return f"{type(model).__name__} has no list of layers with an input norm and a final norm"
    for number, layer in layers.items():
        attention = _child(layer, ATTENTIONS)
        parts = ("rotary_emb", "attn", "o_proj")
        if attention is None or any(not hasattr(attention, part) for part in parts):
            return f"the attention of layer {number} has no rope, attention and output of its own"
        if _child(layer, MLPS) is None or not hasattr(layer, "post_attention_layernorm"):
            return f"layer {number} has no MLP or no norm before it"
        if any(hasattr(layer, name) for name in FURTHER_NORMS):
            return f"layer {number} has norms behind its modules too"
    return ""


def _child(module: Any, names: tuple[str, ...]) -> Any:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def record(
    engine: Any, sequences: list[list[int]], starts: list[int], temperature: float, folder: Path
) -> list[Any]:
    """Score sequences one by one, as ``prefill`` does, and leave ``N.safetensors`` of each.

    Args:
        engine: vLLM or SGLang at work.

    Returns:
        The log-probabilities of each sequence from its start on.

    Raises:
        MismatchError: a model whose modules cannot be told apart, or a sequence that was recorded
            in part.
    """
    obstacle = engine._call("mismatch_start_modules")[0]
    if obstacle:
        raise MismatchError(f"{engine.name}: {obstacle}", "the other sides can still be located")
    scores = []
    try:
        for number, (ids, start) in enumerate(zip(sequences, starts, strict=True)):
            scores += engine.prefill([ids], [start], temperature, lambda *done: None)
            path = str(folder / f"{number}.safetensors")
            tokens = engine._call("mismatch_take_modules", path)[0]
            if tokens != len(ids):
                raise MismatchError(
                    f"{engine.name}: {tokens} of {len(ids)} tokens went through the modules",
                    "drop the --engine-arg that keeps a prefix cache",
                )
    finally:
        engine._call("mismatch_stop_modules")
    return scores
