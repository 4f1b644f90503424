"""The section on experts: what it says, draws and leaves out."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from mismatch.analysis.comparison import compare
from mismatch.analysis.routing_tables import NOISE_UNKNOWN
from mismatch.metrics import METRICS as DECLARED
from mismatch.metrics.routing_pairs import RouterNoise
from mismatch.reports.formatting import percent
from mismatch.reports.section import Figure, Section
from mismatch.reports.sections import routing
from mismatch.reports.svg import OPACITIES
from mismatch.types import Comparison, Report
from tests.reports_fixture import make_report, make_tokens
from tests.routing_fixture import rollout_of, routing_pair, with_routing
from tests.texts import numbers

TOKENS = make_tokens()
ROLLOUT = rollout_of(TOKENS)
NAMES = ["routing-map", "routing-by-margin"]
MOST_BYTES = 150_000


def compared(differs: np.ndarray, **options) -> Comparison:  # type: ignore[no-untyped-def]
    sides = routing_pair(ROLLOUT, differs, **options)
    left, right, noise = with_routing(ROLLOUT, TOKENS, *sides)
    return compare(ROLLOUT, left, right, sampled_by_left=True, noise=noise)


@cache
def report() -> Report:
    return make_report(TOKENS)


def shown(comparison: Comparison) -> Section:
    section = routing.section(replace(report(), comparisons=(comparison,)))
    assert section is not None
    return section


def drawn_figures(comparison: Comparison) -> dict[str, str]:
    return {figure.name: figure.draw() for figure in pictures(shown(comparison))}


def pictures(section: Section) -> tuple[Figure, ...]:
    return next((part.figures for part in section.parts if part.figures), ())


def rows(section: Section, part: str) -> list[list[object]]:
    """Bare values of the tables of a part; none where there is no such part."""
    parts = [item for folded in section.parts for item in (folded, *folded.parts)]
    tables = [table for item in parts if item.id == f"routing-{part}" for table in item.tables]
    return [[cell.value for cell in row] for table in tables for row in table.cells()]


def some(layers: int, share: float = 0.05) -> np.ndarray:
    drawn: np.ndarray = np.random.default_rng(0).random((len(TOKENS), layers)) < share
    return drawn


def test_every_picture_is_there_and_names_no_token_twice() -> None:
    drawn = drawn_figures(compared(some(3)))
    assert list(drawn) == NAMES
    ids = re.findall(r'\bid="([^"]+)"', "".join(drawn.values()))
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(("layers", "experts", "top_k"), [(61, 256, 8), (94, 128, 8)])
def test_large_models_stay_small(layers: int, experts: int, top_k: int) -> None:
    drawn = drawn_figures(compared(some(layers), experts=experts, top_k=top_k))
    assert list(drawn) == NAMES
    assert sum(len(svg.encode()) for svg in drawn.values()) < MOST_BYTES


def test_one_layer_one_expert_without_flips_says_so() -> None:
    comparison = compared(np.zeros((len(TOKENS), 1), bool), top_k=1)
    section, drawn = shown(comparison), drawn_figures(comparison)
    assert section.sentences[0].startswith(routing.NO_FLIP)
    assert numbers(section.sentences[0]) == [5_142]
    assert list(drawn) == ["routing-map"]
    assert routing.NO_FLIP.lower() in drawn["routing-map"].lower()


def test_all_flips_says_so() -> None:
    section = shown(compared(np.ones((len(TOKENS), 2), bool)))
    assert section.sentences[0] == routing.EVERY_TOKEN
    assert [figure.name for figure in pictures(section)] == NAMES


def test_harm_is_told_from_no_harm() -> None:
    flips = TOKENS["routing_flips"].to_numpy(np.int64) > 0
    harmful = routing.sentences(compared(flips[:, None]))
    assert harmful[0].startswith(f"{percent(flips.mean())} of tokens")
    assert harmful[0].endswith(routing.HARMFUL)
    shuffled = np.random.default_rng(1).permutation(flips)
    assert routing.sentences(compared(shuffled[:, None]))[0].endswith(routing.HARMLESS)


def test_too_few_flips_decide_nothing() -> None:
    few = np.zeros((len(TOKENS), 1), bool)
    few[TOKENS["delta"].abs().nlargest(3).index[-1]] = True
    few[::1500] = True
    sentence = routing.sentences(compared(few))[0]
    assert sentence.endswith(routing.TOO_WIDE)
    single = replace(ROLLOUT, prompt_index=np.zeros(ROLLOUT.n_sequences, np.int64))
    left, right, noise = with_routing(single, TOKENS, *routing_pair(single, some(1)))
    alone = compare(single, left, right, sampled_by_left=True, noise=noise)
    assert routing.sentences(alone)[0].endswith(routing.NO_INTERVAL)


def test_near_ties_name_their_yardstick() -> None:
    differs = some(2)
    left, right, _ = with_routing(ROLLOUT, TOKENS, *routing_pair(ROLLOUT, differs))
    for source, words in (("fsdp:regrouped", "against fsdp:regrouped"), ("rounding", "assumed")):
        noise = RouterNoise({0: 0.05, 1: 0.05}, source)
        comparison = compare(ROLLOUT, left, right, sampled_by_left=True, noise=noise)
        assert words in routing.sentences(comparison)[1]
    bare = routing.sentences(compare(ROLLOUT, left, right, sampled_by_left=True))
    assert f"Not measured: {NOISE_UNKNOWN}." in bare


def test_a_replayed_side_is_labelled() -> None:
    nothing = np.zeros((len(TOKENS), 2), bool)
    left, right, noise = with_routing(ROLLOUT, TOKENS, *routing_pair(ROLLOUT, nothing))
    facts = right.fingerprint | {"replay": {"mode": "ids", "source": "vllm:decode"}}
    right = replace(right, fingerprint=facts)
    comparison = compare(ROLLOUT, left, right, sampled_by_left=True, noise=noise)
    notes = comparison.breakdowns["routing_notes"]
    replayed = dict(zip(notes["fact"], notes["value"], strict=True))["replayed"]
    section = shown(comparison)
    assert section.sentences[0].startswith(f"Replayed: {replayed}.")
    assert not any(sentence.startswith(routing.NO_FLIP) for sentence in section.sentences)


def test_reports_of_earlier_versions_still_render() -> None:
    old = {
        "routing_by_layer": {"layer": [0, 1], "disagree": [0.1, 0.2], "low": [0.1, 0.1],
                             "high": [0.2, 0.3], "margin": [None, None]},
        "routing_harm": {"flips": [0, 1], "mean_abs_delta": [0.01, 0.02], "count": [9, 2]},
    }  # fmt: skip
    earlier = replace(report().comparisons[0], breakdowns=old)
    section = shown(earlier)
    assert pictures(section) == ()
    assert len(rows(section, "layers")) == 2
    dense = replace(earlier, breakdowns={}, routing={})
    assert routing.section(replace(report(), comparisons=(dense,))) is None


def test_the_core_and_the_rest_are_all_rows() -> None:
    section = shown(report().comparisons[0])
    numbers = rows(section, "numbers")
    assert len(numbers) == len(report().comparisons[0].routing)
    assert set(routing.CORE) <= set(DECLARED)
    assert numbers[0][1] == report().comparisons[0].routing["routing_disagree_layer"]


def test_places_of_few_tokens_are_blank() -> None:
    table = {"layer": [0, 0], "disagree": [0.5, 1.0], "start": [0, 8], "end": [8, 16]}
    few = {"routing_by_position": {"count": [400, 19]}}
    (masked,) = routing.figures({"routing_layer_position": table, **few})
    (blank,) = routing.figures({"routing_layer_position": {**table, "disagree": [0.5, 0.0]}})
    (every,) = routing.figures({"routing_layer_position": table})
    assert masked.draw() == blank.draw() != every.draw()


def test_every_layer_has_a_row() -> None:
    layers = rows(shown(report().comparisons[0]), "layers")
    assert [row[0] for row in layers] == ["0", "1", "2", "3"]
    assert layers[0][4] is None  # no flip in this layer: no share of flips


def test_heat_map_puts_the_first_row_at_the_bottom_and_joins_equal_cells() -> None:
    table = {"layer": [0, 0, 1, 1], "disagree": [1.0, 1.0, 0.0, 0.5], "start": [0, 8, 0, 8],
             "end": [8, 16, 8, 16]}  # fmt: skip
    (figure,) = routing.figures({"routing_layer_position": table})
    runs = re.findall(
        r'd="([^"]+)"[^>]*style="fill: var\(--accent\)(?:; opacity: ([\d.]+))?', figure.draw()
    )
    half, full = runs[:2]  # the legend's swatches follow
    assert (half[1], full[1]) == (str(OPACITIES[2]), "")
    assert half[0].count("M") == full[0].count("M") == 1  # two equal cells are one rectangle
    below, above = (float(re.findall(r"M[\d.]+ ([\d.]+)", path)[0]) for path in (full[0], half[0]))
    assert below > above  # y grows downwards
