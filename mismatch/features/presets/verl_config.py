"""A user's own verl config, for both sides: what it sets here, and what cannot be reproduced.

The order of precedence is: flags of the user, keys of the config, the ``verl`` preset. Every key
that is given and not followed is named.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mismatch.engines.registry import engine_infos
from mismatch.errors import MismatchError
from mismatch.features.presets import PRESETS, Preset
from mismatch.features.presets.config_file import COMPLETE, MISSING, ConfigFile, read_config
from mismatch.features.presets.verl_keys import (
    CONVERSIONS,
    GAPS,
    OWN_ARGUMENTS,
    REQUIRED,
    RULES,
    Rule,
    short,
    typed,
)
from mismatch.specs import CheckSpec

ROOT = "actor_rollout_ref."
_PLACES: dict[str, tuple[str, ...]] = {
    "engine": ("rollout", "engine"),
    "sampling": ("rollout", "sampling"),
    "prompts": ("rollout", "prompts"),
    "train": ("train",),
}


@dataclass(frozen=True, slots=True)
class VerlApplied:
    """A check with a verl config on.

    Attributes:
        used: keys that took effect, "KEY = VALUE → SETTING".
        kept: keys that lost against a flag of the user, one sentence each.
        not_reproduced: keys that matter and have no counterpart here, and what the preset lacks,
            one sentence each; also in ``spec.not_reproduced``.
        ignored: keys that are given and change nothing here, or that are unknown; those of model,
            actor, rollout and data are also in ``not_reproduced``.
        misspelt: of these, key -> the known name that it is close to.
    """

    spec: CheckSpec
    used: tuple[str, ...]
    kept: tuple[str, ...]
    not_reproduced: tuple[str, ...]
    ignored: tuple[str, ...]
    misspelt: dict[str, str]


@dataclass(frozen=True)
class VerlConfig:
    """A verl config, composed and resolved.

    Attributes:
        source: the composed file.
        preset: the trainer that the config starts: the engine, or the worker of old releases.
    """

    source: ConfigFile
    preset: Preset

    def model(self) -> str:
        """``actor_rollout_ref.model.path``, with ``~`` expanded.

        Raises:
            MismatchError: it is not in the config, or no text.
        """
        key = f"{ROOT}model.path"
        path = self.source.get(key)
        if path is None:
            raise MismatchError(
                f"{self.source.origin}: {key} is not given",
                f"name the model: --model MODEL, or --verl-override {key}=MODEL",
            )
        text: str = typed("text", path, key)
        return str(Path(text).expanduser()) if text.startswith("~") else text

    def apply(
        self,
        spec: CheckSpec,
        explicit: Collection[str] = (),
        packages: Iterable[str] = (),
        cpu_engine: bool = False,
    ) -> VerlApplied:
        """The check that this config describes.

        Args:
            explicit: command-line parameters that the user has given; they win.
            packages: installed kernel packages.
            cpu_engine: the engine is vLLM's CPU build, whose scheduler options are left alone.

        Raises:
            MismatchError: a value of the wrong type, an interpolation that leads nowhere, or a
                rollout engine that mismatch does not have; each with the key.
        """
        work = _Work(self.source, spec, set(explicit), frozenset(packages), cpu_engine)
        work.engine()
        for rule in RULES:
            if rule.only in ("", self.preset.name):
                work.rule(rule)
        work.engine_kwargs()
        work.micro_batch()
        work.prompts()
        work.trainer(self.preset)
        return work.result(self.preset)


def read_verl_config(path: Path, overrides: Sequence[str] = ()) -> VerlConfig:
    """Read ``--verl-config FILE`` with its ``--verl-override`` pairs.

    Raises:
        MismatchError: missing file, invalid YAML (with the line), a config that is not complete,
            or a malformed override.
    """
    source = read_config(path, overrides)
    if lacking := [key for key in REQUIRED if source.get(key) is None]:
        raise MismatchError(
            f"verl config {path} is not complete: it lacks {', '.join(lacking)}", COMPLETE
        )
    # Only old releases know this key.
    legacy = source.get("trainer.use_legacy_worker_impl") in ("auto", "enable")
    return VerlConfig(source, PRESETS["verl-legacy" if legacy else "verl"])


@dataclass
class _Work:
    """One application of a config: the spec as it grows, and the account of every key.

    Attributes:
        configured: fields of TrainSpec that the config decides.
    """

    source: ConfigFile
    spec: CheckSpec
    explicit: set[str]
    packages: frozenset[str]
    cpu_engine: bool
    used: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    # The model is asked for beforehand; response_length is the longest response, resolved.
    seen: set[str] = field(
        default_factory=lambda: {f"{ROOT}model.path", "data.max_response_length"}
    )
    configured: set[str] = field(default_factory=set)

    def value(self, key: str, kind: str) -> Any:
        """The typed value of a key below ``actor_rollout_ref`` or at the top; None if not set."""
        value = self.source.get(key)
        self.seen.add(key)
        return None if value is None else typed(kind, value, key)

    def set(self, key: str, shown: Any, target: str, value: Any, parameter: str) -> None:
        """Put a value at ``engine.dtype``, ``train.dtype`` …, unless the user has."""
        if parameter in self.explicit:
            if _at(self.spec, target) != value:
                self.kept.append(f"{key} = {shown} gives way to --{parameter.replace('_', '-')}")
        else:
            self.spec = _put(self.spec, target, value)
            self.used.append(f"{key} = {shown} → {parameter} {value}")
        if target.startswith("train."):
            self.configured.add(target.removeprefix("train."))

    def engine(self) -> None:
        key = f"{ROOT}rollout.name"
        name = self.value(key, "text")
        started = {n: info for n, info in engine_infos().items() if info.started}
        engines = {info.verl_name or n: n for n, info in started.items()}
        if name not in engines and "engine" not in self.explicit:
            raise MismatchError(
                f"{self.source.origin}: {key} is {name}, which mismatch has no engine for",
                f"use one of {', '.join(sorted(engines))}: --verl-override {key}=vllm",
            )
        self.set(key, name, "engine.engine", engines.get(name, name), "engine")

    def rule(self, rule: Rule) -> None:
        value = self.value(rule.key, rule.kind)
        if value is None or rule.skip == value:
            return
        if not rule.argument:
            for target, parameter in rule.targets:
                self.set(rule.key, value, target, CONVERSIONS[rule.convert](value), parameter)
        elif self.spec.rollout.engine.engine == "vllm":
            self.argument(rule.key, rule.argument, value)

    def argument(self, key: str, name: str, value: Any) -> None:
        """One more engine argument, unless the user has given it (--engine-arg)."""
        engine = self.spec.rollout.engine
        if self.cpu_engine and name in ("max_num_batched_tokens", "enable_prefix_caching"):
            self.gaps.append(
                f"{key} = {value}: left out, vLLM's CPU build needs settings of its own"
            )
        elif name in dict(engine.args):
            self.kept.append(f"{key} = {value} gives way to --engine-arg {name}")
        else:
            self.spec = _put(self.spec, "engine.args", (*engine.args, (name, value)))
            self.used.append(f"{key} = {value} → engine-arg {name}={value}")

    def engine_kwargs(self) -> None:
        name = self.spec.rollout.engine.engine
        prefix = f"{ROOT}rollout.engine_kwargs.{name}"
        for option, value in (self.value(prefix, "mapping") or {}).items():
            key = f"{prefix}.{option}"
            self.seen.add(key)
            if value is None or value == MISSING:
                continue
            if option in OWN_ARGUMENTS:
                rule = OWN_ARGUMENTS[option]
                for target, parameter in rule.targets:
                    self.set(key, value, target, typed(rule.kind, value, key), parameter)
            else:
                self.argument(key, option, value)

    def micro_batch(self) -> None:
        """The token budget of the log-probability pass, from whichever keys set it."""
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
            lengths = [self._length("prompt"), self._length("response")]
            tokens = rows * sum(lengths) if rows and all(lengths) else None
        if not tokens:
            return
        tokens *= self.spec.train.sequence_parallel  # those ranks share what is for one GPU each
        most = self.spec.train.micro_batch_tokens
        if tokens > most and "flash_attn" not in self.packages:
            self.gaps.append(
                f"{key}: micro-batches of up to {tokens} tokens; without flash_attn attention "
                f"needs memory that grows with their square, so they stay at {most}"
            )
            self.configured.add("micro_batch_tokens")
        else:
            self.set(key, tokens, "train.micro_batch_tokens", tokens, "micro_batch_tokens")

    def _length(self, side: str) -> Any:
        return self.value(f"{ROOT}rollout.{side}_length", "count") or self.value(
            f"data.max_{side}_length", "count"
        )

    def prompts(self) -> None:
        key = "data.train_files"
        files = self.value(key, "files")
        if not files:
            return
        path = Path(files[0]).expanduser()
        if {"prompts", "dataset"} & self.explicit:
            self.kept.append(f"{key} gives way to your own prompts")
            return
        if not path.exists():
            self.gaps.append(f"{key} = {files[0]} is not on this machine: other prompts are used")
            return
        if len(files) > 1:
            self.gaps.append(f"{key}: only the first of {len(files)} files is used")
        self.set(key, files[0], "prompts.dataset", str(path), "dataset")
        column = self.value("data.prompt_key", "text") or "prompt"
        self.spec = _put(self.spec, "prompts.prompt_column", column)

    def trainer(self, preset: Preset) -> None:
        """What the config leaves open comes from the preset."""
        strategy = self.source.get(f"{ROOT}actor.strategy") or "fsdp"
        gaps = tuple(gap for gap in preset.gaps if gap.strategy in ("", strategy))
        preset = replace(preset, gaps=gaps)
        resolved = preset.resolve(self.spec.train, self.explicit, self.packages, self.configured)
        self.kept.extend(resolved.kept)
        self.gaps.extend(resolved.not_reproduced)
        self.spec = replace(self.spec, train=resolved.train)

    def result(self, preset: Preset) -> VerlApplied:
        for gap in GAPS:
            value = self.source.get(gap.key)
            self.seen.add(gap.key)
            wanted = gap.only in ("", preset.name)
            if wanted and gap.matters(value):
                self.gaps.append(f"{gap.key} = {short(value)}: {gap.what}")
        ignored = tuple(key for key in self.source.given() if not self._known(key))
        near = [key for key in ignored if key.startswith((ROOT, "data."))]
        if near:
            self.gaps.append(f"keys that this run does not follow: {'; '.join(sections(near))}")
        gaps = tuple(dict.fromkeys(self.gaps))
        spec = replace(
            self.spec,
            preset=f"{preset.title}, as {self.source.origin} sets it",
            not_reproduced=(*self.spec.not_reproduced, *gaps),
        )
        misspelt = {key: name for key in ignored if (name := self._near(key))}
        return VerlApplied(
            spec, tuple(dict.fromkeys(self.used)), tuple(self.kept), gaps, ignored, misspelt
        )

    def _known(self, key: str) -> bool:
        return key in self.seen or any(key.startswith(f"{prefix}.") for prefix in self.seen)

    def _near(self, key: str) -> str:
        """The name beside this key that it may have been meant for; "" without one."""
        parent, _, name = key.rpartition(".")
        brothers = [k.rpartition(".")[2] for k in self.seen if k.rpartition(".")[0] == parent]
        near = difflib.get_close_matches(name, brothers, n=1, cutoff=0.85)
        return near[0] if near else ""


def sections(keys: Iterable[str]) -> list[str]:
    """Return a line for every section of a config: "critic.optim: lr, weight_decay"."""
    names: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        names.setdefault(section or "top level", []).append(name)
    return [f"{section}: {', '.join(inside)}" for section, inside in names.items()]


def _at(spec: Any, target: str) -> Any:
    """Return the value at ``engine.dtype``, ``train.dtype`` … of a check."""
    for name in _path(target):
        spec = getattr(spec, name)
    return spec


def _put(spec: Any, target: str, value: Any) -> Any:
    """Return the check with another value there."""

    def inside(node: Any, path: tuple[str, ...]) -> Any:
        inner = value if len(path) == 1 else inside(getattr(node, path[0]), path[1:])
        return replace(node, **{path[0]: inner})

    return inside(spec, _path(target))


def _path(target: str) -> tuple[str, ...]:
    group, _, name = target.partition(".")
    return (*_PLACES[group], name)
