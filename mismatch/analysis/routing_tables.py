"""Where two sides choose other experts, and what that coincides with: tables for a comparison.

Every table is columns of equal length. Shares and means carry ``low`` and ``high``, the 95 %
interval over prompts (None where there is none); see docs/reference/metrics.md for the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mismatch.analysis.breakdowns import Table, bucket_width
from mismatch.facts import replay_of
from mismatch.metrics import METRICS
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.inference import Groups, group_means, prompt_sums
from mismatch.metrics.registry import POSITIVE, SHARE, Array, floats
from mismatch.metrics.routing_pairs import (
    NOISE_QUANTILE,
    PairedRouting,
    RouterNoise,
    load_variation,
    other_rows,
    pair_routing,
)
from mismatch.types import Estimate, Floats, Ints, Pair, Rollout, Routing, Scoring

MARGIN_EDGES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)  # times the router's noise, from
NOISE_UNKNOWN = "near-ties: the router's noise is unknown"


def routing_tables(
    left: Scoring,
    right: Scoring,
    pair: Pair,
    routes: PairedRouting,
    noise: RouterNoise | None = None,
) -> dict[str, Table]:
    """Return every routing breakdown of a comparison, by name.

    Args:
        routes: of :func:`mismatch.metrics.routing_pairs.pair_routing`, with noise where known.
    """
    seen = Seen(pair, routes)
    tables = {
        "routing_notes": notes(left, right, routes, noise),
        "routing_by_layer": by_layer(seen, noise),
        "routing_by_position": by_position(seen),
        "routing_layer_position": layer_position(seen),
    }
    if "near_tie" in routes.arrays and noise is not None:
        tables["routing_by_margin"] = by_margin(seen, noise)
    return tables


def prompt_routing(
    rollout: Rollout, left: Routing, right: Routing, seed: int = 0
) -> dict[str, Estimate]:
    """Disagreement over the forwarded rows that predict no action; empty where there is none."""
    rows = other_rows(rollout, left, right)
    if not len(rows):
        return {}
    differs = pair_routing(rollout, left, right, rows).differs
    estimator = Estimator(rollout.sequence_of_token[rows], rollout.distinct_prompts, seed=seed)
    names = ("routing_prompt_disagree_layer", "routing_prompt_disagree_any")
    wanted = [METRICS[name] for name in names]
    return estimator.all(wanted, {"prompt_differs": differs})


def notes(left: Scoring, right: Scoring, routes: PairedRouting, noise: RouterNoise | None) -> Table:
    """Return what a reader of the tables has to know: ``fact`` and ``value``, both text."""
    assert right.routing is not None
    rows = [
        ("replayed", f"{side.name} replays the {given}")
        for side in (left, right)
        if (given := replay_of(side.fingerprint))
    ]
    for side in (left, right):
        assert side.routing is not None
        alone = [str(layer) for layer in side.routing.layers if layer not in routes.layers]
        if alone:
            rows.append(("layers left out", f"only {side.name} has {', '.join(alone)}"))
    silent = [side.name for side in (left, right) if side.routing and side.routing.weights is None]
    if silent:
        absent = f"routing_weight_l1 and routing_top1_disagree: no weights from {silent[0]}"
        rows.append(("not measured", absent))
    if right.routing.margin is None:
        rows.append(("not measured", f"margins and near-ties: no scores from {right.name}"))
    elif noise is None:
        rows.append(("not measured", NOISE_UNKNOWN))
    else:
        rows.append(("noise", noise.source))
        if noise.source != "rounding":
            rows.append(("noise quantile", f"{NOISE_QUANTILE:g}"))
    return {"fact": [fact for fact, _ in rows], "value": [value for _, value in rows]}


def by_layer(seen: Seen, noise: RouterNoise | None) -> Table:
    """Per MoE layer: disagreement, margins, near-ties, weights; None where not captured."""
    routes, arrays = seen.routes, seen.routes.arrays
    count = len(routes.layers)
    table: Table = {"layer": list(routes.layers)}
    every = np.broadcast_to(np.True_, routes.differs.shape)
    table |= columns(seen.per_layer(routes.differs, every, SHARE), "disagree")
    nothing: list[Any] = [None] * count
    margin, near = arrays.get("margin"), arrays.get("near_tie")
    table |= {"margin": nothing, "margin_flipped": nothing, "noise": nothing}
    table |= {"near_tie": nothing, "near_tie_low": nothing, "near_tie_high": nothing}
    if margin is not None:
        flipped = np.where(routes.differs, margin, np.float32(0.0))
        table["margin"] = margin.mean(axis=0, dtype=np.float64).tolist()
        table["margin_flipped"] = nan_as_none(
            seen.per_layer(flipped, routes.differs, POSITIVE).mean
        )
    if near is not None and noise is not None:
        table["noise"] = [noise.level[layer] for layer in routes.layers]
        ties = seen.per_layer(near & routes.differs, routes.differs, SHARE)
        table |= columns(ties, "near_tie", "near_tie_")
    table["weight_l1"] = nothing
    if "weight_l1" in arrays:
        table["weight_l1"] = arrays["weight_l1"].mean(axis=0, dtype=np.float64).tolist()
    return table | {
        "load_tv": load_variation(arrays["rollout_load"], arrays["train_load"]).tolist()
    }


def by_position(seen: Seen) -> Table:
    """Return share of (token, layer) that differ, and of tokens with any, along the response."""
    bucket, width = seen.bucket
    groups = int(bucket.max()) + 1
    share = seen.means(bucket, groups, seen.routes.differs.mean(axis=1), SHARE)
    any_layer = seen.means(bucket, groups, np.asarray(seen.routes.differs.any(axis=1)), SHARE)
    return (
        {
            "start": [width * index for index in range(groups)],
            "end": [width * (index + 1) for index in range(groups)],
        }
        | columns(share, "disagree")
        | {"any": nan_as_none(any_layer.mean), "count": share.count.tolist()}
    )


def layer_position(seen: Seen) -> Table:
    """Return the heat map: share of tokens that differ per layer and bucket of positions."""
    bucket, width = seen.bucket
    groups = int(bucket.max()) + 1
    tokens = np.bincount(bucket, minlength=groups)
    table: Table = {"layer": [], "start": [], "end": [], "disagree": []}
    for column, layer in enumerate(seen.routes.layers):
        flipped = np.bincount(bucket[seen.routes.differs[:, column]], minlength=groups)
        table["layer"] += [layer] * groups
        table["start"] += [width * index for index in range(groups)]
        table["end"] += [width * (index + 1) for index in range(groups)]
        table["disagree"] += (flipped / tokens).tolist()
    return table


def by_margin(seen: Seen, noise: RouterNoise) -> Table:
    """Return the share of (token, layer) that differ by margin, in units of its layer's noise."""
    routes, edges = seen.routes, np.array(MARGIN_EDGES)
    sums = np.zeros((2, seen.prompts, len(edges)))
    for column, layer in enumerate(routes.layers):
        margin = floats(routes.arrays["margin"][:, column])
        level = noise.level[layer]
        with np.errstate(all="ignore"):
            units = margin / level if level > 0.0 else np.where(margin > 0.0, np.inf, 0.0)
        group = np.searchsorted(edges, units, "right") - 1
        for index, values in enumerate((routes.differs[:, column], np.ones(len(group)))):
            sums[index] += prompt_sums(seen.prompt, seen.prompts, group, len(edges), floats(values))
    means = group_means(sums[0], sums[1], SHARE)
    present = np.flatnonzero(means.count)
    ends: list[float | None] = [*MARGIN_EDGES[1:], None]
    table: Table = {"from": [MARGIN_EDGES[i] for i in present], "to": [ends[i] for i in present]}
    table |= picked(columns(means, "disagree"), present)
    return table | {"count": means.count[present].tolist()}


