"""Read what a framework recorded: token ids, the sampler's log-probabilities, and the trainer's.

A dump is a JSONL or Parquet file, or a folder of them. Files that hold only text are refused:
encoded again, text may become other tokens. Files of torch and pickle are read by
``torch.load(weights_only=True)`` in a child process of the framework's environment (convert.py).

Values that cannot be true (NaN, null, infinities, lengths that do not fit) are faults of the run,
not of the file: they are kept, counted and reported. Sums are of all rows; of a large dump only the
rows of some prompts are kept. Fields were read in the frameworks' sources, all of August 2026:
torchtitan's ``rollout_recorder.py`` (b5bcd76), open-instruct's ``rl_utils.py`` (e6c3044), verl's
``rollout_skip.py`` (1dda039), NeMo-RL's ``grpo.py`` and ``logger.py`` (7ea279a), prime-rl's
``token_export.py`` (559b447), slime's ``train_dump_utils.py`` (624b824) and SkyRL's ``trainer.py``
(a956457).
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mismatch.errors import MismatchError, in_list
from mismatch.features.recorded.convert import LACKS, converted
from mismatch.features.recorded.parts import (
    LARGE_BYTES,
    TABLES,
    Part,
    Unreadable,
    files_of,
    named,
    parts_of,
)
from mismatch.features.recorded.ratios import Ratios
from mismatch.metrics.row_sums import Row, Sums
from mismatch.processes.spread import HERE, Where
from mismatch.run.files import bounded_memory, open_parquet, open_regular
from mismatch.run.manifest import WRONG
from mismatch.types import Bools, Floats, Ints

Entry = dict[str, Any]
Form = Literal[
    "torchtitan", "open-instruct", "generic", "verl", "nemo-rl", "prime-rl", "slime", "skyrl"
]
TOGETHER = 1 << 16  # tokens that are added up at once
AT_ONCE = 1 << 20  # values of a column of Parquet that are read at once, about
LONGEST = 1 << 20  # tokens of a sequence: more than any context holds
LARGEST_ID = 1 << 31  # more than any vocabulary holds
SPARE = 4  # times its share of the tokens may a part keep: bytes do not count tokens
# Where no more prompts are kept than this, rows are drawn instead of prompts; and no more rows than
# this may have twice the tokens.
LEAST = 16
# First bytes of a file by ``torch.save``, and by ``pickle.dump`` with protocol 2 and later.
PICKLED = (b"PK\x03\x04", b"\x80")
MOST_MISFITS = 1000  # rows whose numbers are kept, of each kind
LEAST_MISFITS = 8  # rows, from which on a list that is too long in all of them is cut to fit
NAMED = 4  # kinds of rows that were left out; the rest are counted
MISFIT = "lists of a row are of its sampled tokens, or of all its tokens: write both sides so"
UNSAMPLED = "left out: no token was sampled"
CUT_OFF = "left out: no JSON object, cut off or still written:"  # a line, and its place
MASKS = ["response_mask", "loss_mask", "completion_mask", "labels_mask", "assistant_mask", "mask"]
# Of a row, what has one value per sampled token.
SIDES = {"rollout": "logprobs", "trainer": "train_logprobs", "entropy": "entropy", "old": "old",
         "weight version": "versions"}  # fmt: skip
# What a row may say of where it came from, in any format; ``step`` also from the file's name.
ATTRIBUTES = ("replica", "rank", "weight_version", "step", "environment", "sample_id")


@dataclass
class Recorded:
    """The sequences of a dump, or of a part of it, and what was noticed while reading."""

    form: Form | None = None
    sequences: list[Row] = field(default_factory=list)
    """Those that are kept: all, or of a large dump some prompts."""
    kept: int = 0
    """Their tokens."""
    sums: Sums = field(default_factory=Sums)
    """Of every sequence."""
    ratios: Ratios = field(default_factory=Ratios)
    """Of every sequence that has them."""
    remarks: Counter[str] = field(default_factory=Counter)
    """Remark -> how often."""
    misfits: Counter[str] = field(default_factory=Counter)
    """Sequences that were left out because their arrays differ in length: how -> how many."""
    misfit_rows: dict[str, list[int]] = field(default_factory=dict)
    """The same -> the first of their rows in the dump."""
    ends: str = ""
    """Where these were cut to the length of their tokens; "": they were left out."""
    entries: int = 0
    """Rows of the dump, those that were left out too."""
    unread: set[str] = field(default_factory=set)
    """Columns that no format here knows, or has no use for."""
    steps: set[str] = field(default_factory=set)
    """Of all sequences, those of steps that are left out too."""
    prompts: float = 1.0
    """Share of the prompts that is kept."""
    rows: float = 1.0
    """Share of their rows."""
    passed_over: list[Unreadable] = field(default_factory=list)
    """Files of a folder that were not read, and why."""
    masked: Sums = field(default_factory=Sums)
    """Of sequences that the framework leaves out of the loss: they decide nothing."""

    def add(self, rows: list[Row], most: int | None) -> None:
        """Count rows, and keep them; see :meth:`keep`."""
        self.sums.add(rows)
        for row in rows:
            if row.ratios is None and row.old is not None and row.train_logprobs is not None:
                self.ratios.of_old, row.ratios = True, np.exp(row.train_logprobs - row.old)
            self.ratios.add(row)
            row.ratios = None  # they are compared, and take memory
        self.keep(rows, most)

    def keep(self, rows: list[Row], most: int | None) -> None:
        """Keep rows; of more than ``most`` tokens draw prompts, or rows where prompts are few."""
        drawn = [row.owned() for row in rows if row.drawn(self.prompts, self.rows)]
        self.sequences += drawn
        self.kept += sum(len(row.token_ids) for row in drawn)
        while most and len(self.sequences) > 1:
            if self.kept <= (most if len(self.sequences) > LEAST else 2 * most):
                return
            if len(self.sequences) <= LEAST:
                longest = max(
                    range(len(self.sequences)), key=lambda at: len(self.sequences[at].token_ids)
                )
                self.kept -= len(self.sequences.pop(longest).token_ids)
                continue
            if len({row.key for row in self.sequences}) > LEAST:
                self.prompts /= 2
            else:
                self.rows /= 2
            self.sequences = [row for row in self.sequences if row.drawn(self.prompts, self.rows)]
            self.kept = sum(len(row.token_ids) for row in self.sequences)

    def merge(self, part: Recorded, most: int | None) -> None:
        """Add the part that follows; the result does not depend on who read it."""
        self.form = self.form or part.form
        for row in part.sequences:
            row.number += self.sums.rows
        self.ratios.merge(part.ratios, self.sums.rows)
        self.sums.merge(part.sums)
        self.remarks += part.remarks
        self.misfits += part.misfits
        self.ends = part.ends
        for what, rows in part.misfit_rows.items():
            known = self.misfit_rows.setdefault(what, [])
            known += [self.entries + row for row in rows][: MOST_MISFITS - len(known)]
        self.entries += part.entries
        self.unread |= part.unread
        self.steps |= part.steps
        self.passed_over += part.passed_over
        self.masked.merge(part.masked)
        self.prompts, self.rows = min(self.prompts, part.prompts), min(self.rows, part.rows)
        before, self.sequences, self.kept = self.sequences, [], 0
        self.keep(before + part.sequences, most)


def read_recorded(
    path: Path | Sequence[Path],
    form: Form | None = None,
    python: str | None = None,
    *,
    step: int | None = None,
    most: int | None = None,
    on: Where = HERE,
    skip_torn: bool = False,
    ends: str = "",
) -> Recorded:
    """Return the format of a dump, its sequences, and sums over all of them.

    Files of a folder that hold no rows are passed over and listed; a file that is given is read.

    Args:
        path: a file, a folder, or files of a folder.
        form: None: decided by the fields of the first row of each file.
        python: interpreter of the framework's environment, for files of torch and pickle.
        step: leave out the sequences of others.
        most: tokens that are kept, about; prompts are drawn so that no more are. None: all.
        on: which processes read its parts.
        skip_torn: leave out lines that are no JSON objects, wherever they are.
        ends: "last" or "first": where values are taken away or added in rows whose lists have
            other lengths. "": these rows are left out; if all are, the better end is taken.

    Raises:
        MismatchError: a file cannot be read, needs ``python``, holds no ids and logprobs, a row is
            malformed (named), or two files have different formats.
    """
    recorded = Recorded()
    if isinstance(path, Path):
        of_folder = path.is_dir()
        files = files_of(path if on.dask is None else path.resolve())
    else:
        files, of_folder = list(path), True
    parts, large = parts_of(files), sum(map(_size_of, files)) > LARGE_BYTES
    work = partial(read_part, form=form, python=python, step=step, most=most,
                   of_folder=of_folder, skip_torn=skip_torn, ends=ends)  # fmt: skip
    for part, read in zip(parts, on.each(work, parts, large), strict=True):
        if read.form and recorded.form and read.form != recorded.form:
            fault = f"{part.file} has the format {read.form}, and files before it {recorded.form}"
            raise MismatchError(fault, "give the files of one format; --dump-format names one")
        recorded.merge(read, most)
    if recorded.form is None and recorded.passed_over:  # the one that was meant to be read
        raise min(recorded.passed_over, key=lambda error: error.foreign)
    where = path if isinstance(path, Path) else files[0]
    if recorded.form is None and not recorded.remarks:
        raise MismatchError(f"{where} is empty", "give a file with one JSON object per line")
    if not recorded.sequences and step is not None and recorded.steps:
        has = ", ".join(sorted(recorded.steps, key=len))
        raise MismatchError(f"--step {step}: the dump has none of it", f"it has {has}")
    if not recorded.sequences and not ends and recorded.misfits.total() >= LEAST_MISFITS:
        both = [
            read_recorded(path, form, python, step=step, most=most, on=on, skip_torn=skip_torn,
                          ends=end)
            for end in ("last", "first")
        ]  # fmt: skip
        if all(read.sums.whole.tokens for read in both):
            return min(both, key=lambda read: read.sums.whole.step(0).abs_diff)
    if not recorded.sequences:
        left = [*recorded.remarks, *(f"{n}×: {what}" for what, n in recorded.misfits.items())]
        more = f"; and {len(left) - NAMED} more" if len(left) > NAMED else ""
        said = "; ".join(left[:NAMED]) or "no row has a sampled token"
        fix = MISFIT if recorded.misfits else ""
        if UNSAMPLED in recorded.remarks:
            fix = "a mask is 1 where the policy sampled a token, and 0 elsewhere"
        if LACKS in recorded.remarks:
            fix = "give the folder with the files of all ranks of a step"
        raise MismatchError(f"{where} has no sequence that can be scored: {said}{more}", fix)
    return recorded


def _size_of(file: Path) -> int:
    with suppress(OSError):  # reading it says what is wrong
        return file.stat().st_size
    return 0


def read_part(
    part: Part,
    form: Form | None,
    python: str | None,
    step: int | None,
    most: int | None,
    of_folder: bool = False,
    skip_torn: bool = False,
    ends: str = "",
) -> Recorded:
    """Read one part of a dump; see :func:`read_recorded`."""
    with bounded_memory(part.file):
        try:
            return _read_part(part, form, python, step, most, skip_torn, ends)
        except Unreadable as error:
            if not of_folder:
                raise
            return Recorded(passed_over=[error])


def _read_part(
    part: Part,
    form: Form | None,
    python: str | None,
    step: int | None,
    most: int | None,
    skip_torn: bool,
    ends: str,
) -> Recorded:
    recorded, place = Recorded(ends=ends), named(part.file)
    most = most and min(most, 1 + int(SPARE * most * part.share))  # few rows leave a process
    waiting, tokens, known = list[Row](), 0, set[str]()
    for number, entry in _entries(part, python, recorded, skip_torn):
        where = partial(part.place, number)
        form = form or _form_of(entry, where, number == 1)
        recorded.form = form
        try:
            rows = [*FORMS[form][0](entry, recorded.remarks)]
        except WRONG as error:
            fault = f"{where()}: no sequence of the format {form}: {error}"
            fix = "docs/how-to/recorded-runs.md lists the fields; --dump-format names another"
            raise MismatchError(fault, fix) from error
        known = known or {*TAKEN[form].split(), *ATTRIBUTES}
        recorded.unread |= entry.keys() - known
        rows = [row for row in rows if _fits(row, where, recorded, ends)]
        recorded.entries += 1
        said = {
            name: str(entry[name])
            for name in ATTRIBUTES
            if name in entry and type(entry[name]) in (str, int)
        }
        if "step" in said and not re.fullmatch(r"-?\d{1,18}", said["step"], re.ASCII):
            fault = f"{where()}: step is {said['step']!r:.60}"
            raise MismatchError(fault, "write the step as a whole number")
        for row in rows:
            row.attributes = place | said | row.attributes
            recorded.steps.add(of := row.attributes.get("step", "none"))
            if step is not None and of != str(step):
                continue
            if row.masked:
                recorded.masked.add([row])
                continue
            row.number = recorded.sums.rows + len(waiting)
            row.place = f"{part.number}:{row.number}"
            waiting.append(row)
        tokens += sum(len(row.token_ids) for row in rows)
        if tokens > TOGETHER:
            recorded.add(waiting, most)
            waiting, tokens = [], 0
    recorded.add(waiting, most)
    return recorded


def _entries(
    part: Part, python: str | None, recorded: Recorded, skip_torn: bool
) -> Iterator[tuple[int, Entry]]:
    """Yield the number and the fields of every row of a part of a file."""
    path = part.file
    try:
        with open_regular(path) as file:
            start = file.read(4)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}", "give a file that can be read") from error
    if path.suffix in TABLES:
        fix = "write one JSON object per row, with lists of numbers: docs/how-to/recorded-runs.md"
        raise Unreadable(f"{path} is a table of text ({path.suffix})", fix)
    if start.startswith(PICKLED):
        yield from converted((path, *part.others), python, recorded.remarks, recorded.unread)
    elif start == b"PAR1" or path.suffix == ".parquet":
        yield from _parquet(part)
    else:

        def cut(place: str) -> None:
            recorded.remarks[f"{CUT_OFF} {place}"] += 1

        yield from part.json_lines(cut, skip_torn)


def _parquet(part: Part) -> Iterator[tuple[int, Entry]]:
    import pyarrow as pa

    path, number = part.file, 0
    try:
        file = open_parquet(path)
        groups = range(file.num_row_groups) if part.groups is None else part.groups
        for group in groups:
            about = file.metadata.row_group(group)
            columns = range(about.num_columns)
            values = max((about.column(at).num_values for at in columns), default=0)
            rows = max(1, min(256, AT_ONCE * about.num_rows // max(1, values)))
            # No threads: none can be made at the limit of memory.
            for batch in file.iter_batches(rows, [group], use_threads=False):
                names = batch.schema.names
                for row in zip(*map(_values, batch.columns), strict=True):
                    number += 1
                    yield number, dict(zip(names, row, strict=True))
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        fault = f"{path} is no readable Parquet file: {error}"
        raise Unreadable(fault, "was it cut off? is it still written?") from error


def _values(column: Any) -> Any:
    """Return a column's values; lists of numbers as arrays, null in them as NaN."""
    from pyarrow import types

    kind = column.type
    numbers = types.is_list(kind) or types.is_large_list(kind)
    if not numbers or not types.is_primitive(kind.value_type):
        return column.to_pylist()
    values = column.values.to_numpy(zero_copy_only=False)
    ends = column.offsets.to_numpy().tolist()
    valid = column.is_valid().to_pylist() if column.null_count else [True] * len(column)
    spans = zip(ends[:-1], ends[1:], valid, strict=True)
    return [values[a:b] if there else None for a, b, there in spans]


