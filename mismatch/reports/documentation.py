"""Where the documentation explains what a report names."""

from __future__ import annotations

SITE = ""  # address of the documentation, with a slash at its end; "": none yet, so no links


def of_cause(id: str) -> str:
    """Return the page of a cause, by its path below docs."""
    return f"reference/causes/{id}.md"


def of_check(id: str) -> str:
    """Return the place that explains a check."""
    return f"reference/checks.md#{id}"


def of_metric(name: str) -> str:
    """Return the place that defines a metric."""
    return f"reference/metrics.md#{name}"


def address(page: str) -> str:
    """Return the address of a page of the documentation; "" where it has no site.

    >>> address("reference/checks.md#alignment")
    ''
    """
    if not SITE or not page:
        return ""
    path, hash, anchor = page.partition("#")
    folder = path.removesuffix("index.md").removesuffix(".md")
    return f"{SITE}{folder}{'/' if folder else ''}{hash}{anchor}"
