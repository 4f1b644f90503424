"""`mismatch template`: whether conversations keep their tokens from turn to turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags, Option, flags_of
from mismatch.cli.options import JSON
from mismatch.specs import MODEL, EngineSpec

if TYPE_CHECKING:
    from mismatch.prompts.template import TemplateReport

SCHEMA = "mismatch.template/1"
MODELS = Option(
    "model", list[str] | None, MODEL, "Embedded model, hub id or directory; repeatable."
)
TEMPLATE = Option("chat_template", Path | None, MODEL, "Another template for the same tokenizer.")


@with_flags(MODELS, flags_of(EngineSpec, "revision trust_remote_code"), TEMPLATE, JSON)
def template(flags: Flags) -> int:
    """Check a chat template: does a later turn keep the ids of the earlier ones?

    Needs a tokenizer alone: no weights, no engine. Exit code 1 where a check fails.
    """
    from mismatch.codec import to_json
    from mismatch.errors import MismatchError

    if not flags["model"]:
        raise MismatchError("no model", "give --model NAME, a hub id or a directory")
    reports = [_examined(name, flags) for name in flags["model"]]
    if flags["as_json"]:
        document = {"schema": SCHEMA, "templates": [to_json(report) for report in reports]}
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        _print(reports)
    return int(any(report.failed for report in reports))


def _examined(name: str, flags: Flags) -> TemplateReport:
    from mismatch.models import resolve_model
    from mismatch.models.resolved import load_tokenizer, stop_ids
    from mismatch.prompts.template import examine

    folder = Path(name).expanduser()
    model = str(folder) if (folder / "tokenizer_config.json").is_file() else resolve_model(name)
    other = None if flags["chat_template"] is None else _read(flags["chat_template"])
    tokenizer: Any = load_tokenizer(model, flags["revision"], flags["trust_remote_code"])
    tokenizer.model_max_length = 10**9  # long outputs of tools are rendered, not scored
    tokenizer.chat_template = other or tokenizer.chat_template
    return examine(name, tokenizer, stop_ids(model, flags["revision"], tokenizer))


def _read(path: Path) -> str:
    from mismatch.errors import MismatchError, first_line

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MismatchError(
            f"--chat-template {path}: {first_line(error)}", "give a file with a Jinja template"
        ) from error


def _print(reports: list[TemplateReport]) -> None:
    from rich.console import Console

    from mismatch.reports.sections.chat_template import shown
    from mismatch.reports.terminal import print_section

    for report in reports:
        print_section(shown(report), Console())
