"""What differs at a module: its weights, its function or its rounding. By evidence, not by size."""

from __future__ import annotations

from typing import NamedTuple

from mismatch.analysis.cause_results import (
    MODULE,
    Cause,
    Evidence,
    Excluded,
    Side,
    Status,
)
from mismatch.analysis.diagnosis.loaded_weights import (
    NOT_OF_CHECKPOINT,
    Difference,
    same_weights,
    unlike_its_checkpoint,
)
from mismatch.analysis.results import Square
from mismatch.features.locate.errors import BEYOND, unlike_level
from mismatch.features.locate.results import FORMS, TITLES, Group, Kind, Location, SideLocation
from mismatch.keys import TRAIN, Key
from mismatch.models.site_parameters import decides
from mismatch.types import SideFacts

CONFIRMED = 0.3  # share of a side's distance that its sources explain, or that goes without them
# On equal input these give nothing but what their weights are; a head and a router can also have
# been asked for another precision, and queries and keys may be normalised behind the projection.
PROJECTIONS = ("embedding", "q", "k", "v", "attention_output")
# What a function that differs at a site can be, by ids of causes.toml.
ROPE = ("rope-config", "position-ids", "yarn-attention-factor")
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "rope_q": ROPE,
    "rope_k": ROPE,
    "attention": (
        *("attention-sinks", "sliding-window", "logit-softcap", "yarn-attention-factor"),
        *("packing-leak", "position-ids"),
    ),
    **dict.fromkeys([name for name in TITLES if name.endswith("_norm")], ("norm-eps",)),
    "router": ("router-config", "router-precision"),
    "head": ("logit-scale", "logit-softcap", "bf16-lm-head"),
}
OF_FORMS = {
    "no-softcap": ("logit-softcap",),
    "no-sinks": ("attention-sinks",),
    "routed-scale": ("router-config",),
}
# What a side does in a batch, from a cache or while decoding alone: no module shows it by itself.
TOGETHER = ("packing-leak", "position-ids", "fp8-kv", "decode-vs-prefill")
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


class Reads(NamedTuple):
    """What the code of a site computes, and the fields of config.json that it reads for it."""

    what: str
    fields: tuple[str, ...] = ()


NORM = Reads("the norm, its epsilon and the offset of its weight",
             ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"))  # fmt: skip
HEADS = Reads("the projection, and the norm of queries and keys with its place before the rotation",
              ("rms_norm_eps", "use_qk_norm", "qk_layernorm", "attention_bias",
               "qkv_bias", "clip_qkv"))  # fmt: skip
TURN = Reads("the rotation and the positions that it is given",
             ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor",
              "rotary_dim", "no_rope_layers"))  # fmt: skip
ADDED = Reads("what is added to the residual stream, and its factor",
              ("residual_multiplier", "scale_depth"))  # fmt: skip
READS: dict[str, Reads] = {
    **dict.fromkeys([name for name in TITLES if name.endswith("_norm")], NORM),
    "embedding": Reads("the embedding and its factor", ("embedding_multiplier", "scale_emb")),
    **dict.fromkeys(("q", "k"), HEADS),
    "v": Reads("the projection and its bias", ("attention_bias", "qkv_bias", "clip_qkv")),
    **dict.fromkeys(("rope_q", "rope_k"), TURN),
    "attention": Reads(
        "the scores' scale, mask, window, cap and sinks",
        ("attention_multiplier", "query_pre_attn_scalar", "attn_logit_softcapping",
         "sliding_window", "layer_types", "head_dim"),
    ),
    "attention_output": Reads("the projection and its bias", ("attention_bias",)),
    "mixer": Reads("the state-space block", ("layer_types",)),
    **dict.fromkeys(("attention_residual", "residual"), ADDED),
    "router": Reads(
        "scores of the experts, their groups, their bias and their choice",
        ("num_experts_per_tok", "norm_topk_prob", "scoring_func", "n_group", "topk_group"),
    ),
    "mlp": Reads(
        "the activation, and of experts the weights of their sum and what is shared",
        ("hidden_act", "hidden_activation", "mlp_bias", "norm_topk_prob", "routed_scaling_factor",
         "shared_expert_intermediate_size", "n_shared_experts", "swiglu_limit"),
    ),
    "shared_mlp": Reads("the shared MLP", ("hidden_act", "shared_intermediate_size")),
    "head": Reads(
        "the head and the factor and cap on its logits",
        ("logits_scaling", "logit_scale", "lm_head_multiplier", "final_logit_softcapping",
         "tie_word_embeddings"),
    ),
}  # fmt: skip


def kind_of(
    side: SideLocation, engine: SideFacts, trainer: SideFacts, square: Square | None
) -> Kind | None:
    """Return what differs at a side's first source; None where there is none, or it is not known.

    Function where the side gives what the reference gives in another form. Weights where the two
    sides' digests of a parameter of this module differ; where the trainer holds its checkpoint's
    values, the trainer is not away from the reference because of them. Else, of a side that
    was recorded in float32, in which rounding plays no part, function; but weights of a projection
    of an engine whose digests are not of what it holds in memory: what it gives on the same input
    is their value. Not known where a norm behind that projection may be what differs. Else rounding
    where the run's own float32 pass of this side agrees with the reference.
    """
    if side.source is None:
        return None
    if side.source.form:
        return "function"
    found = Difference.between(engine, trainer)
    differ = () if found is None else found.differ
    as_in_files = side.role == "trainer" and trainer.get(NOT_OF_CHECKPOINT) == []
    if not as_in_files and any(_decides(name, side.source) for name in differ):
        return "weights"
    if side.dtype == "fp32":
        unknown = side.role == "engine" and not engine.get("weights_in_memory")
        if not unknown or side.source.site not in PROJECTIONS:
            return "function"
        named = [name for name in trainer.get("weights") or () if _decides(name, side.source)]
        return None if any("norm" in name for name in named) else "weights"
    gaps = [] if square is None else [f for f in square.findings if f.evidence == "gap"]
    trainers = side.role == "trainer"
    own = [gap for gap in gaps if (Key(gap.scoring).side == TRAIN) == trainers]
    return "rounding" if own and own[0].standing == "within" else None


