"""The same tokens scored in other ways: exact divergences, two passes, other settings."""

from __future__ import annotations

from mismatch.analysis.exact_kl import KL, KL_TOPK
from mismatch.analysis.routing_tables import replay_of
from mismatch.metrics.ppo_passes import AS_RUN, CLIP, OVERRIDE, REPLAY, TwoPasses, Variant
from mismatch.reports.formatting import line, number, percent, plural, text
from mismatch.reports.section import Cell, Cells, Column, Section, Table
from mismatch.reports.summary import all_rows, headline, metric_tables
from mismatch.specs import AS_STORED
from mismatch.types import Comparison, Report

# ---------------------------------------------------------------- exact divergences

EQUAL = "Every ratio is exactly 1: the two passes agree bit for bit."
NO_FLIP = "No routing flip in the new pass."
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


# ---------------------------------------------------------------- two forward passes

PASSES_LEAD = (
    "PPO divides the probabilities of a new forward pass by those of an old one. Both are the "
    "trainer's, with the same weights: on-policy every ratio should be 1."
)
LABELS = {AS_RUN: "as it runs", REPLAY: "with router replay", OVERRIDE: "on-policy override"}
PASSES = (
    Column("new pass", text),
    Column("ratio ≠ 1", percent, interval=4, detail="of the tokens"),
    Column("mean |ratio - 1|", number, interval=4),
    Column("largest", number, 3),
    Column("clipped", percent, 1, detail=f"beyond {CLIP}"),
    Column("routing flips", percent, 1, detail="of (token, layer)"),
    Column("mean |new - old|", number, 2, detail="nats"),
)


def two_passes(result: TwoPasses, report: Report) -> Section:
    """PPO's ratio of two passes with the same weights, which should be 1; a row a variant."""
    sentences = passes_sentences(result)
    injected = result.injected and (
        "The stored settings say that noise was injected on purpose, in the new pass only: "
        f"{line(result.injected)}. Then these numbers show what it does, not this machine."
    )
    return Section(
        "two_passes",
        "Two forward passes",
        PASSES_LEAD,
        warnings=[injected],
        sentences=sentences,
        tables=[Table(PASSES, [_variant(result, variant) for variant in result.variants])],
        notes=[f"Not run: {note}" for note in result.notes],
        short=sentences[0],
    )


def passes_sentences(result: TwoPasses) -> list[str]:
    """Return what the numbers say, in plain words."""
    plain, replayed = result.named(AS_RUN), result.named(REPLAY)
    assert plain is not None
    share, off = _value(plain, "ratio_not_one"), _value(plain, "ratio_off_mean")
    sentences = [EQUAL]
    if share:
        clipped = _value(plain, "ratio_clipped")
        sentences = [
            f"{percent(share)} of the ratios are not exactly 1 (mean |ratio - 1| {number(off)}, "
            f"largest {number(_value(plain, 'ratio_off_max'))}); "
            f"{'none' if clipped == 0 else percent(clipped)} lie beyond PPO's usual clip range of "
            f"{CLIP}."
        ]
    if plain.routing and result.replayed:
        sentences.append(
            f"Both passes replay {line(result.replayed)}: their experts agree by construction."
        )
    elif plain.routing:
        layer = plain.routing["routing_disagree_layer"].value
        tokens = percent(plain.routing["routing_disagree_any"].value)
        sentences.append(
            f"{tokens} of tokens have a routing flip in some layer ({percent(layer)} of "
            "(token, layer))."
            if layer
            else NO_FLIP
        )
    if replayed is not None and off == 0:
        sentences.append("Router replay has nothing to change here.")
    elif replayed is not None:
        after = _value(replayed, "ratio_off_mean")
        sentences.append(
            "With the old pass's experts replayed in the new one, their experts agree by "
            f"construction; mean |ratio - 1| {'falls' if after < off else 'rises'} by "
            f"{percent(abs(1 - after / off))}, to {number(after)}. What is left comes from the "
            "weights of the experts and from the rest of the network."
        )
    if share:
        left = number(_value(plain, "logprob_abs_diff_mean"))
        sentences.append(
            "The on-policy override (old := new, detached) sets every ratio to 1 by construction. "
            f"It hides the difference: the passes stay {left} nats apart."
        )
    return sentences


def _variant(result: TwoPasses, variant: Variant) -> Cells:
    if variant.scoring is None:
        plain = result.named(AS_RUN)
        left = None if plain is None else plain.metrics["logprob_abs_diff_mean"].value
        label = Cell(LABELS[variant.id], note="set to 1, not measured")
        return label, None, None, None, None, None, left
    metrics, flips = variant.metrics, variant.routing.get("routing_disagree_layer")
    given = variant.id == REPLAY or bool(result.replayed)
    return (
        Cell(LABELS[variant.id], note=f"{result.old} / {variant.scoring}"),
        Cell(metrics["ratio_not_one"], "strong"),
        *map(metrics.get, ("ratio_off_mean", "ratio_off_max", "ratio_clipped")),
        "replayed" if flips is not None and given and flips.value == 0 else flips,
        metrics["logprob_abs_diff_mean"],
    )


def _value(variant: Variant, name: str) -> float:
    return variant.metrics[name].value


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
