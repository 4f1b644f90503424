"""A table of fixes as a run without sinks leaves it: one helps, one makes it worse, and so on."""

from __future__ import annotations

from dataclasses import replace

from mismatch.experiments.results import EstimatorFix, FixCost, FixOutcome, FixTable, HeldOut
from mismatch.types import Estimate, Judgement, Verdict

K3, MEAN, TAIL, ROUTES = (
    "k3_kl", "logprob_abs_diff_mean", "logprob_abs_diff_p999", "routing_disagree_layer",
)  # fmt: skip


def number(value: float, width: float | None = 0.2) -> Estimate:
    spread = None if width is None else abs(value) * width
    low, high = (None, None) if spread is None else (value - spread, value + spread)
    return Estimate(value, low, high, 11_461, 96, 48, ("few-prompts",))


BEFORE = {K3: number(0.061), MEAN: number(0.122), TAIL: number(2.1), ROUTES: number(0.33)}


def verdict(status: str, reason: str) -> Verdict:
    judgement = Judgement(K3, status, 1e-4, 2e-3, 0.013, "levels")  # type: ignore[arg-type]
    return Verdict(status, reason, "bf16 MoE", (judgement,))  # type: ignore[arg-type]


def outcome(id: str, k3: float, mean: float, effect: str, p: float, **more: object) -> FixOutcome:
    change = number(k3 - 0.061)
    fields: dict[str, object] = {
        "side": "train",
        "summary": f"what {id} changes",
        "flags": f"--set {id}",
        "before": BEFORE,
        "after": {K3: number(k3), MEAN: number(mean), TAIL: number(10 * mean)},
        "paired": change,
        "changes": {K3: change, MEAN: number(mean - 0.122)},
        "removed": {K3: number(1 - k3 / 0.061), MEAN: number(1 - mean / 0.122)},
        "p_values": {K3: p, MEAN: min(1.0, 2 * p)},
        "significant": p < 0.05,
        "cost": FixCost(11.5, 3 * 2**30),
        "verdict_after": verdict("unfit", "k3 above the critical level"),
    }
    return FixOutcome(id=id, outcome=effect, **{**fields, **more})  # type: ignore[arg-type]


def make_table(verdict_from: str = "as-is") -> FixTable:
    healthy = verdict("healthy", "within the levels for bf16 MoE")
    sinks = outcome("attention-sinks", 1.02e-4, 0.0036, "better", 1e-5, verdict_after=healthy)
    both = outcome("attention-sinks+router-replay=ids", 5.5e-5, 0.0033, "better", 1e-5,
                   verdict_after=healthy)  # fmt: skip
    engine = outcome("engine-fp32", 0.0604, 0.121, "none", 0.8, side="engine", paired=None,
                     difference=number(-0.0006, 3.0), cost=FixCost(11.5))  # fmt: skip
    return FixTable(
        outcomes=(
            both,
            sinks,
            engine,
            outcome("fp32-router", 0.0709, 0.131, "worse", 1e-3),
            FixOutcome("batch-invariant", "engine", "vLLM's kernels", applies=False,
                       reason="only on a GPU, and there is none"),
            FixOutcome("fp16", "train", "the trainer in fp16",
                       reason="3 logprobs are not finite <b>"),
        ),
        estimators=(
            EstimatorFix("tis", "token ratios as weights", "tis-token"),
            EstimatorFix("on-policy-ratio", "the ratio set to 1", "override", hides=True),
        ),
        best="attention-sinks",
        best_together="attention-sinks+router-replay=ids",
        left_out=("micro-batch=1024: over the budget of 2 minutes",),
        method="p adjusted by Holm's method for all fixes that were tried",
        verdict=verdict_from,  # type: ignore[arg-type]
        seconds=93.0,
        verdict_as_is=verdict("unfit", "as it was") if verdict_from == "after-fixes" else None,
        held_out=HeldOut(
            "attention-sinks+router-replay=ids", "attention-sinks+router-replay=ids", 24, 24,
            removed={K3: number(0.999, 0.0001), MEAN: number(0.97, 0.01)},
            p_values={K3: 1e-5, MEAN: 1e-5}, confirmed=True,
        ),
    )  # fmt: skip


def make_useless_table() -> FixTable:
    """A healthy run: nothing can be told from chance."""
    return FixTable(
        outcomes=(outcome("fp32-lm-head", 0.0609, 0.1219, "none", 0.7),
                  outcome("fp32-router", 0.0611, 0.1221, "none", 0.9)),
        method="p adjusted by Holm's method",
    )  # fmt: skip


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_long_table(count: int = 20) -> FixTable:
    """So many fixes, all measured: a third help, a third do nothing, a third hurt.

    They end in letters: digits in a name would count as numbers of the page.
    """
    helped, same = count // 3, count - 2 * (count // 3)
    outcomes = [
        *(outcome(f"helps-{LETTERS[n]}", 1e-4 * (n + 1), 0.004 * (n + 1), "better", 1e-5,
                  verdict_after=verdict("healthy", "within the levels for bf16 MoE"))
          for n in range(helped)),
        *(outcome(f"idle-{LETTERS[n]}", 0.061, 0.122, "none", 0.7) for n in range(same)),
        *(outcome(f"hurts-{LETTERS[n]}", 0.07 + 0.01 * n, 0.13, "worse", 1e-3)
          for n in range(helped)),
    ]  # fmt: skip
    return replace(make_table(), outcomes=tuple(outcomes), best="helps-a", best_together="helps-a",
                   left_out=(), held_out=None)  # fmt: skip
