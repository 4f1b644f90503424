"""Folders of dumps in the layouts that frameworks write, all from one truth.

The layouts were read in the frameworks' sources and compared with what their own functions write:
NeMo-RL's ``logger.py`` (7ea279a), prime-rl's ``token_export.py`` (559b447), slime's
``train_data_utils.py`` and miles' ``train_dump_utils.py`` and ``cp_utils.py`` (November 2026).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Sample:
    """One sequence, as both sides hold it."""

    prompt: list[int]
    response: list[int]
    rollout: list[float]
    train: list[float]
    mask: list[int] = field(default_factory=list)
    """1 where the policy sampled the token; empty: everywhere."""
    versions: tuple[str, ...] = ()
    kept: bool = True
    """The framework takes it into the loss."""

    @property
    def sampled(self) -> list[int]:
        """The mask of the response."""
        return self.mask or [1] * len(self.response)


def samples(
    n: int = 32, seed: int = 0, spread: float = 0.01, length: tuple[int, int] = (10, 30)
) -> list[Sample]:
    """Return sequences of 8 prompts whose sides differ by centred noise."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(n):
        size = int(random.integers(*length))
        rollout = -random.exponential(1.0, size) - 0.01
        delta = spread * random.standard_normal(size) - spread**2 / 2
        made.append(
            Sample(
                [3 + number % 8, 40, 41, 42 + number % 8],
                random.integers(5, 1000, size).tolist(),
                np.float32(rollout).tolist(),
                np.float32(np.minimum(rollout + delta, -1e-6)).tolist(),
            )
        )
    return made


def lines(path: Path, entries: Sequence[dict[str, Any]]) -> Path:
    """Write JSON lines; a name that ends in .gz compresses them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def generic(path: Path, rows: Sequence[Sample], **more: Any) -> Path:
    """Write the documented schema, a value per sampled token."""
    entries = []
    for row in rows:
        chosen = [n for n, one in enumerate(row.sampled) if one]
        entries.append(
            {
                "token_ids": row.prompt + row.response,
                "action_mask": [0] * len(row.prompt) + row.sampled,
                "rollout_logprobs": [row.rollout[n] for n in chosen],
                "train_logprobs": [row.train[n] for n in chosen],
            }
            | more
        )
    return lines(path, entries)


def nemo_rl(folder: Path, step: int, rows: Sequence[Sample]) -> Path:
    """Write NeMo-RL's train_data_stepN.jsonl: padded lists, a list of one value around each."""
    width = max(len(row.prompt) + len(row.response) for row in rows)
    entries = []
    for row in rows:
        zeros = [0] * len(row.prompt)

        def padded(values: list[Any], zeros: list[int] = zeros) -> list[list[Any]]:
            whole = [*zeros, *values] if len(values) < width else values
            return [whole + [0] * (width - len(whole))]

        ids = row.prompt + row.response
        entries.append(
            {
                "content": ["text"],
                "rewards": [1.0],
                "input_lengths": [len(ids)],
                "token_ids": [ids + [0] * (width - len(ids))],
                "token_loss_mask": padded(row.sampled),
                "sample_loss_mask": [float(row.kept)],
                "generation_logprobs": padded(row.rollout),
                "prev_logprobs": padded(row.train),
            }
        )
    return lines(folder / f"train_data_step{step}.jsonl", entries)


def prime_rl(
    folder: Path, step: int, rows: Sequence[Sample], ranks: int = 2, stable: bool = True
) -> Path:
    """Write prime-rl's token export of a step: a file of each rank, and STABLE."""
    at = folder / f"step_{step}"
    for rank in range(ranks):
        entries = [
            {
                "schema_version": 1,
                "step": step,
                "rank": rank,
                "token_ids": row.prompt + row.response,
                "loss_mask": [False] * len(row.prompt) + [bool(one) for one in row.sampled],
                "inference_logprobs": [0.0] * len(row.prompt) + row.rollout,
                "trainer_logprobs": [-1.0] * len(row.prompt) + row.train,
                "env_name": "math",
            }
            for row in rows[rank::ranks]
        ]
        lines(at / f"rank_{rank}.jsonl", entries)
    if stable:
        (at / "STABLE").touch()
    return at


def columns(rows: Sequence[Sample], of: Sequence[int]) -> dict[str, Any]:
    """Return slime's and miles' lists with one entry per sequence."""
    import torch

    held: dict[str, Any] = {
        "tokens": [torch.tensor(row.prompt + row.response) for row in rows],
        "response_lengths": [len(row.response) for row in rows],
        "total_lengths": [len(row.prompt) + len(row.response) for row in rows],
        "loss_masks": [torch.tensor(row.sampled) for row in rows],
        "rewards": [1.0 for _ in rows],
        "truncated": [0 for _ in rows],
        "sample_indices": [*of],
        "rollout_log_probs": [torch.tensor(row.rollout) for row in rows],
        "log_probs": [torch.tensor(row.train) for row in rows],
    }
    if any(row.versions for row in rows):
        held["weight_versions"] = [[*row.versions] for row in rows]
    return held