def _fits(row: Row, where: Callable[[], str], recorded: Recorded, ends: str) -> bool:
    """Whether a row can be scored; counts it among the misfits where its arrays do not fit.

    Raises:
        MismatchError: its mask is not of its tokens, or its first token is sampled, which nothing
            predicts.
    """
    if len(row.token_ids) > LONGEST:
        fault = f"{where()}: a sequence of {len(row.token_ids):,} tokens, more than {LONGEST:,}"
        raise MismatchError(fault, "is it damaged? leave the row out")
    if len(row.sampled) != len(row.token_ids):
        fault = f"{where()}: a mask of {len(row.sampled)} entries for {len(row.token_ids)} tokens"
        fix = "docs/how-to/recorded-runs.md lists the fields; --dump-format names another format"
        raise MismatchError(fault, fix)
    count = int(np.count_nonzero(row.sampled))
    if count == 0:
        recorded.remarks[UNSAMPLED] += 1
        return False
    if row.sampled[0]:
        fault = f"{where()}: the first token is sampled, and nothing predicts it"
        fix = "the mask is shifted, or the prompt is missing: write the prompt's ids too"
        raise MismatchError(fault, fix)
    if row.ratios is not None and len(row.ratios) != count:
        recorded.remarks["importance ratios that are not of the sampled tokens: not compared"] += 1
        row.ratios = None
    for side, name in SIDES.items():
        values = getattr(row, name)
        if values is None or len(values) == count:
            continue
        what = f"{len(values) - count:+d} {side} values for the sampled tokens"
        recorded.misfits[what] += 1
        known = recorded.misfit_rows.setdefault(what, [])
        known += [recorded.entries] if len(known) < MOST_MISFITS else []
        if not ends or abs(len(values) - count) > count / 2:
            return False
        setattr(row, name, _with_length(values, count, ends))
    return True


