"""Metrics of a run that is larger than memory, read from its files a few sequences at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics.registry import Array, Metric
from mismatch.metrics.stream import stream
from mismatch.run import manifest
from mismatch.run.store import ROLLOUT, ROLLOUT_SCHEMA, SCORING_SCHEMA, scoring_file
from mismatch.run.tables import batches, flat
from mismatch.types import Estimate, Ints

TOKENS = 1 << 18  # read at a time, about


def stream_run(
    run_dir: Path | str,
    left: str,
    right: str,
    metrics: Iterable[Metric] | None = None,
    *,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Token and sequence metrics of two scorings in a run directory, by name.

    The values and intervals of ``analysis.comparison.compare``, in memory that hardly depends on
    the number of tokens. Routing and breakdowns are not part of it.

    Args:
        left: name of the rollout side's scoring, e.g. ``"vllm:decode"``; ``delta = right - left``.
        right: name of the train side's.

    Raises:
        EmptyComparison: no action token.
        MismatchError: a file is missing or damaged, other token ids, or logprobs that are not
            finite.
    """
    run_dir = Path(run_dir)
    for name in (ROLLOUT, scoring_file(left), scoring_file(right)):
        manifest.verify(run_dir, name)
    prompt, tokens = _sequences(run_dir)
    present = np.flatnonzero(tokens)
    rows = max(1, TOKENS * len(tokens) // max(int(tokens.sum()), 1))

    def chunks() -> Iterator[dict[str, Array]]:
        return _chunks(run_dir, left, right, rows)

    return stream(chunks, prompt, metrics, lengths=(present, tokens[present]), seed=seed)


def _sequences(run_dir: Path) -> tuple[Ints, Ints]:
    """Prompt and number of action tokens of each sequence, [N] and [N]."""
    prompts, tokens = [], []
    columns = ["prompt_index", "action_mask"]
    for table in batches(run_dir / ROLLOUT, ROLLOUT_SCHEMA, columns, 1024):
        mask, offsets = flat(table, "action_mask")
        before = np.concatenate([[0], np.cumsum(mask)])
        tokens.append(np.diff(before[offsets]))
        prompts.append(table.column("prompt_index").to_numpy())
    if not prompts:
        raise EmptyComparison(f"{run_dir / ROLLOUT} holds no sequence", "sample it again")
    return np.concatenate(prompts), np.concatenate(tokens).astype(np.int64)


def _chunks(run_dir: Path, left: str, right: str, rows: int) -> Iterator[dict[str, Array]]:
    """What metrics ask for, of ``rows`` sequences at a time."""
    columns = ["token_ids", "action_mask"]
    readers = [batches(run_dir / ROLLOUT, ROLLOUT_SCHEMA, columns, rows)]
    for name in (left, right):
        path = run_dir / scoring_file(name)
        readers.append(batches(path, SCORING_SCHEMA, _columns(path), rows))
    first = 0
    for tables in zip_longest(*readers):
        if any(table is None for table in tables):
            raise MismatchError(
                f"{run_dir}: the rollout and its scorings hold different numbers of sequences",
                "score the run again",
            )
        rollout, one, other = tables
        mask = flat(rollout, "action_mask")[0].astype(bool)
        ids = flat(rollout, "token_ids")[0][mask]
        for name, side in ((left, one), (right, other)):
            if not np.array_equal(flat(side, "token_ids")[0], ids):
                raise MismatchError(
                    f"{name} scored other tokens than the rollout's",
                    "score the rollout's token ids, never re-tokenised text",
                )
        logprobs, offsets = flat(one, "logprobs")
        arrays: dict[str, Array] = {
            "sequence": first + np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)),
            "rollout": logprobs,
            "train": flat(other, "logprobs")[0],
        }
        if "entropy" in other.column_names:
            arrays["train_entropy"] = flat(other, "entropy")[0]
        if "top1" in one.column_names and "top1" in other.column_names:
            arrays["rollout_top1"] = flat(one, "top1")[0]
            arrays["train_top1"] = flat(other, "top1")[0]
        yield arrays
        first += len(offsets) - 1


def _columns(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    names = pq.read_schema(path).names
    return [name for name in ("token_ids", "logprobs", "entropy", "top1") if name in names]
