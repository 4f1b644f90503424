"""What comparing a new run with an old one gives; plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mismatch.analysis.square import Evidence, Standing
from mismatch.codec import object_schema, to_json
from mismatch.types import Comparison, Estimate, Verdict

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


def against_to_json(made: Against) -> dict[str, Any]:
    """All of it, rows by metric; numbers are finite or null."""
    fields = to_json(made)
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
