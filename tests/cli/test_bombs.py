"""Small files that would take all memory, or block for ever: a sentence, within a GiB and a minute.

Every case goes through the command that a user types; what it held at most is measured.
"""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ..command import mismatch
from ..made_run import make_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-gpt-oss"
MOST_BYTES, MOST_S = 1 << 30, 60
TORCH = ["--python", sys.executable]
GOOD = {"prompt_token_ids": [5, 6], "response_token_ids": [7, 8], "logprobs": [-0.5, -0.5]}
GOOD |= {"train_logprobs": [-0.5, -0.25]}


def refused(*arguments, code: int = 2):
    done = mismatch(*arguments, timeout=MOST_S)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "bug in mismatch" not in done.stderr
    assert done.peak_bytes < MOST_BYTES
    return done.stdout + done.stderr


# ---------------------------------------------------------------- dumps


def of_torch(batch, path: Path) -> list[str]:
    import torch

    torch.save(batch(torch), path / "dump.pt")
    return [str(path / "dump.pt"), *TORCH]


def one_value_seen_as_many(path: Path) -> list[str]:
    """Tensors of stride 0: two kilobytes."""

    def batch(torch):
        ids = torch.ones(1, 1, dtype=torch.int64).expand(1, 300_000_000)
        logprobs = torch.zeros(1, 1).expand(1, 300_000_000)
        return {"prompts": ids, "responses": ids, "rollout_log_probs": logprobs}

    return of_torch(batch, path)


def one_list_held_many_times(path: Path) -> list[str]:
    tokens = list(range(1000))

    def batch(torch):
        rows = [tokens] * 1_000_000
        return {"rollout_data": {"tokens": rows, "rollout_log_probs": rows}}

    return of_torch(batch, path)


