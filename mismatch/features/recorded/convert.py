"""Convert files of torch or pickle to rows, in a child process of the framework's environment.

The parent never opens these files. The child is this file, run by path; it imports torch, and
tensordict where it is installed (which allows its classes), and reads with ``weights_only=True``.
That reader knows no pickle of today's protocols, which verl and SkyRL write: see :class:`Plain`.
One child reads all files of a dump. The files of one step that several ranks wrote are joined
there: copies of tensor-parallel ranks are one row, slices of context-parallel ranks are put
together, and a pipeline stage without the trainer's side is completed by the stage that has it.
"""

from __future__ import annotations

import atexit
import itertools
import json
import pickle
import select
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

VERL = ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs",
        "old_log_probs", "rm_scores", "rollout_is_weights")  # fmt: skip
# What verl keeps of a row apart from tensors: the steps whose weights sampled it, its prompt's id,
# and its turns.
VERL_OTHERS = ("min_global_steps", "max_global_steps", "uid", "__num_turns__")
# SkyRL removes rewards and uids before it writes.
SKYRL = ("sequences", "attention_mask", "loss_mask", "rollout_logprobs", "action_log_probs")
# Packages whose classes a batch's pickle may name. Nothing of them is imported: see Held.
NAMED = ("verl", "torch", "numpy", "collections", "omegaconf", "tensordict")
# What a consolidated TensorDict names, as verl writes it; see consolidated.
CONSOLIDATED = "tensordict._reductions._rebuild_tensordict_files_consolidated"
# A file can make older versions run code, also with weights_only (CVE-2025-32434 up to 2.5.1,
# CVE-2026-24747 up to 2.9.1).
SAFE_TORCH = (2, 10)
READING, TIMES = 768 << 20, 16  # bytes that a file may take in the child, and those per byte of it
TIMEOUT_S = 600  # of the files of one step
# slime's lists with one entry per sequence, and those whose names it gives an s.
SLIME = ("tokens", "rollout_log_probs", "log_probs", "entropy", "weight_versions", "truncated")
SLIMES = ("response_length", "max_seq_len", "loss_mask", "reward")
# What a row takes otherwise, or what follows from it.
SLIME_OTHERS = {"sample_indices", "sample_index", "partition", "rollout_position", "total_lengths",
                "data_parallel_rank"}  # fmt: skip
SLICED = ("rollout_log_probs", "log_probs", "entropy")  # by context-parallel ranks
FOREIGN = "neither a train dump of slime or miles nor a batch of verl or SkyRL"
COPIES = "copies that other ranks wrote of a sequence: counted once"
JOINED = "sequences put together from the slices of context-parallel ranks"
UNLIKE = "copies of a sequence with other values than the first rank's: counted too"
CONTIGUOUS = "sequences put together from contiguous slices (allgather_cp), in the ranks' order"
LACKS = "left out: slices of some context-parallel ranks are missing"
ADDED, UNREAD = "remarks", "unread"  # of the line behind the rows

_CHILDREN: dict[str, tuple[subprocess.Popen[str], Any]] = {}  # and their standard error


