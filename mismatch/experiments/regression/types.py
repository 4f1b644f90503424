"""Whether a new run can be compared with an old one, and what that gives; plain data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

import numpy as np

from mismatch.analysis.displaced import Standing
from mismatch.analysis.scored_rollout import ScoredRollout
from mismatch.analysis.square import Evidence
from mismatch.codec import object_schema, to_json
from mismatch.errors import MismatchError
from mismatch.metrics.permutation import prompts_to_tell
from mismatch.types import Comparison, Estimate, Fingerprint, Ints, Rollout, Verdict

SCHEMA = "mismatch.against/1"


def schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    definitions: dict[str, Any] = {}
    whole = object_schema(Against, definitions)
    row = definitions["AgainstRow"]
    for definition, field in ((row, "metric"), (definitions["Comparison"], "breakdowns")):
        del definition["properties"][field]
        definition["required"] = list(definition["properties"])
    by_metric = {"type": "object", "additionalProperties": {"$ref": "#/$defs/AgainstRow"}}
    properties = {
        "metrics" if name == "rows" else name: by_metric if name == "rows" else kind
        for name, kind in whole["properties"].items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA,
        **whole,
        "properties": {"schema": {"const": SCHEMA}, **properties},
        "required": ["schema", *properties],
        "$defs": definitions,
    }


def against_to_json(regression: Against) -> dict[str, Any]:
    """All of it, rows by metric; numbers are finite or null."""
    fields = to_json(regression)
    rows = {row.pop("metric"): row for row in fields["rows"]}
    if fields["engines"] is not None:
        del fields["engines"]["breakdowns"]  # few metrics only, and none of them broken down
    return {
        "schema": SCHEMA,
        **{"metrics" if name == "rows" else name: rows if name == "rows" else value
           for name, value in fields.items()},
    }  # fmt: skip


Outcome = Literal["better", "worse", "mixed", "undecided", "none"]
Where = Literal["engine", "trainer", "machine"]


@dataclass(frozen=True, slots=True)
class RunSide:
    """One of the two runs.

    Attributes:
        run: name of its directory, without the path.
        engine, version: what sampled.
        created: ISO time of its first command, or "".
        verdict: of its tokens, metrics, passes and square, as in a check (whose check of the exact
            KL is not made again); None where no level applies.
        tokens, sequences: action tokens and sequences.
    """

    run: str
    model: str
    engine: str
    version: str
    created: str
    verdict: Verdict | None
    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class AgainstRow:
    """One metric in both runs: engine against trainer, each on its own tokens.

    Attributes:
        change: new - old with its 95 % interval, by prompt.
        p_value: probability of such a change by chance (permutation within prompts, adjusted for
            all deciding metrics); None for a metric that does not decide.
        outcome: of a deciding metric: "worse", "better", "none" (not told from chance) or
            "undecided": several times as large, and too rarely so by chance to be passed over.
        beyond: worse, and by more than the margin.
    """

    metric: str
    old: Estimate
    new: Estimate
    change: Estimate
    p_value: float | None = None
    outcome: Outcome | None = None
    beyond: bool = False


@dataclass(frozen=True, slots=True)
class SquareRow:
    """One number of the square in both runs; None where a run does not have it.

    Attributes:
        evidence: "excess" of a scoring over rounding, or its "gap" in float32 (nats).
        before, after: against its level, in the old and in the new run.
    """

    evidence: Evidence
    scoring: str
    old: Estimate | None
    new: Estimate | None
    before: Standing | None
    after: Standing | None


@dataclass(frozen=True, slots=True)
class Changed:
    """One setting, version or fact that is not the same in both runs.

    >>> Changed("engine", "versions.vllm", "0.31.0", "0.32.0").new
    '0.32.0'
    """

    where: Where
    name: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Against:
    """A new run against an old one.

    Attributes:
        prompts: that both runs hold; always all of them.
        same_tokens: both runs hold the same tokens, so that changes are paired token by token.
        same_sequences: sequences (of ``old.sequences``) that both runs hold, in the same place.
        square: every excess and gap of the two runs; empty where neither has them.
        engines: old engine (left) against new engine (right), on the same tokens; None where the
            tokens are not the same. Few metrics only.
        outcome: of all deciding metrics together.
        margin: share by which a metric may rise before that fails.
        fails: the new run is worse by more than the margin, undecided, or its own verdict fails.
        reason: of the verdict, one line.
        notes: what a reader has to know, one sentence each.
        method: how significance was decided, one sentence.
    """

    outcome: Outcome
    fails: bool
    reason: str
    margin: float
    old: RunSide
    new: RunSide
    prompts: int
    same_tokens: bool
    same_sequences: int
    rows: tuple[AgainstRow, ...]
    square: tuple[SquareRow, ...]
    changed: tuple[Changed, ...]
    engines: Comparison | None
    notes: tuple[str, ...]
    method: str

    @property
    def margin_text(self) -> str:
        """As it is written everywhere: "10 %", "0.5 %"."""
        return f"{100 * self.margin:g} %"


# Of a fingerprint: measured anew in every run, compared elsewhere, or a place on one machine.
NOT_SETTINGS = {"weights", "unmapped_weights", "seconds", "peak_bytes", "model", "not_tested"}
LONGEST = 120  # characters of a value
ABSENT = "–"


def changed(
    old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]
) -> tuple[Changed, ...]:
    """Every fact that is not the same, engine first.

    Args:
        old, new: "engine", "trainer", "machine" -> fingerprint or provenance.
    """
    comparable = not unknown_machine(old, new)
    places: tuple[Where, ...] = ("engine", "trainer", *(("machine",) if comparable else ()))
    return tuple(
        Changed(where, name, before, after)
        for where in places
        for name, before, after in _differing(old.get(where, {}), new.get(where, {}))
    )


def unknown_machine(
    old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Why the machines are not compared, in one sentence; nothing where both runs know theirs."""
    silent = [name for name, facts in (("old", old), ("new", new)) if not facts.get("machine")]
    if not silent:
        return []
    who = f"the {silent[0]} run does not say" if len(silent) == 1 else "neither run says"
    return [f"the machine: not compared, since {who} what it ran on (run.json)"]


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    before, after = dict(flat_facts(old)), dict(flat_facts(new))
    for name in sorted({*before, *after}, key=fact_order):
        pair = before.get(name, ABSENT), after.get(name, ABSENT)
        if pair[0] != pair[1] and set(pair) != {ABSENT, "null"}:  # unset is as good as unknown
            yield name, *pair


