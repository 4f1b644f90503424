"""Modules of both sides by their bits: results of ``mismatch locate --exact``; plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mismatch.codec import fields_of, from_json, refused, to_json
from mismatch.features.locate.results import TITLES, Sequence, Site
from mismatch.reports.formatting import line, plural, text
from mismatch.reports.section import Cell, Column, Section, Table, not_tested
from mismatch.run import store
from mismatch.specs import CheckSpec
from mismatch.types import Judged, NotTested, Report

SCHEMA, FILE = "mismatch.locate-exact/1", "locate-exact.json"
HEAD, LOGPROBS = "head", "logprobs"  # logits, and what log-softmax makes of them
ORDER = (*TITLES, LOGPROBS)
OPERATIONS = {
    "embedding": "embedding",
    **{name: "norm" for name in TITLES if name.endswith("norm")},
    **dict.fromkeys(("q", "k", "v", "attention_output"), "projection"),
    **dict.fromkeys(("rope_q", "rope_k"), "rotary"),
    "attention": "attention",
    "mixer": "mixer",
    "router": "router",
    **dict.fromkeys(("mlp", "shared_mlp"), "MLP"),
    **dict.fromkeys(("attention_residual", "residual"), "residual"),
    HEAD: "head",
    LOGPROBS: "log-softmax",
}
Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class SiteBits:
    """The outputs of one module of both sides on the same tokens, compared by their bits.

    Attributes:
        operation: class of the operation: embedding, norm, projection, rotary, attention, router,
            experts, MLP, mixer, residual, head or log-softmax.
        tokens, values: that were compared; ``unequal_tokens``, ``unequal_values`` of them.
        ulps: the largest distance in units in the last place of the wider of the two dtypes.
        dtypes: of the engine's and of the trainer's output.
        sequence, position: of the first unequal token: its place among the recorded sequences, and
            in its sequence; None: none is.
    """

    layer: int | None
    site: str
    operation: str
    tokens: int
    unequal_tokens: int
    values: int
    unequal_values: int
    ulps: int
    dtypes: tuple[str, str]
    sequence: int | None = None
    position: int | None = None

    @property
    def place(self) -> str:
        """Module and layer."""
        title = "log-probabilities" if self.site == LOGPROBS else TITLES[self.site]
        return title if self.layer is None else f"{title} of layer {self.layer}"


def order(site: Site) -> tuple[float, int]:
    """Return a key that sorts sites as a forward pass meets them, log-probabilities last.

    >>> order(Site.of("logprobs")) > order(Site.of("head")) > order(Site.of("3.residual"))
    True
    """
    outside = -1.0 if site.name == "embedding" else math.inf
    return outside if site.layer is None else site.layer, ORDER.index(site.name)


def operation_of(site: Site, routers: set[int | None]) -> str:
    """Return the class of a site's operation; ``routers``: layers that have one."""
    return "experts" if site.name == "mlp" and site.layer in routers else OPERATIONS[site.name]


@dataclass(frozen=True, slots=True)
class Compared:
    """Both sides in one phase of the engine.

    Attributes:
        sites: in the order of the forward pass.
        hidden: modules that one side alone shows; what is unequal there counts for the next.
        as_run: tokens of the run's own scoring of the engine and of the trainer whose bits are
            those that were recorded, of ``tokens``; None: the run has none. Batches differ there.
    """

    phase: Phase
    engine: str
    trainer: str
    sites: tuple[SiteBits, ...]
    hidden: tuple[str, ...] = ()
    tokens: int = 0
    as_run: tuple[int | None, int | None] = (None, None)

    @property
    def first(self) -> SiteBits | None:
        """The first unequal module."""
        return next((site for site in self.sites if site.unequal_values), None)

    @property
    def before(self) -> SiteBits | None:
        """The last module before it, which is equal."""
        first = self.first
        at = len(self.sites) if first is None else self.sites.index(first)
        return self.sites[at - 1] if at else None


@dataclass(frozen=True, slots=True)
class ExactLocation:
    """What ``mismatch locate --exact`` found."""

    model: str
    sequences: tuple[Sequence, ...]
    phases: tuple[Compared, ...]
    not_tested: tuple[NotTested, ...] = ()


