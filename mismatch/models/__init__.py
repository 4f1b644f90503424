"""Models that ship with the package, and how a model name becomes a path."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from mismatch.errors import MismatchError

EMBEDDED = {"tiny-gpt-oss": Path(__file__).parent / "tiny-gpt-oss"}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name: str) -> str:
    """The path or hub id behind `name`.

    In this order: an embedded model's name gives its packaged directory; an existing directory
    and a hub id ("org/name") give themselves.

    Raises:
        MismatchError: none of the three; names the nearest embedded models.
    """
    if name in EMBEDDED:
        return str(EMBEDDED[name])
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _checkpoint(path)
    if _HUB_ID.fullmatch(name):
        return name
    raise MismatchError(f"model not found: {name!r}", fix=_suggestion(name))


def _checkpoint(path: Path) -> str:
    if not (path / "config.json").is_file():
        raise MismatchError(
            f"no config.json in {path}: not a model directory",
            fix="give a directory in Hugging Face format, as save_pretrained writes it",
        )
    return str(path)


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), EMBEDDED, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    embedded = ", ".join(EMBEDDED)
    return f"{hint}use a local directory, a hub id (org/name) or an embedded model: {embedded}"