def _with_length(values: Floats, count: int, ends: str) -> Floats:
    """Return so many values: others are taken away at an end, or NaN added there."""
    if len(values) > count:
        return values[:count] if ends == "last" else values[len(values) - count :]
    nothing = np.full(count - len(values), np.nan)
    return np.concatenate([values, nothing] if ends == "last" else [nothing, values])


# ---------------------------------------------------------------- formats


def generic(entry: Entry, remarks: Counter[str]) -> Iterator[Row]:
    """Read the documented schema: ids with a mask, the prompt's and the response's ids, or numbers
    alone, of the tokens of a response."""
    if not {"token_ids", "response_token_ids"} & entry.keys():
        entry = _without_ids(entry)
    if "token_ids" in entry:
        ids, sampled = _ids(entry, "token_ids"), _mask(entry, "action_mask")
    else:
        prompt, response = _ids(entry, "prompt_token_ids"), _ids(entry, "response_token_ids")
        ids = np.concatenate([prompt, response])
        sampled = np.ones(len(ids), np.bool_)
        sampled[: len(prompt)] = False
    other = "logprobs" in entry and "rollout_logprobs" not in entry
    name = "logprobs" if other else "rollout_logprobs"
    row = _row(entry, ids, sampled, sampled, name, "train_logprobs", "entropy")
    row.prompt = entry.get("prompt_id")
    row.finish_reason = str(entry.get("finish_reason") or "unknown")
    if row.finish_reason == "unknown" and type(entry.get("truncated")) in (int, bool):
        row.finish_reason = "length" if entry["truncated"] else "stop"
    _take_ratios(row, entry, sampled)
    for name, column in (("old", "old_logprobs"), ("versions", "weight_versions")):
        if entry.get(column) is not None:
            values = _numbers(entry, column)
            setattr(row, name, values[sampled] if len(values) == len(sampled) else values)
    if entry.get("turn_ids") is not None:
        row.turns = _ids(entry, "turn_ids")
        if len(row.turns) != len(ids):
            raise ValueError(f"turn_ids has {len(row.turns)} entries for {len(ids)} tokens")
    yield row


