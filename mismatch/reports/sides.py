"""What really ran on each side, aspect by aspect: resolved, never requested."""

from __future__ import annotations

from typing import Any

from mismatch.models import injections
from mismatch.reports import quantities
from mismatch.reports.summary import headline
from mismatch.reports.text import line
from mismatch.types import Report


def what_ran(report: Report) -> list[tuple[str, str, str]]:
    """(aspect, rollout side, train side): what was resolved, not what was asked for."""
    comparison = headline(report)
    sides = [report.fingerprints.get(name, {}) for name in (comparison.rollout, comparison.train)]
    rows = []
    for aspect, describe in _ASPECTS.items():
        left, right = (line(describe(side)) or quantities.MISSING for side in sides)
        if (left, right) != (quantities.MISSING, quantities.MISSING):
            rows.append((aspect, left, right))
    preset = (report.run.get("spec") or {}).get("preset")
    return rows + ([("settings of", quantities.MISSING, line(preset))] if preset else [])


def _software(side: dict[str, Any]) -> str:
    name = side.get("served_by") or side.get("engine") or side.get("backend") or ""
    world = side.get("world_size")
    if servers := side.get("servers"):
        name = f"{quantities.plural(len(servers), 'server')}: {name}"
    parts = [f"{name} {side.get('version') or ''}".strip() + (f" × {world}" if world else "")]
    versions = side.get("versions") or {}
    parts += [f"{key} {versions[key]}" for key in ("torch", "transformers") if versions.get(key)]
    return ", ".join(part for part in parts if part)


def _precision(side: dict[str, Any]) -> str:
    parts = [str(side.get("dtype") or "")]
    for key, name in (
        ("master_dtype", "master"),
        ("head_dtype", "head"),
        ("autocast", "autocast"),
        ("kv_cache_dtype", "KV cache"),
        ("quantization", "quantised"),
    ):
        if side.get(key) not in (None, "", "auto"):
            parts.append(f"{name} {side[key]}")
    return ", ".join(part for part in parts if part)


def _attention(side: dict[str, Any]) -> str:
    honours = side.get("honours_sinks")
    sinks = "" if honours is None else ", honours sinks" if honours else ", ignores sinks"
    return f"{side['attention']}{sinks}" if side.get("attention") else ""


def _experts(side: dict[str, Any]) -> str:
    return str(side.get("experts") or side.get("moe_backend") or "")


def _logprobs(side: dict[str, Any]) -> str:
    temperature = side.get("logprobs_temperature")
    parts = [str(side.get("logprobs_mode") or "")]
    if temperature is not None:
        parts.append(f"at temperature {quantities.bound(float(temperature))}")
    if side.get("logprobs_truncated"):
        parts.append("renormalised over the kept tokens")
    return ", ".join(part for part in parts if part)


def _layout(side: dict[str, Any]) -> str:
    parts = [str(side.get("device") or "")]
    if (side.get("tensor_parallel_size") or 1) > 1:
        parts.append(f"tensor parallel {side['tensor_parallel_size']}")
    if side.get("enforce_eager") is not None:
        parts.append("eager" if side["enforce_eager"] else "compiled")
    if side.get("layout"):
        parts.append(str(side["layout"]))
    if side.get("micro_batch_tokens"):
        parts.append(
            f"micro-batches of {quantities.plural(int(side['micro_batch_tokens']), 'token')}"
        )
    return ", ".join(part for part in parts if part)


def _routes(side: dict[str, Any]) -> str:
    parts = []
    if replay := side.get("replay"):
        own = int(replay["rows_own"])
        parts.append(f"replayed: {replay['mode']} of {replay['source']}")
        parts += [f"{quantities.plural(own, 'token')} without a route"] if own else []
    if injected := dict(side.get("injected") or {}):
        seed = injected.pop("seed", None)
        parts.append(f"injected: {injections.describe(tuple(injected.items()), seed)}")
    return ", ".join(parts)


_ASPECTS = {
    "software": _software,
    "precision": _precision,
    "attention": _attention,
    "experts": _experts,
    "routes": _routes,
    "logprobs": _logprobs,
    "layout": _layout,
}
