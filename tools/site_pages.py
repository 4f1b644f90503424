"""Write the generated part of the documentation site; mkdocs loads this file as a hook.

Pages of causes and fixes are made as a whole. In the other pages a line ``<!-- made: NAME -->``
is replaced by a table that the code holds. Nothing of this is in git.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"^<!-- made: ([a-z-]+) -->$", re.M)


def pages() -> dict[str, str]:
    """Return the pages that are made as a whole, by their path below docs."""
    from tools import cause_page, fix_pages

    return {**cause_page.pages(), **fix_pages.pages()}


def filled(markdown: str) -> str:
    """Return a page with a table in place of each mark.

    Raises:
        KeyError: no table has the name of a mark.
    """
    return MARK.sub(lambda found: TABLES[found[1]](), markdown)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    cells: list[Sequence[str]] = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def escaped(text: str) -> str:
    """Return a text that fits into a cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def command_line() -> str:
    """Return what ``--help-all`` prints, command by command."""
    from mismatch.cli.main import HELP_ALL, Group, summaries

    parts = []
    for name, summary in summaries().items():
        command: Any = Group().get_command(None, name)
        context = command.make_context(name, [], resilient_parsing=True, terminal_width=100)
        context.meta[HELP_ALL] = True
        context.info_name = f"mismatch {name}"
        parts.append(
            f"## mismatch {name}\n\n{summary}\n\n```text\n{command.get_help(context)}\n```"
        )
        rare = [option for option in command.callback.options if option.rare]
        if rare and name == "check":  # other commands have some of these
            rows = [[f"`{each.name}`", f"`{each.flag}`", escaped(each.help)] for each in rare]
            parts.append(table(["setting", "flag", "what it sets"], rows))
    return "\n\n".join(parts)


def metrics() -> str:
    """Return every metric with its formula and its names elsewhere."""
    from mismatch.metrics import METRICS, framework_names

    rows = []
    for name, metric in METRICS.items():
        formula = metric.definition.strip().split("\n\n")[0]
        good = "" if metric.good == "neither" else metric.good
        elsewhere = "; ".join(
            alias.label + (f" ({alias.remark})" if alias.remark else "")
            for alias in framework_names.of(name)
        )
        place = f' <a id="{name}"></a>'  # where reports lead to
        facts = (metric.meaning, formula, metric.unit, metric.kind, metric.reduction, good)
        meaning, *others = (escaped(fact) for fact in (*facts, elsewhere))
        rows.append((f"`{name}`", meaning + place, *others))
    titles = ("metric", "meaning", "formula", "unit", "interval", "mean over", "good", "elsewhere")
    return table(titles, rows)


def checks() -> str:
    """Return what each check asks."""
    from mismatch.reports.formatting import wording

    rows = [(f'`{id}` <a id="{id}"></a>', escaped(asks)) for id, asks in wording("checks").items()]
    return table(("check", "what it asks"), rows)


def glossary() -> str:
    """Return the words of a report."""
    from mismatch.reports.formatting import wording

    return table(("word", "meaning"), wording("glossary").items())


def dashboard() -> str:
    """Return what each framework logs, as one finds it on a dashboard, and our levels of it."""
    from mismatch.analysis.thresholds import default_thresholds
    from mismatch.frameworks import FRAMEWORKS
    from mismatch.metrics import METRICS, framework_names

    classes, parts = ("bf16 dense", "bf16 MoE", "quantised"), []
    for framework in FRAMEWORKS.values():
        rows = []
        for name, metric in METRICS.items():
            cells = default_thresholds().get(name, {})
            held = [
                f"{cells[c].healthy:g} / {cells[c].unfit:g}" if c in cells else "–" for c in classes
            ]
            for alias in framework_names.of(name, framework.id):
                remark = alias.remark or "the same number"
                remark = f"another number: {remark}" if alias.differs else remark
                rows.append(
                    (f"`{alias.name}`", escaped(metric.label or name), *held, escaped(remark))
                )
        if rows and framework.logs:
            heads = (
                "logged as",
                "ours",
                *(f"{each}: healthy / unfit" for each in classes),
                "difference",
            )
            parts += [f"## {framework.title}", table(heads, rows)]
    return "\n\n".join(parts)


def levels() -> str:
    """Return the healthy and the unfit bound of every judged metric, by class of stack."""
    from mismatch.analysis.thresholds import COLUMNS, default_thresholds

    rows = []
    for metric, cells in default_thresholds().items():
        bounds = [
            f"{cells[column].healthy:g} / {cells[column].unfit:g}" if column in cells else ""
            for column in COLUMNS
        ]
        sources = {f"{column}: {cell.source}" for column, cell in cells.items()}
        if len({cell.source for cell in cells.values()}) == 1:
            sources = {next(iter(cells.values())).source}
        rows.append((f"`{metric}`", *bounds, escaped("; ".join(sorted(sources)))))
    return table(("metric", *COLUMNS, "source"), rows)


