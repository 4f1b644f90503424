"""PPO's two forward passes: how far from 1 the ratio is while nothing has changed."""

from __future__ import annotations

from mismatch.analysis.results import AS_RUN, OVERRIDE, REPLAY, TwoPasses, Variant
from mismatch.metrics.token import CLIP
from mismatch.reports.formatting import line, number, percent, text
from mismatch.reports.section import Cell, Cells, Column, Section, Table
from mismatch.types import Report

EQUAL = "Every ratio is exactly 1: the two passes agree bit for bit."
NO_FLIP = "No routing flip in the new pass."
LEAD = (
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


def section(result: TwoPasses, report: Report) -> Section:
    """PPO's ratio of two passes with the same weights, which should be 1; a row a variant."""
    texts = sentences(result)
    injected = result.injected and (
        "The stored settings inject noise on purpose, into the new pass only: "
        f"{line(result.injected)}. These numbers show what that noise does, not this machine."
    )
    return Section(
        "two_passes",
        "Two forward passes",
        LEAD,
        warnings=[injected],
        sentences=texts,
        tables=[Table(PASSES, [_variant(result, variant) for variant in result.variants])],
        notes=[f"Not run: {note}" for note in result.notes],
        short=texts[0],
    )


def sentences(result: TwoPasses) -> list[str]:
    """Return what the numbers say, in plain words."""
    plain, replayed = result.named(AS_RUN), result.named(REPLAY)
    assert plain is not None
    share, off = _value(plain, "ratio_not_one"), _value(plain, "ratio_off_mean")
    texts = [EQUAL]
    if share:
        clipped = _value(plain, "ratio_clipped")
        texts = [
            f"{percent(share)} of the ratios are not exactly 1 (mean |ratio - 1| {number(off)}, "
            f"largest {number(_value(plain, 'ratio_off_max'))}); "
            f"{'none' if clipped == 0 else percent(clipped)} lie beyond PPO's usual clip range of "
            f"{CLIP}."
        ]
    if plain.routing and result.replayed:
        texts.append(
            f"Both passes replay {line(result.replayed)}: their experts agree by construction."
        )
    elif plain.routing:
        layer = plain.routing["routing_disagree_layer"].value
        tokens = percent(plain.routing["routing_disagree_any"].value)
        texts.append(
            f"{tokens} of tokens have a routing flip in some layer ({percent(layer)} of "
            "(token, layer))."
            if layer
            else NO_FLIP
        )
    if replayed is not None and off == 0:
        texts.append("Router replay has nothing to change here.")
    elif replayed is not None:
        after = _value(replayed, "ratio_off_mean")
        texts.append(
            "With the old pass's experts replayed in the new one, their experts agree by "
            f"construction; mean |ratio - 1| {'falls' if after < off else 'rises'} by "
            f"{percent(abs(1 - after / off))}, to {number(after)}. What is left comes from the "
            "weights of the experts and from the rest of the network."
        )
    if share:
        left = number(_value(plain, "logprob_abs_diff_mean"))
        texts.append(
            "The on-policy override (old := new, detached) sets every ratio to 1 by construction. "
            f"It hides the difference: the passes stay {left} nats apart."
        )
    return texts


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
