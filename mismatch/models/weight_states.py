"""Known updates of a checkpoint's weights, and what tells their states apart.

A state is the checkpoint (push 0) or the checkpoint with one of its updates. The update of a
parameter follows from the seed, the push and the parameter's name, so that two parameters, or two
experts of one, never change alike: a missed, swapped or moved one shows.

State 0 has no adapter: all its matrices are 0. Pushes 1 and 2 load two adapters that share nothing,
push 3 takes the adapter away. As an engine holds it, B carries the factor alpha / rank.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.errors import MismatchError
from mismatch.models.config import read_config
from mismatch.models.derived import Shards, open_tensors, require_space
from mismatch.models.digests import Digest, digest_tensor
from mismatch.run.hub import INDEX

if TYPE_CHECKING:
    from typing import Self  # Python 3.11; workers run on 3.10 too

    import torch


SIZE = 0.1  # of an update, in the parameter's own root mean square
OF_ZEROS = 0.02  # of an update of a parameter that is all 0
SAMPLES = 256  # values of a parameter that are kept
PUSHES = 3
BLOCKS = 4  # of rows, and of columns, of what are no experts
MATRIX = 2  # axes
EXPERTS = ".experts."
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Prints:
    """What one parameter held at one time, small enough to travel.

    >>> Prints((2, 4), {"rows 0:1": (1, 2, 3)}, (0.5,)).shape
    (2, 4)

    Attributes:
        cells: part of the parameter ("expert 3", "rows 0:64, columns 0:32") -> its digest, whose
            indices count from the part's own beginning.
        values: of a sample of elements, whose places depend on name and shape alone.
        turned: digest of the whole with its last two axes exchanged; None where there is one axis.
    """

    shape: tuple[int, ...]
    cells: dict[str, Digest] = field(default_factory=dict)
    values: tuple[float, ...] = ()
    turned: dict[str, Digest] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Self:
        """Of a tensor on any device."""
        import torch

        cells, turned = {}, {}
        for label, part in parts_of(name, tensor):
            cells[label] = digest_tensor(part)
        if tensor.ndim >= MATRIX and tensor.shape[-1] == tensor.shape[-2]:
            flipped = tensor.transpose(-1, -2)
            turned = {label: digest_tensor(part) for label, part in parts_of(name, flipped)}
        count = tensor.numel()
        chosen = torch.randint(max(count, 1), (min(SAMPLES, count),), generator=seeded(name))
        places = chosen.to(tensor.device)
        values = tensor.detach().flatten()[places].float().cpu().tolist()
        return cls(tuple(tensor.shape), cells, tuple(values), turned)

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Self:
        """Return the inverse of ``dataclasses.asdict``, after a journey as plain data."""
        return cls(
            tuple(data["shape"]),
            {label: tuple(digest) for label, digest in data["cells"].items()},
            tuple(data["values"]),
            {label: tuple(digest) for label, digest in data["turned"].items()},
        )


def parts_of(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(label, part): every expert of a fused tensor, else blocks of rows and columns."""
    one_expert = name.partition(EXPERTS)[2].partition(".")[0].isdigit()
    if EXPERTS in name and not one_expert and tensor.ndim >= MATRIX:
        for index, part in enumerate(tensor):
            yield f"expert {index}", part
        return
    rows = _cuts(tensor.shape[0]) if tensor.ndim else [slice(None)]
    if tensor.ndim < MATRIX:
        for row in rows:
            yield f"rows {row.start}:{row.stop}", tensor[row]
        return
    for row, column in itertools.product(rows, _cuts(tensor.shape[1])):
        label = f"rows {row.start}:{row.stop}, columns {column.start}:{column.stop}"
        yield label, tensor[row, column]


