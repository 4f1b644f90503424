"""A framework's configuration on a check: what it sets here, and an account of every key.

The order of precedence is: flags of the user, keys of the configuration, the framework's preset.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from mismatch.features.presets.config_file import ConfigFile
from mismatch.features.presets.frameworks import Preset
from mismatch.features.presets.rules import CONVERSIONS, Keys, Rule, short, typed
from mismatch.specs import CheckSpec

_PLACES: dict[str, tuple[str, ...]] = {
    "engine": ("rollout", "engine"),
    "sampling": ("rollout", "sampling"),
    "prompts": ("rollout", "prompts"),
    "train": ("train",),
}
# Keys of the trainer alone.
TRAINER = ("actor_rollout_ref.actor.", "actor_rollout_ref.rollout.log_prob_", "fsdp", "deepspeed")
# vLLM's CPU build needs other settings, or refuses these.
NOT_ON_A_CPU = ("max_num_batched_tokens", "enable_prefix_caching", "VLLM_BATCH_INVARIANT")


@dataclass(frozen=True, slots=True)
class Followed:
    """A check with a framework's configuration on; one sentence each."""

    spec: CheckSpec
    used: tuple[str, ...]
    """Keys that took effect, "KEY = VALUE → SETTING"."""
    kept: tuple[str, ...]
    """Keys that lost against a flag of the user."""
    not_reproduced: tuple[str, ...]
    """Keys that matter and have no counterpart here; also in ``spec.not_reproduced``."""
    ignored: tuple[str, ...]
    """Keys near the engine and the trainer that are not followed."""

    def notes(self) -> tuple[str, ...]:
        """Return lines for the terminal."""
        return (
            f"trainer: {self.spec.preset}",
            *(f"  {line}" for line in self.used),
            *(f"  kept: {line}" for line in self.kept),
            *(f"  not followed: {line}" for line in sections(self.ignored)),
        )


@dataclass
class Work:
    """One application of a configuration: the spec as it grows, and the account of every key."""

    source: ConfigFile
    keys: Keys
    spec: CheckSpec
    explicit: Collection[str]
    packages: frozenset[str]
    cpu_engine: bool
    used: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)  # fields of TrainSpec that the config decides

    def value(self, key: str, kind: str) -> Any:
        """Return the typed value of a key; None if it is not set."""
        value = self.source.get(key)
        self.seen.add(key)
        return None if value is None else typed(kind, value, key)

    def set(self, key: str, shown: Any, target: str, value: Any) -> None:
        """Put a value at ``engine.dtype``, ``train.dtype:train_dtype`` …, unless the user has."""
        place, _, parameter = target.partition(":")
        parameter = parameter or place.partition(".")[2]
        if parameter in self.explicit:
            if reduce(getattr, _path(place), self.spec) != value:
                self.kept.append(f"{key} = {shown} gives way to --{parameter.replace('_', '-')}")
        else:
            self.spec = _put(self.spec, place, value)
            self.used.append(f"{key} = {shown} → {parameter} {value}")
        if place.startswith("train."):
            self.settled.add(place.removeprefix("train."))

    def rules(self) -> None:
        """Follow every key that has a rule."""
        for rule in self.keys.rules:
            value = self.value(rule.key, rule.kind)
            if value is not None and rule.skip != value:
                self.follow(rule, rule.key, value)

    def follow(self, rule: Rule, key: str, value: Any) -> None:
        """Do what a rule says of a typed value."""
        for target in rule.to:
            self.set(key, value, target, CONVERSIONS[rule.convert](value))
        if self.spec.rollout.engine.engine == "vllm" and (rule.argument or rule.env):
            self.argument(key, rule.argument or rule.env, value, env=bool(rule.env))

    def argument(self, key: str, name: str, value: Any, env: bool = False) -> None:
        """Give the engine one more argument or variable, unless the user has (--engine-arg)."""
        engine = self.spec.rollout.engine
        if self.cpu_engine and name in NOT_ON_A_CPU:
            self.gaps.append(f"{key} = {value}: left out, vLLM's CPU build needs other settings")
        elif env:
            self.spec = _put(self.spec, "engine.env", (*engine.env, (name, "1")))
            self.used.append(f"{key} = {value} → {name}=1")
        elif name in dict(engine.args):
            self.kept.append(f"{key} = {value} gives way to --engine-arg {name}")
        else:
            self.spec = _put(self.spec, "engine.args", (*engine.args, (name, value)))
            self.used.append(f"{key} = {value} → engine-arg {name}={value}")

    def result(self, preset: Preset) -> Followed:
        """Fill what the configuration leaves open from the preset, and close the account.

        Where the framework's own code scores, nothing of the trainer is imitated.
        """
        own_code = self.spec.train.scorer == preset.name
        if own_code:
            preset = replace(preset, settings=(), gaps=())
        resolved = preset.resolve(self.spec.train, self.explicit, self.packages, self.settled)
        self.kept += resolved.kept
        self.gaps += [*self.keys.always, *resolved.not_reproduced]
        for gap in self.keys.gaps:
            value = self.source.get(gap.key)
            self.seen.add(gap.key)
            if gap.matters(value) and not (own_code and gap.key.startswith(TRAINER)):
                self.gaps.append(f"{gap.key} = {short(value)}: {gap.what}")
        known = self.seen | set(self.keys.no_effect)
        ignored = tuple(
            key
            for key in self.source.given()
            if key.startswith(self.keys.near)
            and not any(f"{key}.".startswith(f"{name}.") for name in known)
            and not (own_code and key.startswith(TRAINER))
        )
        if ignored:
            self.gaps.append(f"keys that this run does not follow: {'; '.join(sections(ignored))}")
        gaps = tuple(dict.fromkeys(self.gaps))
        spec = replace(
            self.spec,
            train=resolved.train,
            preset=f"{preset.title}, as {self.source.origin} sets it",
            not_reproduced=(*self.spec.not_reproduced, *gaps),
        )
        used = tuple(dict.fromkeys(self.used))
        return Followed(spec, used, tuple(self.kept), gaps, ignored)


def sections(keys: Iterable[str]) -> list[str]:
    """Return a line for every section of a config: "critic.optim: lr, weight_decay"."""
    names: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        names.setdefault(section or "top level", []).append(name)
    return [f"{section}: {', '.join(inside)}" for section, inside in names.items()]


def _put(spec: Any, place: str, value: Any) -> Any:
    """Return the check with another value there."""

    def inside(node: Any, path: tuple[str, ...]) -> Any:
        inner = value if len(path) == 1 else inside(getattr(node, path[0]), path[1:])
        return replace(node, **{path[0]: inner})

    return inside(spec, _path(place))


def _path(place: str) -> tuple[str, ...]:
    group, _, name = place.partition(".")
    return (*_PLACES[group], name)