def deflated_storage(path: Path) -> list[str]:
    """A file of torch whose zip is compressed: a GB of zeros in a MB."""
    import zipfile

    of_torch(lambda torch: {"responses": torch.zeros(8, 8, dtype=torch.int64)}, path)
    plain, packed = path / "dump.pt", path / "packed.pt"
    size = 1_000_000_000
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("data.pkl"):
                data = data.replace(b"K@", b"J" + (size // 8).to_bytes(4, "little"))
            if name.endswith("data/0"):
                with new.open(name, "w", force_zip64=True) as out:
                    for _ in range(size // 10_000_000):
                        out.write(bytes(10_000_000))
                continue
            new.writestr(name, data)
    return [str(packed), *TORCH]


def long_pickle(path: Path) -> list[str]:
    """A pickle that says that it holds 4 EB."""
    file = path / "gen_batch.dp"
    file.write_bytes(pickle.PROTO + b"\x04" + pickle.BINBYTES8 + (1 << 62).to_bytes(8, "little"))
    return [str(file), *TORCH]


def parquet(path: Path, lengths: list[int], **columns) -> list[str]:
    ends = np.concatenate([[0], np.cumsum(lengths)])

    def ragged(value, kind):
        values = pa.array(np.full(ends[-1], value, kind))
        return pa.LargeListArray.from_arrays(pa.array(ends), values)

    mask = np.ones(ends[-1], np.bool_)
    mask[ends[:-1]] = False
    logprobs = ragged(-0.5, np.float64)
    table = {"token_ids": ragged(7, np.int64)}
    table["action_mask"] = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(mask))
    table |= {"rollout_logprobs": logprobs, "train_logprobs": logprobs, **columns}
    pq.write_table(pa.table(table), path / "dump.parquet", compression="zstd")
    return [str(path / "dump.parquet")]


def one_long_row(path: Path) -> list[str]:
    return parquet(path, [16_000_000])


def one_long_row_among_short_ones(path: Path) -> list[str]:
    return parquet(path, [2] * 9_000 + [16_000_000] + [2] * 9_000)


def many_rows_at_the_limit(path: Path) -> list[str]:
    return parquet(path, [1 << 20] * 3)


def one_text_in_every_row(path: Path) -> list[str]:
    texts = pa.array(["x" * 4_000_000] * 260, pa.large_string())
    return parquet(path, [4] * 260, prompt_id=texts)


def empty_lists(path: Path) -> list[str]:
    """30 MB that Python holds in 700."""
    (path / "dump.jsonl").write_text('{"token_ids": [' + "[]," * 10_000_000 + "[]]}\n")
    return [str(path / "dump.jsonl")]


def a_line_without_end(path: Path) -> list[str]:
    with (path / "dump.jsonl").open("wb") as file:
        file.write(b'{"token_ids": [')
        file.truncate(1 << 40)
    return [str(path / "dump.jsonl")]


def huge_id(path: Path) -> list[str]:
    row = GOOD | {"response_token_ids": [7, 10**18]}
    (path / "dump.jsonl").write_text(json.dumps(row) + "\n")
    return [str(path / "dump.jsonl")]


def fifo(path: Path) -> list[str]:
    os.mkfifo(path / "dump.jsonl")
    return [str(path / "dump.jsonl")]


def fifo_of_parquet(path: Path) -> list[str]:
    os.mkfifo(path / "dump.parquet")
    return [str(path / "dump.parquet")]


def device(path: Path) -> list[str]:
    (path / "dump.jsonl").symlink_to("/dev/zero")
    return [str(path / "dump.jsonl")]


DUMPS = {make.__name__: make for make in (
    one_value_seen_as_many, one_list_held_many_times, deflated_storage, long_pickle, one_long_row,
    one_long_row_among_short_ones, one_text_in_every_row, empty_lists, a_line_without_end, huge_id,
    fifo, fifo_of_parquet, device,
)}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", DUMPS)
def test_a_dump_that_takes_too_much_is_refused(tmp_path, case):
    said = refused("postmortem", *DUMPS[case](tmp_path), "--out", tmp_path / "out")
    assert "dump" in said or "packed" in said
    assert "fix:" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_dump_of_many_long_rows_is_judged_by_some_of_them(tmp_path):
    arguments = many_rows_at_the_limit(tmp_path)
    done = mismatch("postmortem", *arguments, "--out", tmp_path / "out", timeout=MOST_S)
    assert done.returncode in (0, 1), done.stderr
    assert done.peak_bytes < MOST_BYTES, done.peak_bytes


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_watch_names_what_it_cannot_read_and_goes_on(tmp_path):
    folder = tmp_path / "dumps"
    folder.mkdir()
    for step in (1, 9):
        (folder / f"step_{step}.jsonl").write_text(json.dumps(GOOD | {"step": step}) + "\n")
    (folder / "step_2.jsonl").write_text("{garbage\n")
    (folder / "step_3.jsonl").write_text(json.dumps(GOOD)[:40])
    (folder / "step_4.jsonl").symlink_to("gone.jsonl")
    (folder / "step_5.parquet").write_bytes(b"PAR1 and no more")
    (folder / "config.json").write_text('{"lr": 1}\n')
    (folder / "x.pt").write_bytes(b"PK\x03\x04")
    (folder / "step_6.jsonl").symlink_to("/dev/zero")
    os.mkfifo(folder / "step_7.jsonl")
    said = refused("watch", folder, "--once", code=0).splitlines()
    unread = ("step_2.jsonl", "step_3.jsonl", "step_5.parquet", "config.json", "x.pt")
    lines = [line for line in said if "not read" in line]
    assert len(lines) == len(unread)
    assert all(any(str(folder / name) in line for line in lines) for name in unread)
    assert [line.split(":")[0] for line in said if line.startswith("step ")] == ["step 1", "step 9"]


# ---------------------------------------------------------------- runs


def equal_rows(run: Path) -> None:
    table = pa.table({name: np.zeros(6_000_000) for name in TOKENS_COLUMNS})
    header = {"schema": "mismatch.tokens/2", "header": "{}"}
    table = table.replace_schema_metadata(header)
    pq.write_table(table, run / "tokens.parquet", compression="zstd")


TOKENS_COLUMNS = ("sequence", "position", "rollout_logprob", "train_logprob", "delta")


def equal_tokens(run: Path) -> None:
    old = pq.read_table(run / "rollout.parquet")
    n = 20_000_000
    lists = {
        "token_ids": np.full(n, 7, np.int64),
        "action_mask": np.arange(n) > 0,
        "turn": np.ones(n, np.int64),
    }
    columns = {
        name: pa.LargeListArray.from_arrays(pa.array([0, n]), pa.array(values))
        for name, values in lists.items()
    }
    columns |= {"prompt_index": [0], "finish_reason": ["stop"]}
    table = pa.table(columns).replace_schema_metadata(old.schema.metadata)
    pq.write_table(table, run / "rollout.parquet", compression="zstd")


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("make", "verb"), [(equal_tokens, "compare"), (equal_rows, "report")], ids=["rollout", "tokens"]
)
def test_a_table_of_equal_values_is_refused(tmp_path, make, verb):
    run = tmp_path / "run"
    if verb == "report":
        shutil.copytree(EXAMPLE, run)
    else:
        make_run(run)
        (run / "manifest.json").unlink()
    make(run)
    said = refused(verb, run)
    assert "values in" in said
    assert ".parquet" in said


# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize("name", ["verl", "trl"])
def test_a_yaml_of_aliases_of_aliases_is_refused(tmp_path, name):
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 11)]
    (tmp_path / "x.yaml").write_text("\n".join(lines))
    given = ("--framework", name, "--framework-config", tmp_path / "x.yaml")
    said = refused("check", *given, "--dry-run")
    assert "x.yaml" in said