def fact_order(name: str) -> tuple[bool, bool, str]:
    """The version and versions first: they are what an upgrade is about."""
    return name != "version", not name.startswith("versions."), name


def flat_facts(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The settings and versions of a fingerprint: dotted name, and value as text."""
    for key, value in facts.items():
        if not prefix and key in NOT_SETTINGS:
            continue
        if isinstance(value, Mapping) and value:
            yield from flat_facts(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


LAW = ("temperature", "top_p", "top_k", "max_tokens")
NAMED = 4  # parameters or files that an error names


def require_comparable(
    old: ScoredRollout, new: ScoredRollout, prompts: tuple[Ints, Ints]
) -> list[str]:
    """What stays uncertain, one sentence each.

    Args:
        prompts: numbers of the prompts of both runs, the same number for the same tokens.

    Raises:
        MismatchError: another model, other weights, another sampling law or other prompts.
    """
    notes = require_same_weights(old.train.fingerprint, new.train.fingerprint)
    require_same_law(old.rollout, new.rollout)
    require_same_prompts(*prompts)
    return notes


def require_same_weights(old: Fingerprint, new: Fingerprint) -> list[str]:
    """Compare what the two trainers loaded: by the digests of their parameters, else by the files.

    Raises:
        MismatchError: it names the parameters or files that differ.
    """
    a, b = _digests(old), _digests(new)
    if a and b:
        _refuse_parameters(a, b)
        return []
    if old.get("source_files") and new.get("source_files"):
        _refuse_files(old["source_files"], new["source_files"])
        return ["weights: compared by the files' checksums; a run has no digests of its parameters"]
    names = [PurePath(str(side.get("model", ""))).name for side in (old, new)]
    if names[0] != names[1]:
        raise MismatchError(
            f"not comparable: another model: {names[0]!r} in the old run, {names[1]!r} in the new",
            "compare two runs of one model",
        )
    return ["weights: not compared, since a run has neither digests nor checksums of its files"]


def require_same_law(old: Rollout, new: Rollout) -> None:
    """Other temperatures, cuts or lengths give other tokens, whatever the engine.

    Raises:
        MismatchError: it names every setting that differs.
    """
    differing = [
        f"{name} {getattr(old.sampling, name):g} in the old run, {getattr(new.sampling, name):g} "
        "in the new"
        for name in LAW
        if getattr(old.sampling, name) != getattr(new.sampling, name)
    ]
    if differing:
        raise MismatchError(
            f"not comparable: another sampling law: {'; '.join(differing)}",
            "make the new run with the old one's flags: mismatch check --config FILE for both",
        )


def require_same_prompts(old: Ints, new: Ints) -> None:
    """Both runs hold the same prompts, token by token.

    Raises:
        MismatchError: it says how many they share.
    """
    first, second = np.unique(old), np.unique(new)
    shared = int(np.isin(first, second).sum())
    if shared == len(first) == len(second):
        return
    raise MismatchError(
        f"not comparable: other prompts: the old run has {len(first)}, the new {len(second)}, and "
        f"{shared} are the same tokens in both",
        "use the same prompts, --num-prompts and --seed; where these are the same, the tokeniser "
        "or its chat template has changed",
    )


def require_enough(prompts: int, tests: int) -> None:
    """Enough prompts for the permutation test to be able to find anything.

    Raises:
        MismatchError: it says how many prompts are needed.
    """
    least = prompts_to_tell(tests)
    if prompts < least:
        raise MismatchError(
            f"not comparable: {_prompts(prompts)}, and with fewer than {least} no change, however "
            "large, could be told from chance",
            f"make both runs with --num-prompts {least} at the least; the default is a better one",
        )


def _prompts(count: int) -> str:
    return f"{count} different prompt{'' if count == 1 else 's'}"


def _digests(facts: Fingerprint) -> Mapping[str, Any]:
    comparable = facts.get("weights_comparable", True)
    return (facts.get("weights") or {}) if comparable else {}


def _refuse_parameters(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    common = sorted(old.keys() & new.keys())
    alone = sorted(old.keys() ^ new.keys())
    if not common or len(alone) > len(common):
        raise MismatchError(
            f"not comparable: another model: {len(common)} parameters are in both runs, "
            f"{len(alone)} in one of them only",
            "compare two runs of one model",
        )
    differ = [name for name in common if list(old[name]) != list(new[name])]
    if differ or alone:
        raise MismatchError(
            f"not comparable: other weights: {len(differ)} of {len(common)} parameters differ and "
            f"{len(alone)} are in one run only: {_some(differ + alone)}",
            "compare runs of the same checkpoint, with the same --train-weights",
        )


def _refuse_files(old: Mapping[str, str], new: Mapping[str, str]) -> None:
    weights = [name for name in old.keys() | new.keys() if name.endswith((".safetensors", ".bin"))]
    differ = sorted(name for name in weights if old.get(name) != new.get(name))
    if old.get("config.json") != new.get("config.json"):
        raise MismatchError(
            "not comparable: another model: config.json is not the same file",
            "compare two runs of one model",
        )
    if differ:
        raise MismatchError(
            f"not comparable: other weights: other files: {_some(differ)}",
            "compare runs of the same checkpoint",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
