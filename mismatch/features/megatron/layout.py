"""How a Megatron run spreads its model over ranks, from a few words or the framework's own file.

``--scorer-config`` of ``--scorer megatron`` takes ``tp=2,ep=2`` or a file: verl's composed YAML
(``actor_rollout_ref.actor.megatron``), NeMo-RL's (``policy.megatron_cfg``), or a script with
slime's arguments. Nothing here imports torch: a check is refused before anything starts.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.errors import MismatchError, did_you_mean
from mismatch.features.megatron.names import Shape, shape_of

if TYPE_CHECKING:
    from mismatch.specs import TrainSpec

# Name here -> what Megatron's arguments, verl and NeMo-RL call it.
KEYS = {
    "tp": "tensor_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "sp": "sequence_parallel",
    "dispatcher": "moe_token_dispatcher_type",
    "router": "moe_router_dtype",
}
DISPATCHERS = ("alltoall", "allgather", "flex")
ROUTERS = ("fp32", "fp64")
FORM = "--scorer-config tp=2,ep=2 (also etp, pp, cp, sp, dispatcher, router), or a file"
# Where verl, NeMo-RL and verl's free settings of Megatron keep them; the last that is there wins.
SECTIONS = (
    "policy.megatron_cfg",
    "actor_rollout_ref.actor.megatron",
    "actor_rollout_ref.actor.megatron.override_transformer_config",
)


@dataclass(frozen=True)
class Layout:
    """Sizes are ranks.

    Attributes:
        etp: ranks that share one expert's matrices; 0: Megatron's default, which is tp.
        sp: sequence parallelism: norms see a part of each sequence.
        dispatcher: how tokens travel to their experts.
        router: dtype of the routers' scores; "": that of the model.
    """

    tp: int = 1
    ep: int = 1
    etp: int = 0
    pp: int = 1
    cp: int = 1
    sp: bool = False
    dispatcher: str = "alltoall"  # of verl, NeMo-RL and slime's scripts; Megatron's is allgather
    router: str = ""

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    def __str__(self) -> str:
        sizes = f"TP {self.tp}, EP {self.ep}, ETP {self.expert_tp}, PP {self.pp}, CP {self.cp}"
        return f"{sizes}{', sequence parallel' if self.sp else ''}, {self.dispatcher}"


def read_layout(given: str | None, overrides: Sequence[str] = ()) -> Layout:
    """Return the layout that ``--scorer-config`` gives.

    Args:
        overrides: ``key=value`` over a file, as verl takes them.

    Raises:
        MismatchError: an unknown word, a size that is none, or a file without Megatron's settings.
    """
    if not given:
        return Layout()
    if not Path(given).is_file() and re.fullmatch(r"[\w=,. ]+", given) and "=" in given:
        values = {}
        for word in given.split(","):
            name, _, value = word.strip().partition("=")
            if name not in KEYS:
                near = did_you_mean(name, KEYS)
                raise MismatchError(f"--scorer-config {given}: no {name}", f"{near}{FORM}")
            values[name] = value
        return _layout(values, f"--scorer-config {given}")
    path = Path(given)
    from mismatch.run.files import LARGEST_YAML, read_regular

    try:
        text = read_regular(path, LARGEST_YAML).decode("utf-8")
    except (OSError, ValueError) as error:
        raise MismatchError(f"--scorer-config {given}: {error}", FORM) from error
    found = _arguments(text)
    if not found:
        from mismatch.run.yaml_file import read_mapping

        tree = read_mapping(path, f"--scorer-config {given}")
        for section in SECTIONS:
            node: Any = tree
            for key in section.split("."):
                node = node.get(key) if isinstance(node, Mapping) else None
            if isinstance(node, Mapping):
                found |= {
                    name: node[key] for name, key in KEYS.items() if node.get(key) is not None
                }
        for text in overrides:
            place, _, value = text.lstrip("+").partition("=")
            section, _, key = place.rpartition(".")
            name = next((name for name, own in KEYS.items() if own == key), "")
            if name and section in SECTIONS and value.lower() not in ("null", "none", ""):
                found[name] = value
    if not found:
        fault = f"--scorer-config {given} has no settings of Megatron"
        raise MismatchError(fault, f"it needs {' or '.join(SECTIONS[:2])}, or Megatron's arguments")
    return _layout(found, f"--scorer-config {given}")


def _arguments(text: str) -> dict[str, str]:
    """Return Megatron's arguments in a script, as slime and miles take them."""
    found = {}
    for name, key in KEYS.items():
        flag = f"--{key.replace('_', '-')}"
        pattern = rf"^[^#\n]*{flag}(?=[\s=)\\]|$)(?:[ =]+([\w.]+))?"
        if match := re.search(pattern, text, re.MULTILINE):
            found[name] = match[1] or "true"
    return found