def fault_of(side: SideLocation, engine: SideFacts, trainer: SideFacts) -> Side:
    """Return which side is wrong at a side's first source.

    The reference is the trainer's model code: an engine that differs from it can be the one that is
    right. It is wrong where it leaves out what the checkpoint or its config.json declares, holds
    other weights or another adapter than the files do, or rounds more than its precision.
    """
    group = side.source
    if group is None or side.role == "trainer" or group.form or side.kind == "rounding":
        return "either" if group is None else side.role
    if side.kind == "weights":
        found, off = Difference.between(engine, trainer), unlike_its_checkpoint(engine, trainer)
        if off is not None:
            return "trainer" if off else "engine"
        held = set(engine.get("adapter_held_otherwise", ()))
        named = {name for name in (found.differ if found else ()) if _decides(name, group)}
        as_read = not engine.get("weights_in_memory") and same_weights(engine, trainer)
        return "engine" if as_read or (named and named <= held) else "either"
    return "either"


def _decides(parameter: str, group: Group) -> bool:
    return decides(parameter, group.site, group.layers)


def causes_of(location: Location) -> tuple[Cause, ...]:
    """Return the first source of each side as a cause, of the side that is farther off first; the
    module is its first evidence.

    A side that computed something else here than in the run shows nothing of the run.
    """
    causes = []
    for side in sorted(location.sides, key=lambda side: -side.distance):
        group = side.source
        if group is None or side.is_other:
            continue
        share = max(group.explains, group.removed, side.explained or 0.0, side.removed or 0.0)
        otherwise = group.excess <= BEYOND  # it rounds so, if not more
        status: Status = "confirmed" if share >= CONFIRMED or otherwise else "suspected"
        if side.kind == "weights":
            alike: tuple[str, ...] = WEIGHTS
        elif group.form:
            alike = OF_FORMS.get(group.form, ())
        else:
            alike = (ROUNDING if side.kind == "rounding" else FUNCTIONS).get(group.site, ())
        own = f"its error on the same input, over what {side.dtype} costs there"
        measured = Evidence(own, group.excess, "below 4")
        if otherwise:
            own = (
                "its distance from the plain forward's module on the same input, over its rounding"
            )
            level = unlike_level(group.site, side.role)
            measured = Evidence(own, group.unlike, f"below {level:g}")
        evidence: tuple[Evidence, ...] = (
            Evidence(MODULE, f"{group.place} in {side.name}"),
            measured,
            Evidence("share of the side's distance from float32 that it explains", share),
        )
        if group.form:
            evidence += (Evidence("it gives what the reference gives", FORMS[group.form]),)
        name: Side = "trainer" if side.role == "trainer" else "either"
        if side.role == "engine" and side.fault == "engine":
            name = "engine"  # a trainer's weights that are off, its digests tell
        cause = Cause(
            CAUSES[side.kind],
            status,
            name,
            None,
            evidence,
            alike=tuple(name for name in alike if name not in location.impossible),
            fact=True,
            advice=_advice(location, side, group),
        )
        causes.append(cause)
    return tuple(causes)


def excluded_by(location: Location) -> tuple[Excluded, ...]:
    """Return what each side without a source cannot be.

    In float32 that is other weights or another function: a side that is right alone and wrong in
    the run differs by its batch, cache or start. In a lower precision it is another rounding.
    """
    exact = {name for names in (*FUNCTIONS.values(), *OF_FORMS.values(), WEIGHTS) for name in names}
    exact = {"function-differs", "weights-differ", *exact} - {*TOGETHER, "bf16-lm-head"}
    found = []
    for side in location.sides:
        if side.groups or not side.sites or not (side.dtype == "fp32" or location.alike):
            continue
        largest = max(side.sites, key=lambda site: site.excess)
        what = f"largest error of a module of {side.name} on equal input, over what it costs"
        evidence = Evidence(f"{what} ({largest.location.key})", largest.excess, "below 4")
        causes = exact if side.dtype == "fp32" else {"rounding-differs", "bf16-lm-head"}
        found.append(Excluded(side.role, tuple(sorted(causes)), evidence))
    return tuple(found)


def _advice(location: Location, side: SideLocation, group: Group) -> str:
    """Return what to compare at a site whose function differs, in that side's code; "" for others.

    Only fields of config.json are named that the site reads and the model has.
    """
    if side.kind != "function":
        return ""
    reads = READS[group.site]
    code = "the trainer's kernel or model code" if side.role == "trainer" else "the engine's code"
    if group.form:
        fix = "; mismatch check --attention eager shows the run without it"
        other = side.role == "trainer" and group.site == "attention"
        return f"Correct {code}: it computes the {group.place} {FORMS[group.form]}{fix * other}."
    fields = [name for name in reads.fields if name in location.fields]
    named = f" (config.json: {', '.join(fields)})" if fields else ""
    return f"Compare {code} of the {group.place} with the model's own: {reads.what}{named}."
