"""`mismatch models`: the names that --model knows."""

from __future__ import annotations

import json
from typing import Any

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags
from mismatch.cli.options import JSON

EXPLANATION = (
    "experts: MoE layers × experts × active per token; mxfp4: only the experts, the rest is bf16.\n"
    "Any other model: --model org/name (hub) or --model DIRECTORY."
)


@with_flags(JSON)
def models(flags: Flags) -> int:
    """List embedded models and short names.

    Parameters, experts, released format and context of each.

    Examples:
    mismatch models
    """
    from rich.console import Console
    from rich.table import Table

    rows = model_rows()
    if flags["as_json"]:
        typer.echo(json.dumps({"schema": "mismatch.models/1", "models": rows}, indent=2))
        return 0
    titles = ("name", "parameters", "active", "experts", "released", "context", "hub id")
    table = Table(*titles, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(
            row["name"],
            _billions(row["parameters"]),
            _billions(row["active_parameters"]),
            row["experts"] or "dense",
            row["released"].split()[0],
            f"{row['context']:,}",
            row["hub_id"] or "embedded",
        )
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a file or a pipe has no width: no line is cut
    console.print(table)
    console.print(EXPLANATION, highlight=False)
    return 0


def model_rows() -> list[dict[str, Any]]:
    """Return one row per name, from the shipped configs; no network, no torch."""
    from mismatch.models import ALIASES, EMBEDDED, EMBEDDED_ACTIVE, EMBEDDED_PARAMETERS, Alias
    from mismatch.models.config import ModelConfig, read_config

    rows = []
    embedded = (Alias(n, "", EMBEDDED_PARAMETERS, active=EMBEDDED_ACTIVE) for n in EMBEDDED)
    for alias in (*embedded, *ALIASES.values()):
        values = alias.config if alias.hub_id else read_config(EMBEDDED[alias.name])
        config = ModelConfig.of(values)
        moe = f"{config.layers}×{config.experts}×{config.top_k}" if config.experts else None
        rows.append(
            {
                "name": alias.name,
                "hub_id": alias.hub_id or None,
                "parameters": alias.parameters,
                "active_parameters": alias.active or alias.parameters,
                "experts": moe,
                "released": alias.released,
                "context": config.context,
                "unconfirmed": list(alias.unconfirmed),
            }
        )
    return rows


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.1f} M"
