"""How large tensors get, whatever makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that comes out of any operation inside the block."""

    numel: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                # Of its memory: an expanded mask of [T, T] takes but a row.
                used = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.numel = max(self.numel, min(used, tensor.numel()))
        return out
