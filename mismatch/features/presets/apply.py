"""A framework's settings on a check: what they set here, and an account of every key.

The order of precedence is: flags of the user, keys of the configuration, the framework's preset.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from mismatch.cli.flags import flag_of
from mismatch.errors import MismatchError
from mismatch.features.presets.config_file import MISSING, ConfigFile
from mismatch.features.presets.rules import CONVERSIONS, NAMES, Name, Rule, rules_of, table, typed
from mismatch.run.interpreters import look_into
from mismatch.run.trust import NEEDS_TRUST
from mismatch.specs import CheckSpec, EngineSpec, TrainSpec

# Fields of TrainSpec whose command-line parameter has another name.
PARAMETERS = {"dtype": "train_dtype", "experts": "experts_implementation"}
# Fields that can name code, and the specs that hold them.
SPECS = {"engine": EngineSpec, "train": TrainSpec}
CODE = {
    *(("engine", "trust_remote_code"), ("train", "trust_remote_code")),
    *(("train", "attention"), ("train", "experts")),
}
OFF = ("false", "none", "disabled")  # how a switch is off
MEGATRON = "megatron"  # the scorer that reads Megatron's settings of any framework's file
# vLLM's CPU build needs other settings, or refuses these.
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"  # a variable of its environment
NOT_ON_A_CPU = ("max_num_batched_tokens", "enable_prefix_caching", BATCH_INVARIANT)


@dataclass
class Followed:
    """A check as a framework's settings fill it in, and the account of them, in sentences.

    Attributes:
        explicit: command-line parameters that the user has given; they win.
        used: what took effect, "KEY = VALUE → SETTING".
        kept: what lost against a flag of the user.
        not_reproduced: what matters and has no counterpart here; also in the check.
        ignored: keys near the engine and the trainer that are not followed.
        seen: keys that were read, or change no log-probability.
        settled: fields of TrainSpec that the configuration decides.
    """

    spec: CheckSpec
    explicit: Collection[str] = ()
    used: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    not_reproduced: list[str] = field(default_factory=list)
    ignored: tuple[str, ...] = ()
    seen: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)

    def notes(self) -> tuple[str, ...]:
        """Return lines for the terminal."""
        return (
            f"trainer: {self.spec.preset}",
            *(f"  {line}" for line in dict.fromkeys(self.used)),
            *(f"  kept: {line}" for line in self.kept),
            *(f"  not followed: {line}" for line in sections(self.ignored)),
            *(f"  not reproduced: {line}" for line in dict.fromkeys(self.not_reproduced)),
        )

    def set(self, key: str, shown: Any, place: str, value: Any) -> None:
        """Put a value at ``engine.dtype``, ``train.dtype`` …, unless the user has."""
        group, _, name = place.partition(".")
        parameter = name
        rule = NEEDS_TRUST[SPECS[group]][name] if (group, name) in CODE else None
        flag = PARAMETERS.get(name, name)
        if rule and rule(value, self.spec) and flag not in self.explicit:
            self.refuse_code(key, shown, flag_of(flag))
            return
        if own := group == "train":
            parameter = PARAMETERS.get(name, name)
            self.settled.add(name)
        if parameter not in self.explicit:
            self.spec = _put(self.spec, place, value)
            self.used.append(f"{key} = {shown} → {parameter} {value}")
        elif getattr(getattr(self.spec if own else self.spec.rollout, group), name) != value:
            self.kept.append(f"{key} = {shown} gives way to {flag_of(parameter)}")

    def refuse_code(self, key: str, shown: Any, flag: str) -> None:
        """Leave out what could run code: a file that people download does not decide that."""
        gap = f"{key} = {shown}: left out, what could run code needs {flag} on the command line"
        if gap not in self.kept:
            self.kept.append(gap)
            self.not_reproduced.append(gap)

    def follow(self, rule: Rule, key: str, value: Any) -> None:
        """Do what a rule says of a typed value."""
        needs = rule.needs if rule.needs and "flash" in value else ""
        if needs and not installed(needs, self.spec.train.python):
            self.not_reproduced.append(f"{key} = {value}: {needs} is not installed there")
            return
        for target in rule.to:
            self.set(key, value, target, CONVERSIONS[rule.convert](value))
        if self.spec.rollout.engine.engine == "vllm" and rule.argument:
            self.argument(key, rule.argument, value)

    def argument(self, key: str, name: str, value: Any) -> None:
        """Give the engine one more argument, unless the user has (--engine-arg)."""
        from mismatch.engines.vllm.arguments import is_cpu_build

        engine = self.spec.rollout.engine
        if name in NOT_ON_A_CPU and is_cpu_build(engine.python):
            gap = f"{key} = {value}: left out, vLLM's CPU build needs other settings"
            self.not_reproduced.append(gap)
        elif name == BATCH_INVARIANT:
            self.set(key, value, "engine.env", (*engine.env, (name, "1")))
        elif may_name_code(name, value) and name not in dict(engine.args):
            self.refuse_code(key, value, f"--engine-arg {name}=…")
        elif name in dict(engine.args):
            self.kept.append(f"{key} = {value} gives way to --engine-arg {name}")
        else:
            self.spec = _put(self.spec, "engine.args", (*engine.args, (name, value)))
            self.used.append(f"{key} = {value} → engine-arg {name}={value}")

    def preset(self, name: Name) -> None:
        """Fill what is left open of the trainer with a framework's settings, and name its gaps."""
        data = table(name)
        self.spec = replace(self.spec, preset=data["title"])
        for row in data["setting"]:
            where, value, what = row["field"], row["value"], f"{name}: {row['what']}"
            current, needs = getattr(self.spec.train, where), row.get("needs")
            given = PARAMETERS.get(where, where) in self.explicit
            if where in self.settled and current != value:
                continue
            if current != value and (given or current != getattr(TrainSpec(), where)):
                self.kept.append(f"{where} is {current}, by request; {what}")
            elif current != value and needs and not installed(needs, self.spec.train.python):
                gap = f"{what}; {needs} is not installed there, so {where} stays {current}"
                self.not_reproduced.append(gap)
            else:
                self.spec = _put(self.spec, f"train.{where}", value)
                self.used.append(f"{where} = {value}: {row['what']}")
        self.not_reproduced += [f"{name}: {row['what']}" for row in data["gap"]]
        self.tell_gaps()

    def tell_gaps(self) -> None:
        """Put what is not reproduced into the check."""
        told = (*self.spec.not_reproduced, *self.not_reproduced)
        self.spec = replace(self.spec, not_reproduced=tuple(dict.fromkeys(told)))


