"""TRL's configuration files: the YAML of a script, and what ``args.to_json_string()`` wrote.

A script's YAML has the keys of several of TRL's classes in one mapping; a JSON file has every field
of ``GRPOConfig``, also what is derived. The names of the fields come from TRL's source, so that a
file can be judged where neither TRL nor torch can be imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError, in_list
from mismatch.run.interpreters import source_files

# Class -> what it says of a run. Their bases count too.
CLASSES = {
    "GRPOConfig": "grpo",
    "ModelConfig": "model",
    "GRPOScriptArguments": "script",
    "DatasetMixtureConfig": "script",
}
FILES = {
    "trl": ("trainer/*_config.py", "scripts/utils.py", "scripts/grpo.py"),
    "transformers": ("training_args.py",),
}
OF_PARSER = frozenset({"env", "config"})  # keys that TrlParser itself takes out of the file
RENAMED = {"torch_dtype": "dtype"}
CLOSE = 0.85  # similarity of a name from which it is taken for a typing error

DEFAULT_ROWS = 2  # of a forward pass, where there is no file
TRLS_ROWS = 8  # its default of per_device_train_batch_size

# What a scoring needs no data, engine, second model, tracker or hub for. Two generations and two
# steps: the batch holds whole groups on any number of ranks.
NEUTRAL: dict[str, Any] = {
    "num_generations": 2,
    "num_generations_eval": None,
    "steps_per_generation": 2,
    "generation_batch_size": None,
    "auto_find_batch_size": False,
    "max_steps": 1,
    "use_vllm": False,
    "beta": 0.0,
    "sync_ref_model": False,
    "do_eval": False,
    "eval_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "resume_from_checkpoint": None,
    "report_to": [],
    "push_to_hub": False,
    "hub_token": None,
    "log_completions": False,
    "log_completions_hub_repo": None,
    "reward_weights": None,
    "parallelism_config": None,
    "deepspeed": None,
    "use_liger_kernel": False,
    "local_rank": -1,
}
# Of these, what would change a log-probability.
MATTERS = ("deepspeed", "use_liger_kernel", "parallelism_config")
QUANTISED = ("load_in_8bit", "load_in_4bit")
# What a script hands from its model's keys to model_init_kwargs (trl/scripts/grpo.py).
OF_MODEL = ("dtype", "attn_implementation")


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of the fields of TRL's classes."""

    grpo: frozenset[str]
    model: frozenset[str]
    script: frozenset[str]


@dataclass(frozen=True, slots=True)
class TrlFile:
    """A configuration, each key with the class that knows it.

    Attributes:
        unknown: keys that no class of TRL has: a script's own.
        variables: names of the environment variables that a script would set.
    """

    grpo: dict[str, Any]
    model: dict[str, Any]
    unknown: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    def options(self) -> dict[str, Any]:
        """Return arguments of ``GRPOConfig`` that score a run's tokens and do nothing else."""
        init = {name: self.model[name] for name in OF_MODEL if name in self.model}
        if "model_revision" in self.model:
            init["revision"] = self.model["model_revision"]
        init |= self.grpo.get("model_init_kwargs") or {}
        neutral = {name: value for name, value in NEUTRAL.items() if name in self.grpo}
        always = {name: NEUTRAL[name] for name in ("num_generations", "steps_per_generation")}
        return self.grpo | neutral | always | {"max_steps": 1, "model_init_kwargs": init}

    def notes(self) -> tuple[str, ...]:
        """Return what is not followed and could change a log-probability, a sentence each."""
        left_out = [name for name in MATTERS if self.grpo.get(name)]
        left_out += [name for name in QUANTISED if self.model.get(name)]
        notes = [f"{name} is not followed" for name in left_out]
        if self.unknown:
            names = in_list(self.unknown, 12)
            notes.append(f"TRL's own classes do not have these keys: {names}; not followed")
        if self.variables:
            notes.append(f"env: {in_list(self.variables, 12)} is set by the caller alone")
        return tuple(notes)


def divided(origin: str, values: Mapping[str, Any], fields: Fields) -> TrlFile:
    """Return a file's values by the class that knows them.

    Raises:
        MismatchError: a key is a typing error of one that TRL has.
    """
    known = fields.grpo | fields.model | fields.script | OF_PARSER
    unknown = tuple(name for name in values if name not in known)
    for name in unknown:
        near = get_close_matches(name, fields.grpo | fields.model, 1, CLOSE)
        if name in RENAMED:
            near = [RENAMED[name]]
        if near:
            fault = f"{origin}: TRL has no key {name}"
            raise MismatchError(fault, f"did you mean {near[0]}? TRL's own parser refuses it too")
    return TrlFile(
        {name: value for name, value in values.items() if name in fields.grpo},
        {name: value for name, value in values.items() if name in fields.model},
        unknown,
        tuple(map(str, values.get("env") or ())),
    )


def fields_of(python: str | None) -> Fields | None:
    """Return the fields that an environment's TRL has, from its source; None: it has no TRL.

    Args:
        python: its interpreter; None: this process's. Nothing is imported there.
    """
    paths = [path for name, patterns in FILES.items()
             for path in source_files(name, python, *patterns)]  # fmt: skip
    found = fields_in(path.read_text("utf-8") for path in paths)
    return found if found.grpo and found.model else None


def fields_in(sources: Iterable[str]) -> Fields:
    """Return the fields of TRL's classes in these Python sources."""
    own: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                own[node.name] = {
                    entry.target.id
                    for entry in node.body
                    if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
                }
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]

    def all_of(name: str) -> set[str]:
        return own.get(name, set()).union(*map(all_of, bases.get(name, ())))

    names: dict[str, set[str]] = {"grpo": set(), "model": set(), "script": set()}
    for name, kind in CLASSES.items():
        names[kind] |= all_of(name)
    return Fields(**{kind: frozenset(each) for kind, each in names.items()})


def require_known_keys(path: str, python: str | None) -> None:
    """Refuse a file that TRL in this environment would refuse; without TRL only what is no file.

    Raises:
        MismatchError: see :func:`mismatch.run.yaml_file.read_mapping` and :func:`divided`.
    """
    from mismatch.run.yaml_file import read_mapping

    values = read_mapping(Path(path), path)
    if fields := fields_of(python):
        divided(path, values, fields)


def in_plan(path: str | None, accelerate: str | None, ranks: int, on_gpu: bool) -> str:
    """Return how TRL's trainer would run, for a plan: distribution, rows, adapter."""
    from mismatch.run.yaml_file import read_mapping

    values = read_mapping(Path(path), path) if path else {}
    kind = "NO" if ranks == 1 else "MULTI_GPU" if on_gpu else "MULTI_CPU"
    if accelerate:
        kind = str(read_mapping(Path(accelerate), accelerate).get("distributed_type", kind))
    elif values.get("fsdp"):
        kind = "FSDP"
    default = TRLS_ROWS if path else DEFAULT_ROWS
    rows = values.get("per_device_train_batch_size") or default
    adapter = ", a new LoRA" if values.get("use_peft") else ""
    return f"TRL's GRPOTrainer (accelerate: {kind}, {rows} rows a pass{adapter})"
