"""New weights for a plain transformers model, for a probe of the weight sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from mismatch.engines.base import Engine
from mismatch.engines.sync_drivers import Answer, AsGiven, Held
from mismatch.engines.transformers.engine import TransformersEngine
from mismatch.errors import MismatchError
from mismatch.models.weight_states import Checkpoint, Prints
from mismatch.types import NotTested


class TransformersDriver(AsGiven):
    """See :class:`mismatch.engines.sync_drivers.Driver`."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, scratch: Path) -> None:
        self.model: Any = cast(TransformersEngine, engine).model
        self.checkpoint = checkpoint
        self._hooks: list[Any] = []

    def push(self, path: str, push: int) -> None:
        weights = dict(self.checkpoint.tensors(push))
        if path == "lora":
            self._hooks = apply_adapter(self.model, weights, self._hooks)
        else:
            copy_weights(self.model, weights)

    def push_own(self, function: Callable[..., Any], weights: dict[str, Any]) -> None:
        function(weights, self.model)

    def held(self, names: list[str], transposed: list[str]) -> Held:
        prints = {}
        for name, tensor in self.model.state_dict().items():
            turned = tensor.transpose(-1, -2) if name in transposed else tensor
            prints[name] = Prints.of(name, turned)
        return prints, {}

    def answers(self, prompts: Sequence[list[int]]) -> list[Answer] | None:
        return None

    def drop_caches(self) -> None:
        pass

    def not_tested(self) -> list[NotTested]:
        return []


def copy_weights(model: Any, weights: dict[str, Any]) -> None:
    """Copy tensors into a model's own.

    Raises:
        MismatchError: a name that the model does not have.
    """
    own = model.state_dict()
    unknown = sorted(set(weights) - set(own))
    if unknown:
        raise MismatchError(
            f"transformers has another name for {unknown[0]} and {len(unknown) - 1} more",
            "its loader converts this checkpoint: save it again with save_pretrained",
        )
    for name, tensor in weights.items():
        own[name].copy_(tensor)


def apply_adapter(model: Any, weights: Mapping[str, Any], before: Sequence[Any]) -> list[Any]:
    """Let every linear layer add alpha / rank x B A x, as PEFT does unmerged; returns the hooks.

    Args:
        weights: A and B by the names of an adapter's file.
        before: hooks of the adapter that this one replaces.
    """
    from mismatch.models.weight_states import SCALE, A, B

    for hook in before:
        hook.remove()

    def adding(a: Any, b: Any) -> Callable[[Any, tuple[Any, ...], Any], Any]:
        return lambda layer, inputs, output: output + (inputs[0] @ a.T) @ b.T * SCALE

    modules = [name.removesuffix(f".{A}") for name in weights if name.endswith(A)]
    return [
        model.get_submodule(module).register_forward_hook(
            adding(
                weights[f"{module}.{A}"].to(model.dtype), weights[f"{module}.{B}"].to(model.dtype)
            )
        )
        for module in modules
    ]
