"""What of a run is bitwise equal; plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mismatch.codec import fields_of, from_json, refused
from mismatch.run import store
from mismatch.specs import CheckSpec
from mismatch.types import NotTested

SCHEMA, FILE = "mismatch.batch-probe/1", "batch-probe.json"
NO_SETTING = "no setting is known that removes it"
Word = Literal["exact", "not exact", "not proven"]
Scope = Literal["sides", "one side", "further"]


@dataclass(frozen=True, slots=True)
class Place:
    """An action token, by its id and where it is: position in its sequence, from 0."""

    prompt: int
    sequence: int
    position: int
    token: int


@dataclass(frozen=True, slots=True)
class Pair:
    """Two arrays of numbers for the same things, compared by their bits; 0 and -0 are equal.

    Attributes:
        what: the pair in words, "engine: decode / prefill".
        left, right: names of the scorings.
        scope: engine against trainer, one side against itself, or further passes;
            only the first two count for the word.
        unit: what is counted in ``n``: "token", "choice" (of experts), "position", "parameter".
        unequal: of these n; ``ulps``: the largest distance in units in the last place of
            ``dtype``; None: whole numbers, or digests.
        first: the first unequal token; None: none is, or the things are no tokens.
        constructed: why equality would prove nothing; "": both sides were computed.
    """

    what: str
    left: str
    right: str
    scope: Scope
    unit: str
    n: int
    unequal: int
    ulps: int | None = None
    dtype: str = ""
    first: Place | None = None
    constructed: str = ""

    @property
    def word(self) -> Word:
        """What is said of this pair.

        >>> Pair("trainer / engine", "a", "b", "sides", "token", 8, 0).word
        'exact'
        """
        if self.unequal:
            return "not exact"
        return "not proven" if self.constructed or not self.n else "exact"


@dataclass(frozen=True, slots=True)
class Excluded:
    """A setting with which bitwise equality is impossible, or not promised.

    Attributes:
        remove: the setting that removes it; "": none is known.
        source: where that is documented or was reported.
        certain: bits differ with it; else nobody promises that they are equal.
    """

    id: str
    side: Literal["engine", "trainer", "both"]
    what: str
    remove: str
    source: str
    certain: bool = False


@dataclass(frozen=True, slots=True)
class Exactness:
    """The level EXACT of a run.

    Attributes:
        pairs: scorings, the engine's own log-probabilities against the trainer's first.
        others: routes, distributions and weights of engine and trainer.
        excluded: settings of this stack that exclude equality.
    """

    pairs: tuple[Pair, ...]
    others: tuple[Pair, ...] = ()
    excluded: tuple[Excluded, ...] = ()

    @property
    def counted(self) -> tuple[Pair, ...]:
        """Pairs that decide the word."""
        return tuple(pair for pair in self.pairs if pair.scope != "further")

    @property
    def word(self) -> Word:
        """Exact: engine and trainer are equal in every token, and so is each with itself."""
        if any(pair.unequal for pair in self.counted):
            return "not exact"
        sides = any(pair.scope == "sides" for pair in self.counted)
        proven = sides and all(pair.word == "exact" for pair in self.counted)
        return "exact" if proven else "not proven"


def said(result: Exactness) -> str:
    """Return one line: the word, and what it rests on.

    >>> pair = Pair("trainer / engine", "a", "b", "sides", "token", 1200, 0)
    >>> said(Exactness((pair,)))
    'yes, bitwise equal: 1,200 of 1,200 tokens, in 1 of 1 pair; no side was scored twice'
    """
    pairs = result.counted
    equal = sum(pair.word == "exact" for pair in pairs)
    once = "" if any(pair.scope == "one side" for pair in pairs) else "; no side was scored twice"
    ends = f"in {equal} of {len(pairs)} pair{'s' * (len(pairs) != 1)}"
    if result.word == "exact":
        return f"yes, bitwise equal: {pairs[0].n:,} of {pairs[0].n:,} tokens, {ends}{once}"
    if result.word == "not proven":
        why = next((pair.constructed for pair in pairs if pair.constructed), "")
        return f"not proven: {why or 'no pair of engine and trainer'}"
    worst = next(pair for pair in pairs if pair.unequal)
    where = "" if worst is pairs[0] else f" ({worst.what})"
    return f"no: {worst.unequal:,} of {worst.n:,} tokens unequal{where}"


@dataclass(frozen=True, slots=True)
class BatchProbe:
    """What a batch changes.

    Attributes:
        sequences: of a batch.
        pairs: of each side: batch of 1 against N, and N against N in another order and repeated.
    """

    sequences: int
    pairs: tuple[Pair, ...]
    not_tested: tuple[NotTested, ...] = ()


def probe_of_run(run_dir: Path | str, spec: CheckSpec | None = None) -> BatchProbe | None:
    """Return what ``--batch-probe`` left in a run; None where it left nothing.

    Raises:
        MismatchError: it is damaged, or of another version.
    """
    if not (Path(run_dir) / FILE).exists():
        return None
    document = store.load_document(Path(run_dir), FILE)
    fields = fields_of(document, SCHEMA, command="mismatch check --batch-probe")
    page = "docs/how-to/exact.md"
    with refused(SCHEMA, command="mismatch check --batch-probe", page=page):
        return from_json(BatchProbe, fields["batch_probe"])


@dataclass(frozen=True, slots=True)
class FixBits:
    """Engine against trainer with one fix.

    Attributes:
        engine_s, trainer_s: seconds of 1,000 tokens that are sampled, and that are scored, before
            and after; None where they were not noted, or where the side ran as it was.
    """

    id: str
    before: Pair
    after: Pair
    engine_s: tuple[float, float] | None
    trainer_s: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class FixesByBits:
    """All fixes of a run, those with the fewest unequal bits first."""

    fixes: tuple[FixBits, ...]
