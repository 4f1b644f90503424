"""New weights for a plain transformers model, for a probe of the weight sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mismatch.engines.base import Engine
from mismatch.engines.sync_drivers import Driver, Held
from mismatch.errors import MismatchError
from mismatch.models.weight_states import SCALE, A, B, Checkpoint, Prints


class TransformersDriver(Driver):
    """See :class:`mismatch.engines.sync_drivers.Driver`."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, scratch: Path) -> None:
        super().__init__(engine, checkpoint, scratch)
        self.model = self.engine.model
        self._hooks: list[Any] = []

    def push(self, path: str, push: int) -> None:
        """Copy tensors into the model's own, or give its linear layers an adapter.

        Raises:
            MismatchError: a name that the model does not have.
        """
        weights = dict(self.checkpoint.tensors(push))
        if path == "lora":
            self._apply_adapter(weights)
            return
        own = self.model.state_dict()
        unknown = sorted(set(weights) - set(own))
        if unknown:
            fault = f"transformers has another name for {unknown[0]} and {len(unknown) - 1} more"
            fix = "its loader converts this checkpoint: save it again with save_pretrained"
            raise MismatchError(fault, fix)
        for name, tensor in weights.items():
            own[name].copy_(tensor)

    def _apply_adapter(self, weights: Mapping[str, Any]) -> None:
        """Have every linear layer add alpha / rank x B A x, as PEFT does unmerged."""
        for hook in self._hooks:
            hook.remove()

        def adding(a: Any, b: Any) -> Callable[[Any, tuple[Any, ...], Any], Any]:
            return lambda layer, inputs, output: output + (inputs[0] @ a.T) @ b.T * SCALE

        self._hooks = []
        for module in [name.removesuffix(f".{A}") for name in weights if name.endswith(A)]:
            a, b = (weights[f"{module}.{part}"].to(self.model.dtype) for part in (A, B))
            layer = self.model.get_submodule(module)
            self._hooks.append(layer.register_forward_hook(adding(a, b)))

    def drop_caches(self) -> None:
        """Do nothing: it keeps no cache."""

    def push_own(self, function: Callable[..., Any], weights: dict[str, Any]) -> None:
        function(weights, self.model)

    def held(self, names: list[str], transposed: list[str]) -> Held:
        prints = {}
        for name, tensor in self.model.state_dict().items():
            turned = tensor.transpose(-1, -2) if name in transposed else tensor
            prints[name] = Prints.of(name, turned)
        return prints, {}