def converted(
    files: Sequence[Path], python: str | None, remarks: Counter[str], unread: set[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the fields of every row of files of torch or pickle.

    Args:
        files: of one step.
        python: interpreter of the environment that wrote the files.
        remarks: gets what was noticed while files were put together.
        unread: gets the names of columns that no format here knows.

    Raises:
        Unreadable: no interpreter was given, or its torch refuses a file.
    """
    # Not at the top: a child has no mismatch.
    from mismatch.features.recorded.parts import Part, Unreadable

    if python is None:
        fault = f"{files[0]} is a file of torch or pickle, and reading one here can run code"
        fix = "name the environment that wrote it, which reads it safely: --python ENV/bin/python"
        raise Unreadable(fault, fix)
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        path = files[0]
        try:
            answer = _ask(python, {"files": [str(file) for file in files], "out": str(rows)})
            if answer:
                path = Path(answer["file"])
                raise OSError(answer["error"])
        except (OSError, ValueError) as error:
            fault = f"{path} was not read by {python}: {error}"
            fix = "name the environment that wrote it, or write JSONL: docs/how-to/recorded-runs.md"
            raise Unreadable(fault, fix, foreign=FOREIGN in str(error)) from error
        for number, row in Part(rows, 0).json_lines():
            if ADDED in row:
                remarks.update(row[ADDED])
                unread.update(row[UNREAD])
            else:
                yield number, row


def _ask(python: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return what the child says of some files; one child of an interpreter reads all of them."""
    if python in _CHILDREN and _CHILDREN[python][0].poll() is None:
        child, said = _CHILDREN[python]
    else:
        said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        child = subprocess.Popen(
            [python, "-I", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
            text=True, encoding="utf-8",
        )  # fmt: skip
        _CHILDREN[python] = child, said
        atexit.register(child.kill)
    assert child.stdin is not None
    assert child.stdout is not None
    _CHILDREN.pop(python)  # until it answers: a later request must not get its answer
    try:
        with suppress(BrokenPipeError):  # what it wrote says why
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
        if not select.select([child.stdout], [], [], TIMEOUT_S)[0]:
            raise OSError(f"no answer in {TIMEOUT_S} s")
        line = child.stdout.readline()
    except BaseException:
        child.kill()
        raise
    if line:
        _CHILDREN[python] = child, said
        answer: dict[str, Any] = json.loads(line)
        return answer
    said.seek(0)
    lines = said.read().strip().splitlines()
    raise OSError(lines[-1] if lines else f"it ended with code {child.wait()}")


def main() -> None:
    """Answer requests, a line of JSON each: write the rows of files as lines of JSON."""
    import os
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # the parent's own limit is of its reading
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a package prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        at = request["files"][0]
        try:
            with open(request["out"], "w", encoding="utf-8") as out:
                ranks = Ranks()
                for at in request["files"]:
                    for row in counted(Path(at), ranks.unread):
                        if not ranks.takes(row):
                            out.write(json.dumps(row) + "\n")
                for row in ranks.rows():
                    out.write(json.dumps(row) + "\n")
            answer = {}
        except BaseException as error:
            text = str(error).strip().splitlines() or ["no message"]
            if "tensordict" in str(error) and "tensordict" not in sys.modules:
                text = ["it holds a TensorDict, and this environment has no tensordict"]
            named = type(error).__name__
            answer = {"error": f"{named}: {text[-1]}", "file": at}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def counted(path: Path, unread: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file as plain values; ``unread`` gets the columns that are left out.

    Raises:
        ValueError: the rows hold more values than the file has bytes: one value is seen as many.
    """
    left = path.stat().st_size
    for row in rows_of(path, unread):
        left -= sum(map(count, row.values()))
        if left < 0:
            raise ValueError("it holds more values than bytes")
        yield {name: plain(value) for name, value in row.items()}


class Ranks:
    """Sequences of one step that the ranks of slime or miles wrote, put together."""

    def __init__(self) -> None:
        self.held: dict[Any, dict[int, dict[str, Any]]] = {}
        self.sizes: dict[Any, int] = {}
        self.seen: Counter[str] = Counter()
        self.remarks: Counter[str] = Counter()
        self.unread: set[str] = set()

    def takes(self, row: dict[str, Any]) -> bool:
        """Keep a row that other ranks may have a part of; False: it is complete."""
        if "cp_size" not in row:
            return False
        size, rank = row.pop("cp_size"), row.pop("cp_rank")
        of = row.get("sample_id"), row["step"], row["tokens"], row["response_length"]
        alike = json.dumps(of)
        # A file may hold a sequence twice, e.g. to fill up a batch: each copy is a row.
        self.seen[f"{row['rank']} {alike}"] += 1
        key = alike, self.seen[f"{row['rank']} {alike}"]
        slices = self.held.setdefault(key, {})
        self.sizes[key] = size
        if rank not in slices:
            slices[rank] = row
            return True
        first = slices[rank]
        if any(first.get(name) and row.get(name) not in (None, first[name]) for name in SLICED):
            self.remarks[UNLIKE] += 1
            self.held[key, row["rank"]] = {rank: row}
            self.sizes[key, row["rank"]] = size
            return True
        for name in SLICED:  # a stage of a pipeline lacks what another computes
            if first.get(name) is None and row.get(name) is not None:
                first[name] = row[name]
        self.remarks[COPIES] += 1
        return True

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every sequence, then what was noticed."""
        cut = dict[Any, dict[str, dict[int, Any]]]()  # name -> rank -> its slice
        for key, slices in self.held.items():
            count = next(iter(slices.values()))["response_length"]
            for name in SLICED if self.sizes[key] > 1 else ():
                parts = {rank: row.get(name) for rank, row in slices.items()}
                if any(part is not None and len(part) != count for part in parts.values()):
                    cut.setdefault(key, {})[name] = parts
        zigzag = {
            name: all(
                fits(first_of(self.held[key]), parts[name], self.sizes[key])
                for key, parts in cut.items()
                if name in parts
            )
            for name in SLICED
        }
        for key, slices in self.held.items():
            size, first = self.sizes[key], first_of(slices)
            of = cut.get(key, {})
            for name, parts in of.items():
                whole = joined(first, parts, size, zigzag[name])
                first[name] = whole if whole is not None else []
            if of and not all(first.get(name) for name in SLICED[:1]):
                self.remarks[LACKS] += 1
                continue
            self.remarks[JOINED if all(map(zigzag.get, of)) else CONTIGUOUS] += bool(of)
            yield first
        if self.remarks or self.unread:
            yield {ADDED: +self.remarks, UNREAD: sorted(self.unread)}


def first_of(slices: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the row of the first rank that was read."""
    return next(iter(slices.values()))


def spans(row: dict[str, Any], rank: int, size: int) -> list[tuple[int, int]]:
    """Return which values of a response a context-parallel rank has, in order.

    A sequence is cut in 2 × size chunks, of which a rank has the n-th and the n-th from the end
    (zigzag): ``get_logits_and_tokens_offset_with_cp`` in miles' (31f1ca9) and slime's (624b824)
    ``cp_utils.py``. Padded rows ("bshd") are cut as the longest row of the batch is, whose length
    miles writes as max_seq_lens. ``allgather_cp`` computes on contiguous pieces of the whole batch
    and changes them to this layout before anything is written (``allgather_cp_redistribute``).
    """
    total, count = len(row["tokens"]), row["response_length"]
    before = total - count
    longest = row.get("max_seq_len") if row.get("qkv_format") == "bshd" else total
    if type(longest) is not int or longest < total:
        return []
    chunk = (longest + 2 * size - 1) // (2 * size)
    found = []
    for begin in (rank * chunk, (2 * size - rank - 1) * chunk):
        first = max(begin, before - 1) + 1 - before
        end = min(begin + chunk, total - 1) + 1 - before
        if first < end:
            found.append((first, end))
    return found


def fits(row: dict[str, Any], parts: dict[int, Any], size: int) -> bool:
    """Return whether the slices that are there have the lengths of the zigzag layout.

    A few tokens may have the lengths of both layouts: then zigzag is assumed.
    """
    return all(
        part is None or len(part) == sum(end - first for first, end in spans(row, rank, size))
        for rank, part in parts.items()
    )


def joined(row: dict[str, Any], parts: dict[int, Any], size: int, zigzag: bool) -> Any:
    """Return values of a response from the slices of its ranks; None where some lack.

    Args:
        zigzag: each rank has two chunks, see :func:`spans`; else each has one, in their order, as
            a slime without ``_allgather_cp_redistribute`` has them.
    """
    if None in parts.values():
        return None
    count, filled = row["response_length"], 0
    if not zigzag:
        whole = [value for _, part in sorted(parts.items()) for value in part]
        bshd = row.get("qkv_format") == "bshd"  # whose chunks nobody knows without max_seq_lens
        return whole if len(whole) == count and len(parts) == size and not bshd else None
    whole = [None] * count
    for rank, values in parts.items():
        at = 0
        for first, end in spans(row, rank, size):
            whole[first:end] = values[at : at + end - first]
            at += end - first
        filled += at
    return whole if filled == len(whole) == count else None


def rows_of(path: Path, unread: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dump of verl, SkyRL, slime or miles; see :func:`counted`."""
    batch, others, padded = load(path, unread)
    if isinstance(batch, dict) and isinstance(batch.get("rollout_data"), dict):
        yield from of_rank(batch, batch["rollout_data"], unread)
        return
    if isinstance(batch, dict) and isinstance(batch.get("samples"), list) and "dp_shards" in batch:
        for sample in batch["samples"]:  # slime's format_version 2: one file of all ranks
            row = {name: sample.get(name) for name in SLIME}
            row |= {name: sample.get(f"{name}s", sample.get(name)) for name in SLIMES}
            row["sample_id"] = sample.get("sample_index")
            row |= raw_reward(batch, sample.get("rollout_position"), unread)
            row = {name: value for name, value in row.items() if value is not None}
            row["rank"] = str(sample.get("data_parallel_rank", 0))
            unread |= not_taken(sample)
            yield row | {"step": str(batch.get("rollout_id"))}
        return
    held = batch.keys()  # of a TensorDict only these are names
    names = [name for name in (SKYRL if "sequences" in held else VERL) if name in held]
    if names[:1] != ["sequences"] and "responses" not in names:
        raise ValueError(FOREIGN)
    unread.update(str(name) for name in held if name not in names)
    of_rows = {name: others[name] for name in VERL_OTHERS if name in others}
    said = {"step": str(others["global_steps"])} if "global_steps" in others else {}
    columns = [*(batch[name] for name in names), *of_rows.values()]
    for values in zip(*columns, strict=True):
        yield dict(zip((*names, *of_rows), values, strict=True)) | {"padded": padded} | said


def of_rank(
    batch: dict[str, Any], data: dict[str, Any], unread: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield the sequences of the file of one rank, each with what it takes to join ranks."""
    lists = {name: data.get(name) for name in SLIME}
    lists |= {name: data.get(f"{name}s") for name in SLIMES}
    lists["sample_id"], places = data.get("sample_indices"), data.get("partition")
    of_all: dict[str, Any] = {"rank": str(batch.get("rank")), "step": str(batch.get("rollout_id"))}
    of_all |= {"cp_rank": batch.get("cp_rank", 0), "cp_size": batch.get("cp_size", 1)}
    of_all["qkv_format"] = batch.get("qkv_format")
    unread |= not_taken(data)
    for number in range(len(data["tokens"])):
        row = {name: held[number] for name, held in lists.items() if held is not None}
        place = None if places is None else places[number]
        yield row | of_all | raw_reward(data, place, unread)


def not_taken(data: dict[str, Any]) -> set[str]:
    """Return the names of columns of slime and miles that no row takes."""
    taken = {*SLIME, *SLIMES, *(f"{name}s" for name in SLIMES), *SLIME_OTHERS, "raw_reward"}
    return {str(name) for name, held in data.items() if held is not None} - taken


def raw_reward(data: dict[str, Any], place: Any, unread: set[str]) -> dict[str, Any]:
    """Return the reward before normalisation, of the rollout's sample with this number."""
    raw = data.get("raw_reward")
    if raw is None:
        return {}
    if type(place) is int and isinstance(raw, list) and 0 <= place < len(raw):
        return {"raw_reward": raw[place]}
    unread.add("raw_reward")
    return {}


def load(path: Path, unread: set[str]) -> tuple[Any, dict[str, Any], bool]:
    """Return the batch of a file, what it says apart from tensors, and whether rows are padded.

    verl's ``gen_batch.dp`` is a pickle of a file of torch as bytes, or of arrays as bytes
    (VERL_DATAPROTO_SERIALIZATION_METHOD=numpy).
    """
    import importlib.util
    import io

    import torch

    version = str(torch.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < SAFE_TORCH:
        needs = ".".join(map(str, SAFE_TORCH))
        raise ValueError(f"a file can run code in its torch {version}; this needs {needs} or later")
    limit_memory(path)
    torch.serialization.add_safe_globals([(consolidated, CONSOLIDATED)])
    if importlib.util.find_spec("tensordict") is not None:
        import tensordict  # noqa: F401 (allows its classes to torch.load)
    others: dict[str, Any] = {}
    with path.open("rb") as file:
        zipped = file.read(2) == b"PK"
        file.seek(0)
        source: Any = file
        if not zipped:
            try:
                held = Plain(file).load()
            except pickle.UnpicklingError:
                file.seek(0)
                if not (data := embedded(file)):
                    raise
                batch = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
                return batch, others, True
            state = held.state if isinstance(held, Held) else None
            if state is None and isinstance(held, Held):
                state = held.given[-1]
            if isinstance(state, dict) and "batch_dict" in state:
                unread.update(
                    str(name) for name, held in state["batch_dict"].items()
                    if held is not None and name not in SKYRL
                )  # fmt: skip
                return tensors_of(state), others, True
            if not isinstance(state, tuple) or len(state) != 3:
                raise ValueError(FOREIGN)
            others = {**plain_arrays(state[1]), **steps_of(state[2])}
            unread.update(str(name) for name in state[1] or () if name not in others)
            if not isinstance(state[0], bytes):
                unread.update(str(name) for name in state[0][2] if name not in VERL)
                return dict(arrays_of_verl(state[0])), others, True
            source = io.BytesIO(state[0])
        batch = torch.load(source, weights_only=True, map_location="cpu")
    if isinstance(batch, dict) and "tensordict" in batch:
        batch = batch["tensordict"]
    return batch, others, not zipped


class Held(dict[Any, Any]):
    """Stands for whatever a batch's pickle names: takes what it is given, and runs nothing."""

    given: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Plain(pickle.Unpickler):
    """Reads a pickle of verl's ``protocol.py`` (0.9.1) or SkyRL's ``training_batch.py`` (a956457)
    without any of their classes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of a known name; refuse others, which are not imported."""
        if module.split(".")[0] not in NAMED and not module.endswith("training_batch"):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a batch")
        return Held


def consolidated(metadata: dict[str, Any], storage: Any) -> dict[str, Any]:
    """Return the tensors of a consolidated TensorDict; rows of different lengths as lists.

    In the place of tensordict's function (0.10.0), which the reader does not allow.
    """
    import torch

    found: dict[str, Any] = {}
    values: Any = None
    for name, (kind, shape, start, stop, pad) in metadata["leaves"].items():
        dtype = getattr(torch, str(kind).removeprefix("torch."))
        size = torch.Size(shape)
        value = storage[start:stop].view(dtype)
        value = (value[: size.numel()] if pad else value).view(size)
        if name.startswith("<NJT_VALUES>"):
            values = value
        elif name.startswith("<NJT_OFFSETS>"):
            ends = value.tolist()
            rows = [values[a:b] for a, b in itertools.pairwise(ends)]
            found[name.removeprefix("<NJT_OFFSETS>")] = rows
        elif not name.startswith("<NJT"):
            found[name] = value
    return found


def embedded(file: Any) -> bytes:
    """Return the file of torch that a pickle holds as bytes, without unpickling; b"": none."""
    import pickletools

    for _, value, _ in pickletools.genops(file):
        if type(value) is bytes and value[:2] == b"PK":
            return value
    return b""


def plain_arrays(arrays: Any) -> dict[str, list[Any]]:
    """Return numpy's arrays of objects and of numbers, as verl has them by name, as lists."""
    import numpy as np

    found: dict[str, list[Any]] = {}
    for name, held in arrays.items() if isinstance(arrays, dict) else ():
        if not isinstance(held, Held) or name not in VERL_OTHERS:
            continue
        if held.state is not None:
            kind, data = held.state[2].given[0], held.state[4]
        else:  # numpy's _frombuffer(data, dtype, shape, order)
            data, kind = held.given[0], held.given[1].given[0]
        if isinstance(data, list):
            found[name] = [one_number(x) for x in data]
        elif str(kind)[:1] in "iuf" and isinstance(data, bytes | bytearray):
            found[name] = np.frombuffer(data, np.dtype(str(kind))).tolist()
    return found


def one_number(value: Any) -> Any:
    """Return a number of numpy, which a pickle has as its dtype and bytes, as Python's."""
    import numpy as np

    if not isinstance(value, Held):
        return value
    kind, data = value.given
    return np.frombuffer(data, np.dtype(str(kind.given[0])))[0].item()


def steps_of(meta: Any) -> dict[str, Any]:
    """Return the step of a batch, where its meta_info names one."""
    step = meta.get("global_steps") if isinstance(meta, dict) else None
    return {"global_steps": step} if type(step) is int else {}


def arrays_of_verl(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield tensors that verl wrote by way of numpy: name -> (dtype, shape, bytes), or a list."""
    for name, held in state[2].items():
        if name in VERL:
            nested = len(held) == 2
            yield name, [one_array(each) for each in held[1]] if nested else one_array(held)


def one_array(held: Any) -> Any:
    """Return a tensor from its dtype, shape and bytes."""
    import torch

    kind, shape, data = held
    array = data.state[4] if data.state is not None else data.given[0]
    kind = getattr(torch, str(kind))
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{held[0]} is no dtype")
    values = torch.frombuffer(bytearray(array), dtype=torch.uint8).view(kind)
    return values.view(tuple(map(int, shape.given[0] if isinstance(shape, Held) else shape)))


def tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of a batch of SkyRL, without the rows that fill up its last step."""
    import io

    import numpy as np
    import torch

    arrays = dict[str, Any]()
    for name in SKYRL:
        held = state["batch_dict"].get(name)
        if held is None:
            continue
        if held.get("format") == "torch":  # of a type that numpy lacks, e.g. bfloat16
            arrays[name] = torch.load(io.BytesIO(held["data"]), weights_only=True)
        else:
            array = np.frombuffer(held["data"], np.dtype(str(held["dtype"])))
            arrays[name] = array.reshape(held["shape"])
    added = (state["metadata"] or {}).get("pad_size", 0)
    return {name: array[: len(array) - added] for name, array in arrays.items()}


def limit_memory(path: Path) -> None:
    """Let this process take no more memory than it has now and some per byte of a file."""
    import resource

    with suppress(OSError), open("/proc/self/statm", "rb") as file:  # not on macOS
        now = int(file.read().split()[0]) * resource.getpagesize()
        most = now + READING + TIMES * path.stat().st_size
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # the next file's limit may be higher
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def count(value: Any) -> int:
    """Return the number of values in a tensor, an array or a list."""
    if hasattr(value, "tolist"):
        return int(value.numel() if hasattr(value, "numel") else value.size)
    return len(value) if type(value) is list else 1


def plain(value: Any) -> Any:
    """Return a value as JSON has it; None for lists of lists and other objects."""
    if hasattr(value, "tolist"):
        return value.tolist()
    flat = value if type(value) is list else [value]
    return value if {*map(type, flat)} <= {int, float, bool, str, type(None)} else None


if __name__ == "__main__":
    main()
