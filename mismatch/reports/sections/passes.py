"""The same tokens scored in other ways: exact divergences, other settings."""

from __future__ import annotations

from mismatch.facts import replay_of
from mismatch.metrics.exact import KL, KL_TOPK
from mismatch.reports.formatting import line, number, percent, plural, text
from mismatch.reports.section import Cell, Cells, Column, Section, Table
from mismatch.reports.summary import all_rows, headline, metric_tables
from mismatch.specs import AS_STORED
from mismatch.types import Comparison, Report

# ---------------------------------------------------------------- exact divergences

EXACT_LEAD = (
    "k1 and k3 look at the token that was sampled. At a random sample of tokens both sides also "
    "gave {}, so that the divergence there is a sum and no estimate{}."
)
GIVEN = {
    KL: ("the whole distribution over the vocabulary", ""),
    KL_TOPK: ("the probabilities of the likeliest tokens and of all others together",
              ": a lower bound"),
}  # fmt: skip
ORDER = ("", "_p99", "_max")
OTHERS = ("exact_reverse_kl", "exact_tv")


def exact(report: Report) -> Section | None:
    """Show exact values of the headline next to what the estimators say; None where it has none."""
    comparison = headline(report)
    name = next((name for name in GIVEN if name in comparison.metrics), None)
    if name is None:
        return None
    names = [f"{name}{tail}" for tail in ORDER]
    names += [f"{other}{name.removeprefix(KL)}" for other in OTHERS]
    names += ["exact_argmax_agree", "kl_at_exact", "k3_kl_at_exact"]
    rows = {row.metric: row for row in all_rows(comparison)}
    sentences = exact_sentences(report, name)
    return Section(
        "exact",
        "Exact KL",
        EXACT_LEAD.format(*GIVEN[name]),
        sentences=sentences,
        tables=metric_tables([rows[each] for each in names if each in rows]),
        short=sentences[0],
    )


def exact_sentences(report: Report, name: str) -> list[str]:
    """Return the exact value next to the estimator's, and how much of it is the trainer's noise."""
    metrics = headline(report).metrics
    value, k3 = metrics[name], metrics["k3_kl_at_exact"]
    what = "exact KL" if name == KL else "KL over the likeliest tokens, a lower bound"
    sentences = [
        f"{what}: {number(value.value)} nats per token ({plural(value.n_tokens, 'position')} of "
        f"{plural(value.n_prompts, 'prompt')}); k3 on the same positions: {number(k3.value)}"
    ]
    for pair in report.noise_floor:
        if pair.right.endswith(":regrouped") and name in pair.metrics and value.value > 0:
            noise = pair.metrics[name].value
            sentences.append(
                f"the trainer against itself in other micro-batches: {number(noise)} "
                f"({percent(noise / value.value)} of it)"
            )
    return sentences


# ---------------------------------------------------------------- other settings

VARIANTS_LEAD = (
    "Settings of the trainer other than the tested setting; report.json has all their numbers."
)
VARIANTS = (
    Column("left / right", text),
    Column("mean |delta|", number),
    Column("k3 KL", number),
    Column("routing flips", percent, detail="of (token, layer)"),
)


def variants(report: Report) -> Section | None:
    """Replayed experts, weights in another form, what `mismatch score --name` has added.

    The headline comes first, for comparison; None where there is nothing else. The engine's
    prefill against the trainer is left out: the noise shows it.
    """
    others = [
        comparison
        for comparison in report.comparisons[1:]
        if report.fingerprints.get(comparison.rollout, {}).get("mode") != "prefill"
    ]
    if not others:
        return None
    rows = [_setting(report, each) for each in (report.comparisons[0], *others)]
    return Section("beside", "On the same tokens", VARIANTS_LEAD, tables=[Table(VARIANTS, rows)])


def _setting(report: Report, comparison: Comparison) -> Cells:
    facts = report.fingerprints.get(comparison.train, {})
    form, given = facts.get("weights_form", AS_STORED), replay_of(facts)
    flips = comparison.routing.get("routing_disagree_layer")
    constructed = bool(given) and flips is not None and flips.value == 0
    meaning = [f"replays the {line(given)}"] if given else []
    meaning += [f"weights {line(form)}"] if form != AS_STORED else []
    return (
        Cell(f"{comparison.rollout} / {comparison.train}", note="; ".join(meaning)),
        comparison.metrics.get("logprob_abs_diff_mean"),
        comparison.metrics.get("k3_kl"),
        "replayed" if constructed else flips,
    )
