"""What both sides state of themselves: digests of their weights, and their settings as resolved.

Evidence, never a precondition: a side that states nothing is judged by its numbers alone. A
difference of digests or of resolved settings is a fact, and no detector comes before it; how much
of the mismatch comes from it, other detectors say. Which side is right, digests do not tell, unless
one side alone holds other weights than the files of its checkpoint.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mismatch.analysis.cause_results import DIFFER, Evidence, Side
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.declared import EAGER
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look
from mismatch.analysis.diagnosis.loaded_weights import (
    NOT_OF_CHECKPOINT,
    Difference,
    unlike_its_checkpoint,
)
from mismatch.analysis.levels import NOT_QUANTISED
from mismatch.types import NotTested, SideFacts

HEADS = ("lm_head", "embed_out", "output_layer")
ALIKE: tuple[str, ...] = ("stale-weights", "double-load", "lora-scale")
TIMES_HELD = "factor of the adapter, held over that of its files"
NEARLY_ALL = 0.9  # share of the parameters, from which a whole sync is missing
LONGEST = 60  # characters of a value in the evidence
WIDE = ("bf16", "fp16", "fp32", "auto", None)

CLOSE = 0.01  # relative: tables in bf16 hold 0.4 %
NOTHING_CUT = 1 - 1e-9  # kept mass, from which a truncation cut nothing off
LEADS = ("head_dtype", "router_dtype")  # often differ on purpose, as a fix on one side

# Field of a resolved configuration -> the cause that a difference in it names.
FIELDS = {
    "rope_frequencies": "rope-config",
    "attention_scale": "yarn-attention-factor",
    "attention_sinks": "attention-sinks",
    "head_dtype": "bf16-lm-head",
    "router_dtype": "router-precision",
    "rope_theta": "rope-config",
    "rope_scaling": "rope-config",
    "rope_parameters": "rope-config",
    "partial_rotary_factor": "rope-config",
    "attention_factor": "yarn-attention-factor",
    "mscale": "yarn-attention-factor",
    "sliding_window": "sliding-window",
    "use_sliding_window": "sliding-window",
    "layer_types": "sliding-window",
    "attn_logit_softcapping": "logit-softcap",
    "final_logit_softcapping": "logit-softcap",
    "query_pre_attn_scalar": "logit-softcap",
    "rms_norm_eps": "norm-eps",
    "layer_norm_epsilon": "norm-eps",
    "tie_word_embeddings": "tied-head-stale",
    "num_experts_per_tok": "router-config",
    "norm_topk_prob": "router-config",
    "routed_scaling_factor": "router-config",
    "scoring_func": "router-config",
    "modules_to_not_convert": "quantised-module-list",
    "ignored_layers": "quantised-module-list",
}


def weights(case: Case) -> Look | NotTested:
    """Compare the digests of every parameter; the first evidence lists those that differ."""
    engine, trainer = case.engine.fingerprint, case.trainer.fingerprint
    found = Difference.between(engine, trainer)
    if found is None or not found.common:
        reason = "a side gave none, or holds them in a dtype that lost bits"
        return NotTested("digests of the weights", reason, "keep them in bf16 or fp32")
    compared = Evidence("parameters compared", len(found.common))
    if not found.differ:
        return Look((Evidence("parameters that differ", 0, "0"), compared))
    evidence: tuple[Evidence, ...] = (Evidence(DIFFER, found.text(), "none"), compared)
    tied = any(_resolved(side, 0).get("tie_word_embeddings") for side in (engine, trainer))
    cause, alike = "weights-differ", ALIKE
    if found.forms:
        asked = f"{found.forms[0]} in the engine, {found.forms[1]} in the trainer"
        evidence += (Evidence("form of the experts, as asked", asked, "equal"),)
        cause, alike = "quantised-rollout", ()
    elif all(".experts" in name for name in found.differ):
        cause, alike = "experts-differ", ("double-load", "quantised-rollout")
    elif tied and all(any(head in name for head in HEADS) for name in found.differ):
        cause, alike = "tied-head-stale", ("stale-weights",)
    elif len(found.differ) > NEARLY_ALL * len(found.common):
        cause, alike = "stale-weights", ("sleep-level-2", "double-load")
    off = unlike_its_checkpoint(engine, trainer)
    side: Side = "either" if off is None else ("engine", "trainer")[off]
    advice = ""
    of_adapter = set(engine.get("adapter_held_otherwise", ()))
    if of_adapter.issuperset(found.differ):  # the adapter's files say what the engine had to hold
        cause, alike, side = "lora-scale", (), "engine"
        what = "parameters whose adapter the engine holds otherwise than its files"
        evidence += (Evidence(what, len(found.differ), "0"),)
        if (times := engine.get("adapter_times")) is not None:
            evidence += (Evidence(TIMES_HELD, times, "1"),)
    if off is not None:
        own = set(found.differ) & set((engine, trainer)[off].get(NOT_OF_CHECKPOINT, ()))
        what = f"parameters that the {side} alone holds otherwise than its checkpoint"
        evidence += (Evidence(what, len(own), "0"),)
    finding = Finding(
        cause, side, None, evidence, alike=alike, stated=True, fact=True, advice=advice
    )
    return Look(evidence, (finding,))


def configurations(case: Case) -> Look | NotTested:
    """Compare settings as resolved, field by field."""
    engine, trainer = case.engine.fingerprint, case.trainer.fingerprint
    longest = int(np.diff(case.rollout.offsets).max())
    a, b = _resolved(engine, longest), _resolved(trainer, longest)
    common = [name for name in FIELDS if name in a and name in b]
    causes: dict[tuple[str, bool], list[Evidence]] = {}  # a finding each, of all its fields
    for name in common:
        if not _same(a[name], b[name]):
            values = f"{_shown(a[name])} in the engine, {_shown(b[name])} in the trainer"
            key = FIELDS[name], name not in LEADS
            causes.setdefault(key, []).append(Evidence(name, values, "equal"))
    findings = [
        Finding(cause, "either", None, tuple(fields), certain=certain, stated=True, fact=certain)
        for (cause, certain), fields in causes.items()
    ]
    findings += [*_one_sided(engine, trainer), *_sampled(case)]
    if not common and not findings and not (engine.get("dtype") and trainer.get("dtype")):
        return NotTested("resolved configurations", "a side states no settings")
    evidence = (
        Evidence("fields of the model's configuration compared", len(common)),
        Evidence("settings that differ", len(findings), "0"),
    )
    looked_for = tuple(dict.fromkeys(FIELDS[name] for name in common))
    return Look(evidence, tuple(findings), looked_for)


def _resolved(fingerprint: SideFacts, longest: int) -> dict[str, Any]:
    """Return the model's configuration as this side runs it; {} where it does not state one.

    A window that no sequence of the run reaches past is none.
    """
    fields: dict[str, Any] = dict(fingerprint.get("config") or {})
    windows = fields.get("sliding_window")
    if isinstance(windows, list):
        fields["sliding_window"] = [None if w is None or w >= longest else w for w in windows]
    return fields


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal: numbers within ``CLOSE``, unset entries left aside."""
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = ({k: v for k, v in side.items() if v is not None} for side in (a, b))
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    numbers = [isinstance(v, int | float) and not isinstance(v, bool) for v in (a, b)]
    return math.isclose(a, b, rel_tol=CLOSE) if all(numbers) else bool(a == b)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _one_sided(engine: SideFacts, trainer: SideFacts) -> list[Finding]:
    """Return settings that exist on one side only, or that speak for themselves."""
    findings: list[Finding] = []

    def add(
        cause: str,
        side: Side,
        what: str,
        value: Any,
        normal: str,
        certain: bool = True,
        advice: str = "",
    ) -> None:
        evidence = (Evidence(what, str(value), normal),)
        findings.append(Finding(cause, side, None, evidence, certain=certain, stated=True,
                                advice=advice))  # fmt: skip

    if trainer.get("honours_sinks") is False:
        add("attention-sinks", "trainer", "attention kernel that ignores the model's sinks",
            trainer.get("attention"), "honours them")  # fmt: skip
    if trainer.get("honours_softcap") is False:
        kernel = trainer.get("attention")
        advice = "Train with a kernel that caps the scores (eager, flash attention); here: " + EAGER
        add("logit-softcap", "trainer", "attention kernel that ignores attn_logit_softcapping",
            kernel, "caps its scores", advice=f"{advice}.")  # fmt: skip
    if engine.get("kv_cache_dtype") not in WIDE:
        add("fp8-kv", "engine", "dtype of the KV cache", engine["kv_cache_dtype"], "bf16")
    if str(engine.get("quantization") or "none").lower() not in NOT_QUANTISED:
        # The two sides may hold the same values all the same: a lead, not a difference.
        kind = engine["quantization"]
        add("quantised-rollout", "engine", "quantisation", kind, "none", certain=False)
    if trainer.get("cast_forward_inputs"):
        add("fsdp-cast-inputs", "trainer", "FSDP2 cast_forward_inputs", True, "off", certain=False)
    if trainer.get("autocast"):
        kind = trainer["autocast"]
        alone = engine.get("dtype") == trainer.get("dtype") != kind  # nothing else lowers it
        add("trainer-autocast", "trainer", "autocast", kind, "off", certain=alone)
    dtypes = engine.get("dtype"), trainer.get("autocast") or trainer.get("dtype")
    if None not in dtypes and dtypes[0] != dtypes[1] and not trainer.get("autocast"):
        values = f"{dtypes[0]} in the engine, {dtypes[1]} in the trainer"
        add("precision", "either", "dtype", values, "equal", certain=False)
    if engine.get("dtype") and engine.get("prefix_caching"):
        add("prefix-cache-stale", "engine", "prefix cache", "on", "off", certain=False)
    return findings


def _sampled(case: Case) -> list[Finding]:
    """Look for a cut for sampling alone: it leaves no mark in whole log-probabilities."""
    sampling, kept = case.rollout.sampling, case.trainer.extra.get("kept_mass")
    nothing_cut = kept is not None and float(kept.min()) > NOTHING_CUT
    scored_whole = case.engine.fingerprint.get("logprobs_truncated") is False
    if not sampling.truncates or sampling.temperature == 0 or not scored_whole or nothing_cut:
        return []
    what = "distribution that sampled; log-probabilities are of the whole"
    evidence = (Evidence(what, sampling.cut, "whole"),)
    return [Finding("sampling-truncation", "engine", None, evidence)]


DETECTORS = (
    Detector("weights", "weights", ("weights-differ", "stale-weights", "tied-head-stale",
             "experts-differ", "quantised-rollout", "lora-scale"), weights,
             "digests of both sides' parameters", 60),
    Detector("configurations", "function", (*dict.fromkeys(FIELDS.values()), "attention-sinks",
             "fp8-kv", "quantised-rollout", "fsdp-cast-inputs", "trainer-autocast", "precision",
             "prefix-cache-stale", "sampling-truncation"), configurations, order=61),
)  # fmt: skip
