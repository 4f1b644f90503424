"""Experiments that confirm a cause or rule it out: what each shows, and what they said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mismatch.analysis.diagnosis.results import Evidence, Side
from mismatch.types import Estimate

Outcome = Literal["confirmed", "ruled out", "of little weight", "undecided", "not run"]
GONE, STAYS = 0.3, 0.1  # share of mean |delta| that goes: at least, for yes; at most, for no


@dataclass(frozen=True, slots=True)
class Taken:
    """What goes when a fix is applied.

    Attributes:
        side: whose fault it shows.
        own: what is true of every mismatch that it removes: the setting that it changes, and
            marks in the data.
        wide: causes that it removes too, and does not separate.
    """

    side: Side
    own: tuple[str, ...]
    wide: tuple[str, ...] = ()


KERNEL = Taken(
    "trainer",
    ("function-differs", "side-off", "onset"),
    ("attention-sinks", "sliding-window", "packing-leak", "yarn-attention-factor"),
)
TESTS = {
    "attention-sinks": Taken("trainer", ("attention-sinks",)),
    "no-sinks": Taken("engine", ("attention-sinks",)),
    "no-packing": Taken("trainer", ("packing-leak",)),
    "plain-attention": KERNEL,
    "fp32-lm-head": Taken("trainer", ("bf16-lm-head",)),
    "fp32-router": Taken("trainer", ("router-precision",)),
    "no-autocast": Taken("trainer", ("trainer-autocast", "precision")),
    "fp32": Taken(
        "trainer",
        ("precision",),
        (
            "bf16-lm-head",
            "router-precision",
            "trainer-autocast",
            "fsdp-cast-inputs",
            "microbatch-dependence",
        ),
    ),
    "processed-logprobs": Taken("engine", (), ("temperature-semantics", "sampling-truncation")),
    "explicit-generation-config": Taken("engine", ("implicit-generation-config", "sampling-law")),
    "sampling-mask": Taken("engine", ("sampling-truncation", "sampling-law")),
    "bf16-kv-cache": Taken("engine", ("fp8-kv", "decode-vs-prefill"), ("fp8-kv-tile",)),
    "rollout-bf16-weights": Taken("engine", ("quantised-rollout",), ("quantised-module-list",)),
    "no-prefix-cache": Taken("engine", ("prefix-cache-stale", "kv-block", "decode-vs-prefill")),
    "no-cascade-attention": Taken("engine", ("decode-vs-prefill", "onset", "kv-block")),
    "engine-fp32-lm-head": Taken("engine", ("bf16-lm-head",)),
    "engine-fp32": Taken("engine", ("precision", "decode-vs-prefill"), ("bf16-lm-head", "fp8-kv")),
    "regenerate": Taken("engine", (), ("sleep-level-2", "double-load")),
}


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment, with what it said where it was made."""

    GONE = frozenset({"bits", "expected_s"})  # see mismatch/codec.py

    id: str
    """Of its fix."""
    side: Side
    """Whose fault it would show."""
    tests: tuple[str, ...]
    """Causes that it takes out."""
    outcome: Outcome = "not run"
    seconds: float | None = None
    """Of its passes and of its engine; None where it was not made."""
    gone: Estimate | None = None
    """Share of mean |delta| that disappears with the cause."""
    same_tokens: bool = True
    """On the tokens of the run; False: the engine samples again."""
    reason: str = ""
    """Why it was not made, or failed."""
    evidence: tuple[Evidence, ...] = ()
    """What it measured, where that is no share of mean |delta|."""
    names: str = ""
    """The cause that it names where it confirms and no detector suspected one."""
    wide: tuple[str, ...] = ()
    """Those of ``tests`` that it cannot separate: it confirms one of them only where
    no other of ``tests`` is left."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the experiments of one run said."""

    experiments: tuple[Experiment, ...]
    confirmed: tuple[str, ...]
    """Causes that they confirm."""
    ruled_out: tuple[str, ...]
    seconds: float
    """That they took together, with the starts of processes and passes left out before."""