def judge(location: ExactLocation) -> Judged:
    """Judge: 0 where every module of every phase is equal."""
    unequal = [each for each in location.phases if each.first is not None]
    reason = "; ".join(map(sentence, unequal or location.phases))
    return Judged("unequal" if unequal else "exact", reason, int(bool(unequal)))


def sentence(each: Compared) -> str:
    """Say of one phase which module is the first unequal one."""
    first, before = each.first, each.before
    names = f"{each.engine} and {each.trainer}"
    if first is None:
        count = plural(len(each.sites), "module")
        return f"in {each.phase} all {count} of {names} are bitwise equal"
    dtypes = " and ".join(dict.fromkeys(first.dtypes))
    after = "" if before is None else f", behind the equal {before.place}"
    hidden = f" ({', '.join(each.hidden)} not shown by both)" if each.hidden else ""
    return (
        f"in {each.phase} {names} are unequal first at the {first.place} ({first.operation}, "
        f"{dtypes}): {first.unequal_tokens:,} of {plural(first.tokens, 'token')}, up to "
        f"{plural(first.ulps, 'ulp')}{after}{hidden}"
    )


def to_document(location: ExactLocation) -> dict[str, Any]:
    """Return the location as JSON data, with the verdict."""
    verdict = judge(location)
    head = {"status": verdict.status, "reason": verdict.reason}
    return {"schema": SCHEMA, "verdict": head, **to_json(location)}


def of_run(run_dir: Path | str, spec: CheckSpec | None = None) -> ExactLocation | None:
    """Return what ``mismatch locate --exact`` left in a run; None where it left nothing.

    Raises:
        MismatchError: it is damaged, or of another version.
    """
    if not (Path(run_dir) / FILE).exists():
        return None
    fields = fields_of(store.load_document(run_dir, FILE), SCHEMA, command="mismatch locate")
    fields.pop("verdict", None)
    with refused(SCHEMA, command="mismatch locate --exact", page="docs/how-to/exact.md"):
        return from_json(ExactLocation, fields)


# ---------------------------------------------------------------- in a report

LEAD = (
    "Outputs of the same modules on the same tokens, one sequence at a time on both sides, by "
    "their bits. Everything after the first unequal module follows from it."
)
SITES = (
    Column("layer", text, of=lambda site: "" if site.layer is None else str(site.layer)),
    Column("module", text, of=lambda site: TITLES.get(site.site, "log-probabilities")),
    Column("operation", text, of="operation"),
    Column("unequal tokens", text, of=lambda site: f"{site.unequal_tokens:,} of {site.tokens:,}"),
    Column("values", text, 2, of=lambda site: f"{site.unequal_values:,} of {site.values:,}"),
    Column("ulps", text, of=lambda site: f"{site.ulps:,}"),
    Column("dtypes", text, 1, of=lambda site: " / ".join(dict.fromkeys(site.dtypes))),
)


def section(result: ExactLocation, report: Report | None = None) -> Section:
    """Return the first unequal module of each phase, then every module."""
    return Section(
        "locate-exact",
        "Module by module, by bits",
        LEAD,
        sentences=[*dict.fromkeys(_sentences(result))],
        notes=not_tested(result.not_tested),
        parts=[_part(each) for each in result.phases],
        short=judge(result).reason,
    )


def _sentences(result: ExactLocation) -> Iterator[str]:
    for each in result.phases:
        yield f"{line(sentence(each))}."
        for name, count in zip((each.engine, each.trainer), each.as_run, strict=True):
            if count is not None:
                yield (
                    f"Of {line(name)} {count:,} of {plural(each.tokens, 'token')} have the bits "
                    "that the run recorded, in batches of the run."
                )


def _part(each: Compared) -> Section:
    first = each.first
    rows = Table.of(SITES, each.sites)
    if first is not None:
        at = each.sites.index(first)
        cells = list(rows.rows[at])
        cells[1] = Cell(TITLES.get(first.site, "log-probabilities"), "critical")
        rows = Table(rows.columns, [*rows.rows[:at], tuple(cells), *rows.rows[at + 1 :]])
    title = f"{line(each.engine)} and {line(each.trainer)}: {each.phase}"
    return Section(f"locate-exact-{each.phase}", title, tables=[rows], short=sentence(each))