def _layout(values: Mapping[str, Any], where: str) -> Layout:
    taken: dict[str, Any] = {}
    for field in fields(Layout):
        if field.name not in values:
            continue
        value, text = values[field.name], str(values[field.name]).lower()
        if field.name == "sp":
            good = text in ("true", "false", "1", "0")
            value = text in ("true", "1")
        elif isinstance(field.default, int):
            good = text.isdigit() and int(text) > 0
            value = int(text) if good else 0
        else:
            known = DISPATCHERS if field.name == "dispatcher" else ROUTERS
            good, value = text in known, text
        if not good:
            fault = f"{where}: {KEYS[field.name]} is {values[field.name]}"
            raise MismatchError(fault, "write the number or the word that the run uses")
        taken[field.name] = value
    return Layout(**taken)


def require_fit(layout: Layout, shape: Shape, ranks: int) -> None:
    """Refuse a layout that Megatron-Core cannot build this model in.

    Args:
        ranks: of the whole world.

    Raises:
        MismatchError: a size does not divide what it has to.
    """
    layers = shape.number("num_hidden_layers")
    widths = {0: shape.number("intermediate_size"), 1: shape.expert_width}
    dense = not shape.experts or not all(shape.is_moe(layer) for layer in range(layers))
    model = layout.tp * layout.pp * layout.cp
    experts = layout.expert_tp * layout.ep * layout.pp
    checks = [
        ("tp", layout.tp, "attention heads", shape.heads),
        ("tp", layout.tp, "key and value heads", shape.groups),
        ("tp", layout.tp, "features of an MLP", widths[0] if dense else 0),
        ("ep", layout.ep, "experts", shape.experts),
        ("etp", layout.expert_tp, "features of an expert", widths[1] if shape.experts else 0),
        ("pp", layout.pp, "layers", layers),
        ("tp × pp × cp", model, "ranks (--nproc-per-node)", ranks),
        ("etp × ep × pp", experts if shape.experts else 1, "ranks (--nproc-per-node)", ranks),
    ]
    if layout.ep > 1 and not shape.experts:
        raise MismatchError(f"{layout} for a dense model, which has no experts", "drop ep")
    if shape.config["model_type"] == "gpt_oss" and layout.expert_tp > 1:
        fault = f"{layout}: Megatron-Core cuts no experts that have biases, as gpt-oss's have"
        raise MismatchError(fault, "add etp=1")
    for name, size, what, count in checks:
        if count % size:
            fault = f"--scorer megatron, {layout}: {name} = {size} does not divide {count} {what}"
            raise MismatchError(fault, f"choose a size that divides {count}")


def require(spec: TrainSpec, ranks: int) -> None:
    """Refuse, before anything starts, what Megatron-Core cannot score.

    Raises:
        MismatchError: an unknown layout or family, one that does not fit, or a checkpoint of
            another shape.
    """
    from mismatch.models.config import find_config

    layout = read_layout(spec.scorer_config, spec.scorer_overrides)
    try:
        found = find_config(spec.model, spec.revision)
    except MismatchError:
        return  # not on this machine yet: the ranks judge it
    shape = shape_of(found.values)
    require_fit(layout, shape, ranks)
    if Path(spec.model).is_dir():
        require_tensors(Path(spec.model), shape)


def headers(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return the file and the shape of every tensor of a checkpoint, from its files' headers.

    Raises:
        MismatchError: no safetensors, or a damaged file.
    """
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with open(path, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                entries = json.loads(file.read(min(length, 100_000_000)))
            entries.pop("__metadata__", None)
            found |= {name: (path, tuple(each["shape"])) for name, each in entries.items()}
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise MismatchError(f"{path} is damaged: {error}", "download it again") from error
    if not found:
        fix = "give the checkpoint in Hugging Face's format"
        raise MismatchError(f"{folder} holds no model*.safetensors", fix)
    return found


def require_tensors(folder: Path, shape: Shape) -> None:
    """Refuse a checkpoint whose tensors are not those of its configuration.

    Raises:
        MismatchError: a tensor that is missing, of another shape, or known to no table.
    """
    expected = shape.tensors()
    stored = {name: size for name, (_, size) in headers(folder).items()}
    if shape.config.get("tie_word_embeddings"):
        stored.pop("lm_head.weight", None)
    for name in sorted(expected.keys() | stored.keys()):
        wanted, there = expected.get(name), stored.get(name)
        if wanted != there:
            ours = f"of shape {list(there)}" if there else "missing"
            asked = f"asks for {list(wanted)}" if wanted else "knows no such tensor"
            fault = f"{folder}: {name} is {ours}, and config.json {asked}"
            raise MismatchError(fault, "use the configuration and the weights of one checkpoint")
