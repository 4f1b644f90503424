"""What the modules of vLLM and SGLang give, under canonical names, from hooks beside the model.

Both fuse query, key and value projections, add the residual inside their norms, and work in place:
inputs are copied before a module runs. Steps of one request are joined in their order. Of several
tensor-parallel ranks each leaves its own file; :func:`join_ranks` puts heads beside one another and
adds what is not added up yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mismatch.errors import MismatchError
from mismatch.models.moe import ATTENTIONS, MLPS, child, norms_of

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
GATES = ("router", "gate")
BY_HEAD = ("q", "k", "v", "rope_q", "rope_k", "attention")  # a rank has its own heads
BY_KV_HEAD = ("k", "v", "rope_k")  # of which several ranks may have the same
ADDED_UP = ("attention_output", "mlp")  # by the module itself, or later by whoever reads it
KV_COPIES = "kv_copies"  # in a file's metadata: layer -> ranks that have the same heads


class ModuleCalls:
    """Calls of an engine for a recording; a part of what is called beside its model."""

    def mismatch_start_modules(self) -> str:
        """Record what every module gives from now on; why that is impossible, or ""."""
        self._mismatch_modules = ModuleCapture(self._mismatch_model())
        return self._mismatch_modules.obstacle

    def mismatch_take_modules(self, path: str) -> int:
        """Write what this rank recorded since the last time; how many tokens it has."""
        return self._mismatch_modules.take(of_rank(path, _rank()))

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
        self._kv_copies: dict[int, int] = {}
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
        save_file(whole, Path(path), {KV_COPIES: json.dumps(self._kv_copies)})
        return tokens

    # ------------------------------------------------------------ hooks

    def _layer(self, number: int, layer: Any) -> None:
        before = "embedding" if number == 0 else f"{number - 1}.residual"
        attention, mlp, norms = child(layer, ATTENTIONS), child(layer, MLPS), norms_of(layer)
        self._norm(layer.input_layernorm, before, f"{number}.input_norm")
        self._norm(norms.before_mlp, f"{number}.attention_residual", f"{number}.post_norm")
        for norm, site in (
            (norms.behind_attention, "attention_norm"),
            (norms.behind_mlp, "mlp_norm"),
        ):
            if norm is not None:
                self._after(norm, partial(self._keep, f"{number}.{site}"))
        fused = getattr(attention, "qkv_proj", None)
        self._kv_copies[number] = int(getattr(fused, "num_kv_head_replicas", 1))
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
        gate = child(mlp, GATES)
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
    if any(type(module).__name__ == "PPMissingLayer" for module in model.modules()):
        return "a pipeline stage holds some layers only"
    for number, layer in layers.items():
        attention = child(layer, ATTENTIONS)
        parts = ("rotary_emb", "attn", "o_proj")
        if attention is None or any(not hasattr(attention, part) for part in parts):
            return f"the attention of layer {number} has no rope, attention and output of its own"
        if child(layer, MLPS) is None:
            return f"layer {number} has no MLP"
        try:
            norms_of(layer)
        except LookupError as error:
            return f"layer {number} {error}"
    return ""


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


# ---------------------------------------------------------------- ranks


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_initialized() else 0


def of_rank(path: str | Path, rank: int) -> str:
    """The file of one rank."""
    return f"{path}.rank{rank}"


def join_ranks(path: Path, ranks: int) -> None:
    """Make one file of what each rank left, and remove theirs.

    What cannot be told from the parts is left out: the side does not show it.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    files = [of_rank(path, rank) for rank in range(ranks)]
    parts = [load_file(file) for file in files]
    with safe_open(files[0], "pt") as first:
        copies = json.loads((first.metadata() or {}).get(KV_COPIES, "{}"))
    shared = set(parts[0]).intersection(*parts)
    whole = {
        key: whole_of(key, [part[key] for part in parts], copies.get(key.partition(".")[0], 1))
        for key in shared
    }
    save_file({key: value for key, value in whole.items() if value is not None}, path)
    for file in files:
        Path(file).unlink()


def whole_of(key: str, parts: list[torch.Tensor], kv_copies: int) -> torch.Tensor | None:
    """One site from what each rank gave; None where the parts do not say it.

    Args:
        parts: [tokens, features] by rank.
        kv_copies: neighbouring ranks that have the same heads of keys and values.
    """
    site = key.rpartition(".")[2]
    if len(parts) > 1 and site in BY_HEAD:
        return torch.cat(parts[:: kv_copies if site in BY_KV_HEAD else 1], dim=-1)
    if all(_same(parts[0], part) for part in parts[1:]):
        return parts[0]
    if site not in ADDED_UP or len({part.shape for part in parts}) > 1:
        return None
    return torch.stack(parts).float().sum(0)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, with what is no number in the same places."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


# ---------------------------------------------------------------- in the engine's process


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
    obstacle = next(filter(None, engine._call("mismatch_start_modules")), "")
    if obstacle:
        raise MismatchError(f"{engine.name}: {obstacle}", "the other sides can still be located")
    scores = []
    try:
        for number, (ids, start) in enumerate(zip(sequences, starts, strict=True)):
            scores += engine.prefill([ids], [start], temperature, lambda *done: None)
            path = folder / f"{number}.safetensors"
            tokens = min(engine._call("mismatch_take_modules", str(path)))
            if tokens != len(ids):
                raise MismatchError(
                    f"{engine.name}: {tokens} of {len(ids)} tokens went through the modules",
                    "drop the --engine-arg that keeps a prefix cache or splits a sequence",
                )
            join_ranks(path, engine.spec.tensor_parallel_size)
    finally:
        engine._call("mismatch_stop_modules")
    return scores


def record_transformers(
    engine: Any, sequences: list[list[int]], starts: list[int], temperature: float, folder: Path
) -> list[Any]:
    """Score sequences one by one, as ``prefill`` does, and leave ``N.safetensors`` of each.

    Args:
        engine: a :class:`mismatch.engines.transformers.engine.TransformersEngine` at work.

    Returns:
        The log-probabilities of each sequence from its start on.

    Raises:
        MismatchError: a model whose modules cannot be told apart.
    """
    from safetensors.torch import save_file

    from mismatch.training.module_capture import Boundaries, Recorder, decoder_of

    scores = []
    for number, (ids, start) in enumerate(zip(sequences, starts, strict=True)):
        recorder = Recorder()
        with Boundaries(decoder_of(engine.model), recorder).shown():
            scores += engine.prefill([ids], [start], temperature, lambda *done: None)
        save_file(recorder.values, folder / f"{number}.safetensors")
    return scores
