"""vLLM serves MXFP4 experts in bf16 or float32 without a copy of the checkpoint.

vLLM computes MXFP4 as it is stored, or refuses it: on CPUs, and in float32. Asked for bf16, it gets
a loader that reads the packed files and hands on dequantised experts, under the names and in the
layout of an unquantised gpt-oss; the configuration says nothing of a quantisation any more.

Every process that loads weights registers the loader: vLLM's workers import worker.py first.
Nothing here imports vLLM until :func:`register` is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from mismatch.engines.base import argument_name, refuse_own
from mismatch.engines.vllm.arguments import OWN_LOADER
from mismatch.engines.vllm.private import device_type, found
from mismatch.models.config import unpacks_mxfp4
from mismatch.models.derived import unpacked
from mismatch.specs import EngineSpec

if TYPE_CHECKING:
    import torch

FORMAT = "mismatch-dequantised-mxfp4"  # vLLM's load_format
LOADERS = "vllm.model_executor.model_loader"


def loader_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` that have the loader used; {}: it is not wanted.

    Raises:
        MismatchError: the user chose another load format.
    """
    if not unpacks_mxfp4(spec):
        return {}
    refuse_own(spec, {}, OWN_LOADER)
    register()
    given = {argument_name(raw): value for raw, value in spec.args}
    overrides = given.get("hf_overrides") or {}
    return {"load_format": FORMAT, "hf_overrides": partial(without_quantisation, overrides)}


def without_quantisation(overrides: dict[str, Any], config: Any) -> Any:
    """Return a model's configuration as of unquantised weights; in place.

    vLLM asks whether the attribute exists, so that None would not do. It pickles this function for
    its core process, and also calls it with an empty configuration.

    Args:
        overrides: the user's own, ``--engine-arg hf_overrides={…}``.
    """
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for name, value in overrides.items():
        part: Any = getattr(config, name, None)
        if isinstance(value, dict) and hasattr(part, "to_dict"):  # the configuration of a part
            part.update(value)
        else:
            setattr(config, name, value)
    return config


@cache
def register() -> None:
    """Make the loader known to the vLLM of this process; nothing where there is no vLLM."""
    loader = found(LOADERS, "DefaultModelLoader")
    registered = found(LOADERS, "register_model_loader")
    if loader is None or registered is None:
        return

    class DequantisedMxfp4(loader):  # type: ignore[misc, valid-type]
        """vLLM's default loader, with experts dequantised on the device that computes."""

        def __init__(self, load_config: Any) -> None:
            known = copy(load_config)
            known.load_format = "safetensors"  # how the default loader reads the files
            super().__init__(known)

        def get_all_weights(
            self, model_config: Any, model: Any
        ) -> Iterator[tuple[str, torch.Tensor]]:
            # Not the device of a parameter, which may be offloaded to the host's memory.
            device = self.load_config.device or device_type()
            weights = super().get_all_weights(model_config, model)
            yield from unpacked(weights, model_config.dtype, device)

    registered(FORMAT)(DequantisedMxfp4)
