"""What the modules of an engine give, under canonical names: vLLM, SGLang and transformers.

vLLM and SGLang fuse query, key and value projections, add the residual inside their norms, and work
in place: inputs are copied before a module runs. Steps of one request are joined in their order. Of
several tensor-parallel ranks each leaves a separate file; :func:`join_ranks` puts heads next to one
another and adds what is not added up yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mismatch.errors import MismatchError
from mismatch.features.locate.bits import Logits
from mismatch.features.locate.exact import HEAD
from mismatch.models.layer_parts import LAYERS, child, final_norm, has_rope, parts_of

GATES = ("router", "gate")
BY_HEAD = ("q", "k", "v", "rope_q", "rope_k", "attention")  # each rank has different heads
BY_KV_HEAD = ("k", "v", "rope_k")  # of which several ranks may have the same
ADDED_UP = ("attention_output", "mlp")  # by the module itself, or later by whoever reads it
CALL = "mismatch_with_model"  # of the engine's process, see mismatch/engines/model_calls.py
CAPTURE = "mismatch_modules"  # attribute of the model that is recorded
KV_COPIES = "kv_copies"  # in a file's metadata: layer -> ranks that have the same heads


# ---------------------------------------------------------------- in the engine's process


def start(model: Any, head: bool = False) -> str:
    """Record what every module gives from now on; return why that is impossible, or "".

    Args:
        head: the logits too.
    """
    capture = ModuleCapture()
    setattr(model, CAPTURE, capture)
    if any(type(module).__name__ == "PPMissingLayer" for module in model.modules()):
        return "a pipeline stage holds some layers only"
    try:
        capture.watch(model)
        if head:
            capture.watch_head(model)
    except (AttributeError, LookupError) as error:
        stop(model)
        return f"the layers of {type(model).__name__} are put together otherwise: {error}"
    return ""


def take(model: Any, path: str) -> int:
    """Write what this rank recorded since the last time; return how many tokens it has."""
    distributed = torch.distributed
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    count: int = getattr(model, CAPTURE).take(of_rank(path, rank))
    return count


def stop(model: Any) -> None:
    """Take the hooks away."""
    for handle in getattr(model, CAPTURE).handles:
        handle.remove()


class ModuleCapture:
    """Hooks on one model; :meth:`take` gives what was seen since the last time."""

    def __init__(self) -> None:
        self.parts: dict[str, list[torch.Tensor]] = {}
        self.handles: list[Any] = []
        self._ropes: set[int] = set()
        self._turned = True  # queries and keys, by anything
        self._number = 0  # of the layer at work
        self._kv_copies: dict[int, int] = {}
        self._logits: list[torch.Tensor] = []

    def watch(self, model: Any) -> None:
        """Put hooks on every layer.

        Raises:
            AttributeError, LookupError: layers that are put together otherwise.
        """
        decoders = {}  # more than one where a model reads images
        for name, module in model.named_modules():
            layers = child(module, LAYERS)
            if isinstance(layers, torch.nn.ModuleList) and final_norm(module) is not None:
                decoders[name] = module, layers, parts_of(layers[0]).input_norm is not None
        known = [decoder for decoder in decoders.values() if decoder[2]] or [*decoders.values()]
        if len(known) != 1:
            raise LookupError(f"they are in {' and '.join(sorted(decoders)) or 'no known place'}")
        ((decoder, layers, _),) = known
        self._turned = has_rope(model)
        for number, layer in enumerate(layers):
            self._layer(number, layer)
        self._norm(final_norm(decoder), f"{len(layers) - 1}.residual", "final_norm")

    def watch_head(self, model: Any) -> None:
        """Put a hook on what makes the logits."""

        def keep(out: Any) -> None:
            if torch.is_tensor(out) and len(out) > 1:  # one row: what is sampled next
                self._logits.append(out.detach().to("cpu", copy=True))

        for module in model.modules():
            if type(module).__name__ == "LogitsProcessor":
                self._after(module, keep)

    def take(self, path: str) -> int:
        """Write what was seen to a safetensors file; return how many tokens it has."""
        joined = {key: torch.cat(parts) for key, parts in self.parts.items()}
        self.parts = {}
        tokens = len(joined["embedding"]) if "embedding" in joined else 0
        whole = {  # some modules show a row a head
            key: value.reshape(tokens, -1).contiguous()
            for key, value in joined.items()
            if tokens and value.numel() % tokens == 0
        }
        logits, self._logits = self._logits, []
        if (
            logits and tokens - 1 <= sum(map(len, logits)) <= tokens
        ):  # a row for each token but the first
            whole[HEAD] = torch.cat(logits)[: tokens - 1].contiguous()
        save_file(whole, Path(path), {KV_COPIES: json.dumps(self._kv_copies)})
        return tokens

    def _layer(self, number: int, layer: Any) -> None:
        before = "embedding" if number == 0 else f"{number - 1}.residual"
        parts, middle = parts_of(layer), f"{number}.attention_residual"
        attention = parts.attention
        fused = getattr(attention, "qkv_proj", None)
        fused = getattr(fused, "base_layer", fused)  # of a layer that applies an adapter
        self._kv_copies[number] = int(getattr(fused, "num_kv_head_replicas", 1))

        def enter(args: Any) -> None:
            self._number = number
            streams = [x for x in args if torch.is_tensor(x) and x.is_floating_point()]
            if parts.input_norm is None and len(streams) == 1:  # not in two parts
                self._keep(before, streams[0])

        self._before(layer, enter)
        if parts.input_norm is not None:
            self._norm(parts.input_norm, before, f"{number}.input_norm")
        if parts.before_mlp is not None:
            self._norm(parts.before_mlp, middle, f"{number}.post_norm")
        elif parts.middle is not None:
            self._before(parts.middle, lambda args: self._keep(middle, args[0]))
        # Latent attention (MLA) has other parts than the trainer's: it is recorded as a whole.
        latent = hasattr(attention, "kv_lora_rank")
        inside = None if latent else getattr(attention, "attn", None)
        if inside is not None:
            rope = getattr(attention, "rotary_emb", None)
            if not self._turned:
                self._before(inside, lambda args: self._pair("q", "k", args))
            elif rope is not None and id(rope) not in self._ropes:  # layers may share one
                self._ropes.add(id(rope))
                self._before(rope, lambda args: self._pair("q", "k", args[1:]))
                self._after(rope, lambda out: self._pair("rope_q", "rope_k", out))
            self._before(inside, lambda args: self._keep(f"{number}.v", args[2]))
        for module, site in (
            (inside, "attention"),
            (attention if latent else getattr(attention, "o_proj", attention), "attention_output"),
            (parts.mixer, "mixer"),
            (parts.behind_attention, "attention_norm"),
            (child(parts.mlp, GATES), "router"),
            (parts.mlp, "mlp"),
            (parts.shared_mlp, "shared_mlp"),
            (parts.behind_mlp, "mlp_norm"),
        ):
            if module is not None:
                self._after(module, partial(self._keep, f"{number}.{site}"))

    def _norm(self, norm: Any, stream: str, normed: str) -> None:
        """Keep both values of a norm that adds the residual: (normed, stream).

        A norm that does not add it is given the stream, and may pass a residual on.
        """
        given: list[Any] = []

        def before(args: Any) -> None:
            given[:] = [x.clone() for x in args[:2] if torch.is_tensor(x)]

        def after(out: Any) -> None:
            self._keep(normed, out)
            passed_on = len(given) == 1 or torch.equal(out[1], given[1])
            self._keep(stream, given[0] if passed_on else out[1])

        self._before(norm, before)
        self._after(norm, after)

    def _pair(self, first: str, second: str, values: Any) -> None:
        """Keep queries and keys of the layer at work."""
        self._keep(f"{self._number}.{first}", values[0])
        self._keep(f"{self._number}.{second}", values[1])

    def _keep(self, key: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) else value
        if torch.is_tensor(value):  # some modules write into one that they are given
            flat = value.detach().reshape(-1, value.shape[-1]).to("cpu", copy=True)
            self.parts.setdefault(key, []).append(flat)

    def _before(self, module: Any, keep: Callable[[Any], None]) -> None:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            keep((*args, *kwargs.values()))

        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(self, module: Any, keep: Callable[[Any], None]) -> None:
        def hook(_: Any, args: Any, out: Any) -> None:
            keep(out)

        self.handles.append(module.register_forward_hook(hook))


# ---------------------------------------------------------------- ranks


def of_rank(path: str | Path, rank: int) -> str:
    """Return the file of one rank."""
    return f"{path}.rank{rank}"


def join_ranks(path: Path, ranks: int) -> None:
    """Make one file of what each rank left, and remove theirs.

    What does not follow from the parts is left out: the side does not show it.
    """
    files = [of_rank(path, rank) for rank in range(ranks)]
    parts = [load_file(file) for file in files]
    with safe_open(files[0], "pt") as first:
        copies = json.loads((first.metadata() or {}).get(KV_COPIES, "{}"))
    whole = {}
    for key in set(parts[0]).intersection(*parts):
        kv_copies = copies.get(key.partition(".")[0], 1)
        joined = _whole(key.rpartition(".")[2], [part[key] for part in parts], kv_copies)
        if joined is not None:
            whole[key] = joined
    save_file(whole, path)
    for file in files:
        Path(file).unlink()


def _whole(site: str, parts: list[torch.Tensor], kv_copies: int) -> torch.Tensor | None:
    """Return one site from what each rank gave; None where it does not follow.

    Args:
        parts: [tokens, features] by rank.
        kv_copies: neighbouring ranks that have the same heads of keys and values.
    """
    first, rest = parts[0], parts[1:]
    if rest and site in BY_HEAD:
        return torch.cat(parts[:: kv_copies if site in BY_KV_HEAD else 1], dim=-1)
    shapes = {part.shape for part in parts}
    if len(shapes) == 1 and all(
        torch.allclose(first, part, rtol=0, atol=0, equal_nan=True) for part in rest
    ):
        return first
    if site not in ADDED_UP or len(shapes) > 1:
        return None
    return torch.stack(parts).float().sum(0)


# ---------------------------------------------------------------- next to the engine


def record(
    engine: Any,
    sequences: list[list[int]],
    starts: list[int],
    temperature: float,
    folder: Path,
    head: bool = False,
) -> list[Any]:
    """Score sequences one by one, as ``prefill`` does, and leave ``N.safetensors`` of each.

    Args:
        head: leave the logits too, a row for every token but the first.

    Returns:
        The log-probabilities of each sequence from its start on.

    Raises:
        MismatchError: a model whose modules cannot be recorded, or a sequence that was recorded
            in part.
    """
    obstacle = next(filter(None, engine._call(CALL, f"{__name__}:start", head)), "")
    if obstacle:
        raise MismatchError(f"{engine.name}: {obstacle}", "the other sides can still be located")
    scores = []
    try:
        for number, (ids, first) in enumerate(zip(sequences, starts, strict=True)):
            scores += engine.prefill([ids], [first], temperature, lambda *done: None)
            path = folder / f"{number}.safetensors"
            tokens = min(engine._call(CALL, f"{__name__}:take", str(path)))
            if tokens != len(ids):
                fault = f"{engine.name}: {tokens} of {len(ids)} tokens went through the modules"
                fix = "drop the --engine-arg that keeps a prefix cache or splits a sequence"
                raise MismatchError(fault, fix)
            join_ranks(path, engine.spec.tensor_parallel_size)
    finally:
        engine._call(CALL, f"{__name__}:stop")
    return scores


def record_transformers(
    engine: Any,
    sequences: list[list[int]],
    starts: list[int],
    temperature: float,
    folder: Path,
    head: bool = False,
) -> list[Any]:
    """Do the same with transformers, whose modules are the trainer's.

    Raises:
        MismatchError: a model whose modules cannot be recorded.
    """
    from mismatch.models.boundaries import Boundaries, Recorder

    scores = []
    for number, (ids, first) in enumerate(zip(sequences, starts, strict=True)):
        recorder, logits = Recorder(), Logits()
        with Boundaries(_decoder(engine.model), recorder).shown(), _logits(engine.model, logits):
            scores += engine.prefill([ids], [first], temperature, lambda *done: None)
        shown = {HEAD: logits.whole()[:-1]} if head else {}
        save_file(recorder.values | shown, folder / f"{number}.safetensors")
    return scores


def decode_transformers(
    engine: Any, sequences: list[list[int]], starts: list[int], temperature: float, folder: Path
) -> list[Any]:
    """Do the same as sampling does, with these tokens: the prompt, then one at a time, cached."""
    from transformers import DynamicCache

    from mismatch.models.boundaries import Boundaries

    model, scores = engine.model, []
    for number, (ids, first) in enumerate(zip(sequences, starts, strict=True)):
        steps, logits = Steps(), Logits()
        cache: Any = DynamicCache(config=model.config)
        given = torch.tensor([ids], device=engine.device)
        with (
            torch.inference_mode(),
            Boundaries(_decoder(model), steps).shown(),
            _logits(model, logits),
        ):
            for part in (given[:, :first], *torch.split(given[:, first:-1], 1, dim=1)):
                steps.tokens = part.shape[1]
                model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        rows = logits.whole()
        values = (rows.float() / (temperature or 1.0)).log_softmax(-1)
        targets = torch.tensor(ids[first:])[:, None]
        scores.append(values.gather(1, targets)[:, 0].double().numpy())
        save_file(steps.joined() | {HEAD: rows}, folder / f"{number}.safetensors")
    return scores


class Steps:
    """A visitor that joins what every step shows of its new tokens; attention shows the cache."""

    def __init__(self) -> None:
        self.parts: dict[str, list[torch.Tensor]] = {}
        self.tokens = 0  # of the step at work

    def __call__(self, key: str, value: torch.Tensor) -> None:
        new = value[-self.tokens :].detach().to("cpu", copy=True)
        self.parts.setdefault(key, []).append(new)

    def joined(self) -> dict[str, torch.Tensor]:
        """Return every site in the order of its tokens."""
        return {key: torch.cat(parts) for key, parts in self.parts.items()}


def _decoder(model: Any) -> Any:
    decoder = model.get_decoder()
    return model.model if decoder is model else decoder


@contextmanager
def _logits(model: Any, keep: Logits) -> Iterator[None]:
    handle = model.register_forward_hook(lambda module, args, out: keep(out.logits))
    try:
        yield
    finally:
        handle.remove()


DECODE = {"transformers": decode_transformers}  # engines that can be given the tokens
RECORD = {"vllm": record, "sglang": record, "transformers": record_transformers}
