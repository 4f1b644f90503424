"""Names of scorings: which side scored, in which of its passes, at which precision, which tokens.

No other module builds these names or splits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLOAT32 = "fp32"
LONG = "long"  # the tokens of one long sequence
SAMPLES = "first-samples"  # folder of a run: the first sample of each prompt
FIRST = "first-layers"  # kind of a scoring by a model of its first layers alone
APART = "adapter-apart"  # kind of a plain forward that does not merge its adapter
AS_RUN = "as-run"  # the long sequence at the run's own precision; without it, in float32
FIX, PLAIN = "fix", "plain"  # sides whose names over the long sequence say their precision
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")


class Key(str):
    """The name of a scoring, as it is on disk, with its parts.

    Attributes:
        side: an engine's name, ``fsdp`` (whatever code trains), ``reference``, ``plain`` or
            ``fix``.
        kind: which pass of that side; of a fix, its id; "": the only one, or the trainer's own.
        precision: where it is not the run's own, else "".
        tokens: ``long`` for the long sequence; "": those of the run.

    >>> Key("vllm:decode").side, Key("vllm:decode").kind
    ('vllm', 'decode')
    >>> Key("vllm:long").precision, Key("vllm:as-run:long").precision, Key("plain:bf16").precision
    ('fp32', '', 'bf16')
    >>> str(Key.of("fsdp", precision="fp32", tokens="long")), Key.of("fsdp", tokens="long")
    ('fsdp:long', 'fsdp:as-run:long')
    """

    side: str
    kind: str
    precision: str
    tokens: str

    def __new__(cls, name: str) -> Key:
        """Take a name apart."""
        key = super().__new__(cls, name)
        key.side, *parts = name.split(":")
        key.tokens = parts.pop() if parts[-1:] == [LONG] else ""
        key.precision = ""
        least = 2 if key.side == FIX else 1  # a fix may be called fp32
        if len(parts) >= least and parts[-1].partition("-")[0] in PRECISIONS:
            key.precision = parts.pop()
        elif key.tokens and key.side not in (FIX, PLAIN) and parts[-1:] != [AS_RUN]:
            key.precision = FLOAT32
        key.kind = ":".join(part for part in parts if not (key.tokens and part == AS_RUN))
        return key

    @classmethod
    def of(cls, side: str, kind: str = "", precision: str = "", tokens: str = "") -> Key:
        """Name a scoring by its parts."""
        if tokens and side not in (FIX, PLAIN):
            precision = "" if precision == FLOAT32 else (precision or AS_RUN)
        return cls(":".join(filter(None, (side, kind, precision, tokens))))

    def over_long(self, precision: str | None = None) -> Key:
        """Return the key of the same pass over the long sequence, at another precision if given.

        >>> Key("fix:attention-sinks").over_long(FLOAT32), Key("fsdp").over_long(FLOAT32)
        ('fix:attention-sinks:fp32:long', 'fsdp:long')
        """
        held = self.precision if precision is None else precision
        return Key.of(self.side, self.kind, held, LONG)


TRAIN = Key("fsdp")
REFERENCE = Key("reference:fp32")
REGROUPED = Key.of(TRAIN, "regrouped")
REPEATED = Key.of(TRAIN, "repeated")
GRAD = Key.of(TRAIN, "grad")  # the trainer with gradients
ALONE = Key.of(TRAIN, "alone")  # one sequence per forward pass, of a trainer adapter
NEW = Key.of(TRAIN, "new")  # the second pass with injected noise
NEW_REPLAYED = Key.of(TRAIN, "new-replayed")  # the second pass with the first one's routes
REPLAYED = Key.of(TRAIN, "replayed")  # the trainer with the engine's routes
WEIGHTS = Key.of(TRAIN, "other-weights")  # the same trainer, its experts in another form
PLAIN_TRAINER = Key.of(PLAIN, "trainer")  # with the settings that the trainer declares
TRAINER_FLOAT32 = Key.of(TRAIN, precision=FLOAT32)  # the trainer's implementation in float32
REFERENCE_FIRST = Key.of(REFERENCE.side, FIRST, FLOAT32)
TRAINER_LONG, REFERENCE_LONG = TRAIN.over_long(FLOAT32), REFERENCE.over_long()


def yardsticks(facts: Mapping[str, Any], precision: str | None, trainer: bool) -> tuple[Key, ...]:
    """Return names of the plain forwards that round as a side does, the closest first.

    Args:
        facts: fingerprint of the side. One that does not merge its adapter rounds twice.
    """
    if (facts.get("adapter") or {}).get("as") == "own":
        return (Key.of(PLAIN, APART, precision or ""),)
    return (*((PLAIN_TRAINER,) if trainer else ()), Key.of(PLAIN, precision=precision or ""))
