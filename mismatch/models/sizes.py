"""Sizes of a model, counted on transformers' own modules: every family that transformers builds.

The modules are built on the meta device, so neither weights nor memory are needed. That imports
torch (5 s of CPU), so :func:`sized` counts in a separate process. It does not know what a pass
computes: ``mismatch.doctor.memory`` derives that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mismatch.errors import MismatchError, first_line
from mismatch.models.auto_class import auto_class
from mismatch.models.config import MXFP4_BITS, FoundConfig, ModelConfig

TIMEOUT_S = 180.0  # a cold import of torch from a network file system takes a minute
# Class names of layers that keep a state of fixed size instead of keys and values.
RECURRENT = (
    *("mixer", "mamba", "deltanet", "linearattention", "lightningattention", "shortconv"),
    *("rwkv", "recurrent", "timemix"),
)


class UnknownSize(MismatchError):
    """The parameters of a model cannot be counted here."""

    def __init__(self, config: str, reason: str) -> None:
        family = json.loads(config).get("model_type")
        super().__init__(
            f"the parameters of a {family!r} model cannot be counted: {reason}",
            "name an environment with torch and a transformers that knows this model: "
            "--python ENV/bin/python",
        )
        self.reason = reason


@dataclass(frozen=True, slots=True)
class SizedModel(ModelConfig):
    """A model whose parameters are counted.

    Attributes:
        parameters: all, tied embeddings once.
        layer_parameters: of the largest decoder layer.
        expert_parameters: of the routed experts of all layers.
        packed_parameters: of these those that MXFP4 packs: all but the biases.
        root_parameters: outside the decoder layers, which FSDP2 wraps at the root.
        largest_tensor: elements of the largest parameter.
        biased_experts: experts have biases.
        recurrent: class names of layers that keep a state instead of keys and values.
    """

    parameters: int = 0
    layer_parameters: int = 0
    expert_parameters: int = 0
    packed_parameters: int = 0
    root_parameters: int = 0
    largest_tensor: int = 0
    biased_experts: bool = False
    recurrent: tuple[str, ...] = ()

    def stored_bytes(self, element: int, keeps_packed: bool) -> int:
        """Bytes of all weights with ``element`` each, MXFP4 experts and fp8 layers as they are."""
        layers = self.parameters - self.root_parameters
        held = {"mxfp4": (self.packed_parameters, MXFP4_BITS), "fp8": (layers, 8)}
        packed, bits = held.get(self.quantised if keeps_packed else "", (0, 0))
        return int((self.parameters - packed) * element + packed * bits / 8)


def sized(found: FoundConfig, python: str | None = None) -> SizedModel:
    """Count the parameters of a model by its config.json.

    Args:
        python: interpreter whose transformers builds the model; None: the running one.

    Raises:
        UnknownSize: torch or transformers is missing, or cannot build this model.
    """
    text = json.dumps(found.values, sort_keys=True)
    # A process that has transformers already need not start another.
    own = python is None and "transformers.modeling_utils" in sys.modules
    return count(text) if own else _counted(text, python)


@lru_cache
def _counted(config: str, python: str | None) -> SizedModel:
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with TemporaryDirectory() as room:
        if python is not None:  # which finds this package, and no other from here
            (Path(room) / "mismatch").symlink_to(Path(__file__).resolve().parents[1])
            quiet["PYTHONPATH"] = os.pathsep.join(
                [room, *filter(None, [os.environ.get("PYTHONPATH")])]
            )
        try:
            done = subprocess.run(
                [python or sys.executable, "-m", "mismatch.models.sizes"],
                input=config,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                env={**os.environ, **quiet},
            )
        except subprocess.TimeoutExpired as error:
            raise UnknownSize(config, f"it took more than {TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise UnknownSize(config, f"{python}: {error.strerror}") from error
    if done.returncode:
        raise UnknownSize(config, (done.stderr.strip().splitlines() or ["no message"])[-1])
    fields = json.loads(done.stdout.splitlines()[-1])
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return SizedModel(**fields | lists)


@lru_cache
def count(config: str) -> SizedModel:
    """Return the sizes of a model, counted in this process.

    Args:
        config: the text of config.json.
    """
    import torch
    from transformers import AutoConfig

    values = json.loads(config)
    plain = {k: v for k, v in values.items() if k not in ("model_type", "quantization_config")}
    build: Any = auto_class(values["model_type"]).from_config
    try:
        made = AutoConfig.for_model(values["model_type"], **plain)
        with torch.device("meta"):
            model = build(made)
    except Exception as error:  # whatever a family's constructor raises at a config it dislikes
        raise UnknownSize(config, first_line(error)) from error
    read = ModelConfig.of(values)
    described = ModelConfig.of(made)
    blocks = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in blocks]
    in_layers = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    # Routed experts alone: a shared expert is "shared_expert(s).", which every token uses.
    experts = {name: p.numel() for name, p in model.named_parameters() if ".experts." in f".{name}"}
    weights = [p for layer in layers for p in layer.parameters() if p.dim() > 1]
    total = sum(p.numel() for p in model.parameters())
    classes = {type(module).__name__ for layer in layers for module in layer.modules()}
    counted = SizedModel(
        **{
            **asdict(described),
            "quantised": read.quantised,
            "dtype": read.dtype,
            # Families with other names for it: the widest matrix of a layer.
            "width": described.width or max((max(p.shape) for p in weights), default=0),
        },
        parameters=total,
        layer_parameters=max(in_layers, default=0),
        expert_parameters=sum(experts.values()),
        packed_parameters=sum(n for name, n in experts.items() if "bias" not in name),
        root_parameters=total - sum(in_layers),
        largest_tensor=max((p.numel() for p in model.parameters()), default=0),
        biased_experts=any("bias" in name for name in experts),
        recurrent=tuple(sorted(c for c in classes if any(r in c.lower() for r in RECURRENT))),
    )
    # A configuration may name experts that no module has (dense variants of an MoE family).
    return counted if experts else replace(counted, experts=0, top_k=0)


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(count(sys.stdin.read()))))
    except UnknownSize as failure:
        sys.exit(failure.reason)
    except ImportError as failure:
        sys.exit(str(failure))
