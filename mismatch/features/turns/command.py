"""`mismatch template`: whether conversations keep their tokens from turn to turn."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import JSON, Flags, Option, flags_of
from mismatch.codec import to_json
from mismatch.errors import MismatchError, first_line
from mismatch.run.files import read_regular
from mismatch.specs import MODEL, EngineSpec

SCHEMA = "mismatch.template/2"
MODELS = Option(
    "model", list[str] | None, MODEL, "Embedded model, hub id or directory; repeatable."
)
TEMPLATE = Option("chat_template", Path | None, MODEL, "Another template for the same tokenizer.")


@with_flags(MODELS, flags_of(EngineSpec, "revision trust_remote_code"), TEMPLATE, JSON)
def template(flags: Flags) -> int:
    """Check a chat template: do later turns keep the ids of earlier turns?

    Needs only a tokenizer: no weights, no engine. Exit code 1 if a check fails.

    Examples:
    mismatch template --model MODEL
    """
    from rich.console import Console

    from mismatch.features.turns.section import shown
    from mismatch.features.turns.template import examine
    from mismatch.models import resolve_model
    from mismatch.models.tokenizers import load_tokenizer, stop_ids
    from mismatch.reports.terminal import print_section

    if not flags["model"]:
        raise MismatchError("no model", "give --model NAME, a hub id or a directory")
    other, file = None, flags["chat_template"]
    if file is not None:
        try:
            other = read_regular(file).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            fault = f"--chat-template {file}: {first_line(error)}"
            raise MismatchError(fault, "give a file with a Jinja template") from error
    reports = []
    for name in flags["model"]:
        folder = Path(name).expanduser()
        # A folder may hold a tokenizer and no model, which resolve_model would refuse.
        model = str(folder) if (folder / "tokenizer_config.json").is_file() else resolve_model(name)
        tokenizer = load_tokenizer(model, flags["revision"], flags["trust_remote_code"])
        tokenizer.model_max_length = 10**9  # long outputs of tools are rendered, not scored
        tokenizer.chat_template = other or tokenizer.chat_template
        stops = stop_ids(model, flags["revision"], tokenizer.eos_token_id)
        reports.append(examine(name, tokenizer, stops))
    if flags.as_json:
        document = {"schema": SCHEMA, "templates": [to_json(report) for report in reports]}
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        for report in reports:
            print_section(shown(report), Console())
    return int(any(report.failed for report in reports))
