"""What is fuzzed, one trial at a time: an input that is nearly right, and what may come of it.

Each target takes a source of randomness and ends in one of three ways: ``"refused"`` (a
MismatchError or exit code 2 with a message), ``"same"`` (nothing that counts was touched), or an
exception, which is a fault. tests/unit/test_fuzz.py runs some hundred trials of each; ``python -m
benchmarks.fuzz`` any number, and goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import shutil
import struct
import sys
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from rich.console import Console

from mismatch.analysis.thresholds import load_thresholds
from mismatch.cli import main as cli
from mismatch.cli.command import read_config
from mismatch.cli.options import CHECK
from mismatch.engines.servers.client import RequestFailed
from mismatch.errors import MismatchError
from mismatch.features.recorded.dumps import FORMS, read_recorded
from mismatch.features.recorded.run import as_run
from mismatch.models import EMBEDDED
from mismatch.models.derived import layers_held
from mismatch.models.digests import RECORD, source_hashes
from mismatch.pipeline.document import report_from_json, report_to_json
from mismatch.prompts.sources import read_file
from mismatch.reports.markdown import to_markdown
from mismatch.reports.sections import page
from mismatch.reports.terminal import print_page
from mismatch.run import directory, manifest, store
from mismatch.run.hub import INDEX, weight_places
from mismatch.types import Sampling

from .report_makers import report_of
from .unit import test_recorded as recorded
from .unit import test_servers_answers as servers
from .unit.test_verl_config import PRINTED

TINY = EMBEDDED["tiny-gpt-oss"]
JUNK: list[Any] = [
    *(None, True, False, 0, -1, 10**30, 1.5, -1e308, float("nan"), "", "x", "../../x", "\x1b]0;x"),
    *([], {}, [None], [[]], {"a": 1}, "9" * 30, ["x"], "bf16", "a:b", "\ud800"),
]
DELETED = object()
Target = Callable[[Random, Path], str]


def mutated(document: Any, random: Random) -> Any:
    """A copy with one part replaced by junk, or left out."""
    document = copy.deepcopy(document)
    parent, key, node = None, None, document
    while isinstance(node, dict | list) and node and (parent is None or random.random() < 0.8):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        parent, key = node, random.choice(keys)
        node = parent[key]
    junk = random.choice([*JUNK, DELETED])
    if parent is None:
        return None if junk is DELETED else junk
    if junk is DELETED:
        del parent[key]
    else:
        parent[key] = copy.deepcopy(junk)
    return document


def mutated_bytes(data: bytes, random: Random) -> bytes:
    """Flipped, cut, doubled or overwritten."""
    at = random.randrange(len(data))
    size = random.choice([1, 1, 4, 64])
    kinds = [
        data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :],
        data[:at],
        data[:at] + data[at + size :],
        data[:at] + data[at : at + size] * 2 + data[at + size :],
        data[:at] + bytes(random.randrange(256) for _ in range(size)) + data[at + size :],
    ]
    return random.choice(kinds)


# ---------------------------------------------------------------- artefacts


def artefact(random: Random, run: Path) -> str:
    """One file of a run, its content mutated; its entry as it was, right again, or no manifest."""
    readers: dict[str, Callable[[], Any]] = {
        "spec.json": lambda: directory.load_spec(run),
        "run.json": lambda: directory.invocations(run),
        "manifest.json": lambda: [
            manifest.entries(run),
            manifest.verify(run, store.ROLLOUT),
            manifest.is_current(run, store.ROLLOUT, ""),
        ],
        "vocabulary.json": lambda: store.load_vocabulary(run),
        "rollout.parquet": lambda: store.load_rollout(run),
        "scores/fsdp.parquet": lambda: [store.load_scoring(run, "fsdp"), store.scoring_names(run)],
    }
    name = random.choice(list(readers))
    path, listed = run / name, (run / "manifest.json").read_bytes()
    before = path.read_bytes()
    try:
        if path.suffix == ".json" and random.random() < 0.7:
            path.write_text(json.dumps(mutated(json.loads(before), random)))
        else:
            path.write_bytes(mutated_bytes(before, random))
        if name != "manifest.json" and random.random() < 0.8:
            entry = manifest.entries(run).get(name)
            if entry is not None and random.random() < 0.5:
                manifest.record(run, name, entry["schema"], entry["made_by"], entry["inputs"])
            else:
                (run / "manifest.json").unlink()
        readers[name]()
    except MismatchError:
        return "refused"
    finally:
        path.write_bytes(before)
        (run / "manifest.json").write_bytes(listed)
    return "same"


def report(random: Random, run: Path) -> str:
    """A report.json with one thing wrong, read and shown."""
    names = ("healthy", "failing", "gradients", "fixes", "example-tiny-gpt-oss")
    name = random.choice(names)
    document = dict(_documents()[name])
    part = random.choice(list(document))
    document[part] = mutated(document[part], random)
    if part == "comparisons" and random.random() < 0.8:  # most of a report are its tables
        pairs = copy.deepcopy(_documents()[name][part])
        pairs[0]["breakdowns"] = mutated(pairs[0]["breakdowns"], random)
        document[part] = pairs
    console = Console(file=io.StringIO())
    try:
        shown = report_from_json(document)
        with manifest.damage_named("report.json"):  # as `mismatch report` shows it
            print_page(page(shown), console, None, details=True)
            to_markdown(shown, None, True)
    except MismatchError:
        return "refused"
    return "same"


@cache
def _documents() -> dict[str, dict[str, Any]]:
    names = ("healthy", "failing", "gradients", "fixes", "example-tiny-gpt-oss")
    return {name: report_to_json(report_of(name)[0]) for name in names}


def dump(random: Random, run: Path) -> str:
    """A dump of a framework with one thing wrong, as `mismatch postmortem` reads it."""
    rows = [copy.deepcopy(random.choice(recorded.ROWS)) for _ in range(random.randrange(1, 4))]
    rows[-1] = mutated(rows[-1], random)
    data = "\n".join(map(json.dumps, rows)).encode()
    if random.random() < 0.2:
        data = mutated_bytes(data, random)
    path = run.parent / "dump.jsonl"
    path.write_bytes(data)
    if random.random() < 0.3:
        table = path.with_suffix(".parquet")
        with contextlib.suppress(pa.ArrowException, TypeError, OverflowError, UnicodeError):
            pq.write_table(pa.Table.from_pylist(rows), table)
            table.write_bytes(mutated_bytes(table.read_bytes(), random))
            path.unlink()
            path = table
    try:
        if random.random() < 0.02:  # all of it, which takes a second
            return _main(["postmortem", str(path), "--out", str(run.parent / "postmortem")])
        read = read_recorded(path, random.choice([None, None, None, *FORMS]))
        as_run(read, Sampling(), {"engine": "recorded"}, {"mode": "train"})
    except MismatchError:
        return "refused"
    finally:
        path.unlink()
        shutil.rmtree(run.parent / "postmortem", ignore_errors=True)
    return "same"


def odd_column(column: pa.ChunkedArray, random: Random) -> pa.Array:
    """A column of as many rows, of values of another kind."""
    rows = len(column)
    kinds: list[Callable[[], Any]] = [
        lambda: pa.nulls(rows),
        lambda: pa.array(["x"] * rows),
        lambda: pa.array([str(value) for value in column.to_pylist()]).dictionary_encode(),
        lambda: pa.array([b"\xff"] * rows, pa.binary()),
        lambda: pa.array([[["a"], None]] * rows),
        lambda: pa.array([[[1]]] * rows),
        lambda: pa.array([["x"]] * rows),
        lambda: pa.array([[None, 1]] * rows),
        lambda: pa.array([[]] * rows, pa.large_list(pa.int64())),
        lambda: pa.array([None, *[[1, 2]] * (rows - 1)][:rows], pa.list_(pa.int64())),
        lambda: pa.array([[1, 2]] * rows, pa.list_(pa.int64(), 2)),
        lambda: pa.array([[2**63 + 1]] * rows, pa.list_(pa.uint64())),
        lambda: pa.array([{"a": [1]}] * rows),
        lambda: pa.array([Decimal("1.5")] * rows),
        lambda: pa.array([datetime(1, 1, 1)] * rows, pa.timestamp("us")),
        lambda: pa.array([random.choice([-1, 0, 2**62, -(2**63)]) for _ in range(rows)]),
        lambda: pa.array([random.choice([float("nan"), -1e308, 1e308]) for _ in range(rows)]),
        lambda: pa.array([[float("nan"), float("inf")]] * rows),
        lambda: pa.array([True] * rows),
    ]
    cast = random.choice([pa.string(), pa.float16(), pa.int8(), pa.uint64(), pa.bool_(), None])
    if cast is not None and pa.types.is_large_list(column.type):  # as many values, of another type
        whole = column.combine_chunks()
        with contextlib.suppress(pa.ArrowException):
            return pa.LargeListArray.from_arrays(whole.offsets, whole.values.cast(cast, safe=False))
    return random.choice(kinds)()


def table(random: Random, run: Path) -> str:
    """A table of a judged run with a column or a header of another kind, read by a command."""
    judged, changed = run.parent / "judged", run.parent / "changed"
    if not judged.exists():
        shutil.copytree(run, judged)
        _main(["compare", str(judged)])
    shutil.rmtree(changed, ignore_errors=True)  # hypothesis may end a trial at any draw
    shutil.copytree(judged, changed)
    name = random.choice(["rollout.parquet", "scores/fsdp.parquet", "tokens.parquet"])
    rows = pq.read_table(changed / name)
    about, at = dict(rows.schema.metadata), random.randrange(rows.num_columns)
    what = random.choice(["column", "column", "column", "header", "header", "name", "metadata"])
    if what == "column":
        column = odd_column(rows.column(at), random)
        rows = rows.set_column(at, rows.column_names[at], column)
    elif what == "name":
        rows = rows.append_column(rows.column_names[at], rows.column(at))
    elif what == "header":
        header = json.dumps(mutated(json.loads(about[b"header"]), random)).encode()
        about[b"header"] = random.choice([header] * 6 + [b"\xff", b"[" * 10_000])
    else:
        del about[random.choice(list(about))]
    try:
        with contextlib.suppress(pa.ArrowException, OSError):
            pq.write_table(rows.replace_schema_metadata(about), changed / name)
        (changed / "manifest.json").unlink()
        if name == "tokens.parquet" or random.random() < 0.2:  # others take longer
            command = "report" if name == "tokens.parquet" else "compare"
            return _main([random.choice([command, command, "corrections"]), str(changed)])
        if name == "rollout.parquet":
            store.load_rollout(changed)
        for each in store.scoring_names(changed):
            store.load_scoring(changed, each)
    except MismatchError:
        return "refused"
    finally:
        shutil.rmtree(changed)
    return "same"


def parquet_dump(random: Random, run: Path) -> str:
    """A Parquet dump with a column of another kind, as `mismatch postmortem` reads it."""
    ids, values = [[5, 6, 7]] * 3, [[-0.5, -0.25]] * 3
    columns: dict[str, Any] = {
        "token_ids": pa.array(ids, pa.large_list(pa.int64())),
        "action_mask": pa.array([[False, True, True]] * 3, pa.large_list(pa.bool_())),
        "rollout_logprobs": pa.array(values, pa.large_list(pa.float64())),
        "train_logprobs": pa.array(values, pa.large_list(pa.float64())),
        "prompt_id": pa.array([1, 1, 2]),
        "step": pa.array([0, 1, 1]),
    }
    for name in random.sample(list(columns), random.choice([1, 1, 2])):
        columns[name] = odd_column(pa.chunked_array([columns[name]]), random)
    path = run.parent / "dump.parquet"
    with contextlib.suppress(pa.ArrowException):
        pq.write_table(pa.table(columns), path)
    try:
        if random.random() < 0.1:
            return _main(["postmortem", str(path), "--out", str(run.parent / "postmortem")])
        as_run(read_recorded(path), Sampling(), {"engine": "recorded"}, {"mode": "train"})
    except MismatchError:
        return "refused"
    finally:
        path.unlink(missing_ok=True)
        shutil.rmtree(run.parent / "postmortem", ignore_errors=True)
    return "same"


# ---------------------------------------------------------------- flags and files of flags

WORDS = [
    *("", "-", "--", "0", "-1", "1", "nan", "inf", "1e9", "9" * 40, "x", "a=b", "a:b", "=", "{}"),
    *("[1", "tiny-gpt-oss", "none.jsonl", "../..", "\x1b[31m", "é\u202e", "true", "bf16", "2,3"),
    *("http://x y", "http://h:99999", "http://u:p@h", "http://[::1", "all", "a+b", ",", "\ud800"),
]


def command_line(random: Random, run: Path) -> str:
    """`mismatch check` with some flags, each right or not; nothing is started."""
    flags = [option.flag for option in CHECK if option.flag not in ("--config", "--out")]
    arguments = ["check", "--model", "tiny-gpt-oss", "--engine", "transformers"]
    for _ in range(random.randrange(1, 4)):
        arguments.append(random.choice(flags))
        if random.random() < 0.9:
            arguments.append(random.choice(WORDS))
    return _main(arguments)


def config(random: Random, run: Path) -> str:
    """A file of flags, with lines that may be none."""
    option = random.choice(CHECK)
    values = [json.dumps(word) for word in WORDS if "\ud800" not in word] + ["1", "[1]", "{a=1}"]
    lines = [f"{random.choice([option.name, 'x', 'a.b'])} = {random.choice(values)}"]
    data = ('max_tokens = 3\n[t]\nx = "é"\n' + "\n".join(lines)).encode()
    path = run.parent / "flags.toml"
    path.write_bytes(mutated_bytes(data, random) if random.random() < 0.7 else lines[0].encode())
    try:
        read_config(path, CHECK)
    except MismatchError:
        return "refused"
    return "same"


def prompts(random: Random, run: Path) -> str:
    """A file of prompts with one line that is none, read as a check reads it."""
    rows: list[Any] = [
        {"messages": [{"role": "user", "content": "Compute 1 + 1."}], "answer": "2"},
        {"prompt_token_ids": [1, 5, 9]},
        {"prompt": "Compute 2 + 2.", "tools": [{"type": "function"}]},
    ]
    at = random.randrange(len(rows))
    rows[at] = mutated(rows[at], random)
    data = "\n".join(map(json.dumps, rows)).encode()
    path = run.parent / "prompts.jsonl"
    path.write_bytes(mutated_bytes(data, random) if random.random() < 0.5 else data)
    line = ["check", "--model", "tiny-gpt-oss", "--engine", "transformers", "--dry-run"]
    try:
        if random.random() < 0.1:
            return _main([*line, "--prompts", str(path)])
        read_file(path)
    except MismatchError:
        return "refused"
    finally:
        path.unlink()
    return "same"


LEVELS = {"k3_kl": {"bf16 MoE": {"healthy": 1e-3, "unfit": 0.01, "source": "ours"}}}
LEVELS |= {"ratio_outside_2": {"bf16 dense": {"healthy": 1e-3}}}


def levels(random: Random, run: Path) -> str:
    """A file of levels with one thing wrong."""
    lines = []
    for metric, columns in mutated(LEVELS, random).items() if random.random() < 0.9 else ():
        lines += [f"[{json.dumps(metric)}]"]
        for column, cell in columns.items() if isinstance(columns, dict) else ():
            cells = cell.items() if isinstance(cell, dict) else [("healthy", cell)]
            inner = ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in cells)
            lines += [f"{json.dumps(column)} = {{{inner}}}"]
    data = "\n".join(lines).encode() or b"="
    path = run.parent / "levels.toml"
    path.write_bytes(mutated_bytes(data, random) if random.random() < 0.5 else data)
    try:
        load_thresholds(path)
    except MismatchError:
        return "refused"
    finally:
        path.unlink()
    return "same"


def watched(random: Random, run: Path) -> str:
    """A folder of dumps of which one is damaged, as `mismatch watch` reads it."""
    folder = run.parent / "dumps"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    row = {"prompt_token_ids": [5, 6], "response_token_ids": [7, 8], "logprobs": [-0.5, -0.5]}
    row |= {"train_logprobs": [-0.5, -0.25]}
    for step in range(2):
        data = json.dumps(row | {"step": step}).encode()
        if step:
            changed = json.dumps(mutated(row | {"step": step}, random)).encode()
            data = mutated_bytes(data, random) if random.random() < 0.5 else changed
        (folder / f"step_{step}.jsonl").write_bytes(data + b"\n")
    given = ["--out", str(folder / "kept")] if random.random() < 0.5 else []
    try:
        return _main(["watch", str(folder), "--once", *given])
    finally:
        shutil.rmtree(folder)


@cache
def logs() -> dict[str, bytes]:
    """Name -> a log of three steps: console, JSON lines, TensorBoard's and W&B's records."""
    numbers = {"rollout_corr/k3_kl": 1e-4, "actor/pg_clipfrac": 0.0, "actor/grad_norm": 0.5}
    pairs = " - ".join(f"{name}:{value}" for name, value in numbers.items())
    lines = [json.dumps({"step": step, "data": numbers}) for step in range(3)]
    state = {"log_history": [{"step": step, "reward": 0.5, "entropy": 1.0} for step in range(3)]}

    def field(number: int, value: bytes | int) -> bytes:
        if isinstance(value, int):
            return bytes([number << 3, value])
        return bytes([number << 3 | 2, len(value)]) + value

    scalar = field(1, b"gen_kl_error") + bytes([2 << 3 | 5]) + struct.pack("<f", 0.5)
    event = field(2, 1) + field(5, field(1, scalar))
    item = field(2, b"mismatch_kl/all/mean") + bytes([130, 1, 3]) + b"0.5"
    record = field(2, field(1, item) + field(2, field(1, 1)))
    return {
        "run.log": "\n".join(f"step:{step} - {pairs}" for step in range(3)).encode(),
        "run.jsonl": "\n".join(lines).encode(),
        "trainer_state.json": json.dumps(state).encode(),
        "events.out.tfevents.1": 3 * (struct.pack("<Q", len(event)) + bytes(4) + event + bytes(4)),
        "run-1.wandb": b":W&B" + bytes(3)
        + 3 * (bytes(4) + struct.pack("<HB", len(record), 1) + record),
    }  # fmt: skip


def log(random: Random, run: Path) -> str:
    """A log of metrics with one thing wrong, as `mismatch postmortem` reads it."""
    name = random.choice(list(logs()))
    data = logs()[name]
    for _ in range(random.choice([0, 1, 1, 2])):
        data = mutated_bytes(data, random) or b"a"
    path = run.parent / name
    path.write_bytes(data)
    try:
        out = str(run.parent / "postmortem")
        return _main(["postmortem", str(path), "--format", "json", "--out", out])
    finally:
        path.unlink()
        shutil.rmtree(run.parent / "postmortem", ignore_errors=True)


def checkpoint(random: Random, run: Path) -> str:
    """A model's folder with one file that is none, as a dry run and its readers see it."""
    folder = run.parent / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(TINY, folder)
    index = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    record = {"form": "bf16", "source_files": {"config.json": "0"}, "sizes": {"config.json": 3}}
    made = {INDEX: index, RECORD: record | {"layers": [1, 2], "of": "fp8"}}
    name = random.choice([INDEX, RECORD, *(path.name for path in folder.glob("*.json"))])
    data = json.dumps(made[name]) if name in made else (folder / name).read_text("utf-8")
    document = mutated(json.loads(data), random)
    changed = json.dumps(document).encode() if random.random() < 0.6 else data.encode()
    (folder / name).write_bytes(
        changed if random.random() < 0.5 else mutated_bytes(changed, random)
    )
    line = ["check", "--model", str(folder), "--engine", "transformers", "--dry-run"]
    try:
        if name not in made:
            return _main(line)
        for read in (weight_places, source_hashes, layers_held):
            read(folder)
    except MismatchError:
        return "refused"
    finally:
        shutil.rmtree(folder)
    return "same"