def _without_ids(entry: Entry) -> Entry:
    """Return a row of numbers alone with ids: a prompt of one token, then a response of zeros.

    Prompts of equal ids count as one, so each prompt's id is a checksum of its name or its numbers.
    """
    name = "rollout_logprobs" if "rollout_logprobs" in entry else "logprobs"
    count, prompt = len(_list(entry, name)), entry.get("prompt_id")
    told = _numbers(entry, name).tobytes() if prompt is None else str(prompt).encode()
    mask = _list(entry, "action_mask") if "action_mask" in entry else np.ones(count, np.bool_)
    ids = np.zeros(count + 1, np.int64)
    ids[0] = zlib.crc32(told) % LARGEST_ID
    columns = [name, "train_logprobs", "entropy", "old_logprobs", "weight_versions"]
    columns += ["importance_ratio", "log_importance_ratio"]
    held = [each for each in columns if isinstance(entry.get(each), list | np.ndarray)]
    for each in held:
        if len(entry[each]) != count:
            raise ValueError(f"{each} has {len(entry[each])} entries for {count} of {name}")
    longer: Entry = {each: np.append(0.0, _numbers(entry, each)) for each in held}
    if entry.get("turn_ids") is not None:
        turns = _ids(entry, "turn_ids")
        longer["turn_ids"] = np.append(turns[:1], turns)
    return entry | longer | {"token_ids": ids, "action_mask": np.append(False, mask)}