def _cuts(length: int) -> list[slice]:
    edges = sorted({length * index // BLOCKS for index in range(BLOCKS + 1)})
    return [slice(low, high) for low, high in itertools.pairwise(edges)]


def seeded(text: str) -> torch.Generator:
    """Return a generator of random numbers that follow from a text."""
    import torch

    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def updated(name: str, base: torch.Tensor, seed: int, push: int) -> torch.Tensor:
    """Return the parameter in the state after a push; push 0 is the checkpoint itself.

    Every element moves by :data:`SIZE` of the parameter's root mean square times normal noise, and
    the result is rounded to the checkpoint's own dtype: all sides have the same values. Integers
    stay as they are.
    """
    import torch

    if push == 0 or not base.is_floating_point():
        return base
    wide = base.float()
    size = float(wide.square().mean().sqrt()) * SIZE or OF_ZEROS
    noise = torch.randn(base.shape, generator=seeded(f"{seed}/{push}/{name}"))
    return (wide + size * noise.to(base.device)).to(base.dtype)


def state_of(push: int) -> int:
    """Return the state that a push brings: the third brings the first weights back.

    >>> [state_of(push) for push in range(4)]
    [0, 1, 2, 0]
    """
    return push % PUSHES


def transposed_names(expected: Mapping[str, Prints], held: Mapping[str, Prints]) -> list[str]:
    """Return parameters that the engine holds, rightly, with their last two axes exchanged."""
    names = []
    for name, now in expected.items():
        own = held.get(name)
        if own is None or len(own.shape) < MATRIX or own.cells == now.cells:
            continue
        flipped = (*own.shape[:-2], *own.shape[:-3:-1])
        if own.turned == now.cells if own.turned else flipped == now.shape:
            names.append(name)
    return names


class Checkpoint:
    """Tensors of a checkpoint's files in one of its states, read one at a time.

    Args:
        directory: with safetensors files, and config.json.
        seed: of the updates.
    """

    def __init__(self, directory: str | Path, seed: int) -> None:
        self.directory, self.seed = Path(directory), seed

    def names(self) -> list[str]:
        with ExitStack() as stack:
            return list(open_tensors(self.directory, stack))

    def tied(self) -> dict[str, str]:
        """Return the head of a model with tied embeddings -> the embeddings."""
        if not read_config(self.directory).get("tie_word_embeddings", False):
            return {}
        names = self.names()
        source = next((name for name in names if name.endswith("embed_tokens.weight")), None)
        head = next((name for name in names if name.endswith(HEAD)), HEAD)
        return {} if source is None else {head: source}

    def tensors(self, push: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, value) of every tensor after this push."""
        tied = self.tied()
        with ExitStack() as stack:
            files = open_tensors(self.directory, stack)
            for name in files:
                own = tied.get(name, name)  # a stored copy moves with what it is tied to
                yield name, updated(own, files[own].get_tensor(own), self.seed, state_of(push))

    def prints(self, push: int) -> dict[str, Prints]:
        """Return digests of all tensors of floating-point numbers after this push."""
        return {n: Prints.of(n, t) for n, t in self.tensors(push) if t.is_floating_point()}

    def write(self, push: int, target: Path) -> Path:
        """Return this state as a separate checkpoint, with configuration and tokenizer as links.

        Raises:
            MismatchError: too little space.
        """
        link_others(self.directory, target)
        shards = Shards(target)
        for name, tensor in self.tensors(push):
            shards.add(name, tensor)
        shards.finish()
        return target


def link_others(source: Path, target: Path) -> None:
    """Make a folder for weights of this checkpoint, its other files as hard links or copies.

    A run directory holds no symbolic links (mismatch/run/trust.py).

    Raises:
        MismatchError: too little space for the weights.
    """
    target.mkdir(parents=True, exist_ok=True)
    require_space(source, target)
    for path in source.iterdir():
        weights = path.name.endswith((".safetensors", ".bin", INDEX))
        if path.is_file() and not weights and not (target / path.name).exists():
            try:
                os.link(path.resolve(), target / path.name)
            except OSError:  # another file system, or one without links
                shutil.copyfile(path, target / path.name)


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
            fault = (
                f"{self.directory} has no linear layers that the adapter of this probe can change"
            )
            raise MismatchError(fault, "another --path")

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
        """Return digests of what an engine holds after this push: B times alpha / rank."""
        return {
            name: Prints.of(name, tensor * SCALE if name.endswith(B) else tensor)
            for name, tensor in self.tensors(push)
        }

    def write(self, push: int, target: Path) -> Path:
        """Return the adapter of a push as a folder that PEFT, vLLM and SGLang load."""
        return write_adapter(dict(self.tensors(push)), target)


def write_adapter(weights: Mapping[str, Any], target: Path, **config: Any) -> Path:
    """Write matrices by name, and adapter_config.json; ``config`` goes over what that says."""
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
