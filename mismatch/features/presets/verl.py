"""A user's own verl config, for both sides: what it sets here, and what cannot be reproduced."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from mismatch.engines.registry import engine_infos
from mismatch.errors import MismatchError
from mismatch.features.presets.apply import Followed, Work
from mismatch.features.presets.config_file import MISSING, ConfigFile, read_config
from mismatch.features.presets.frameworks import get_preset
from mismatch.features.presets.rules import read_keys, typed
from mismatch.specs import CheckSpec

FLAG = "--verl-config"
ROOT = "actor_rollout_ref."
MODEL = f"{ROOT}model.path"
COMPLETE = (
    "give the config that hydra saved when the run started, outputs/DATE/TIME/.hydra/config.yaml; "
    "or print it: python -m verl.trainer.main_ppo YOUR_OVERRIDES --cfg job --resolve > config.yaml"
)


def read_verl_config(path: Path, overrides: Sequence[str] = ()) -> ConfigFile:
    """Read ``--verl-config FILE`` with its ``--verl-override`` pairs.

    Raises:
        MismatchError: missing file, invalid YAML (with the line), a config that is not complete,
            or a malformed override.
    """
    source = read_config(FLAG, path, overrides)
    lacking = [key for key in read_keys("verl").required if source.get(key) is None]
    if "defaults" in source.tree:
        lacking.insert(0, "what its defaults name, other files")
    if lacking:
        fault = f"verl config {path} is not complete: it lacks {', '.join(lacking)}"
        raise MismatchError(fault, COMPLETE)
    return source


def follow_verl(
    source: ConfigFile,
    spec: CheckSpec,
    explicit: Collection[str] = (),
    packages: frozenset[str] = frozenset(),
    cpu_engine: bool = False,
) -> Followed:
    """Return the check that a config describes.

    Args:
        explicit: command-line parameters that the user has given; they win.
        packages: installed kernel packages.
        cpu_engine: the engine is vLLM's CPU build.

    Raises:
        MismatchError: a value of the wrong type, an interpolation that leads nowhere, or a
            rollout engine that mismatch does not have; each with the key.
    """
    work = _Verl(source, read_keys("verl"), spec, explicit, packages, cpu_engine)
    # The model is asked for beforehand; response_length is the longest response, resolved.
    work.seen |= {MODEL, "data.max_response_length"}
    work.engine()
    work.rules()
    work.engine_kwargs()
    if spec.train.scorer != "verl":  # verl's code reads the budget itself
        work.micro_batch()
    work.prompts()
    return work.result(get_preset("verl"))


@dataclass
class _Verl(Work):
    """What is verl's alone."""

    def engine(self) -> None:
        key = f"{ROOT}rollout.name"
        name = self.value(key, "text")
        started = {n: info for n, info in engine_infos().items() if info.started}
        engines = {info.verl_name or n: n for n, info in started.items()}
        if name not in engines and "engine" not in self.explicit:
            fault = f"{self.source.origin}: {key} is {name}, which mismatch has no engine for"
            fix = f"use one of {', '.join(sorted(engines))}: --verl-override {key}=vllm"
            raise MismatchError(fault, fix)
        self.set(key, name, "engine.engine", engines.get(name, name))

    def engine_kwargs(self) -> None:
        """Follow the engine's own arguments; they win over verl's keys, as in verl."""
        prefix = f"{ROOT}rollout.engine_kwargs.{self.spec.rollout.engine.engine}"
        own = {rule.key: rule for rule in self.keys.own_arguments}
        for option, value in (self.value(prefix, "mapping") or {}).items():
            key = f"{prefix}.{option}"
            if value in (None, MISSING):
                continue
            if option in own:
                self.follow(own[option], key, typed(own[option].kind, value, key))
            else:
                self.argument(key, option, value)

    def micro_batch(self) -> None:
        """Take the token budget of the log-probability pass from whichever keys set it."""
        rollout, actor = f"{ROOT}rollout.", f"{ROOT}actor."
        if self.value(f"{actor}use_dynamic_bsz", "switch"):
            names = (
                f"{rollout}log_prob_max_token_len_per_gpu",
                f"{actor}ppo_max_token_len_per_gpu",
            )
            pairs = [(key, self.value(key, "count")) for key in names]
            key, tokens = next((pair for pair in pairs if pair[1]), (names[0], None))
        else:
            key = f"{rollout}log_prob_micro_batch_size_per_gpu"
            rows = self.value(key, "count")
            prompt, response = self._length("prompt"), self._length("response")
            tokens = rows * (prompt + response) if rows and prompt and response else None
        if not tokens:
            return
        tokens *= self.spec.train.sequence_parallel  # those ranks share what is for one GPU each
        most = self.spec.train.micro_batch_tokens
        if tokens > most and "flash_attn" not in self.packages:
            self.gaps.append(
                f"{key}: micro-batches of up to {tokens} tokens; without flash_attn attention "
                f"needs memory that grows with their square, so they stay at {most}"
            )
            self.settled.add("micro_batch_tokens")
        else:
            self.set(key, tokens, "train.micro_batch_tokens", tokens)

    def _length(self, side: str) -> int | None:
        own: int | None = self.value(f"{ROOT}rollout.{side}_length", "count")
        return own or self.value(f"data.max_{side}_length", "count")

    def prompts(self) -> None:
        key = "data.train_files"
        files = self.value(key, "files")
        if not files:
            return
        path = Path(files[0]).expanduser()
        if {"prompts", "dataset"} & set(self.explicit):
            self.kept.append(f"{key} gives way to your own prompts")
            return
        if not path.exists():
            self.gaps.append(f"{key} = {files[0]} is not on this machine: other prompts are used")
            return
        if len(files) > 1:
            self.gaps.append(f"{key}: only the first of {len(files)} files is used")
        self.set(key, files[0], "prompts.dataset", str(path))
        column = self.value("data.prompt_key", "text") or "prompt"
        self.set("data.prompt_key", column, "prompts.prompt_column", column)
