"""Pages of the site about causes, from mismatch/analysis/causes.toml and the detectors."""

from __future__ import annotations

from pathlib import Path

from mismatch.analysis.catalogue import Entry, catalogue
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.experiments.fixes.catalogue import FIXES
from mismatch.experiments.fixes.guides import settings_of
from mismatch.experiments.probes import PROBES
from mismatch.experiments.results import TESTS
from mismatch.frameworks import FRAMEWORKS

DOCS = Path(__file__).parent.parent / "docs"
NARROW = 3  # fixes that take out more causes than this are no fix of a single one
EVERYWHERE = ("verl", "TRL", "NeMo-RL", "prime-rl", "slime", "SkyRL")
READ = (  # what `frameworks` of causes.toml was read from
    f"Read in {', '.join(FRAMEWORKS[id].read_in for id in ('verl', 'trl', 'skyrl'))}, NeMo-RL of "
    "2026-08-22, "
    "prime-rl and slime of 2026-08-21; a line that names a fix has the versions on the fix's page. "
    "Settings passed on to vLLM, SGLang, Megatron or transformers have the names used there."
)
COMMAND = """```bash
mismatch check … --explain
mismatch check --resume RUN --explain   # for a finished run
```
"""


def pages() -> dict[str, str]:
    """Return a page for each cause, by its path below docs."""
    return {f"reference/causes/{entry.id}.md": _page(entry) for entry in catalogue().values()}


def tables() -> str:
    """Return the detectors and the causes as tables."""
    return "\n".join([_detectors(), _index()])


def _detectors() -> str:
    lines = ["## Detectors", "", "| detector | names | needs |", "| --- | --- | --- |"]
    for detector in detectors():
        names = ", ".join(f"[{id}](causes/{id}.md)" for id in detector.causes)
        needs = detector.needs or "both log-probabilities"
        lines.append(f"| `{detector.id}` | {names} | {needs} |")
    return "\n".join([*lines, ""])


def _index() -> str:
    lines = ["## Causes", "", "| cause | what it is | what you see |", "| --- | --- | --- |"]
    for entry in catalogue().values():
        see = entry.see.replace("|delta|", "abs(delta)")
        lines.append(f"| [{entry.id}](causes/{entry.id}.md) | {entry.title} | {see} |")
    return "\n".join([*lines, ""])


def _page(entry: Entry) -> str:
    fixes = [fix for fix, one in TESTS.items() if entry.id in (*one.own, *one.wide)]
    probes = [probe for probe, tests in PROBES.items() if entry.id in tests]
    parts = [
        f"# {entry.title.rstrip('.')}",
        f"`{entry.id}` · [all causes](../causes.md)",
        "## What you see",
        entry.see,
        *_picture(entry),
        "## Why",
        entry.why,
        "## Confirm",
        entry.confirm,
        *_by_experiment(entry, fixes, probes),
        "## Fix it",
        entry.mend,
        *_settings(entry, fixes),
        "## How it is found",
        *_found(entry),
    ]
    if entry.seen:
        parts += ["## Seen in", ", ".join(entry.seen)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _picture(entry: Entry) -> list[str]:
    """Return the figure of the planted fault; benchmarks/gallery.py draws it."""
    if not (DOCS / "images" / "gallery" / f"{entry.id}.svg").is_file():
        return [entry.picture]
    return [f"![{entry.title}](../../images/gallery/{entry.id}.svg)",
            "Planted and measured: [gallery](../../evidence/gallery.md)."]  # fmt: skip


def _found(entry: Entry) -> list[str]:
    looking = [detector for detector in detectors() if entry.id in detector.causes]
    if not looking:
        return ["No detector names it from the numbers alone: others name it as a look-alike."]
    return [
        f"Detector `{one.id}`; needs {one.needs or 'both log-probabilities'}." for one in looking
    ]


def _by_experiment(entry: Entry, fixes: list[str], probes: list[str]) -> list[str]:
    if not fixes and not probes:
        return []
    alone = [id for id in fixes if entry.id in TESTS[id].own]
    among = [id for id in fixes if entry.id in TESTS[id].wide]
    made = _listed([*alone, *probes, *among])
    known = [fix.id for fix in FIXES if fix.id in alone]
    parts = [f"`--explain` runs these experiments if they apply: {made}."]
    if known:
        parts.append(f"As a fix, it measures the same: `--fix {known[0]}`.")
    if among:
        parts.append(
            f"{_listed(among)} also removes the mismatch of other causes: this cause is confirmed "
            "only if experiments ruled out the others."
        )
    return [" ".join(parts), COMMAND]


def _listed(ids: list[str]) -> str:
    return ", ".join(f"`{id}`" for id in ids)


def _settings(entry: Entry, fixes: list[str]) -> list[str]:
    """Return what is known of each framework, read at its source; what is not known is said."""
    known: dict[str, list[str]] = {name: [] for name in EVERYWHERE}
    for id in fixes:
        narrow = len(TESTS[id].own) + len(TESTS[id].wide) <= NARROW
        for setting in settings_of(id) if narrow else ():
            parts = known.setdefault(setting.framework, [])
            remark = "; ".join(text for text in (setting.remark, setting.source) if text)
            parts.append(f"- {setting.framework} ([{id}](../fixes/{id}.md)): {remark}")
            if setting.lines:
                lines = "\n".join(f"  {text}" for text in setting.lines)
                parts.append(f"  ```\n{lines}\n  ```")
    for name, text in entry.frameworks.items():
        known.setdefault(name, []).append(f"- {name}: {text}.")
    rest = [name for name in EVERYWHERE if not known[name]]
    unread = f"- {', '.join(rest)}: not read at the source; look for what the fix names."
    lines_of = [line for parts in known.values() for line in parts]
    read = [READ] if entry.frameworks else []
    return ["## In the frameworks", *read, "\n".join([*lines_of, *([unread] if rest else [])])]
