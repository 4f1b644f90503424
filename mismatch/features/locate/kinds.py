"""What differs at a module: its weights, its function or its rounding. By evidence, not by size."""

from __future__ import annotations

from mismatch.analysis.cause_results import MODULE, Cause, Evidence, Side, Status
from mismatch.analysis.diagnosis.loaded_weights import Difference
from mismatch.analysis.results import Square
from mismatch.features.locate.results import TITLES, Kind, Location, SideLocation
from mismatch.keys import TRAIN, Key
from mismatch.models.site_parameters import decides
from mismatch.types import SideFacts

CONFIRMED = 0.3  # share of a side's distance that its sources explain, or that goes without them
# On equal input these give nothing but what their weights are; a head and a router can also have
# been asked for another precision.
PROJECTIONS = ("embedding", "q", "k", "v", "attention_output")
# What a function that differs at a site can be, by ids of causes.toml.
ROPE = ("rope-config", "yarn-attention-factor")
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "rope_q": ROPE,
    "rope_k": ROPE,
    "attention": (
        *("attention-sinks", "sliding-window", "logit-softcap", "yarn-attention-factor"),
        *("packing-leak", "position-ids"),
    ),
    **dict.fromkeys([name for name in TITLES if name.endswith("_norm")], ("norm-eps",)),
    "router": ("router-config", "router-precision"),
    "head": ("logit-softcap", "bf16-lm-head"),
}
WEIGHTS = ("stale-weights", "experts-differ", "tied-head-stale", "quantised-rollout", "lora-scale")
ROUNDING: dict[str, tuple[str, ...]] = {
    "attention": ("fp8-kv", "decode-vs-prefill"),
    "router": ("router-precision",),
    "head": ("bf16-lm-head",),
    "mlp": ("quantised-rollout",),
}
CAUSES: dict[Kind | None, str] = {
    "weights": "weights-differ",
    "function": "function-differs",
    "rounding": "rounding-differs",
    None: "side-off",
}


def kind_of(
    side: SideLocation, engine: SideFacts, trainer: SideFacts, square: Square | None
) -> Kind | None:
    """Return what differs at a side's first source; None where there is none, or it is not known.

    Weights where the two sides' digests of a parameter of this module differ. Else, of a side that
    was recorded in float32, in which rounding plays no part, function; but weights of a projection
    of an engine whose digests are not of what it holds in memory. Else rounding where the run's own
    float32 pass of this side agrees with the reference.
    """
    if side.source is None:
        return None
    found = Difference.between(engine, trainer)
    differ = () if found is None else found.differ
    if any(decides(name, side.source.site, side.source.layers) for name in differ):
        return "weights"
    if side.dtype == "fp32":
        unknown = side.role == "engine" and not engine.get("weights_in_memory")
        return "weights" if unknown and side.source.site in PROJECTIONS else "function"
    gaps = [] if square is None else [f for f in square.findings if f.evidence == "gap"]
    trainers = side.role == "trainer"
    own = [gap for gap in gaps if (Key(gap.scoring).side == TRAIN) == trainers]
    return "rounding" if own and own[0].standing == "within" else None


def causes_of(location: Location) -> tuple[Cause, ...]:
    """Return the first source of each side as a cause; the module is its first evidence.

    A side that computed something else here than in the run shows nothing of the run.
    """
    causes = []
    for side in location.sides:
        group = side.source
        if group is None or side.is_other:
            continue
        share = max(group.explains, group.removed, side.explained or 0.0, side.removed or 0.0)
        status: Status = "confirmed" if share >= CONFIRMED else "suspected"
        name: Side = "trainer" if side.role == "trainer" else "either"
        if side.role == "engine" and side.kind == "rounding":
            name = "engine"
        if side.kind == "weights":
            alike: tuple[str, ...] = WEIGHTS
        else:
            alike = (ROUNDING if side.kind == "rounding" else FUNCTIONS).get(group.site, ())
        own = f"its error on the same input, over what {side.dtype} costs there"
        evidence = (
            Evidence(MODULE, f"{group.place} in {side.name}"),
            Evidence(own, group.excess, "below 4"),
            Evidence("share of the side's distance from float32 that it explains", share),
        )
        cause = Cause(CAUSES[side.kind], status, name, None, evidence, alike=alike, fact=True)
        causes.append(cause)
    return tuple(causes)
