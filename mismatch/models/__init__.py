"""Models that ship with the package, short names, and how a name becomes a path or a hub id."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from mismatch.errors import MismatchError
from mismatch.models.aliases import ALIASES, find_alias

EMBEDDED = {"tiny-gpt-oss": Path(__file__).parent / "tiny-gpt-oss"}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name: str) -> str:
    """The path or hub id behind `name`.

    In this order: an embedded model's name gives its packaged directory; an existing directory
    gives itself; an alias ("gpt-oss-20b") gives its hub id; a hub id ("org/name") gives itself.

    Raises:
        MismatchError: none of the four; names the nearest ones.
    """
    if name in EMBEDDED:
        return str(EMBEDDED[name])
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _checkpoint(path)
    alias = None if "/" in name else find_alias(name)
    if alias is not None:
        return alias.hub_id
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
    known = [*EMBEDDED, *ALIASES]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    embedded = ", ".join(EMBEDDED)
    return (
        f"{hint}use a local directory, a hub id (org/name), an embedded model ({embedded}) or a "
        "short name: mismatch models lists them"
    )
