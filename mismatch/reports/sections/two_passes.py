"""Two forward passes of the trainer with the same weights: PPO's ratio, which should be 1."""

from __future__ import annotations

from mismatch.metrics.ppo_passes import AS_RUN, CLIP, OVERRIDE, REPLAY, TwoPasses, Variant
from mismatch.reports.formatting import line, number, percent, text
from mismatch.reports.section import Cell, Cells, Column, Section, Table
from mismatch.types import Report

EQUAL = "Every ratio is exactly 1: the two passes agree bit for bit."
NO_FLIP = "No routing flip in the new pass."
LEAD = (
    "PPO divides the probabilities of a new forward pass by those of an old one. Both are the "
    "trainer's, with the same weights: on-policy every ratio should be 1."
)
LABELS = {
    AS_RUN: "as it runs",
    REPLAY: "with router replay",
    OVERRIDE: "on-policy override",
}
COLUMNS = (
    Column("new pass", text),
    Column("ratio ≠ 1", percent, interval=4, detail="of the tokens"),
    Column("mean |ratio - 1|", number, interval=4),
    Column("largest", number, 3),
    Column("clipped", percent, 1, detail=f"beyond {CLIP}"),
    Column("routing flips", percent, 1, detail="of (token, layer)"),
    Column("mean |new - old|", number, 2, detail="nats"),
)


def section(result: TwoPasses, report: Report) -> Section:
    """Every variant as a row; what was injected on purpose is a warning."""
    said = sentences(result)
    return Section(
        id="two_passes",
        title="Two forward passes",
        lead=LEAD,
        warnings=(injected(result),),
        sentences=said,
        tables=(Table(COLUMNS, [_row(result, variant) for variant in result.variants]),),
        notes=[f"Not run: {note}" for note in result.notes],
        short=said[0],
    )


def injected(result: TwoPasses) -> str:
    """What the new pass has of its own, as a sentence; "" where nothing was injected."""
    if not result.injected:
        return ""
    return (
        f"Injected on purpose, in the new pass only: {line(result.injected)}. These numbers show "
        "what such noise does; they are no measurement of this machine."
    )


def sentences(result: TwoPasses) -> list[str]:
    """What the numbers say, in plain words."""
    plain = result.named(AS_RUN)
    assert plain is not None
    said = [_plain_words(plain)]
    if plain.routing:
        said.append(_flips(result, plain))
    replayed = result.named(REPLAY)
    if replayed is not None:
        said.append(_replay(plain, replayed))
    if _value(plain, "ratio_not_one") == 0:
        return said
    left = number(_value(plain, "logprob_abs_diff_mean"))
    said.append(
        "The on-policy override (old := new, detached) sets every ratio to 1 by construction. It "
        f"hides the difference: the passes stay {left} nats apart."
    )
    return said


def _plain_words(plain: Variant) -> str:
    share = _value(plain, "ratio_not_one")
    if share == 0:
        return EQUAL
    clipped = _value(plain, "ratio_clipped")
    beyond = "none" if clipped == 0 else percent(clipped)
    return (
        f"{percent(share)} of the ratios are not exactly 1 (mean |ratio - 1| "
        f"{number(_value(plain, 'ratio_off_mean'))}, largest "
        f"{number(_value(plain, 'ratio_off_max'))}); {beyond} lie beyond PPO's usual "
        f"clip range of {CLIP}."
    )


def _flips(result: TwoPasses, plain: Variant) -> str:
    if result.replayed:
        return f"Both passes replay {line(result.replayed)}: their experts agree by construction."
    layer, some = (
        plain.routing[n].value for n in ("routing_disagree_layer", "routing_disagree_any")
    )
    if layer == 0:
        return NO_FLIP
    return (
        f"{percent(some)} of tokens have a routing flip in some layer ({percent(layer)} of "
        "(token, layer))."
    )


def _replay(plain: Variant, replayed: Variant) -> str:
    before, after = (_value(variant, "ratio_off_mean") for variant in (plain, replayed))
    if before == 0:
        return "Router replay has nothing to mend here."
    change = percent(abs(1 - after / before))
    falls = f"falls by {change}" if after < before else f"rises by {change}"
    return (
        "With the old pass's experts replayed in the new one, their experts agree by construction; "
        f"mean |ratio - 1| {falls}, to {number(after)}. What is left comes from the "
        "weights of the experts and from the rest of the network."
    )


def _row(result: TwoPasses, variant: Variant) -> Cells:
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
        metrics["ratio_off_mean"],
        metrics["ratio_off_max"],
        metrics["ratio_clipped"],
        "replayed" if flips is not None and given and flips.value == 0 else flips,
        metrics["logprob_abs_diff_mean"],
    )


def _value(variant: Variant, name: str) -> float:
    return variant.metrics[name].value
