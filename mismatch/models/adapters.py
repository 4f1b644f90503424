"""A LoRA adapter as PEFT saves it, and what it makes of a checkpoint's parameters.

Merging adds scale x B A to a weight, computed in float32 and stored in the checkpoint's dtype; for
passes in float32 it is stored as computed. An adapter whose every tensor does not find its
parameter is refused, and so is whatever is more than that sum (DoRA, biases, other initial
weights): merged here it would be another model.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.errors import MismatchError
from mismatch.facts import SideFacts
from mismatch.models.config import find_config, read_config
from mismatch.models.digests import file_sha256
from mismatch.specs import AS_STORED, Adapter, EngineSpec, TrainSpec

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
PREFIX = "base_model.model."
MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.weight)?")
SWAPPED = str.maketrans("AB", "BA")
WRAPPED = ".base_layer"
OWN = re.compile(r"\.(?:base_layer|modules_to_save)(?=\.)")  # in names of whole tensors
EXPERTS_AXES = 3  # [E, in, out]
# Settings of PEFT with which an adapter is more than a sum of two matrices' products.
MORE = {
    "use_dora": "DoRA",
    "lora_bias": "separate biases",
    "layer_replication": "repeated layers",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "alora_invocation_tokens": "aLoRA",
    "trainable_token_indices": "single rows of the embeddings",
}
OTHER_BASE = re.compile("pissa|olora|corda|loftq", re.IGNORECASE)  # initial weights that change W
TIED = ("embed_tokens.weight", "lm_head.weight")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter makes of one parameter: W + scale x B A, or another W.

    Attributes:
        a: name in the adapter's file, of A or of the whole new parameter.
        b: name of B; "": the parameter is replaced.
        scale: alpha / r, or alpha / sqrt(r) with rsLoRA.
        turned: the parameter is stored [in, out].
    """

    a: str
    b: str = ""
    scale: float = 1.0
    turned: bool = False


def find_adapter(text: str) -> Adapter:
    """Return the adapter in a directory, with the digest of its files.

    Raises:
        MismatchError: no directory, or one without an adapter that can be merged.
    """
    path = Path(text).expanduser()
    read_config_of(path)
    digest = hashlib.sha256(json.dumps(sorted(adapter_files(path).items())).encode())
    return Adapter(str(path), digest.hexdigest()[:12])


def adapter_files(path: str | Path) -> dict[str, str]:
    """Return sha256 of an adapter's files, under names that no base model's file has."""
    return {f"adapter/{name}": file_sha256(Path(path) / name) for name in FILES}


def adapter_facts(adapter: Adapter | None, way: str | None) -> SideFacts:
    """Return what a fingerprint says of an adapter; {} without one."""
    if adapter is None:
        return {}
    name = Path(adapter.path).name
    return {"adapter": {"name": name, "digest": adapter.digest, "as": way or "merged"}}


def merge_first(path: str | Path) -> str:
    """Return the command that merges an adapter with PEFT, as a fix."""
    merged = f"{path}-merged"
    return (
        'python -c "from peft import AutoPeftModelForCausalLM as Model; Model.from_pretrained('
        f"'{path}').merge_and_unload().save_pretrained('{merged}')\", copy the base model's "
        f"tokenizer there, then --model {merged}"
    )


def read_config_of(path: Path) -> dict[str, Any]:
    """Return an adapter's configuration.

    Raises:
        MismatchError: no adapter, or more than a LoRA adapter's matrices.
    """
    if missing := [name for name in FILES if not (path / name).is_file()]:
        raise MismatchError(
            f"no {missing[0]} in {path}: not an adapter as PEFT saves it",
            "give the directory that save_pretrained wrote; of the hub's: hf download ID "
            "--local-dir DIR",
        )
    config = read_config(path, CONFIG)
    kind, bias = config.get("peft_type"), config.get("bias") or "none"
    more = [words for key, words in MORE.items() if config.get(key)]
    if kind != "LORA":
        more = [f"{kind}, not LORA"]
    elif bias != "none":
        more.append(f"bias: {bias}")
    elif OTHER_BASE.search(str(config.get("init_lora_weights"))):
        more.append(f"init_lora_weights: {config['init_lora_weights']}, which changes the base")
    if more:
        raise MismatchError(f"the adapter {path} has {', '.join(more)}", merge_first(path))
    return config


def rank_of(path: str | Path) -> int:
    """Return the largest rank of an adapter's matrices."""
    config = read_config(Path(path), CONFIG)
    return max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])


