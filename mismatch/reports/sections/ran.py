"""What really ran on each side, everything that was measured, and what the words mean."""

from __future__ import annotations

import json
from typing import Any

from mismatch.frameworks import FRAMEWORKS
from mismatch.metrics import framework_names
from mismatch.models import moe
from mismatch.reports.formatting import MISSING, bound, line, number, plural, text, wording
from mismatch.reports.section import Cell, Cells, Column, Section, Table, named
from mismatch.reports.summary import METRICS, all_rows, command, headline, metric_tables
from mismatch.types import Comparison, Report

LONG = 80  # characters of a setting, beyond which it is cut: report.json has it whole
LEAD = "As each side resolved it while it ran (actual kernels and dtypes); differing rows first."
APART = ("weights", "weights_parameters", "source_files", "engine_args", "not_tested", "seconds")


def section(report: Report, framework: str | None) -> tuple[Section, ...]:
    """Both sides beside each other; then every number of the headline.

    Args:
        framework: whose names of the metrics are shown; None: every framework's.
    """
    comparison, aspects = headline(report), what_ran(report)
    titles = ("", "", comparison.rollout, comparison.train)
    columns = tuple(Column(title, text) for title in titles)
    differing = [name for name, left, right in aspects if _differ(left, right)]
    ran = Section(
        "ran",
        "Resolved configuration",
        LEAD,
        tables=[Table(columns, _differing_first(aspects))],
        parts=[
            Section(
                "settings",
                "Every setting of both sides",
                tables=[Table(columns, _differing_first(_settings(report)))],
                page_only=True,
            ),
            _this_run(report),
        ],
        short=f"differs in {', '.join(differing)}" if differing else "alike on both sides",
    )
    parts = [_everything(index, item, framework) for index, item in enumerate(report.comparisons)]
    everything = Section("everything", "Everything measured", parts=parts, page_only=True)
    return (ran, everything) if parts else (ran,)


def glossary(report: Report) -> Section:
    """The words of a report, the same for every one."""
    table = Table((Column("word", text), Column("meaning", text)), [*wording("glossary").items()])
    return Section("glossary", "Glossary", tables=[table], page_only=True)


def _differing_first(rows: list[tuple[str, str, str]]) -> list[Cells]:
    """(name, left, right) with a mark where both sides say something and it differs."""
    marks = {True: Cell("≠", "strong"), False: Cell("")}
    ordered = sorted(rows, key=lambda row: not _differ(*row[1:]))
    return [(name, marks[_differ(left, right)], left, right) for name, left, right in ordered]


def _differ(left: str, right: str) -> bool:
    return left != right and MISSING not in (left, right)


def _settings(report: Report) -> list[tuple[str, str, str]]:
    """Every entry of the two fingerprints, without digests and long tables."""
    comparison = headline(report)
    sides = [report.fingerprints.get(name, {}) for name in (comparison.rollout, comparison.train)]
    keys = [key for key in dict.fromkeys([*sides[0], *sides[1]]) if key not in APART]
    return [(line(key), _setting(sides[0], key), _setting(sides[1], key)) for key in keys]


def _setting(side: dict[str, Any], key: str) -> str:
    value = side.get(key)
    if value is None or value == "":
        return MISSING
    if key == "substitutes":  # what is ours in an engine is said in full
        return line("; ".join(map(str, value)))
    shown = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    shown = line(shown)
    return shown if len(shown) <= LONG else f"{shown[: LONG - 1]}…"


def _everything(index: int, item: Comparison, framework: str | None) -> Section:
    """Return every metric of a comparison, with its names in frameworks."""
    rows = all_rows(item)
    names = {
        row.metric: "; ".join(
            f"{alias.label} ({alias.remark})" if alias.remark else alias.label
            for alias in framework_names.of(row.metric, framework)
        )
        for row in rows
    }
    title = "known elsewhere as"
    if framework is not None:
        title = f"in {FRAMEWORKS[framework].title}"
    columns = (
        METRICS[0],
        Column("name", text, of="metric", tone="code"),
        METRICS[1],
        Column(title, text, of=lambda row: names[row.metric]),
    )
    lead = "" if item.sampled_by_left else "{} is not the law that sampled: its KL are scores."
    return Section(
        f"everything-{index}",
        f"All {len(rows)} numbers of {item.rollout} against {item.train}",
        lead.format(item.rollout),
        tables=metric_tables(rows, columns),
    )


