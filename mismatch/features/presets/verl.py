"""A user's own verl config, for both sides: what it sets here, and what cannot be reproduced."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from mismatch.engines.registry import engine_infos
from mismatch.errors import MismatchError
from mismatch.features.presets.apply import FollowedFile
from mismatch.features.presets.config_file import ConfigFile, read_config
from mismatch.features.presets.rules import table
from mismatch.specs import CheckSpec

ROOT = "actor_rollout_ref."
MODEL = f"{ROOT}model.path"
COMPLETE = (
    "give the config that hydra saved when the run started, outputs/DATE/TIME/.hydra/config.yaml; "
    "or print it: python -m verl.trainer.main_ppo YOUR_OVERRIDES --cfg job --resolve > config.yaml"
)


def read_verl_config(path: Path, overrides: Sequence[str] = ()) -> ConfigFile:
    """Read ``--framework-config FILE`` with its ``--framework-override`` pairs.

    Raises:
        MismatchError: missing file, invalid YAML (with the line), a config that is not complete,
            or a malformed override.
    """
    source = read_config("--framework-config", path, overrides)
    lacking = [key for key in table("verl_keys")["required"] if source.get(key) is None]
    if "defaults" in source.tree:
        lacking.insert(0, "what its defaults name, other files")
    if lacking:
        fault = f"verl config {path} is not complete: it lacks {', '.join(lacking)}"
        raise MismatchError(fault, COMPLETE)
    return source


def follow_verl(
    source: ConfigFile, spec: CheckSpec, explicit: Collection[str] = ()
) -> FollowedFile:
    """Return the check that a config describes; arguments as of :class:`Followed`.

    Raises:
        MismatchError: a value of the wrong type, an interpolation that leads nowhere, or a
            rollout engine that mismatch does not have; each with the key.
    """
    work = FollowedFile(spec, explicit, source=source, framework="verl")
    # The model is asked for beforehand; response_length is the longest response, resolved.
    work.seen |= {MODEL, "data.max_response_length"}
    key = f"{ROOT}rollout.name"
    name = work.value(key, "text")
    started = {n: info for n, info in engine_infos().items() if info.started}
    engines = {info.verl_name or n: n for n, info in started.items()}
    if name not in engines and "engine" not in explicit:
        fault = f"{source.origin}: {key} is {name}, which mismatch has no engine for"
        fix = f"use one of {', '.join(sorted(engines))}: --framework-override {key}=vllm"
        raise MismatchError(fault, fix)
    work.set(key, name, "engine.engine", engines.get(name, name))
    work.rules()
    # The engine's own arguments win over verl's keys, as in verl.
    prefix = f"{ROOT}rollout.engine_kwargs.{work.spec.rollout.engine.engine}"
    work.options(f"{prefix}.", work.value(prefix, "mapping") or {})
    if files := work.value("data.train_files", "files"):
        key, path = "data.train_files", Path(files[0]).expanduser()
        if {"prompts", "dataset"} & set(explicit):
            work.kept.append(f"{key} gives way to your own prompts")
        elif not path.exists():
            gap = f"{key} = {files[0]} is not on this machine: other prompts are used"
            work.not_reproduced.append(gap)
        else:
            if len(files) > 1:
                work.not_reproduced.append(f"{key}: only the first of {len(files)} files is used")
            work.set(key, files[0], "prompts.dataset", str(path))
            column = work.value("data.prompt_key", "text") or "prompt"
            work.set("data.prompt_key", column, "prompts.prompt_column", column)
    work.finish()
    return work
