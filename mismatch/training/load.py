"""Load a causal language model under FSDP2 so that no rank ever holds it whole.

transformers' own loader does the reading: it knows each family's checkpoint conversions (experts
stored one by one and fused in memory, MXFP4 …) and slices every tensor on disk down to the local
shard. What we replace, for the time of one ``from_pretrained``, is its sharding step: our
mixed-precision policy, our mesh, and FSDP2 at world size 1 as well (transformers leaves it out).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from mismatch.errors import MismatchError, first_line
from mismatch.models import mxfp4
from mismatch.models.adapters import apply_apart
from mismatch.models.auto_class import auto_class
from mismatch.models.derived import in_form
from mismatch.specs import MasterDtype, TrainSpec, weights_key
from mismatch.training.attention.resolve import ResolvedAttention, resolve_for
from mismatch.training.distributed import MemoryPeak
from mismatch.training.experts import NAME as BOUNDED
from mismatch.training.experts import implementations_for
from mismatch.training.experts import register as register_bounded
from mismatch.training.routing.capture import require_readable
from mismatch.training.routing.interventions import checkpoint_contexts
from mismatch.training.routing.replay import require_interventions_possible
from mismatch.training.scorer import Scorer, torch_dtype
from mismatch.training.sequence_parallel import require_splittable
from mismatch.training.source import (
    TOKENIZER_FILES,
    dequantising,
    model_directory,
    quantisation_of,
    read_config,
    resolve_master,
    skeleton,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A sharded model, ready to score.

    Attributes:
        directory: of the model's files; None if unknown.
        experts: the experts implementation that runs; None for a dense model.
        master_dtype: of the parameters at rest.
        peak_bytes: most memory that loading took on this rank; None if not measured.
        device: of the computation.
        dropout: what the model would drop or jitter in train mode, by name, and no pass does.
        probed: cached results of :meth:`once` for these weights and kernels.
    """

    scorer: Scorer
    spec: TrainSpec
    attention: ResolvedAttention
    experts: str | None
    master_dtype: MasterDtype
    directory: Path | None
    peak_bytes: int | None
    device: torch.device
    dropout: dict[str, float]
    probed: dict[Any, Any] = field(default_factory=dict, compare=False)

    def once(self, key: Any, probe: Callable[[], T]) -> T:
        """Return the cached result of ``probe()`` under this key."""
        if key not in self.probed:
            self.probed[key] = probe()
        result: T = self.probed[key]
        return result


def load(
    spec: TrainSpec, mesh: DeviceMesh, device: torch.device, measure: bool = False
) -> LoadedModel:
    """Load ``spec.model`` sharded over ``mesh``, parameters at rest in ``spec.master_dtype``.

    With ``spec.offload`` they rest in host memory; buffers, which are small, do not.

    Args:
        measure: also measure the peak memory of loading.

    Raises:
        MismatchError: files missing, architecture unknown, weights that do not fit the model, an
            attention or experts implementation that cannot run it.
    """
    files = in_form(spec)
    config, attention = require_runnable(files, device)
    directory = model_directory(files)
    master = resolve_master(files, config)
    files = replace(files, master_dtype=master)
    with MemoryPeak(device, measure) as peak, _our_sharding(files, mesh, device) as wrapped:
        model, info = _from_pretrained(files, attention, config)
        if not wrapped:  # FSDP2 moves and cuts parameter by parameter
            wrapped.append(shard(model, files, mesh))
    missing = sorted(info["missing_keys"])
    if missing:
        raise MismatchError(
            f"{spec.model}: the checkpoint lacks {len(missing)} of the model's tensors, "
            f"e.g. {missing[0]}; they would be random",
            "use a complete checkpoint of this architecture",
        )
    scorer = wrapped[0]
    _settle(scorer, torch_dtype(master), device)
    running = model.config._attn_implementation
    if running != attention.implementation:
        fault = f"attention {attention.implementation} was resolved, but {running} runs"
        raise MismatchError(fault, "name the kernel: --attention eager or sink-sdpa")
    experts = model.config._experts_implementation if scorer.moe else None
    if spec.adapter is not None and spec.adapter_as == "own" and directory is not None:
        apply_apart(scorer.model, spec.adapter, directory, torch_dtype(spec.dtype), device)
    return LoadedModel(
        scorer, spec, attention, experts, master, directory, peak.bytes, device, _silence(scorer)
    )