CLOSE = 0.88  # similarity of two names: "num_generations_eval" has 0.857 to a name of TRL's
# Sections in which a name that is nearly one of those that are followed is asked about.
SECTIONS = {"verl": ("actor_rollout_ref.rollout", "actor_rollout_ref.model")}
# Arguments of engines that are fields of the check's engine, with their kinds.
ENGINE_FIELDS = dict.fromkeys(("max_model_len", "tensor_parallel_size"), "count")
ENGINE_FIELDS |= {"dtype": "dtype", "gpu_memory_utilization": "number"}


@dataclass
class FollowedFile(Followed):
    """A check as a framework's configuration file fills it in."""

    source: ConfigFile = field(kw_only=True)
    framework: str = field(kw_only=True)

    def value(self, key: str, kind: str) -> Any:
        """Return the typed value of a key; None if it is not set."""
        value = self.source.get(key)
        self.seen.add(key)
        return None if value is None else typed(kind, value, key)

    def rules(self) -> None:
        """Follow every key that has a rule."""
        for rule in rules_of(self.framework):
            self.seen.add(rule.key)
            if rule.skip is not None and self.source.get(rule.key) == rule.skip:
                continue  # "auto" is no dtype
            value = self.value(rule.key, rule.kind)
            if value is not None and rule.skip != value:
                self.follow(rule, rule.key, value)

    def options(self, prefix: str, given: Mapping[str, Any]) -> None:
        """Follow arguments of the engine, by flags where mismatch has them."""
        places = {rule.to[0]: rule for rule in rules_of(self.framework) if rule.to}
        for option, value in given.items():
            key, name = f"{prefix}{option}", option.replace("-", "_")
            if value in (None, MISSING):
                continue
            own = places.get(f"engine.{name}") or places.get(f"sampling.{name}")
            if own is None and name in ENGINE_FIELDS:
                own = Rule(key, ENGINE_FIELDS[name], (f"engine.{name}",))
            if own is not None:
                self.follow(own, key, typed(own.kind, value, key))
            else:
                self.argument(key, name, value)

    def known(self) -> set[str]:
        """Return the keys that the framework's table names."""
        keys = table(f"{self.framework}_keys")
        rows = {row["key"] for row in (*keys["follow"], *keys["gap"])} | set(keys.get("model", ()))
        for section, names in keys["no_effect"].items():
            rows.update(f"{section}.{name}".lstrip(".") for name in names)
        return rows

    def finish(self) -> None:
        """Fill what the configuration leaves open from the preset, and close the account.

        Where the framework's own code scores, nothing of the trainer is imitated.
        """
        keys, scorer = table(f"{self.framework}_keys"), self.spec.train.scorer
        own_code, on_megatron = scorer in (self.framework, MEGATRON), scorer == MEGATRON
        followed_there = tuple(keys.get(MEGATRON if on_megatron else "own", ()) if own_code else ())
        if keys.get("runs") != scorer:
            self.not_reproduced += keys.get("always", ())
        for gap in keys["gap"]:
            key = gap["key"]
            self.seen.add(key)
            try:
                value = self.source.get(key)
            except MismatchError as error:  # it leads nowhere: nothing needs it
                self.not_reproduced.append(error.message)
                continue
            matters = bool(value) and str(value).lower() not in OFF
            if "usual" in gap:
                matters = value not in (None, *gap["usual"])
            unless = gap.get("unless", "")
            set_here = unless in self.explicit or getattr(self.spec, unless, None)
            if set_here or gap.get("runs") == scorer:
                continue
            if matters and not key.startswith(followed_there):
                self.not_reproduced.append(f"{key} = {value!s:.60}: {gap['what']}")
        self.not_reproduced += [
            f"{key} = {value}: the script does not set this variable"
            for key, value in self.source.left_open.items()
            if key in self.seen
        ]
        self.seen |= self.known()
        self.ignored = tuple(
            key
            for key in self.source.given()
            if key.startswith(tuple(keys.get("near", ("",))))
            and not any(f"{key}.".startswith(f"{name}.") for name in self.seen)
            and not key.startswith(followed_there)
        )
        unknown: list[str] = []
        if "near" not in keys:  # its table has all keys
            after = tuple(f"{name}." for name in keys.get("unfollowed", ()))
            unknown = [key for key in self.ignored if not key.startswith(after)]
            self.ignored = tuple(key for key in self.ignored if key not in unknown)
        guessed = self.ask_typing_errors(keys, unknown)
        for line in sections(key for key in unknown if key not in guessed):
            self.not_reproduced.append(f"unknown to {keys['title']}: {line}")
        if self.ignored:
            unread = f"keys that this run does not follow: {'; '.join(sections(self.ignored))}"
            self.not_reproduced.append(unread)
        preset = next((name for name in NAMES if name == self.framework), None)
        if preset and not own_code:
            self.preset(preset)
        else:
            self.tell_gaps()
        title = (table(preset) if preset else keys)["title"]
        whose = f"{title.split()[0]}'s own code" if own_code else title
        whose = "Megatron-Core" if on_megatron else whose
        title = f"{whose}, as {self.source.origin} sets it"
        self.spec = replace(self.spec, preset=title)

    def ask_typing_errors(self, keys: dict[str, Any], unknown: Collection[str]) -> set[str]:
        """Look for keys that are nearly the name of one that would be followed, and return them.

        An unknown key may also be of another release, which has it in another section.

        Raises:
            MismatchError: a top-level key of TRL's; in deeper sections frameworks have many names,
                so that a resemblance is said and no more.
        """
        known = {row["key"] for row in (*keys["follow"], *keys["gap"])}
        guessed = set()
        for key in self.source.given():
            section, dot, name = key.rpartition(".")
            places = SECTIONS.get(self.framework, () if "near" in keys else (section,))
            if key in self.seen or (dot and section not in places):
                continue
            inside = [
                each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == section
            ]
            near = [f"{section}{dot}{each}" for each in get_close_matches(name, inside, 1, CLOSE)]
            if near and not dot and "near" in keys:
                fault = f"{self.source.origin}: {key} is no key of {table(self.framework)['title']}"
                raise MismatchError(fault, f"did you mean {near[0]}?")
            if key in unknown:
                top = f"{key.partition('.')[0]}."
                moved = [each for each in known if each.endswith(f".{name}")]
                near += moved if len(moved) == 1 and moved[0].startswith(top) else []
            if near:
                self.not_reproduced.append(f"{key} is not followed: did you mean {near[0]}?")
                guessed.add(key)
        return guessed