def nemo_rl(entry: Entry, remarks: Counter[str]) -> Iterator[Row]:
    """Read a line of NeMo-RL's ``train_data_stepN.jsonl``: padded rows, each value in a list of
    one; the log-probability at index t is that of token t."""
    columns = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
    for name in columns:
        if name not in entry:
            raise ValueError(f"no {name}: a newer NeMo-RL writes it")
    alone = {name: isinstance(held, list) and len(held) == 1 for name, held in entry.items()}
    entry = {name: held[0] if alone[name] else held for name, held in entry.items()}
    length = _size(entry["input_lengths"], "input_lengths", len(_list(entry, "token_ids")))
    entry |= {name: _list(entry, name)[:length] for name in columns}
    ids, sampled = _ids(entry, "token_ids"), _mask(entry, "token_loss_mask")
    row = _row(entry, ids, sampled, sampled, "generation_logprobs", "prev_logprobs")
    row.prompt, row.reward = _context(row), _reward(entry.get("rewards"))
    row.masked = entry.get("sample_loss_mask") in (0, False)
    yield row


def prime_rl(entry: Entry, remarks: Counter[str]) -> Iterator[Row]:
    """Read a line of prime-rl's token export; every column has a value per token."""
    ids, sampled = _ids(entry, "token_ids"), _mask(entry, "loss_mask")
    columns = ("inference_logprobs", "trainer_logprobs", "entropy")
    row = _row(entry, ids, sampled, sampled, *columns)
    rewards = [] if entry.get("rewards") is None else _numbers(entry, "rewards").tolist()
    row.prompt = _context(row)
    row.reward = next(filter(math.isfinite, reversed(rewards)), None)
    if entry.get("env_name"):
        row.attributes["environment"] = str(entry["env_name"])
    if entry.get("export_sequence_idx") is not None:
        row.attributes["sample_id"] = str(entry["export_sequence_idx"])
    _take_ratios(row, entry, sampled)
    yield row


def slime(entry: Entry, remarks: Counter[str]) -> Iterator[Row]:
    """Read a sequence of slime's or miles' train dump, as convert.py writes it."""
    if "rollout_log_probs" not in entry:
        raise ValueError("no rollout_log_probs: run with --use-rollout-logprobs or --use-tis")
    ids = _ids(entry, "tokens")
    count = _size(entry["response_length"], "response_length", len(ids))
    mask, context = entry.get("loss_mask"), len(ids) - count
    whole = mask is None or not len(mask)
    response = np.ones(count, np.bool_) if whole else _mask(entry, "loss_mask")
    sampled = np.concatenate([np.zeros(context, np.bool_), response])
    row = _row(entry, ids, sampled, response, "rollout_log_probs", "log_probs", "entropy")
    row.prompt = tuple(ids[:context].tolist())
    row.reward = _reward(entry.get("raw_reward", entry.get("reward")))
    if type(entry.get("truncated")) in (int, bool):
        row.finish_reason = "length" if entry["truncated"] else "stop"
    versions = entry.get("weight_versions")
    _versions(row, versions if isinstance(versions, list) else [])
    yield row


