"""What really ran on each side, and what the words mean."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any, Literal

from mismatch.facts import injected_into
from mismatch.reports.formatting import MISSING, bound, line, number, plural, text, wording
from mismatch.reports.section import Cell, Cells, Column, Section, Table, named
from mismatch.reports.summary import command, headline
from mismatch.types import Report, SideFacts

LONG = 80  # characters of a setting, beyond which it is cut: report.json has it whole
LEAD = "As each side resolved it while it ran (actual kernels and dtypes); differing rows first."
Said = Literal[
    "code", "served_by", "engine", "backend", "version", "dtype", "master_dtype", "head_dtype",
    "autocast", "kv_cache_dtype", "quantization", "attention", "experts", "moe_backend", "layout",
    "logprobs_mode", "device",
]  # fmt: skip
APART = ("weights", "weights_parameters", "source_files", "engine_args", "not_tested", "seconds")


def section(report: Report) -> Section:
    """Return both sides next to each other, then how to run this again."""
    comparison, aspects = headline(report), what_ran(report)
    titles = ("", "", comparison.rollout, comparison.train)
    columns = tuple(Column(title, text) for title in titles)
    differing = [name for name, *_ in aspects if _aspect_differs(report, name)]
    settings = _settings(report)
    apart = {name for name, *sides in settings if sides[0] != sides[1] and MISSING not in sides}
    return Section(
        "ran",
        "Resolved configuration",
        LEAD,
        tables=[Table(columns, _differing_first(aspects, differing))],
        parts=[
            Section(
                "settings",
                "Every setting of both sides",
                tables=[Table(columns, _differing_first(settings, apart))],
                page_only=True,
            ),
            _this_run(report),
        ],
        short=f"differs in {', '.join(differing)}" if differing else "alike on both sides",
    )


def glossary() -> Section:
    """Return the words of a report, the same for every one."""
    table = Table((Column("word", text), Column("meaning", text)), [*wording("glossary").items()])
    more = ["All names of metrics, checks, causes and fixes: mismatch explain NAME."]
    return Section("glossary", "Glossary", sentences=more, tables=[table], page_only=True)


def _differing_first(rows: list[tuple[str, str, str]], differing: Container[str]) -> list[Cells]:
    """(name, left, right) with a mark where both sides say something and it differs."""
    marks = {True: Cell("≠", "strong"), False: Cell("")}
    ordered = sorted(rows, key=lambda row: row[0] not in differing)
    return [(name, marks[name in differing], left, right) for name, left, right in ordered]


# Of an aspect, the attributes that both sides may state and that mean the same on both.
COMPARED: dict[str, tuple[str, ...]] = {
    "software": ("versions.torch", "versions.transformers"),
    "precision": ("dtype", "master_dtype", "head_dtype", "autocast", "kv_cache_dtype"),
    "adapter": ("adapter",),
    "attention": ("honours_sinks", "honours_softcap"),
    "logprobs": ("logprobs_temperature", "logprobs_truncated"),
    "layout": ("device",),
}


def _aspect_differs(report: Report, aspect: str) -> bool:
    """Return whether an attribute differs that both sides state."""

    def stated(side: Any, name: str) -> Any:
        for part in name.split("."):
            side = (side or {}).get(part)
        return side

    names = COMPARED.get(aspect, ())
    pairs = [[stated(side, name) for side in _sides(report)] for name in names]
    return any(None not in pair and "" not in pair and pair[0] != pair[1] for pair in pairs)


def _settings(report: Report) -> list[tuple[str, str, str]]:
    """Every entry of the two fingerprints, without digests and long tables."""
    left, right = _sides(report)
    keys = [key for key in dict.fromkeys([*left, *right]) if key not in APART]
    return [(line(key), _setting(left.get(key)), _setting(right.get(key))) for key in keys]


def _sides(report: Report) -> tuple[SideFacts, SideFacts]:
    comparison, prints = headline(report), report.fingerprints
    return prints.get(comparison.rollout, {}), prints.get(comparison.train, {})


def _setting(value: Any) -> str:
    if value is None or value == "":
        return MISSING
    shown = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    shown = line(shown)
    return shown if len(shown) <= LONG else f"{shown[: LONG - 1]}…"


def _this_run(report: Report) -> Section:
    run = report.run
    times, versions = run.get("seconds") or {}, run.get("versions") or {}
    facts = {
        "time": ", ".join(f"{stage} {number(float(value))} s" for stage, value in times.items()),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "model": report.model,
        "levels": report.verdict.levels,
    }
    cells = {"command": Cell(command(report), "code")}
    cells |= {name: Cell(fact) for name, fact in facts.items()}
    shown = named((name, cell) for name, cell in cells.items() if cell.value)
    return Section("this-run", "This run", tables=(shown,))


def what_ran(report: Report) -> list[tuple[str, str, str]]:
    """(aspect, rollout side, train side): what was resolved, not what was asked for."""
    left, right = map(_aspects, _sides(report))
    rows = [
        (aspect, line(left[aspect]) or MISSING, line(right[aspect]) or MISSING)
        for aspect in left
        if line(left[aspect]) or line(right[aspect])
    ]
    preset = (report.run.get("spec") or {}).get("preset")
    notes = "; ".join(_sides(report)[1].get("notes") or ())
    more = {"stored preset": preset, "not followed": notes}
    return rows + [(name, MISSING, line(value)) for name, value in more.items() if value]


def _aspects(side: SideFacts) -> dict[str, str]:
    """Each aspect of one side in words; "" where the side does not say."""

    def said(key: Said) -> str:
        return str(side.get(key) or "")

    def listed(*parts: str) -> str:
        return ", ".join(filter(None, parts))

    name = said("code") or said("served_by") or said("engine") or said("backend")
    if side.get("server"):
        name = f"server: {name}"
    world = f" × {side['world_size']}" if side.get("world_size") else ""
    versions = side.get("versions") or {}
    libraries = [f"{key} {versions[key]}" for key in ("torch", "transformers") if versions.get(key)]
    precisions: dict[Said, str] = {
        "master_dtype": "master",
        "head_dtype": "head",
        "autocast": "autocast",
        "kv_cache_dtype": "KV cache",
        "quantization": "quantised",
    }
    reduced = [
        f"{label} {said(key)}" for key, label in precisions.items() if said(key) not in ("", "auto")
    ]
    sinks, eager = side.get("honours_sinks"), side.get("enforce_eager")
    honours = "" if sinks is None else ", honours sinks" if sinks else ", ignores sinks"
    temperature = side.get("logprobs_temperature")
    tensor = side.get("tensor_parallel_size") or 1
    batch = side.get("micro_batch_tokens")
    replay, injected = side.get("replay"), injected_into(side)
    own = replay["rows_own"] if replay else 0
    adapter = side.get("adapter")
    return {
        "software": listed(f"{name} {said('version')}".strip() + world, *libraries),
        "precision": listed(said("dtype"), *reduced),
        "adapter": "{name} ({digest}), {as}".format(**adapter) if adapter else "",
        "attention": f"{said('attention')}{honours}" if said("attention") else "",
        "experts": said("experts") or said("moe_backend"),
        "routes": listed(
            f"replayed: {replay['mode']} of {replay['source']}" if replay else "",
            f"{plural(own, 'token')} without a route" if own else "",
            f"injected: {injected}" if injected else "",
        ),
        "logprobs": listed(
            said("logprobs_mode"),
            "" if temperature is None else f"at temperature {bound(float(temperature))}",
            "renormalised over the kept tokens" if side.get("logprobs_truncated") else "",
        ),
        "layout": listed(
            said("device"),
            f"tensor parallel {tensor}" if tensor > 1 else "",
            "" if eager is None else "eager" if eager else "compiled",
            said("layout"),
            f"micro-batches of {plural(int(batch), 'token')}" if batch else "",
        ),
    }