def _this_run(report: Report) -> Section:
    times, packages = (
        recorded.items() if isinstance(recorded := report.run.get(name), dict) else ()
        for name in ("seconds", "versions")
    )
    facts = {
        "command": command(report),
        "time": ", ".join(f"{stage} {number(float(value))} s" for stage, value in times),
        "versions": ", ".join(f"{name} {version}" for name, version in packages),
        "model": report.model,
        "levels": report.verdict.levels,
    }
    cells = {name: Cell(fact, "code" if name == "command" else "") for name, fact in facts.items()}
    shown = named((name, cell) for name, cell in cells.items() if cell.value)
    return Section("this-run", "This run", tables=(shown,))


def what_ran(report: Report) -> list[tuple[str, str, str]]:
    """(aspect, rollout side, train side): what was resolved, not what was asked for."""
    comparison = headline(report)
    sides = [report.fingerprints.get(name, {}) for name in (comparison.rollout, comparison.train)]
    rows = []
    for aspect, describe in _ASPECTS.items():
        left, right = (line(describe(side)) or MISSING for side in sides)
        if (left, right) != (MISSING, MISSING):
            rows.append((aspect, left, right))
    preset = (report.run.get("spec") or {}).get("preset")
    notes = "; ".join(sides[1].get("notes") or ())
    more = {"settings of": preset, "not followed": notes}
    return rows + [(name, MISSING, line(value)) for name, value in more.items() if value]


def _software(side: dict[str, Any]) -> str:
    name = (
        side.get("code") or side.get("served_by") or side.get("engine") or side.get("backend") or ""
    )
    world = side.get("world_size")
    if servers := side.get("servers"):
        name = f"{plural(len(servers), 'server')}: {name}"
    parts = [f"{name} {side.get('version') or ''}".strip() + (f" × {world}" if world else "")]
    versions = side.get("versions") or {}
    parts += [f"{key} {versions[key]}" for key in ("torch", "transformers") if versions.get(key)]
    return ", ".join(part for part in parts if part)


def _precision(side: dict[str, Any]) -> str:
    names = {"master_dtype": "master", "head_dtype": "head", "autocast": "autocast",
             "kv_cache_dtype": "KV cache", "quantization": "quantised"}  # fmt: skip
    parts = [f"{name} {side[key]}" for key, name in names.items()
             if side.get(key) not in (None, "", "auto")]  # fmt: skip
    return ", ".join(filter(None, (str(side.get("dtype") or ""), *parts)))


def _attention(side: dict[str, Any]) -> str:
    sinks = {None: "", True: ", honours sinks", False: ", ignores sinks"}[side.get("honours_sinks")]
    return f"{side['attention']}{sinks}" if side.get("attention") else ""


def _logprobs(side: dict[str, Any]) -> str:
    temperature = side.get("logprobs_temperature")
    parts = [
        str(side.get("logprobs_mode") or ""),
        "" if temperature is None else f"at temperature {bound(float(temperature))}",
        "renormalised over the kept tokens" if side.get("logprobs_truncated") else "",
    ]
    return ", ".join(filter(None, parts))


def _layout(side: dict[str, Any]) -> str:
    parts = [str(side.get("device") or "")]
    if (side.get("tensor_parallel_size") or 1) > 1:
        parts.append(f"tensor parallel {side['tensor_parallel_size']}")
    if side.get("enforce_eager") is not None:
        parts.append("eager" if side["enforce_eager"] else "compiled")
    if side.get("layout"):
        parts.append(str(side["layout"]))
    if side.get("micro_batch_tokens"):
        parts.append(f"micro-batches of {plural(int(side['micro_batch_tokens']), 'token')}")
    return ", ".join(part for part in parts if part)


def _routes(side: dict[str, Any]) -> str:
    parts = []
    if replay := side.get("replay"):
        own = int(replay["rows_own"])
        parts.append(f"replayed: {replay['mode']} of {replay['source']}")
        parts += [f"{plural(own, 'token')} without a route"] if own else []
    if injected := dict(side.get("injected") or {}):
        seed = injected.pop("seed", None)
        parts.append(f"injected: {moe.describe(tuple(injected.items()), seed)}")
    return ", ".join(parts)


_ASPECTS = {
    "software": _software,
    "precision": _precision,
    "attention": _attention,
    "experts": lambda side: str(side.get("experts") or side.get("moe_backend") or ""),
    "routes": _routes,
    "logprobs": _logprobs,
    "layout": _layout,
}
