"""A folder of exported weights beside the checkpoint they shall replace: names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mismatch.errors import MismatchError

Difference = Literal["missing", "unexpected", "transposed", "shape", "dtype"]
SCHEMA = "mismatch.exported-weights/1"
WORST: tuple[Difference, ...] = ("missing", "unexpected", "transposed", "shape")
Header = tuple[tuple[int, ...], str]  # shape, dtype as safetensors writes it


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor that differs.

    >>> Row("lm_head.weight", "missing", (8, 4), None).difference
    'missing'

    Attributes:
        expected: shape in the checkpoint.
        exported: shape in the folder.
        detail: both dtypes, where these differ.
    """

    name: str
    difference: Difference
    expected: tuple[int, ...] | None
    exported: tuple[int, ...] | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """A folder held against a checkpoint.

    Attributes:
        compared: tensors of the checkpoint.
    """

    model: str
    folder: str
    compared: int
    rows: tuple[Row, ...]

    @property
    def wrong(self) -> tuple[Row, ...]:
        """Rows that a loader would not survive, or would pass over; another dtype is converted."""
        return tuple(row for row in self.rows if row.difference in WORST)

    @property
    def line(self) -> str:
        """The verdict, as it is printed."""
        if not self.wrong:
            return f"verdict: healthy – all {self.compared} names and shapes are the checkpoint's"
        counts = {kind: sum(r.difference == kind for r in self.wrong) for kind in WORST}
        told = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        return f"verdict: broken – of {self.compared} tensors {told}: {self.wrong[0].name}"


def headers(directory: Path) -> dict[str, Header]:
    """Name -> (shape, dtype) of all tensors of a directory's safetensors files.

    Raises:
        MismatchError: no such files, or a damaged one.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, Header] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    part = file.get_slice(name)
                    found[name] = tuple(part.get_shape()), str(part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise MismatchError(f"{path} cannot be read: {error}", "export it again") from error
    if not found:
        raise MismatchError(
            f"{directory} holds no *.safetensors", "export the weights as safetensors files"
        )
    return found


def compare(
    expected: Mapping[str, Header], exported: Mapping[str, Header], tied: Mapping[str, str]
) -> tuple[Row, ...]:
    """Rows that differ, worst first.

    Args:
        tied: name of a tied tensor -> its source; either may stand alone.
    """
    pairs = {**tied, **{source: name for name, source in tied.items()}}
    rows = []
    for name in sorted({*expected, *exported}):
        ours, theirs = expected.get(name), exported.get(name)
        if ours is None or theirs is None:
            other = pairs.get(name)
            if other is not None and other in expected and other in exported:
                continue
            kind: Difference = "missing" if theirs is None else "unexpected"
            rows.append(Row(name, kind, ours and ours[0], theirs and theirs[0]))
        elif ours[0] != theirs[0]:
            flipped = (*ours[0][:-2], *ours[0][:-3:-1]) == theirs[0]
            rows.append(Row(name, "transposed" if flipped else "shape", ours[0], theirs[0]))
        elif ours[1] != theirs[1]:
            detail = f"{ours[1]} in the checkpoint, {theirs[1]} here"
            rows.append(Row(name, "dtype", ours[0], theirs[0], detail))
    order = (*WORST, "dtype")
    return tuple(sorted(rows, key=lambda row: order.index(row.difference)))
