"""Hooks at the boundaries between a transformers decoder's modules: to record, or to replace.

Every boundary is shown to a visitor under its name (``TITLES`` of locate) as [tokens, features];
what the visitor returns takes its place. Queries and keys around rope, values and the attention's
output are seen at two functions that nearly all families call: ``apply_rotary_pos_emb…`` of the
model's own file, and transformers' attention interface. Router logits are the product with the
router's E rows of weights. A visitor may also ask what a module would give on the same input if it
left something out that the checkpoint or its configuration declares: ``FORMS`` of locate.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mismatch.errors import MismatchError
from mismatch.models.layer_parts import LAYERS, child, final_norm, has_rope, parts_of

Visit = Callable[[str, torch.Tensor], torch.Tensor | None]
# Key, name of the form, and what the module gives in that form; of a form with a free factor for
# each token, that part of it which has none, and the part that is multiplied.
Otherwise = Callable[[str, str, torch.Tensor, torch.Tensor | None], None]
QK_NORMS = ("q_norm", "query_layernorm", "q_layernorm")
SHARED = ("shared_expert", "shared_experts", "shared_mlp")  # inside a block of experts
ACTIVATIONS = {
    "gelu": torch.nn.GELU(),
    "gelu-tanh": torch.nn.GELU(approximate="tanh"),
    "silu": torch.nn.SiLU(),
}
NO_SINK = -1e4  # logit that adds nothing to a softmax
ROPE = "apply_rotary_pos_emb"
FIX = "this family's layers are put together otherwise; please report it"


class Recorder:
    """A visitor that keeps every boundary, on the CPU, as it is."""

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}

    def __call__(self, key: str, value: torch.Tensor) -> torch.Tensor | None:
        self.values[key] = value.detach().to("cpu", copy=True).contiguous()
        return None


@dataclass
class Boundaries:
    """Shows the boundaries of a decoder's forward passes to a visitor, within :meth:`shown`.

    Args:
        decoder: with layers and a norm behind them.
        visit: called with key and value; its result, if any, takes the value's place.
        otherwise: called before it with every other form of the value; None: nobody asks.
    """

    decoder: Any
    visit: Visit
    otherwise: Otherwise | None = None
    _layer: int = -1  # at work
    _turning: bool = False
    _modes: ExitStack = field(default_factory=ExitStack)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep hooks and wrapped functions in place within the block.

        Raises:
            MismatchError: a decoder whose residual stream goes another way.
        """
        with ExitStack() as stack:
            try:
                for handle in self._hooks():
                    stack.callback(handle.remove)
            except (AttributeError, LookupError) as error:
                raise MismatchError(f"{type(self.decoder).__name__}: {error}", FIX) from error
            parts = [part for layer in child(self.decoder, LAYERS) for part in layer.children()]
            for name in {type(part).__module__ for part in parts}:
                stack.enter_context(self._rope(sys.modules[name]))
            stack.enter_context(self._attention())
            stack.callback(self._modes.close)
            yield

    def _hooks(self) -> Iterator[Any]:
        before, norm = "embedding", final_norm(self.decoder)
        for number, layer in enumerate(child(self.decoder, LAYERS) or ()):
            yield from self._of_layer(number, layer, before)
            before = f"{number}.residual"
        yield norm.register_forward_pre_hook(self._residual(before))
        yield norm.register_forward_hook(self._leaving("final_norm"))

    def _of_layer(self, number: int, layer: Any, before: str) -> Iterator[Any]:
        parts = parts_of(layer)

        def enter_layer(*called: Any) -> None:
            self._layer = number

        yield layer.register_forward_pre_hook(enter_layer)
        yield layer.register_forward_pre_hook(self._entering(before), with_kwargs=True)
        if parts.middle is not None:
            stream = self._residual(f"{number}.attention_residual")
            yield parts.middle.register_forward_pre_hook(stream)
        mlp, experts = parts.mlp, getattr(parts.mlp, "experts", None)
        if self.otherwise is not None:
            yield from self._other_forms(number, parts.attention, mlp, experts is not None)
        for module, site in (
            (parts.input_norm, "input_norm"),
            (parts.attention, "attention_output"),
            (parts.mixer, "mixer"),
            (parts.behind_attention, "attention_norm"),
            (parts.before_mlp, "post_norm"),
            (parts.mlp, "mlp"),
            (parts.shared_mlp, "shared_mlp"),
            (parts.behind_mlp, "mlp_norm"),
        ):
            if module is not None:
                yield module.register_forward_hook(self._leaving(f"{number}.{site}"))
        if experts is not None:
            logits = _RouterLogits(expert_count(mlp), f"{number}.router", self._see)

            def enter(*called: Any) -> None:
                self._modes.enter_context(logits)

            def leave(*called: Any) -> None:
                self._modes.close()

            yield mlp.register_forward_pre_hook(enter)
            yield experts.register_forward_pre_hook(leave, prepend=True)
            yield mlp.register_forward_hook(leave, always_call=True)

    def _other_forms(
        self, number: int, attention: Any, mlp: Any, with_experts: bool
    ) -> Iterator[Any]:
        """Yield hooks that show what queries, keys and the MLP or experts would be otherwise."""
        if child(attention, QK_NORMS) is not None:
            for site in ("q", "k"):
                if (projection := getattr(attention, f"{site}_proj", None)) is not None:
                    key = f"{number}.{site}"
                    yield projection.register_forward_hook(
                        lambda _, args, out, key=key: self._form(key, "no-qk-norm", out)
                    )
        if not with_experts:
            yield from self._other_activations(f"{number}.mlp", mlp)
            return
        shared, gate = child(mlp, SHARED), getattr(mlp, "shared_expert_gate", None)
        given: dict[str, torch.Tensor] = {}
        for name, module in (("shared", shared), ("gate", gate)):
            if module is not None:
                # Some families add to the shared expert's output in place.
                yield module.register_forward_hook(
                    lambda _, args, out, name=name: given.update({name: out.clone()})
                )

        def leaving(_: Any, args: Any, out: Any) -> None:
            whole = out[0] if isinstance(out, tuple) else out
            whole, key = whole.reshape(-1, whole.shape[-1]), f"{number}.mlp"
            part = given["shared"].view_as(whole) if shared is not None else whole * 0
            added = part if gate is None else part * given["gate"].reshape(-1, 1).sigmoid()
            routed = whole - added
            if gate is not None:
                self._form(key, "no-shared-gate", routed + part)
                self._form(key, "shared-gate", routed, part)
            if shared is not None:
                self._form(key, "no-shared-expert", routed)
            self._form(key, "routed-scale", added, routed)

        yield mlp.register_forward_hook(leaving)

    def _other_activations(self, key: str, mlp: Any) -> Iterator[Any]:
        """Yield a hook that shows what a dense MLP would give with other activations."""

        def leaving(module: Any, args: Any, out: Any) -> None:
            own = module.act_fn
            try:
                for name, activation in ACTIVATIONS.items():
                    module.act_fn = activation
                    self._form(key, name, module.forward(*args))
            finally:
                module.act_fn = own

        if isinstance(getattr(mlp, "act_fn", None), torch.nn.Module):
            yield mlp.register_forward_hook(leaving)

    def _form(
        self, key: str, name: str, value: torch.Tensor, times: torch.Tensor | None = None
    ) -> None:
        assert self.otherwise is not None
        flat = None if times is None else times.reshape(-1, times.shape[-1])
        self.otherwise(key, name, value.reshape(-1, value.shape[-1]), flat)

    def _entering(self, key: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            if args:
                return (self._see(key, args[0]), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": self._see(key, kwargs["hidden_states"])}

        return hook

    def _leaving(self, key: str) -> Any:
        def hook(module: Any, args: Any, out: Any) -> Any:
            if isinstance(out, tuple):
                return (self._see(key, out[0]), *out[1:])
            return self._see(key, out)

        return hook

    def _residual(self, key: str) -> Any:
        """Return a hook on a norm's input: the residual stream itself, replaced in place."""

        def hook(module: Any, args: Any) -> None:
            seen = self._see(key, args[0])
            if seen is not args[0]:
                args[0].copy_(seen)

        return hook

    @contextmanager
    def _rope(self, module: Any) -> Iterator[None]:
        rotations = {
            name: rotate
            for name, rotate in vars(module).items()
            if name.startswith(ROPE) and "vision" not in name
        }
        for name, rotate in rotations.items():
            setattr(module, name, self._rotated(rotate))
        try:
            yield
        finally:
            for name, rotate in rotations.items():
                setattr(module, name, rotate)

    def _rotated(self, rotate: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of queries and keys that shows them before and after it."""

        def shown(q: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
            # One of these functions calls another; or an indexer turns what no head attends with.
            if self._turning or kwargs.get("unsqueeze_dim", 1) != 1:
                return rotate(q, k, *args, **kwargs)
            q, k = self._heads("q", q), self._heads("k", k)
            self._turning = True
            try:
                q, k = rotate(q, k, *args, **kwargs)
            finally:
                self._turning = False
            return self._heads("rope_q", q), self._heads("rope_k", k)

        return shown

    @contextmanager
    def _attention(self) -> Iterator[None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        kind: Any = type(ALL_ATTENTION_FUNCTIONS)
        get, turned = kind.get_interface, has_rope(self.decoder)

        def get_shown(own: Any, *args: Any, **kwargs: Any) -> Any:
            attend = get(own, *args, **kwargs)

            def shown(module: Any, q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
                if not turned:
                    q, k = self._heads("q", q), self._heads("k", k)
                v = self._heads("v", v)
                for name, left_out in self._left_out(module, named):
                    other = attend(module, q, k, v, *rest, **named | left_out)[0]
                    self._form(f"{self._layer}.attention", name, other.flatten(2))
                out, weights = attend(module, q, k, v, *rest, **named)
                flat = out.reshape(*out.shape[:2], -1)
                return self._see(f"{self._layer}.attention", flat).reshape(out.shape), weights

            return shown

        kind.get_interface = get_shown
        try:
            yield
        finally:
            kind.get_interface = get

    def _left_out(self, module: Any, named: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield other forms of an attention: their name, and the arguments that make them."""
        if self.otherwise is None:
            return
        if named.get("softcap"):
            yield "no-softcap", {"softcap": None}
        sinks = named.get("s_aux")
        if sinks is not None:
            yield "no-sinks", {"s_aux": torch.full_like(sinks, NO_SINK)}

    def _heads(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Show [B, heads, S, D] as [tokens, heads x D]."""
        batch, heads, width, size = value.shape
        flat = value.transpose(1, 2).reshape(batch, width, heads * size)
        seen = self._see(f"{self._layer}.{name}", flat)
        if seen is flat:
            return value
        return seen.reshape(batch, width, heads, size).transpose(1, 2)

    def _see(self, key: str, value: torch.Tensor) -> torch.Tensor:
        seen = self.visit(key, value.reshape(-1, value.shape[-1]))
        return value if seen is None else seen.to(value.dtype).reshape(value.shape)


class _RouterLogits(TorchFunctionMode):
    """Shows the router's logits: the product with a matrix of E rows."""

    def __init__(self, count: int, key: str, see: Any) -> None:
        super().__init__()
        self.count, self.key, self.see = count, key, see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and args[1].shape[0] == self.count:
            return self.see(self.key, out)
        return out


def expert_count(mlp: Any) -> int:
    """Return E of a block of experts; 0 where it does not say."""
    for module in mlp.modules():
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            if isinstance(count := getattr(module, name, None), int):
                return count
    return 0