def flipped_layers(routes: PairedRouting) -> tuple[Ints, Ints]:
    """Numbers of the layers whose sets of experts differ, [F], and each token's offsets, [R + 1].

    Token r flips in layers ``[offsets[r], offsets[r + 1])``, ascending.
    """
    _, columns = np.nonzero(routes.differs)
    offsets = np.concatenate([[0], np.cumsum(routes.flips)])
    return np.array(routes.layers, np.int64)[columns], offsets


# ---------------------------------------------------------------- groups with intervals


@dataclass(frozen=True)
class Seen:
    """One comparison's routing with what its tables share."""

    pair: Pair
    routes: PairedRouting

    @cached_property
    def prompt(self) -> Ints:
        """Prompt of each action token, numbered without gaps, [A]."""
        of_token = self.pair.prompt[self.pair.sequence]
        return np.unique(of_token, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def prompts(self) -> int:
        return int(self.prompt.max()) + 1

    @cached_property
    def bucket(self) -> tuple[Ints, int]:
        """Bucket of each token's place among its sequence's action tokens, and their width."""
        first = np.searchsorted(self.pair.sequence, self.pair.sequence)
        position = np.arange(len(self.pair.sequence)) - first
        width = bucket_width(position)
        return position // width, width

    def means(self, group: Ints, groups: int, values: Array, bounds: tuple[float, float]) -> Groups:
        """Mean of ``values`` [A] per group of tokens."""
        sums, counts = (
            prompt_sums(self.prompt, self.prompts, group, groups, floats(each))
            for each in (values, np.ones(len(group)))
        )
        return group_means(sums, counts, bounds)

    def per_layer(self, values: Array, units: Array, bounds: tuple[float, float]) -> Groups:
        """Mean of ``values`` [A, L] per layer, over the pairs that ``units`` [A, L] marks."""
        return group_means(self._sums(values), self._sums(units), bounds)

    def _sums(self, values: Array) -> Floats:
        """Per prompt and layer, [P, L]; a layer at a time: no [A, L] of float64."""
        columns = [
            np.bincount(self.prompt, floats(values[:, layer]), minlength=self.prompts)
            for layer in range(values.shape[1])
        ]
        return np.stack(columns, axis=1)


def columns(groups: Groups, name: str, prefix: str = "") -> Table:
    return {
        name: nan_as_none(groups.mean),
        f"{prefix}low": groups.low,
        f"{prefix}high": groups.high,
    }


def nan_as_none(values: Floats) -> list[float | None]:
    """NaN as None."""
    return [None if np.isnan(value) else float(value) for value in values]


def picked(table: Table, rows: Ints) -> Table:
    return {name: [column[row] for row in rows] for name, column in table.items()}