def _silence(scorer: Scorer) -> dict[str, float]:
    """Set every dropout and jitter to 0, as RL trainers do; return those that modules had.

    With one on, log-probabilities in train mode are random.
    """
    found = {}
    for path, module in scorer.model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            found[path.rpartition(".")[2]], module.p = module.p, 0.0
        found |= _set_to_zero(module)
    for config in (scorer.model.config, scorer.decoder_config):  # read by forward of some models
        _set_to_zero(config)
    return found


def _set_to_zero(holder: Any) -> dict[str, float]:
    random = {
        name: value
        for name, value in vars(holder).items()
        if isinstance(value, float) and value > 0 and re.search("drop|jitter", name)
    }
    for name in random:
        setattr(holder, name, 0.0)
    return random


def switched(loaded: LoadedModel, spec: TrainSpec) -> LoadedModel | None:
    """Return the same weights under the kernels of another spec; None: they must be loaded again.

    transformers looks attention and experts implementations up at every forward pass, so switching
    them needs no reload.

    Raises:
        MismatchError: see :func:`require_runnable`.
    """
    if weights_key(loaded.spec) != weights_key(spec):
        return None
    model: Any = loaded.scorer.model
    _require_experts(spec.experts, model)
    device = loaded.device
    attention = resolve_for(spec.attention, model, device, torch_dtype(spec.autocast or spec.dtype))
    experts = None if spec.experts == "auto" else spec.experts
    if attention.implementation != model.config._attn_implementation:
        if not model._can_set_attn_implementation():
            return None
        model.set_attn_implementation(attention.implementation)
    if loaded.scorer.moe:
        name = model.get_correct_experts_implementation(experts)
        if name != model.config._experts_implementation:
            model.set_experts_implementation(name)
        if model.config._experts_implementation != name:
            return None
    configs = (model.config, loaded.scorer.decoder_config)
    if any(config._attn_implementation != attention.implementation for config in configs):
        return None
    running = model.config._experts_implementation if loaded.scorer.moe else None
    return replace(loaded, spec=spec, attention=attention, experts=running, probed={})


def require_runnable(
    spec: TrainSpec, device: torch.device | None = None
) -> tuple[Any, ResolvedAttention]:
    """Return the model's configuration and the kernel that will run, before any weight is loaded.

    Args:
        device: where it will run; None: kernels are not tried.

    Raises:
        MismatchError: configuration or tokenizer missing, architecture unknown, an attention or
            experts implementation that cannot run it, routing that cannot be captured.
    """
    config = read_config(spec)
    local = Path(spec.model)
    if local.is_dir() and not any((local / name).exists() for name in TOKENIZER_FILES):
        fault = f"{local} holds no tokenizer ({', '.join(TOKENIZER_FILES)})"
        fix = "copy the tokenizer's files next to the weights: tokenizer.save_pretrained(DIRECTORY)"
        raise MismatchError(fault, fix)
    bare = skeleton(config, spec.trust_remote_code)
    attention = resolve_for(spec.attention, bare, device, torch_dtype(spec.autocast or spec.dtype))
    _require_experts(spec.experts, bare)
    if spec.routing:
        require_readable(config, bare)
    require_interventions_possible(spec, bare)
    require_splittable(spec, config)
    return config, attention


def resident_share(scorer: Scorer) -> float:
    """Return the share of the model's parameters that this rank holds, from its local shards."""
    total = local = 0
    for parameter in scorer.parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        total += parameter.numel()
        local += part.numel()
    return local / total


def _from_pretrained(spec: TrainSpec, attention: ResolvedAttention, config: Any) -> tuple[Any, Any]:
    method = quantisation_of(config)
    if method not in ("", "mxfp4"):
        fault = f"{spec.model} is quantised ({method}); a trainer needs weights in full precision"
        raise MismatchError(
            fault, "give the unquantised checkpoint, or its values: --weights train=bf16"
        )
    options = dequantising(config)
    if loads_shards():
        from transformers.distributed.configuration_utils import DistributedConfig

        options["distributed_config"] = DistributedConfig()
    if spec.experts != "auto":
        options["experts_implementation"] = spec.experts
    try:
        pair: Any = auto_class(config.model_type).from_pretrained(
            spec.model,
            revision=spec.revision,
            dtype=torch_dtype(spec.master_dtype),
            attn_implementation=attention.implementation,
            trust_remote_code=spec.trust_remote_code,
            output_loading_info=True,
            **options,
        )
        return pair[0], pair[1]
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise MismatchError(
            f"cannot load {spec.model}: {first_line(error)}",
            "check that the weights (*.safetensors and their index) are complete and match "
            "config.json",
        ) from error