def changes(path: str | Path, shapes: Shapes, tied: bool = False) -> dict[str, Change]:
    """Return what an adapter changes in a checkpoint, by the parameter's name.

    Args:
        shapes: of all of the checkpoint's tensors.
        tied: its head is its embeddings.

    Raises:
        MismatchError: a tensor of the adapter that has no counterpart, or of another shape.
    """
    path = Path(path)
    config, held = read_config_of(path), stored_shapes(path / WEIGHTS)
    found: dict[str, Change] = {}
    for key, shape in held.items():
        name = key.removeprefix(PREFIX)
        match = MATRIX.fullmatch(name)
        if match is None:
            target, change, made = re.sub(OWN, "", name), Change(key), shape
        else:
            other = key[: key.rindex("lora_")] + key[key.rindex("lora_") :].translate(SWAPPED)
            if other not in held:
                raise _unfit(path, key, f"there is no {other.removeprefix(PREFIX)}")
            if match["side"] == "B":
                continue
            target = _parameter(match["module"], config, shapes)
            whole = shapes.get(target, ())
            experts = whole[0] if len(whole) == EXPERTS_AXES else 0
            rank, scale = _scale(config, target.removesuffix(".weight"))
            if shape[0] != rank * (experts or 1):
                raise _unfit(path, key, f"it has {shape[0]} rows, which is no rank of {rank}")
            turned = bool(match["embedding"] or config.get("fan_in_fan_out") or experts)
            change = Change(key, other, scale, turned)
            made = (shape[1], held[other][0]) if turned else (held[other][0], shape[1])
            made = (experts, *made) if experts else made
        if target not in shapes:
            raise _unfit(path, key, f"the checkpoint has no {target}")
        if made != shapes[target]:
            raise _unfit(path, key, f"{target} is {list(shapes[target])}, not {list(made)}")
        if tied and target.endswith(TIED):
            raise _unfit(path, key, "head and embeddings are one parameter of this checkpoint")
        found[target] = change
    return found


def merged(
    change: Change, tensor: torch.Tensor, held: Callable[[str], torch.Tensor], exact: bool = False
) -> torch.Tensor:
    """Return a parameter with its adapter, in the parameter's shape and dtype.

    Args:
        tensor: [out, in]; [in, out] where ``change.turned``; experts [E, in, out].
        held: returns a tensor of the adapter's file by name: A [r, in] and B [out, r]; of
            experts A [E r, in] and B [out, r E], as PEFT lays them out.
        exact: return float32.
    """
    import torch

    a, dtype = held(change.a), torch.float32 if exact else tensor.dtype
    if not change.b:
        return a.to(dtype)
    a, b = a.float(), held(change.b).float()
    if tensor.ndim == EXPERTS_AXES:
        parts = a.reshape(len(tensor), -1, a.shape[1]), b.reshape(len(b), -1, len(tensor))
        delta = torch.einsum("eri,ore->eio", *parts)
    else:
        delta = (b @ a).T if change.turned else b @ a
    return (tensor.float() + change.scale * delta).to(dtype)