TRL = """
model_name_or_path: tiny-gpt-oss
max_completion_length: 64
temperature: 1.0
bf16: true
use_vllm: true
learning_rate: 1e-6
generation_kwargs: {min_p: 0.1}
"""


def framework_yaml(random: Random, run: Path) -> str:
    """A configuration of verl or TRL with one thing wrong, followed; nothing is started."""
    name, text = random.choice([("verl", PRINTED), ("trl", TRL)])
    data = text.encode()
    if random.random() < 0.7:
        document = mutated(yaml.safe_load(text), random)
        with contextlib.suppress(yaml.YAMLError, UnicodeError):
            data = yaml.safe_dump(document, allow_unicode=True).encode()
    if random.random() < 0.5:
        data = mutated_bytes(data, random)
    path = run.parent / "framework.yaml"
    path.write_bytes(data)
    try:
        given = ["--framework", name, "--own-loop", "--framework-config", str(path)]
        return _main(["check", "--model", "tiny-gpt-oss", *given])
    finally:
        path.unlink()


def _main(arguments: list[str]) -> str:
    """The command with preflight as its end; an exit code of the documented, and no traceback."""
    from mismatch.pipeline import preflight

    class Enough(MismatchError):
        pass

    def enough(*rest: Any, **more: Any) -> None:
        raise Enough("far enough")

    kept, argv, real = io.StringIO(), sys.argv, preflight.preflight
    preflight.preflight, sys.argv = enough, ["mismatch", *arguments]
    try:
        with contextlib.redirect_stderr(kept), contextlib.redirect_stdout(io.StringIO()):
            cli.main()
    except SystemExit as ended:
        output = kept.getvalue()
        if "Traceback" in output or ended.code not in (0, 1, 2):
            raise AssertionError(f"{arguments}: exit {ended.code}\n{output}") from None
        return "same" if "far enough" in output or ended.code in (0, 1) else "refused"
    finally:
        preflight.preflight, sys.argv = real, argv
    raise AssertionError("no exit code")


# ---------------------------------------------------------------- servers


def server(random: Random, run: Path) -> str:
    """An answer or the facts of a server with one thing wrong."""
    try:
        if random.random() < 0.7:
            kind, what = random.choice(list(servers.GOOD))
            servers.ask(kind, what, mutated(servers.GOOD[kind, what], random))
        else:
            kind = random.choice(list(servers.FACTS))
            facts = servers.FACTS[kind]
            path = random.choice(list(facts))
            changed = {**facts, path: mutated(facts[path], random)}
            servers.described(kind, changed)
    except (RequestFailed, MismatchError):
        return "refused"
    return "same"


TARGETS: dict[str, Target] = {
    "artefact": artefact,
    "report": report,
    "table": table,
    "dump": dump,
    "Parquet dump": parquet_dump,
    "command line": command_line,
    "config": config,
    "server": server,
    "framework's YAML": framework_yaml,
    "prompts": prompts,
    "levels": levels,
    "watch": watched,
    "log": log,
    "checkpoint": checkpoint,
}