def loads_shards() -> bool:
    """Return whether transformers' loader reads shards alone, as it does from 5.10 on.

    An older one reads the whole model into every rank's host memory.
    """
    from transformers import PreTrainedModel

    return hasattr(PreTrainedModel, "maybe_distribute_model")


@contextmanager
def _our_sharding(
    spec: TrainSpec, mesh: DeviceMesh, device: torch.device
) -> Iterator[list[Scorer]]:
    """Within the block, ``from_pretrained`` shards with our policy; the root lands in the list."""
    import transformers.integrations.mxfp4 as mxfp4_integration
    import transformers.modeling_utils as modeling

    wrapped: list[Scorer] = []

    def prepare(cls: Any, config: Any, /, **_: Any) -> tuple[Any, Any, None]:
        return config, torch.device("cpu") if spec.offload else device, None

    def distribute(cls: Any, model: Any, *_: Any, **__: Any) -> Any:
        wrapped.append(shard(model, spec, mesh))
        return model

    def dequantise(
        blocks: torch.Tensor, scales: torch.Tensor, *device: object
    ) -> torch.nn.Parameter:
        return torch.nn.Parameter(mxfp4.dequantise(blocks, scales, torch_dtype(spec.master_dtype)))

    replaced: list[tuple[Any, str, Any]] = [
        # It reserves the memory of whole tensors, on every rank.
        (modeling, "caching_allocator_warmup", lambda *args, **kwargs: None),
        (mxfp4_integration, "dequantize_convertops", dequantise),
    ]
    if loads_shards():
        replaced += [
            (modeling.PreTrainedModel, "prepare_distribute_model", classmethod(prepare)),
            (modeling.PreTrainedModel, "maybe_distribute_model", classmethod(distribute)),
        ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield wrapped


def shard(model: Any, spec: TrainSpec, mesh: DeviceMesh) -> Scorer:
    """Wrap a model that has no weights yet: FSDP2 per decoder layer, and at the root."""
    scorer = Scorer(model)
    policy = MixedPrecisionPolicy(param_dtype=torch_dtype(spec.dtype), reduce_dtype=torch.float32)
    rest = CPUOffloadPolicy(mesh.device_type == "cuda") if spec.offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": rest}
    blocks = set(model._no_split_modules or ())
    layers = [m for m in scorer.decoder.modules() if type(m).__name__ in blocks]
    if not layers:
        fault = f"{model.config.model_type} does not say which of its modules are decoder layers"
        fix = "use an architecture of transformers that declares _no_split_modules"
        raise MismatchError(fault, fix)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True, **options)
    if model.supports_gradient_checkpointing:
        # In train mode only: a forward with gradients then keeps one hidden state per layer.
        # The context function applies interventions on routers again when a layer is recomputed.
        recompute = {"use_reentrant": False, "context_fn": checkpoint_contexts}
        model.gradient_checkpointing_enable(recompute)
    # The root is resharded after each pass too: embedding and head are a large share.
    fully_shard(scorer, reshard_after_forward=True, **options)
    return scorer


def _settle(scorer: Scorer, dtype: torch.dtype, device: torch.device) -> None:
    """Cast all parameters to the master dtype: FSDP2 refuses mixed dtypes within a block.

    Dequantised experts, and modules that a family keeps in float32, are loaded in other dtypes.
    Buffers move to the device: with offloading all is loaded to the CPU, and FSDP2 moves
    parameters alone.
    """
    for module in scorer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dtype != dtype and parameter.is_floating_point():
                cast = torch.nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                setattr(module, name, cast)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.device != device:
                module._buffers[name] = buffer.to(device)
    scorer.model.tie_weights(recompute_mapping=False)


def _require_experts(name: str, bare: Any) -> None:
    if name == "auto":
        return
    possible = implementations_for(bare)
    if not possible:
        fault = f"--experts-implementation {name}: {bare.config.model_type} has no experts"
        raise MismatchError(fault, "leave it out")
    if possible == ["eager"] and name != "eager":  # transformers would take it, and run its loop
        raise MismatchError(
            f"--experts-implementation {name}: the experts of {bare.config.model_type} are not "
            "behind transformers' interface; the model's loop would run",
            "leave it out",
        )
    if name == BOUNDED:
        register_bounded()
    try:
        bare.get_correct_experts_implementation(name)
    except (ValueError, ImportError) as error:
        fault = f"--experts-implementation {name} cannot run: {first_line(error)}"
        raise MismatchError(fault, f"use auto, {', '.join(possible)}") from error