def open_instruct(entry: Entry, remarks: Counter[str]) -> Iterator[Row]:
    """Read a line of open-instruct's ``*_rollouts_*.jsonl``. A sequence that called a tool is left
    out: the file does not say which tokens of its response were sampled."""
    if any((entry.get("request_info") or {}).get(name) for name in ("num_calls", "tool_calleds")):
        remarks["left out: it called a tool, and no mask says which tokens were sampled"] += 1
        return
    if entry.get("logprobs") is None:
        raise ValueError("no logprobs")
    prompt, response = _ids(entry, "prompt_tokens"), _ids(entry, "response_tokens")
    ids = np.concatenate([prompt, response])
    sampled = np.arange(len(ids)) >= len(prompt)
    row = _row(entry, ids, sampled, sampled[len(prompt) :], "logprobs")
    row.prompt = (entry.get("step"), entry.get("prompt_idx"))
    row.finish_reason = str(entry.get("finish_reason", "stop"))
    yield row


def torchtitan(entry: Entry, remarks: Counter[str]) -> Iterator[Row]:
    """Read a line of torchtitan's ``rollout_samples.jsonl`` (``log_tensors``, ``log_logprobs``).

    Turns become one sequence as long as the prompt of each turn begins with the ids before it; a
    turn whose prompt does not is a separate sequence, with the context that its engine saw.
    """
    rows: list[Row] = []
    for number, turn in enumerate(_list(entry, "turns"), start=1):
        for name, switch in (
            ("completion_token_ids", "log_tensors"),
            ("completion_logprobs", "log_logprobs"),
        ):
            if name not in turn:
                raise ValueError(f"turn {number} has no {name}: record with {switch}=True")
        context, ids = _ids(turn, "prompt_token_ids"), _ids(turn, "completion_token_ids")
        if turn.get("min_policy_version") != turn.get("max_policy_version"):
            remarks["turns that were sampled by more than one version of the weights"] += 1
        known = rows[-1].token_ids if rows else None
        if known is None or context[: len(known)].tolist() != known.tolist():
            if rows:
                remarks["turns whose prompt has other ids than the turns before"] += 1
            empty = (np.zeros(0, np.int64), np.zeros(0, np.bool_), np.zeros(0))
            reward = _reward(entry.get("reward"))
            rows.append(Row(*empty, prompt=entry.get("group_id"), reward=reward))
            _versions(rows[-1], [turn.get("min_policy_version")])
        row = rows[-1]
        observed = np.zeros(len(context) - len(row.token_ids), np.bool_)
        row.token_ids = np.concatenate([context, ids])
        row.sampled = np.concatenate([row.sampled, observed, np.ones(len(ids), np.bool_)])
        row.logprobs = np.concatenate([row.logprobs, _numbers(turn, "completion_logprobs")])
    yield from rows


