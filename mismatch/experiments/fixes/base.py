"""What a fix is, and what measuring one gives. Pure data: no engine, no torch.

A fix changes the spec of a check and nothing else, so that a run with it is an ordinary run. Fixes
of the trainer and of the engine change what is measured. A fix of the estimator (a weight in the
loss) changes no log-probability: it is listed with what it keeps and costs, and never ranked.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from mismatch.specs import CheckSpec

Side = Literal["engine", "train", "estimator"]
VALUE = "VALUE"  # in the flags of a fix that takes a value: where the value goes


@dataclass(frozen=True, slots=True)
class Flags:
    """How a check is made with a fix.

    >>> str(Flags(set=(("--weights", "engine=bf16"),), unset=("--engine-arg quantization",)))
    '--weights engine=bf16 (without --engine-arg quantization)'

    Attributes:
        set: (flag, value) of ``mismatch check``; the value may be :data:`VALUE`.
        unset: flags that must not be given, with the name of the setting for ``--engine-arg``.
        env: (variable, value) of the environment.
    """

    set: tuple[tuple[str, str], ...] = ()
    unset: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.set or self.unset or self.env)

    def __str__(self) -> str:
        words = [*(f"environment {setting}" for setting in self.settings), *self.arguments]
        dropped = " ".join(f"without {flag}" for flag in self.unset)
        if dropped:
            words.append(f"({dropped})" if words else dropped)
        return " ".join(words)

    @property
    def settings(self) -> list[str]:
        """Of the environment, as a shell takes them."""
        return [f"{name}={shlex.quote(value)}" for name, value in self.env]

    @property
    def arguments(self) -> list[str]:
        """Of the command, as a shell takes them."""
        return [f"{flag} {shlex.quote(value)}" for flag, value in self.set]


def check_command(parts: Iterable[Flags], made_by: str = "") -> str:
    """Return the command that makes a check with several fixes.

    >>> check_command([Flags(env=(("A", "1"),)), Flags(set=(("--dtype", "fp32"),))])
    'A=1 mismatch check … --dtype fp32'
    >>> check_command([Flags(unset=("--autocast",)), Flags(set=(("--dtype", "fp32"),))])
    'mismatch check … --dtype fp32, without --autocast'
    >>> check_command([Flags(set=(("--dtype", "fp32"),))], "mismatch check --model M --fix all")
    'mismatch check --model M --dtype fp32'

    Args:
        made_by: the command of the run without them; "": not known, or not of a check.
    """
    flags = list(parts)
    settings = [text for part in flags for text in part.settings]
    arguments = [text for part in flags for text in part.arguments]
    dropped = [flag for part in flags for flag in part.unset]
    replaced = {flag for part in flags for flag, _ in part.set} | set(dropped) | TRIED_WITH
    try:
        words = shlex.split(made_by)
    except ValueError:  # a report may hold anything
        words = []
    base = "mismatch check …"
    if words[:2] == ["mismatch", "check"]:
        kept: list[str] = []
        while words:
            word = words.pop(0)
            name, equals, _ = word.partition("=")
            takes = word.startswith("-") and not equals and words and not words[0].startswith("-")
            value = [words.pop(0)] if takes else []
            setting = f"{name} {value[0].partition('=')[0]}" if value else name
            if replaced.isdisjoint((name, setting)):
                kept += [word, *value]
            dropped = [flag for flag in dropped if flag not in (name, setting)]
        base = shlex.join(kept)
    command = " ".join([*settings, base, *arguments])
    return f"{command}, without {' and '.join(dropped)}" if dropped else command


# Of a run's command: what tries fixes, and where it went.
TRIED_WITH = {"--fix", "--explain", "--no-explain", "--out", "-o", "--resume"}


@dataclass(frozen=True, slots=True)
class Fix:
    """One thing to try.

    >>> Fix("fp32", "train", "the trainer computes in fp32", "…", "…").id
    'fp32'

    Attributes:
        id: as in ``--fix ID``; one that takes a value is asked for as ``ID=VALUE``.
        summary: one line: what it changes.
        effect: what is expected of it, one line.
        cost: what it costs in training, one line.
        flags: how a check is made with it.
        values: of a fix that takes one: the values that ``--fix all`` tries, the first by default.
        change: (spec, value) -> spec. Pure. Raises MismatchError for a value that means nothing.
        needs: what a check has to have, by names of :data:`.applies.NEEDS`.
        corrects: of an estimator fix: its name in the corrections table.
        hides: of an estimator fix: makes the mismatch invisible and does not weigh it.
        value: that it is tried with; "" where it takes none, and before one is chosen.
    """

    id: str
    side: Side
    summary: str
    effect: str
    cost: str
    flags: Flags = Flags()
    values: tuple[str, ...] = ()
    change: Callable[[CheckSpec, str], CheckSpec] = lambda spec, value: spec
    needs: tuple[str, ...] = ()
    corrects: str = ""
    hides: bool = False
    value: str = ""

    @property
    def label(self) -> str:
        return f"{self.id}={self.value}" if self.value else self.id

    def taking(self, value: str = "") -> Fix:
        """Return a fix of the catalogue with a value, its first unless told, and the flags for it.

        >>> Fix("micro-batch", "train", "", "", "", values=("512",)).taking("256").label
        'micro-batch=256'
        """
        value = value or next(iter(self.values), "")
        given = tuple((flag, value if v == VALUE else v) for flag, v in self.flags.set)
        return replace(self, value=value, flags=replace(self.flags, set=given))

    def apply(self, spec: CheckSpec) -> CheckSpec:
        """Return a check with it."""
        return self.change(spec, self.value)