def zigzag(total: int, response: int, rank: int, size: int, longest: int) -> list[int]:
    """Return which tokens of a response a context-parallel rank has: two of 2 × size chunks."""
    chunk = -(-longest // (2 * size))
    chunks = (rank, 2 * size - rank - 1)
    tokens = [at for n in chunks for at in range(n * chunk + 1, (n + 1) * chunk + 1)]
    before = total - response
    return [at - before for at in tokens if before <= at < total]


def contiguous(rows: Sequence[Sample], rank: int, size: int) -> list[range]:
    """Return which values of each response a rank has, if all rows together are cut in pieces."""
    total = sum(len(row.prompt) + len(row.response) for row in rows)
    piece = -(-total // size)
    found, start = [], 0
    for row in rows:
        first = start + len(row.prompt) - 1  # position of what predicts the first token
        start += len(row.prompt) + len(row.response)
        found.append(range(
            min(max(rank * piece - first, 0), len(row.response)),
            min(max((rank + 1) * piece - first, 0), len(row.response)),
        ))  # fmt: skip
    return found


def alike(rows: Sequence[Sample], cp: int = 1, dp: int = 1) -> bool:
    """Return whether no length tells contiguous pieces of the rows from two chunks of each."""
    lengths = set()
    for shard in range(dp):
        mine = [*rows[shard::dp]]
        for rank in range(cp):
            for row, piece in zip(mine, contiguous(mine, rank, cp), strict=True):
                total = len(row.prompt) + len(row.response)
                lengths.add((len(piece), len(zigzag(total, len(row.response), rank, cp, total))))
    return cp > 1 and all(one == other for one, other in lengths)


def miles(
    folder: Path, step: int, rows: Sequence[Sample], *, tp: int = 1, cp: int = 1, pp: int = 1,
    dp: int = 1, layout: str = "thd",
) -> Path:  # fmt: skip
    """Write miles' files of a step, one of each rank; earlier stages lack the trainer's side.

    Args:
        layout: "thd"; "bshd": chunks are of the longest row, padded to a multiple; "allgather":
            the trainer's side in contiguous pieces of the batch, as it is computed.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    rank, qkv = 0, "bshd" if layout == "bshd" else "thd"
    for stage in range(pp):
        for shard in range(dp):
            mine = [*rows[shard::dp]]
            for part in range(cp):
                data = columns(mine, range(shard, len(rows), dp))
                for name in ("rollout_log_probs", "log_probs") if cp > 1 else ():
                    lengths = [len(row.prompt) + len(row.response) for row in mine]
                    if layout == "bshd":
                        longest = -(-max(lengths) // 8) * 8
                        data["max_seq_lens"] = [longest] * len(mine)
                    if layout == "allgather" and name == "log_probs":
                        pieces: Any = contiguous(mine, part, cp)
                    else:
                        pieces = [
                            zigzag(total, len(row.response), part, cp,
                                   longest if layout == "bshd" else total)
                            for row, total in zip(mine, lengths, strict=True)
                        ]  # fmt: skip
                    data[name] = [
                        value[[*at]] for value, at in zip(data[name], pieces, strict=True)
                    ]
                if stage < pp - 1:
                    del data["log_probs"]
                held = {"rollout_id": step, "rollout_data": data, "cp_rank": part, "cp_size": cp}
                for _ in range(tp):
                    file = folder / f"{step}_{rank}.pt"
                    torch.save(held | {"rank": rank, "qkv_format": qkv}, file)
                    rank += 1
    return folder


def slime(folder: Path, step: int, rows: Sequence[Sample], dp: int = 2) -> Path:
    """Write slime's file of a step, format_version 2: samples of all shards, in their order."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    held = columns(rows, range(len(rows)))
    indices = held.pop("sample_indices")
    held["advantages"] = [value * 0 for value in held["log_probs"]]
    made = [
        {name: column[n] for name, column in held.items()}
        | {"sample_index": indices[n], "rollout_position": n, "data_parallel_rank": n % dp}
        for n in range(len(rows))
    ]
    shards = [{"rank": 2 * n, "data_parallel_rank": n} for n in range(dp)]
    whole = {"format_version": 2, "rollout_id": step, "rank": 0, "samples": made}
    torch.save(whole | {"dp_shards": shards, "raw_reward": [n / 8 for n in range(len(rows))]},
               folder / f"{step}.pt")  # fmt: skip
    return folder


def foreign(folder: Path) -> None:
    """Put files beside a dump that hold no rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").write_text('{"global_steps": 1}')
    (folder / "config.json").write_text('{\n  "a": 1\n}\n')
    lines(folder / "val_data_step1.jsonl", [{"content": ["x"], "rewards": [1.0], "idx": [0]}])
    (folder / "config.yaml").write_text("a: 1\n")
    (folder / "notes.txt").write_text("notes\n")
    (folder / ".step_9.jsonl.tmp").write_text("{")


def off(rows: Sequence[Sample], which: Sequence[int], spread: float = 0.3) -> list[Sample]:
    """Return the rows, these of them far apart."""
    random = np.random.default_rng(7)
    made = [*rows]
    for n in which:
        noise = spread * random.standard_normal(len(made[n].train)) - spread**2 / 2
        train = np.minimum(np.asarray(made[n].rollout) + noise, -1e-6)
        made[n] = replace(made[n], train=np.float32(train).tolist())
    return made