def verl(entry: Entry, remarks: Counter[str]) -> Iterator[Row]:
    """Read a row of verl's batch without its padding, as convert.py writes it.

    In a ``gen_batch.dp`` rows are padded, the prompt on the left and the response on the right. In
    a ``tq_batch.pt`` (``"padded": false``) row lengths differ. ``old_log_probs`` are the
    trainer's, where the batch has them.
    """
    if "rollout_log_probs" not in entry:
        raise ValueError(
            "no rollout_log_probs: record with actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    prompt, response = _ids(entry, "prompts"), _ids(entry, "responses")
    mask = _mask(entry, "response_mask")
    if len(mask) != len(response):
        raise ValueError(f"response_mask has {len(mask)} entries for {len(response)} tokens")
    ids = np.concatenate([prompt, response])
    masked = "attention_mask" in entry
    there = _mask(entry, "attention_mask") if masked else np.ones(len(ids), np.bool_)
    row = _unpadded(entry, ids, there, mask, "rollout_log_probs", "old_log_probs")
    row.prompt = entry.get("uid") or tuple(prompt[there[: len(prompt)]].tolist())
    if entry.get("__num_turns__") is not None:
        row.attributes["turns in the dump"] = str(entry["__num_turns__"])
    if entry.get("rollout_is_weights") is not None:
        weights = _numbers(entry, "rollout_is_weights")
        row.ratios = weights[mask & there[len(prompt) :]] if len(weights) == len(mask) else weights
    _versions(row, [entry.get(name) for name in ("min_global_steps", "max_global_steps")])
    scores = entry.get("rm_scores")
    row.reward = None if scores is None else _reward(float(sum(scores)))
    # A row does not say what ended it. A response that leaves no padding was cut; where the last
    # token was not sampled, the environment had the last word. Rows of different lengths do not
    # tell a response that was cut from one that ended.
    if masked and there[-1:].any() and bool(entry.get("padded", True)):
        row.finish_reason = "length"
    else:
        row.finish_reason = "stop" if row.sampled[-1:].any() else "environment"
    yield row


def skyrl(entry: Entry, remarks: Counter[str]) -> Iterator[Row]:
    """Read a row of SkyRL's batch without its padding, as convert.py writes it.

    The mask and log-probabilities are of its last columns, whichever of them are padding.
    """
    if "rollout_logprobs" not in entry:
        raise ValueError("no rollout_logprobs: run with generator.sampling_params.logprobs=1")
    ids, mask = _ids(entry, "sequences"), _mask(entry, "loss_mask")
    there = _mask(entry, "attention_mask")
    row = _unpadded(entry, ids, there, mask, "rollout_logprobs", "action_log_probs")
    row.prompt = _context(row)
    yield row


def _versions(row: Row, versions: Sequence[Any]) -> None:
    """Note the versions of the weights that sampled a row: one, or the first and the last."""
    known = [str(each) for each in versions if type(each) in (int, str)]
    if known:
        span = known[:1] if known[0] == known[-1] else [known[0], known[-1]]
        row.attributes["weight_version"] = " to ".join(span)


def _unpadded(entry: Entry, ids: Ints, there: Bools, mask: Bools, *columns: str) -> Row:
    """Return a row of a batch without its padding.

    Args:
        mask: of the last tokens: whether they were sampled; the columns are of these tokens too.
    """
    before = len(ids) - len(mask)
    if len(there) != len(ids) or before < 0:
        raise ValueError(f"attention_mask has {len(there)} entries for {len(ids)} tokens")
    sampled = np.concatenate([np.zeros(before, np.bool_), mask]) & there
    return _row(entry, ids[there], sampled[there], sampled[before:], *columns)


# What yields the sequences of a row and counts remarks, and the fields that mark a row of it: the
# first whose marks it has. Other rows may count their turns, so that list is last.
FORMS: dict[Form, tuple[Callable[[Entry, Counter[str]], Iterator[Row]], str]] = {
    "open-instruct": (open_instruct, "response_tokens"),
    "prime-rl": (prime_rl, "inference_logprobs"),
    "nemo-rl": (nemo_rl, "generation_logprobs"),
    "slime": (slime, "tokens response_length"),
    "generic": (
        generic,
        "token_ids|response_token_ids|rollout_logprobs train_logprobs|logprobs train_logprobs",
    ),
    "verl": (verl, "responses response_mask"),
    "skyrl": (skyrl, "sequences loss_mask"),
    "torchtitan": (torchtitan, "turns"),
}
# Of the generic format, which people write by hand: a misspelt field is named in the report.
GENERIC = "token_ids action_mask prompt_token_ids response_token_ids logprobs rollout_logprobs "
GENERIC += "train_logprobs entropy prompt_id reward finish_reason"
GENERIC += " truncated turn_ids importance_ratio log_importance_ratio old_logprobs weight_versions"
_BATCH = "attention_mask padded "
# Fields that are taken; all others of a row are said to be unread. Of files of torch and pickle,
# convert.py says it.
TAKEN: dict[Form, str] = {
    "generic": GENERIC,
    "nemo-rl": "token_ids token_loss_mask sample_loss_mask generation_logprobs prev_logprobs "
    "input_lengths rewards",
    "prime-rl": "token_ids loss_mask inference_logprobs trainer_logprobs entropy rewards env_name "
    "importance_ratio log_importance_ratio export_sequence_idx",
    "open-instruct": "prompt_tokens response_tokens logprobs reward request_info prompt_idx "
    "finish_reason",
    "torchtitan": "turns reward group_id",
    "slime": "tokens response_length loss_mask rollout_log_probs log_probs entropy truncated "
    "weight_versions reward raw_reward max_seq_len qkv_format",
    "verl": f"{_BATCH} prompts responses response_mask rollout_log_probs old_log_probs rm_scores "
    "rollout_is_weights min_global_steps max_global_steps uid __num_turns__",
    "skyrl": f"{_BATCH} sequences loss_mask rollout_logprobs action_log_probs",
}
# Files that many have and that cannot be scored: fields that mark them, what they are, the remedy.
TEXT_ONLY = (
    (
        {"input", "output", "gts"},
        "verl's rollout_data_dir holds only text",
        "record a batch: skip.rollout.enable=True skip.rollout.steps=[N] skip.rollout.dump_dir=DIR "
        "and actor_rollout_ref.rollout.calculate_log_probs=True",
    ),
    (
        {"head_version", "prompt", "completion"},
        "AReaL's dump_to_file holds only text",
        "no setting of it records ids; a workflow can write input_ids, loss_mask, logprobs and "
        "versions of its trajectories as docs/how-to/recorded-runs.md has them",
    ),
    (
        {"prompt", "completion"},
        "a record of TRL's completions holds only text",
        "no setting of it records ids; a callback can write prompt_ids, completion_ids and "
        "sampling_per_token_logps",
    ),
)


SHAPES = (
    'rows like {"token_ids": […], "action_mask": […], "rollout_logprobs": […], '
    '"train_logprobs": […]}, or {"rollout_logprobs": […], "train_logprobs": […]} of the response'
)


def _form_of(entry: Entry, where: Callable[[], str], first: bool) -> Form:
    for form, (_, marks) in FORMS.items():
        if any(set(each.split()) <= entry.keys() for each in marks.split("|")):
            return form
    for fields, what, remedy in TEXT_ONLY:
        if fields <= set(entry):
            raise Unreadable(f"{where()}: {what}, and tokens are what is compared", remedy)
    fault = f"{where()}: no known format (fields: {', '.join(sorted(entry)) or 'none'})"
    fix = f"{SHAPES}; or what {in_list(list(FORMS), 9)} write: docs/how-to/recorded-runs.md"
    raise Unreadable(fault, fix, foreign=first)


# ---------------------------------------------------------------- values


def _list(entry: Entry, name: str) -> Any:
    value = entry.get(name)
    if value is None:
        raise ValueError(f"no {name} (fields: {', '.join(sorted(entry)):.200})")
    if not isinstance(value, list | np.ndarray):
        raise ValueError(f"{name} is no list of numbers, but {value!r:.60}")
    return value


def _ids(entry: Entry, name: str) -> Ints:
    ids = _list(entry, name)
    whole = ids.dtype.kind in "iu" if isinstance(ids, np.ndarray) else {*map(type, ids)} <= {int}
    array: Ints = np.asarray(ids, np.int64) if whole else -np.ones(1, np.int64)
    # A negative number is large without its sign: one pass.
    if len(array) and array.view(np.uint64).max() >= LARGEST_ID:
        raise ValueError(f"{name} holds what is no token id: {list(ids[:4])!r:.60}")
    return array


def _mask(entry: Entry, name: str) -> Bools:
    other = next((other for other in MASKS if name not in entry and other in entry), "")
    if other:
        raise ValueError(f"no {name}, but {other}: rename it, if it is 1 where a token was sampled")
    return np.asarray(_list(entry, name), np.bool_)


def _row(entry: Entry, ids: Ints, sampled: Bools, at: Bools, logprobs: str, *others: str) -> Row:
    """Return a row; its columns have one value per entry of ``at``, or per sampled token.

    Args:
        others: columns of the trainer's log-probabilities and of its entropy, which may be missing.
    """
    rollout = _numbers(entry, logprobs)
    held = [None if entry.get(name) is None else _numbers(entry, name) for name in others]
    values: list[Any] = [rollout, *held]
    values = [each[at] if each is not None and len(each) == len(at) else each for each in values]
    row = Row(ids, sampled, *values)
    row.reward = _reward(entry.get("reward"))
    return row


def _take_ratios(row: Row, entry: Entry, sampled: Bools) -> None:
    """Give a row the importance ratios of its sampled tokens, where its entry has some."""
    for name, of in (("importance_ratio", np.array), ("log_importance_ratio", np.exp)):
        if entry.get(name) is not None and row.ratios is None:
            values = _numbers(entry, name)
            with np.errstate(over="ignore"):
                row.ratios = of(values[sampled] if len(values) == len(sampled) else values)


def _context(row: Row) -> tuple[int, ...] | None:
    """Return the ids before the first sampled one, which samples of a prompt have in common."""
    first = int(row.sampled.argmax())
    return tuple(row.token_ids[:first].tolist()) if row.sampled.any() else None


def _size(value: Any, name: str, most: int) -> int:
    """Return a number of tokens; JSON may hold a whole number as a float.

    Raises:
        ValueError: it is no whole number, or more than there are tokens.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{name} is {value!r:.60}, no number of tokens")
    if not 0 <= value <= most:
        raise ValueError(f"{name} is {int(value)}, and the row has {most} tokens")
    return int(value)


def _numbers(entry: Entry, name: str) -> Floats:
    """Return recorded numbers; null is NaN, which the report counts.

    Raises:
        ValueError: one is a text, a list or a truth value.
    """
    values = _list(entry, name)
    if not isinstance(values, np.ndarray):
        other = {*map(type, values)} - {int, float, type(None)}
        for value in values if other else ():
            if type(value) in other:
                raise ValueError(f"{name}: {value!r:.60} is no log-probability")
    elif values.dtype.kind not in "fiu":
        raise ValueError(f"{name} holds what is no log-probability")
    return np.asarray(values, np.float64)


def _reward(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) else None