def with_adapter(
    adapter: Adapter, base: Path, tensors: Iterable[tuple[str, torch.Tensor]], exact: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a checkpoint, merged where the adapter changes it.

    Raises:
        MismatchError: as :func:`changes`.
    """
    from safetensors import safe_open

    found = changes_of(adapter, base)
    with safe_open(Path(adapter.path) / WEIGHTS, framework="pt") as file:
        for name, tensor in tensors:
            change = found.get(name)
            yield name, tensor if change is None else merged(change, tensor, file.get_tensor, exact)


def changes_of(adapter: Adapter, base: Path) -> dict[str, Change]:
    """Return what an adapter changes in the checkpoint of a directory; see :func:`changes`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(base.glob("*.safetensors")):
        shapes |= stored_shapes(path)
    tied = bool(read_config(base).get("tie_word_embeddings", False))
    return changes(adapter.path, shapes, tied)


def is_of_linear_layers(adapter: Adapter) -> bool:
    """Return whether every tensor of an adapter is a matrix of one linear layer or embedding."""
    names = [name.removeprefix(PREFIX) for name in stored_shapes(Path(adapter.path) / WEIGHTS)]
    found = [MATRIX.fullmatch(name) for name in names]
    return all(m is not None and ".experts" not in f"{m['module']}." for m in found)


def apply_apart(
    model: torch.nn.Module, adapter: Adapter, base: Path, dtype: torch.dtype, device: torch.device
) -> None:
    """Have each layer add its adapter's part to its output: x A^T (scale x B)^T, in ``dtype``.

    Engines that apply an adapter themselves round so: the part alone, then the sum. A layer with
    merged weights rounds once.

    Raises:
        MismatchError: as :func:`changes`, or a parameter that no layer of the model has.
    """
    import torch
    from safetensors import safe_open

    layers, linear = dict(model.named_modules()), torch.nn.functional.linear

    def adding(a: torch.Tensor, b: torch.Tensor) -> Callable[..., torch.Tensor]:
        def hook(layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
            if isinstance(layer, torch.nn.Embedding):
                return output + linear(torch.nn.functional.embedding(inputs[0], a.T), b)
            return output + linear(linear(inputs[0], a), b)

        return hook

    with safe_open(Path(adapter.path) / WEIGHTS, framework="pt") as file:
        for name, change in changes_of(adapter, base).items():
            layer = layer_of(layers, name.removesuffix(".weight"))
            if layer is None or not change.b:
                raise _unfit(Path(adapter.path), change.a, f"no layer of the model holds {name}")
            scaled = file.get_tensor(change.b).float() * change.scale
            matrices = (m.to(device, dtype) for m in (file.get_tensor(change.a), scaled))
            layer.register_forward_hook(adding(*matrices))


def layer_of(layers: Mapping[str, Any], name: str) -> Any:
    """Return the layer of a checkpoint's name; a family may hold it under another prefix.

    None where no layer, or more than one, has its last parts.
    """
    tail = name
    while tail and tail not in layers:
        found = [own for own in layers if own.endswith(f".{tail}")]
        if found:
            return layers[found[0]] if len(found) == 1 else None
        tail = tail.partition(".")[2]
    return layers.get(tail) if tail else None


def require_adapter(spec: EngineSpec | TrainSpec) -> None:
    """Refuse, before anything starts, an adapter that cannot be merged into a spec's model.

    Raises:
        MismatchError: its files are not those that the spec names, the base is quantised or is to
            be served in another form, or as :func:`changes`, where the base is on this machine.
    """
    adapter = spec.adapter
    if adapter is None:
        return
    if find_adapter(adapter.path).digest != adapter.digest:
        raise MismatchError(
            f"the adapter {adapter.path} is no longer the one of this run ({adapter.digest})",
            "start a new run, or bring its files back",
        )
    try:
        found = find_config(spec.model, spec.revision)
    except MismatchError:
        return  # what is not on this machine is merged with its weights
    quantised = found.values.get("quantization_config")
    if quantised or spec.weights != AS_STORED:
        what = "is quantised" if quantised else f"is asked for as {spec.weights}"
        raise MismatchError(
            f"{spec.model} {what}: an adapter can only be merged into bf16, fp16 or fp32 weights",
            "name that checkpoint with --model" if quantised else "drop that flag, or --adapter",
        )
    if found.weights is not None and any(found.weights.glob("*.safetensors")):
        changes_of(adapter, found.weights)


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return shapes of a safetensors file's tensors, from its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise MismatchError(f"{path} cannot be read: {error}", "fetch it again") from error


def _parameter(module: str, config: Mapping[str, Any], shapes: Shapes) -> str:
    """Return the parameter that matrices of this module change.

    PEFT wraps a module once for each of its parameters (``target_parameters``): the first, of
    fused experts gate_up_proj, is the innermost.
    """
    if module.endswith(f".experts{WRAPPED}"):
        return f"{module.removesuffix(WRAPPED)}.gate_up_proj"
    if f"{module}.weight" in shapes or not module.endswith(".experts"):
        return f"{module}.weight"
    leaves = {name.rpartition(".")[2] for name in config.get("target_parameters") or ()}
    return f"{module}.{'gate_up_proj' if leaves == {'gate_up_proj'} else 'down_proj'}"


def _scale(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return rank, and the factor of B A, of one module; the first pattern that fits decides."""

    def of(pattern: str, default: str) -> Any:
        for key, value in (config.get(pattern) or {}).items():
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        return config[default]

    rank, alpha = int(of("rank_pattern", "r")), float(of("alpha_pattern", "lora_alpha"))
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _unfit(path: Path, name: str, why: str) -> MismatchError:
    what = f"the adapter {path} does not fit the model: {name.removeprefix(PREFIX)}: {why}"
    return MismatchError(what, f"give the adapter's own base as --model; or {merge_first(path)}")
