"""LoRA adapters with known values, and the states in which an engine holds one or none.

State 0 has no adapter: all its matrices are 0. Pushes 1 and 2 load two adapters that share nothing,
push 3 takes the adapter away. As an engine holds it, B carries the factor alpha / rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.errors import MismatchError
from mismatch.models.derived import open_tensors
from mismatch.models.weight_states import SIZE, Checkpoint, Prints, seeded, state_of

if TYPE_CHECKING:
    import torch

RANK, ALPHA = 8, 16
SCALE = ALPHA / RANK
LINEAR = re.compile(r"\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.weight$")
A, B = "lora_A.weight", "lora_B.weight"


class Adapters(Checkpoint):
    """Adapters for the attention and the dense MLP of a checkpoint, one a push.

    Raises:
        MismatchError: the checkpoint has no such layers.
    """

    def __init__(self, directory: str | Path, seed: int) -> None:
        super().__init__(directory, seed)
        self._base: dict[str, tuple[int, int, float]] = {}  # module -> out, in, rms of the weight
        with ExitStack() as stack:
            for name, file in open_tensors(self.directory, stack).items():
                if LINEAR.search(name):
                    tensor = file.get_tensor(name)
                    rms = float(tensor.float().square().mean().sqrt())
                    module = name.removesuffix(".weight")
                    self._base[module] = (*tensor.shape, rms)
        if not self._base:
            raise MismatchError(
                f"{self.directory} has no linear layers that an adapter is made for here",
                "another --path",
            )

    def names(self) -> list[str]:
        return [f"{module}.{matrix}" for module in self._base for matrix in (A, B)]

    def tied(self) -> dict[str, str]:
        return {}

    def tensors(self, push: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, value) as an adapter's file has them: A [rank, in], B [out, rank], bf16.

        B's size makes alpha / rank x B A :data:`SIZE` of the weight's root mean square.
        """
        import torch

        state = state_of(push)
        for module, (rows, columns, rms) in self._base.items():
            size = SIZE * rms * columns**0.5 / (SCALE * RANK**0.5)
            for matrix, shape, factor in (
                (A, (RANK, columns), columns**-0.5),
                (B, (rows, RANK), size),
            ):
                name = f"{module}.{matrix}"
                generator = seeded(f"{self.seed}/{state}/{name}")
                values = torch.randn(shape, generator=generator) * factor
                yield name, (values if state else torch.zeros(shape)).bfloat16()

    def prints(self, push: int) -> dict[str, Prints]:
        """Prints of what an engine holds after this push: B times alpha / rank."""
        return {
            name: Prints.of(name, tensor * SCALE if name.endswith(B) else tensor)
            for name, tensor in self.tensors(push)
        }

    def write(self, push: int, target: Path) -> Path:
        """The adapter of a push as a folder that PEFT, vLLM and SGLang load."""
        return write_adapter(dict(self.tensors(push)), target)


def write_adapter(weights: Mapping[str, Any], target: Path, **config: Any) -> Path:
    """Matrices by name, and adapter_config.json; ``config`` goes over what that says."""
    from safetensors.torch import save_file

    target.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name}": tensor for name, tensor in weights.items()}
    save_file(named, target / "adapter_model.safetensors")
    modules = sorted({name.rsplit(".", 3)[1] for name in weights})
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": modules,
        "bias": "none",
    }
    (target / "adapter_config.json").write_text(json.dumps(facts | config), encoding="utf-8")
    return target
