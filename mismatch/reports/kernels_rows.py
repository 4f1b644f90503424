"""An audit of kernels as rows of text: what every rendering shows."""

from __future__ import annotations

from dataclasses import dataclass

from mismatch.experiments.kernels.types import Kind
from mismatch.experiments.kernels.verdict import KernelVerdict
from mismatch.reports.figures import Picture


@dataclass(frozen=True, slots=True)
class Mark:
    """One answer as a cell.

    Attributes:
        tone: class of the badge.
        value: the number that decided; "" where there is none.
    """

    column: str
    title: str
    sign: str
    tone: str
    word: str
    value: str
    limit: str
    detail: str


@dataclass(frozen=True, slots=True)
class Line:
    """One implementation as a line of the table; all texts.

    Attributes:
        name: in full; ``short``: the function alone, of the user's own.
        faults: what is wrong, a sentence each; ``remarks``: what is only told.
        causes: those of the faults that are no consequence of another; ``follows``: names of the
            others.
    """

    name: str
    short: str
    origin: str
    chosen: bool
    verdict: str
    sign: str
    tone: str
    reason: str
    marks: tuple[Mark, ...]
    faults: tuple[str, ...]
    causes: tuple[str, ...]
    follows: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Other:
    """One implementation without any answer; all texts."""

    name: str
    sign: str
    tone: str
    reason: str


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """Errors of one implementation in one dtype.

    Attributes:
        largest: the largest error of a gradient, and the name of that gradient.
    """

    name: str
    dtype: str
    forward: str
    gradients: tuple[tuple[str, str], ...]
    largest: tuple[str, str]
    floor: str


@dataclass(frozen=True, slots=True)
class CostLine:
    """Time and memory of one implementation at one length, and against the best there."""

    name: str
    tokens: str
    seconds: str
    slower: str
    memory: str
    more: str
    note: str


@dataclass(frozen=True, slots=True)
class HarmLine:
    """What a kernel does to the model's logprobs and to their gradient."""

    name: str
    tokens: str
    mean: str
    k3: str
    gradient: str
    cosine: str
    sinks: str


@dataclass(frozen=True, slots=True)
class Part:
    """Attention, or experts.

    Attributes:
        lines: what was run; ``others``: what was not, or did not come to its end.
    """

    kind: Kind
    title: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    others: tuple[Other, ...]
    errors: tuple[ErrorLine, ...]
    gradients: tuple[str, ...]
    costs: tuple[CostLine, ...]
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class View:
    """What the renderings show."""

    verdict: KernelVerdict
    tone: str
    model: str
    shape: str
    device: str
    lead: str
    sentences: tuple[str, ...]
    parts: tuple[Part, ...]
    harm: tuple[HarmLine, ...]
    not_tested: tuple[str, ...]