def models() -> str:
    """Return every short name of ``--model``."""
    from mismatch.models import ALIASES, EMBEDDED, EMBEDDED_PARAMETERS, Alias
    from mismatch.models.config import ModelConfig, read_config

    titles = (
        "name",
        "hub id",
        "parameters",
        "MoE layers × experts × active",
        "released",
        "context",
    )
    rows = []
    embedded = (Alias(name, "", EMBEDDED_PARAMETERS) for name in EMBEDDED)
    for alias in (*embedded, *ALIASES.values()):
        values = alias.config if alias.hub_id else read_config(EMBEDDED[alias.name])
        config = ModelConfig.of(values)
        moe = f"{config.layers}×{config.experts}×{config.top_k}" if config.experts else "dense"
        place = f"`{alias.hub_id}`" if alias.hub_id else "embedded"
        sizes = f"{alias.parameters:,}", moe, alias.released, f"{config.context:,}"
        rows.append((f"`{alias.name}`", place, *sizes))
    return table(titles, rows)


def presets() -> str:
    """Return the settings of every framework's preset with the place where each was read."""
    from mismatch.features.presets.rules import NAMES
    from mismatch.features.presets.rules import table as preset_file

    parts = []
    for name in NAMES:
        data = preset_file(name)

        def read_in(row: dict[str, Any], data: dict[str, Any] = data) -> str:
            version = f"{row.get('package', data['package'])} {row.get('version', data['version'])}"
            return f"`{row['file']}`: `{row['symbol']}`, {version}"

        rows = [
            (f"`{row['field']}`", str(row["value"]), escaped(row["what"]), read_in(row))
            for row in data["setting"]
        ]
        titles = ("setting here", "value", "what the framework does", "read in")
        gaps = [f"- {row['what']} ({read_in(row)})" for row in data["gap"]]
        parts += [f"### `--framework {name}`", f"{data['title']}.", table(titles, rows)]
        parts += ["Not reproduced, and said so in the report:", "\n".join(gaps)]
    return "\n\n".join(parts)


def report_fields() -> str:
    """Return every object of report.json, with what the code's docstrings say of its fields."""
    from mismatch.pipeline.document import schema

    described, documented = schema(), dict(_documented_fields())
    parts = []
    for name, item in {"report.json": described, **described["$defs"]}.items():
        properties = item.get("properties")
        if not properties:
            continue
        meanings = documented.get((name, frozenset(properties)), {})
        rows = [
            (f"`{field}`", escaped(_kind(of)), escaped(meanings.get(field, "")))
            for field, of in properties.items()
        ]
        parts.append(f"### {name}\n\n" + table(("field", "type", "meaning"), rows))
    return "\n\n".join(parts)


def _kind(of: Any) -> str:
    """Return the type of a field in words."""
    if isinstance(of, bool):
        return "any"
    if "$ref" in of:
        name = of["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower().replace('.', '')})"
    if "anyOf" in of:
        return " or ".join(_kind(each) for each in of["anyOf"])
    if "enum" in of:
        return ", ".join(f"`{value}`" for value in of["enum"])
    if "const" in of:
        return f"`{of['const']}`"
    kind = of.get("type", "any")
    if kind == "array" and "items" in of:
        return f"list of {_kind(of['items'])}"
    if kind == "object" and isinstance(of.get("additionalProperties"), dict):
        return f"map to {_kind(of['additionalProperties'])}"
    return " or ".join(kind) if isinstance(kind, list) else kind


def _documented_fields() -> Iterator[tuple[tuple[str, frozenset[str]], dict[str, str]]]:
    """Yield the fields of every class of the package with their docstrings."""
    for path in sorted((ROOT / "mismatch").rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                fields = [
                    each.target.id
                    for each in node.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                ]
                yield (node.name, frozenset(fields)), _meanings(node)


def _meanings(node: ast.ClassDef) -> dict[str, str]:
    """Return what the docstring of a class, or a string below a field, says of each field."""
    _, _, listed = (ast.get_docstring(node) or "").partition("Attributes:\n")
    entries = re.findall(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", listed, re.M)
    found = {name: text for names, text in entries for name in names.split(", ")}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = str(text.value.value)
    return found


def causes() -> str:
    """Return the tables of detectors and causes."""
    from tools import cause_page

    return cause_page.tables()


def fixes() -> str:
    """Return the fixes by side."""
    from tools import fix_pages

    return fix_pages.tables()


def gpu_proofs() -> str:
    """Return what each committed proof of a GPU holds."""
    from tools import gpu_page

    return gpu_page.tables()


# Pages of the evidence that the search shows.
FOUND = ("index.md", "calibration.md", "compatibility.md", "known-issues.md", "gpu-results.md")
TABLES = {
    "causes": causes,
    "checks": checks,
    "command-line": command_line,
    "dashboard": dashboard,
    "fixes": fixes,
    "glossary": glossary,
    "gpu-proofs": gpu_proofs,
    "levels": levels,
    "metrics": metrics,
    "models": models,
    "presets": presets,
    "report-fields": report_fields,
}


# ---------------------------------------------------------------- mkdocs


def on_config(config: Any) -> Any:
    """Let this file import its neighbours: mkdocs loads a hook by path, and restores sys.path."""
    sys.path.insert(0, str(ROOT))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the tables of a page; leave pages of the project itself out of the search."""
    if hidden(page.file.src_uri):
        page.meta["search"] = {"exclude": True}
    return filled(markdown)


def hidden(path: str) -> bool:
    """Whether the search leaves a page out: a user looks for none of them.

    >>> hidden("decisions/0001-python.md"), hidden("evidence/known-issues.md")
    (True, False)
    """
    folder, _, name = path.partition("/")
    return folder in ("decisions", "contribute") or (folder == "evidence" and name not in FOUND)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(json.dumps({path: len(text.split()) for path, text in pages().items()}, indent=1))