def installed(module: str, python: str | None) -> bool:
    """Tell whether an interpreter's environment holds a module; None: this interpreter's."""
    if python is None:
        return find_spec(module) is not None
    return module not in look_into(python, (module,)).missing


def sections(keys: Iterable[str]) -> list[str]:
    """Return a line for every section of a config: "critic.optim: lr, weight_decay"."""
    names: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        names.setdefault(section or "top level", []).append(name)
    return [f"{section}: {', '.join(inside)}" for section, inside in names.items()]


def _put(spec: CheckSpec, place: str, value: Any) -> CheckSpec:
    """Return the check with another value at ``train.NAME``, ``engine.NAME`` …"""
    group, _, name = place.partition(".")
    if group == "train":
        return replace(spec, train=replace(spec.train, **{name: value}))
    part = replace(getattr(spec.rollout, group), **{name: value})
    return replace(spec, rollout=replace(spec.rollout, **{group: part}))


def may_name_code(name: str, value: Any) -> bool:
    """Return whether an engine argument of a file could name a module, a file or a command.

    Engines load classes (``worker_cls``), plug-ins and connectors by names. Numbers, switches
    and single words (``fp8``, ``FLASH_ATTN``) are choices, also within mappings and lists.

    >>> may_name_code("worker_cls", "evil.Worker"), may_name_code("kv_cache_dtype", "fp8_e4m3")
    (True, False)
    """
    if "module" in name or "trust_remote_code" in name:
        return bool(value)
    if isinstance(value, dict):
        return any(may_name_code(str(key), part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return any(may_name_code(name, part) for part in value)
    return isinstance(value, str) and re.fullmatch(r"[\w-]*", value) is None
