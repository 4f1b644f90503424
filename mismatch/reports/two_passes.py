"""Two forward passes of the trainer, as text, as a picture and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatch.metrics.two_passes import AS_RUN, CLIP, OVERRIDE, REPLAY, TwoPasses, Variant
from mismatch.reports import quantities
from mismatch.reports.figures import Picture
from mismatch.reports.svg import ACCENT, SECOND, drawing, to_svg
from mismatch.reports.text import line
from mismatch.types import Estimate, Report

TITLE = "Two forward passes"
LEAD = (
    "PPO divides the probabilities of a new forward pass by those of an old one. Both are the "
    "trainer's, with the same weights: on-policy every ratio should be 1."
)
LABELS = {
    AS_RUN: "as it runs",
    REPLAY: "with router replay",
    OVERRIDE: "on-policy override",
}
SIZES = ("exactly 1", "≤ 1e-6", "≤ 1e-5", "≤ 1e-4", "≤ 1e-3", "≤ 0.01", f"≤ {CLIP}", f"> {CLIP}")


@dataclass(frozen=True, slots=True)
class PassRow:
    """One variant as a line of a table; "–" where nothing was measured."""

    label: str
    pair: str
    not_one: str
    not_one_interval: str
    off: str
    off_interval: str
    largest: str
    clipped: str
    flips: str
    nats: str


@dataclass(frozen=True, slots=True)
class View:
    """What the renderings show.

    Attributes:
        lead: what the two passes are.
        injected: what was injected on purpose, as a sentence, or "".
    """

    lead: str
    injected: str
    rows: tuple[PassRow, ...]
    sentences: tuple[str, ...]
    notes: tuple[str, ...]
    pictures: tuple[Picture, ...]


def view(report: Report) -> View | None:
    """The section of a report; None where there were no two passes."""
    made = report.result("two_passes")
    if made is None:
        return None
    return View(
        lead=LEAD,
        injected=injected(made),
        rows=tuple(_row(made, variant) for variant in made.variants),
        sentences=tuple(sentences(made)),
        notes=tuple(f"Not run: {line(note)}" for note in made.notes),
        pictures=(by_size(made),),
    )


def injected(made: TwoPasses) -> str:
    """What the new pass has of its own, as a sentence; "" where nothing was injected."""
    if not made.injected:
        return ""
    return (
        f"Injected on purpose, in the new pass only: {line(made.injected)}. These numbers show "
        "what such noise does; they are no measurement of this machine."
    )


def sentences(made: TwoPasses) -> list[str]:
    """What the numbers say, in plain words."""
    plain = made.named(AS_RUN)
    assert plain is not None
    said = [_plain_words(plain)]
    if plain.routing:
        said.append(_flips(made, plain))
    replayed = made.named(REPLAY)
    if replayed is not None:
        said.append(_replay(plain, replayed))
    if _value(plain, "ratio_not_one") == 0:
        return said
    left = quantities.number(_value(plain, "logprob_abs_diff_mean"))
    said.append(
        "The on-policy override (old := new, detached) sets every ratio to 1 by construction. It "
        f"hides the difference and mends none of it: the passes stay {left} nats apart."
    )
    return said


def _plain_words(plain: Variant) -> str:
    share = _value(plain, "ratio_not_one")
    if share == 0:
        return "Every ratio is exactly 1: the two passes agree bit for bit."
    clipped = _value(plain, "ratio_clipped")
    beyond = "none" if clipped == 0 else quantities.percent(clipped)
    return (
        f"{quantities.percent(share)} of the ratios are not exactly 1 (mean |ratio - 1| "
        f"{quantities.number(_value(plain, 'ratio_off_mean'))}, largest "
        f"{quantities.number(_value(plain, 'ratio_off_max'))}); {beyond} lie beyond PPO's usual "
        f"clip range of {CLIP}."
    )


def _flips(made: TwoPasses, plain: Variant) -> str:
    if made.replayed:
        return f"Both passes replay {line(made.replayed)}: their experts agree by construction."
    layer, some = (
        plain.routing[n].value for n in ("routing_disagree_layer", "routing_disagree_any")
    )
    if layer == 0:
        return "No router chose other experts in the new pass."
    return (
        f"Routers chose other experts in {quantities.percent(layer)} of (token, layer), for "
        f"{quantities.percent(some)} of the tokens."
    )


def _replay(plain: Variant, replayed: Variant) -> str:
    before, after = (_value(one, "ratio_off_mean") for one in (plain, replayed))
    if before == 0:
        return "Router replay has nothing to mend here."
    change = quantities.percent(abs(1 - after / before))
    falls = f"falls by {change}" if after < before else f"rises by {change}"
    return (
        "With the old pass's experts replayed in the new one, their experts agree by construction; "
        f"mean |ratio - 1| {falls}, to {quantities.number(after)}. What is left comes from the "
        "weights of the experts and from the rest of the network."
    )


def _row(made: TwoPasses, variant: Variant) -> PassRow:
    if variant.scoring is None:
        plain = made.named(AS_RUN)
        left = None if plain is None else _value(plain, "logprob_abs_diff_mean")
        none = quantities.MISSING
        return PassRow(
            LABELS[variant.id], "set to 1, not measured", none, none, none, none, none, none, none,
            quantities.number(left),
        )  # fmt: skip
    metrics, flips = variant.metrics, variant.routing.get("routing_disagree_layer")
    given = variant.id == REPLAY or bool(made.replayed)
    return PassRow(
        label=LABELS[variant.id],
        pair=f"{line(made.old)} / {line(variant.scoring)}",
        not_one=quantities.percent(metrics["ratio_not_one"].value),
        not_one_interval=_interval(metrics["ratio_not_one"], quantities.percent),
        off=quantities.number(metrics["ratio_off_mean"].value),
        off_interval=_interval(metrics["ratio_off_mean"], quantities.number),
        largest=quantities.number(metrics["ratio_off_max"].value),
        clipped=quantities.percent(metrics["ratio_clipped"].value),
        flips=quantities.MISSING if flips is None
        else "replayed" if given and flips.value == 0
        else quantities.percent(flips.value),
        nats=quantities.number(metrics["logprob_abs_diff_mean"].value),
    )  # fmt: skip


def _interval(estimate: Estimate, write: Any) -> str:
    if estimate.low is None or estimate.high is None:
        return quantities.MISSING
    return f"{write(estimate.low)} … {write(estimate.high)}"


def _value(variant: Variant, name: str) -> float:
    return variant.metrics[name].value


def by_size(made: TwoPasses) -> Picture:
    """Share of tokens by |ratio - 1|, one bar per pass that was run."""
    ran = [variant for variant in made.variants if variant.by_size]
    colours = {AS_RUN: ACCENT, REPLAY: SECOND}
    width = 0.8 / len(ran)
    with drawing() as (figure, axes):
        places = np.arange(len(SIZES))
        for index, variant in enumerate(ran):
            counts = np.array(variant.by_size["count"], np.float64)
            offset = (index - (len(ran) - 1) / 2) * width
            axes.bar(
                places + offset, 100 * counts / counts.sum(), width * 0.95,
                color=colours[variant.id], label=LABELS[variant.id],
            )  # fmt: skip
        axes.set_xticks(places, SIZES)
        axes.set_xlabel("|ratio - 1|, up to")
        axes.set_ylabel("tokens, %")
        if len(ran) > 1:
            axes.legend(loc="upper left")
            axes.margins(y=0.25)
        svg = to_svg(figure, "two-passes", "Tokens by the distance of their ratio from 1")
    return Picture(
        "two-passes",
        "How far the ratio is from 1",
        "Left: ratios that are exactly 1. Right: beyond PPO's usual clip range, where a token's "
        "gradient is cut although no update has happened."
        + (" Noise was injected into the new pass on purpose." if made.injected else ""),
        svg,
    )
