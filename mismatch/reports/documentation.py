"""Where the documentation explains what a report names."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata

DISTRIBUTION = "train-infer-mismatch"
FOLDERS = "start|how-to|explain|reference|evidence|contribute"
PAGE = re.compile(rf"\bdocs/((?:{FOLDERS})/[\w/-]+\.md(?:#[\w-]+)?)")  # as texts name a page


@cache
def site() -> str:
    """Return the address of the documentation, from the installed package's metadata.

    It ends with a slash. A release has one (tools/set_addresses.py); "": a checkout, so no links.
    """
    try:
        entries = metadata(DISTRIBUTION).get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    labelled = (entry.split(", ", 1) for entry in entries)
    return next((url for label, url in labelled if label == "Documentation"), "")


def of_cause(id: str) -> str:
    """Return the page of a cause, by its path below docs."""
    return f"reference/causes/{id}.md"


def of_check(id: str) -> str:
    """Return the place that explains a check."""
    return f"reference/checks.md#{id}"


def address(page: str) -> str:
    """Return the address of a page of the documentation; "" where it has no site.

    >>> address("reference/checks.md#alignment")
    ''
    """
    if not site() or not page:
        return ""
    path, hash, anchor = page.partition("#")
    folder = path.removesuffix("index.md").removesuffix(".md")
    return f"{site()}{folder}{'/' if folder else ''}{hash}{anchor}"


def linked(text: str) -> str:
    """Return a text with the addresses of the pages that it names; a checkout holds the files."""
    return PAGE.sub(lambda found: address(found[1]), text) if site() else text
