"""Models that ship with the package, short names, and how a name becomes a path or a hub id.

The config.json that ships for a short name makes `mismatch doctor`, `mismatch kernels` and
`--dry-run` work without a network; a real run always reads the model's own. They were written from
published copies of config.json; those behind OLMoE from two of these: copies, slime
(scripts/models, 2026-08), Megatron-Bridge, OLMo-core, the defaults of transformers 5.19. Where a
value had no second public source, it is listed as unconfirmed (parameters are checked against the
published count). The table is aliases.json: workers import this
module on Python 3.10, which reads no TOML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError, did_you_mean

EMBEDDED = {name: Path(__file__).parent / name for name in ("tiny-gpt-oss", "tiny-gpt-oss-tools")}
EMBEDDED_PARAMETERS, EMBEDDED_ACTIVE = 2_182_336, 993_472  # of either
CONFIGS = Path(__file__).parent / "configs"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Alias:
    """One short name.

    >>> ALIASES["gpt-oss-20b"].hub_id
    'openai/gpt-oss-20b'

    Attributes:
        parameters: exact count, tied embeddings once, as transformers builds the model: without
            layers that predict several tokens; of Qwen3.5 the language model alone.
        released: how the weights are stored on the hub.
        unconfirmed: fields of the shipped config that rest on one source only.
        active: parameters that one token uses; 0: all (a dense model).
        also: other hub ids with these sizes.
        of: the alias whose shipped config this is, but for ``changes`` and what is ``without``.
    """

    name: str
    hub_id: str
    parameters: int
    released: str = "bf16"
    unconfirmed: Sequence[str] = ()
    active: int = 0
    also: Sequence[str] = ()
    of: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    without: Sequence[str] = ()

    @property
    def config(self) -> dict[str, Any]:
        """The shipped config.json."""
        parsed: dict[str, Any] = json.loads((CONFIGS / f"{self.of or self.name}.json").read_text())
        return {k: v for k, v in {**parsed, **self.changes}.items() if k not in self.without}


def _aliases() -> dict[str, Alias]:
    rows = json.loads(Path(__file__).with_name("aliases.json").read_text("utf-8"))
    return {name: Alias(name, **row) for name, row in rows.items()}


ALIASES = _aliases()


def find_alias(name: str) -> Alias | None:
    """Return the alias of that name, or of that hub id; capitals do not matter."""
    wanted = name.lower()
    for alias in ALIASES.values():
        if wanted in (alias.name, *map(str.lower, (alias.hub_id, *alias.also))):
            return alias
    return None


def resolve_model(name: str) -> str:
    """Return the path or hub id behind `name`.

    In this order: an embedded model's name gives its packaged directory; an existing directory
    gives itself; an alias ("gpt-oss-20b") gives its hub id; a hub id ("org/name") gives itself.

    Raises:
        MismatchError: none of the four; names the nearest.
    """
    if name in EMBEDDED:
        return str(EMBEDDED[name])
    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if name and path.is_dir():
        if (reason := unconverted(path)) is not None:
            raise reason
        if not (path / "config.json").is_file():
            fix = "give a directory in Hugging Face format, as save_pretrained writes it"
            raise MismatchError(f"no config.json in {path}: not a model directory", fix=fix)
        return str(path)
    if path.suffix == ".gguf":
        raise MismatchError(f"{name} is GGUF", fix="give the checkpoint that it was made from")
    alias = None if "/" in name else find_alias(name)
    if alias is not None:
        return alias.hub_id
    if _HUB_ID.fullmatch(name):
        return name
    hint = did_you_mean(name, [*EMBEDDED, *ALIASES], most=3)
    embedded = ", ".join(EMBEDDED)
    raise MismatchError(
        f"model not found: {name!r}",
        f"{hint}use a local directory, a hub id (org/name), an embedded model ({embedded}) or a "
        "short name: docs/reference/models.md lists them",
    )


def named(data: Any) -> Any:
    """JSON data with embedded models by their names, not by where this machine has them.

    >>> named({"model": resolve_model("tiny-gpt-oss"), "other": ["openai/gpt-oss-20b", 3]})
    {'model': 'tiny-gpt-oss', 'other': ['openai/gpt-oss-20b', 3]}
    """
    if isinstance(data, dict):
        return {key: named(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [named(value) for value in data]
    if not isinstance(data, str):
        return data
    # Of any installation: a run may be compared on another machine.
    return next((name for name in EMBEDDED if data.endswith(f"/mismatch/models/{name}")), data)


def unconverted(path: Path) -> MismatchError | None:
    """Recognise a checkpoint as trainers leave it; the fix is the command that converts it.

    The shards of verl's FSDP engine (also from the folders around them), a checkpoint of
    ``torch.distributed.checkpoint`` (torchtitan, NeMo-RL, prime-rl), a LoRA adapter of PEFT, GGUF.
    """
    whole = any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin"))
    if whole and not (path / "adapter_config.json").is_file():
        return None
    for place in (path, path.parent, path / "actor"):
        if any(place.glob("model_world_size_*_rank_*.pt")):
            target = f"{place}-merged"
            return MismatchError(
                f"{place} holds the shards of verl's FSDP engine",
                f"python -m verl.model_merger merge --backend fsdp --local_dir {place} "
                f"--target_dir {target}, then --model {target}",
            )
    if (path / ".metadata").is_file() and any(path.glob("*.distcp")):
        return MismatchError(
            f"{path} is a checkpoint of torch.distributed.checkpoint",
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} model.pt, "
            "load that into the model, and save_pretrained() it with its tokenizer",
        )
    if (path / "adapter_config.json").is_file():
        return MismatchError(
            f"{path} is a LoRA adapter, without its base model",
            f"--model {_base_of(path)} --adapter {path}",
        )
    if any(path.glob("*.gguf")):
        fault = f"{path} holds GGUF, which no trainer reads"
        return MismatchError(fault, "give the checkpoint that it was made from")
    return None


def _base_of(path: Path) -> str:
    """Return the base model that an adapter names; BASE where it names none."""
    try:
        config = json.loads((path / "adapter_config.json").read_text("utf-8"))
        return str(config.get("base_model_name_or_path") or "BASE")
    except (OSError, ValueError, RecursionError, AttributeError):
        return "BASE"
