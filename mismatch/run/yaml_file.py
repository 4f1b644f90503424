"""YAML and JSON files of frameworks, read with PyYAML alone: a mapping in, plain data out."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.run.files import LARGEST_YAML, parse_json, read_regular, require_small_yaml

# PyYAML follows YAML 1.1, where 1e-6 is text; frameworks read it as a number.
EXPONENT = re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")


def read_mapping(path: Path, where: str) -> dict[str, Any]:
    """Return a file's keys and values.

    Args:
        where: the file as the user named it, for errors: ``--framework-config run.yaml``.

    Raises:
        MismatchError: missing file, invalid YAML (with the line), or no mapping.
    """
    from yaml import YAMLError

    try:
        text = read_regular(path, LARGEST_YAML).decode("utf-8")
        try:
            tree = parse_json(text.encode()) if text.lstrip().startswith("{") else parsed(text)
        except json.JSONDecodeError:  # a YAML mapping in one line starts like JSON
            tree = parsed(text)
    except (OSError, ValueError, RecursionError, YAMLError) as error:
        reason = " ".join(str(error).split())  # a YAML error says the line
        raise MismatchError(f"{where}: {reason}", "give a YAML file of key: value lines") from error
    if not isinstance(tree, dict):
        what = "a list" if isinstance(tree, list) else "no keys"
        raise MismatchError(f"{where} holds {what}, not a mapping", "write key: value")
    return {str(key): value for key, value in tree.items()}


def parsed(text: str) -> Any:
    """Return what YAML text holds, as plain data.

    Raises:
        ValueError: as :func:`mismatch.run.files.require_small_yaml`.
        yaml.YAMLError: it is no YAML.

    >>> parsed("lr: 1e-6")
    {'lr': 1e-06}
    """
    import yaml

    require_small_yaml(text)
    return yaml.load(text, Loader=_loader())


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML without objects, with numbers as frameworks read them."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
    return Loader
