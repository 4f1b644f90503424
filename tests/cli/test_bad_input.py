"""Bad input is refused before anything starts: a clear error, its fix, exit 2, no debris.

What only a worker can find out is in tests/integration/test_failures.py.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch.engines.registry import engine_info
from mismatch.run import store

from ..command import mismatch
from ..limited import mounted
from ..made_run import make_run, rollout, scoring

TINY = ["--model", "tiny-gpt-oss"]


def assert_refused(done: subprocess.CompletedProcess[str], expected: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# ---------------------------------------------------------------- check: nothing may be left


def jsonl(*lines: str):
    def make(folder: Path) -> list[str]:
        path = folder / "prompts.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines))
        return [*TINY, "--prompts", str(path)]

    return make


def thresholds(text: str):
    def make(folder: Path) -> list[str]:
        path = folder / "levels.toml"
        path.write_text(text)
        return [*TINY, "--thresholds", str(path)]

    return make


def directory_without_config(folder: Path) -> list[str]:
    (folder / "empty").mkdir()
    return ["--model", str(folder / "empty")]


def occupied_output(folder: Path) -> list[str]:
    (folder / "out").mkdir()
    (folder / "out" / "report.json").write_text("{}")
    return [*TINY, "--out", str(folder / "out")]


def output_of_another_run(folder: Path) -> list[str]:
    make_run(folder / "earlier")
    return [*TINY, "--out", str(folder / "earlier")]


def output_is_a_file(folder: Path) -> list[str]:
    (folder / "out").write_text("")
    return [*TINY, "--out", str(folder / "out" / "run")]


def resume_of_another_spec(folder: Path) -> list[str]:
    make_run(folder / "earlier")
    return [*TINY, "--resume", str(folder / "earlier")]


def bare_interpreter(folder: Path) -> list[str]:
    """A Python with nothing but its standard library."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    path.chmod(0o755)
    return [*TINY, "--python", f"vllm={path}"]


CASES = {
    "no model": (lambda f: [], "--model"),
    "unknown option": (lambda f: [*TINY, "--atention", "eager"], "--atention"),
    "unknown model": (lambda f: ["--model", "tiny-gpt-os"], "tiny-gpt-oss"),
    "model path missing": (lambda f: ["--model", "./no/such/dir"], "no/such/dir"),
    "no config.json": (directory_without_config, "config.json"),
    "unknown engine": (lambda f: [*TINY, "--engine", "vlm"], "did you mean vllm"),
    "engine argument without value": (lambda f: [*TINY, "--engine-arg", "seed"], "key=value"),
    **{
        f"{flag} {value}{' in a plan' * len(plan)}": (
            lambda f, given=(flag, value, *plan): [*TINY, *given],
            said,
        )
        for flag, value, said in (
            ("--attention", "flex_atention", "did you mean flex_attention"),
            ("--experts-implementation", "groupedmm", "did you mean grouped_mm"),
            ("--engine-arg", "enforce_eagr=1", "did you mean enforce_eager"),
            ("--fix", "attention-sink", "did you mean attention-sinks"),
        )
        for plan in ((), ("--dry-run",))
    },
    "prompts file missing": (lambda f: [*TINY, "--prompts", "none.jsonl"], "none.jsonl"),
    "prompts file empty": (jsonl(), "prompts.jsonl"),
    "prompts not JSON": (jsonl('{"prompt": "a"}', "{oops"), "prompts.jsonl:2"),
    "half a character in a prompt": (jsonl('{"prompt": "a\\ud800"}'), "prompts.jsonl:1"),
    "half a character in a message": (
        jsonl('{"messages": [{"role": "user", "content": "\\udfff"}]}'),
        "udfff is half a character",
    ),
    "a number of 5,000 digits": (jsonl('{"prompt_token_ids": [' + "9" * 5000 + "]}"), ".jsonl:1"),
    "a level that no run reaches": (
        thresholds('[k3_kl."bf16 MoE"]\nhealthy = -1e-3'),
        "no run can reach healthy = -0.001",
    ),
    "a share above all": (
        thresholds('[probs_pearson."bf16 MoE"]\nhealthy = 1.5'),
        "probs_pearson lies between -1 and 1",
    ),
    "prompt without a known key": (jsonl('{"text": "a"}'), "prompts.jsonl:1"),
    "prompt with two keys": (jsonl('{"prompt": "a", "messages": []}'), "prompts.jsonl:1"),
    "prompt ids not integers": (jsonl('{"prompt_token_ids": [1, "a"]}'), "prompts.jsonl:1"),
    "no samples": (lambda f: [*TINY, "--samples-per-prompt", "0"], "--samples-per-prompt"),
    "no tokens": (lambda f: [*TINY, "--max-tokens", "0"], "--max-tokens"),
    "no prompts": (lambda f: [*TINY, "--num-prompts", "0"], "--num-prompts"),
    "no layers": (lambda f: [*TINY, "--layers", "0"], "--layers"),
    "all layers": (lambda f: [*TINY, "--layers", "4"], "has 4 layers"),
    "layers of a server": (
        lambda f: [*TINY, "--layers", "2", "--server", "http://127.0.0.1:1"],
        "servers keep their settings",
    ),
    "no ranks": (lambda f: [*TINY, "--nproc-per-node", "0"], "--nproc-per-node"),
    "negative temperature": (lambda f: [*TINY, "--temperature", "-1"], "--temperature"),
    "top-p of zero": (lambda f: [*TINY, "--top-p", "0"], "--top-p"),
    "unknown dtype": (lambda f: [*TINY, "--dtype", "fp8"], "bf16"),
    "thresholds file missing": (lambda f: [*TINY, "--thresholds", "no.toml"], "no.toml"),
    "thresholds not TOML": (thresholds("[k3_kl"), "levels.toml"),
    "thresholds with an unknown metric": (thresholds("[k3_lk]\nhealthy = 1"), "k3_kl"),
    "occupied output directory": (occupied_output, "not empty"),
    "output directory of another run": (output_of_another_run, "--resume"),
    "output below a file": (output_is_a_file, "cannot create"),
    "resume of nothing": (lambda f: [*TINY, "--resume", "runs/gone"], "no run in runs/gone"),
    "resume of nothing, without flags": (lambda f: ["--resume", "gone"], "no run in gone"),
    "resume with another spec": (resume_of_another_spec, "rollout.engine.engine: 'transformers'"),
    "two directories": (lambda f: ["--resume", "a", "--out", "b", *TINY], "two directories"),
    "no such interpreter": (lambda f: [*TINY, "--python", "vllm=no/python"], "no/python"),
    "interpreter without packages": (bare_interpreter, "psutil, vllm"),
    "interpreter of another engine": (
        lambda f: [*TINY, "--python", "vllm=python", "--engine", "transformers"],
        "--python vllm=… given with --engine transformers",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_the_fix(name, tmp_path):
    make, expected = CASES[name]
    if name == "two directories":
        make_run(tmp_path / "a")
    arguments = make(tmp_path)
    before = contents(tmp_path)
    assert_refused(mismatch("check", *arguments, cwd=tmp_path), expected)
    assert contents(tmp_path) == before, "left debris, or changed what was there"


def test_a_missing_engine_names_its_install_command(tmp_path):
    """Without vllm on the path: the exact command, before anything starts."""
    code = (
        "import sys, importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'vllm' else real(name, *a)\n"
        "sys.argv = ['mismatch', 'check', '--model', 'tiny-gpt-oss']\n"
        "from mismatch.cli.main import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert engine_info("vllm").install_hint in done.stderr


def test_a_crash_of_the_tool_is_no_verdict(tmp_path):
    """Exit 1 says "critical"; a bug says that it is one, and shows where."""
    code = (
        "import sys\n"
        "from mismatch.cli import main, session\n"
        "session.stored_spec = lambda flags: {}['no such key']\n"
        "sys.argv = ['mismatch', 'check', '--model', 'tiny-gpt-oss']\n"
        "main.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" in done.stderr
    *_, cause, last = done.stderr.splitlines()
    assert cause.split(": ") == ["KeyError", "'no such key'"]
    assert last.startswith("error: unexpected KeyError")


# ---------------------------------------------------------------- the machine


def test_a_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = mismatch("check", *TINY, cwd=tmp_path, MASTER_PORT=port)
    assert_refused(done, f"port {port} (MASTER_PORT)")
    assert_refused(mismatch("check", *TINY, cwd=tmp_path, MASTER_PORT="x"), "no port number")


HUB = ["--model", "some-org/some-model"]
NOWHERE = {"HF_ENDPOINT": "http://hub.invalid", "HF_HUB_OFFLINE": "0"}


def test_a_hub_out_of_reach_gives_the_offline_hint(tmp_path):
    home = {"HF_HOME": str(tmp_path / "home")}
    done = mismatch("check", *HUB, cwd=tmp_path, **NOWHERE, **home)
    assert_refused(done, "hub.invalid")
    assert "HF_HUB_OFFLINE=1" in done.stderr
    assert "hf download some-org/some-model" in done.stderr
    done = mismatch("check", *HUB, cwd=tmp_path, HF_HUB_OFFLINE="1", **home)
    assert_refused(done, "HF_HUB_OFFLINE is set")


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = mismatch("check", *HUB, cwd=tmp_path, **NOWHERE, HF_HOME=str(tmp_path / "file" / "x"))
    assert_refused(done, "cannot be written")
    assert "HF_HOME" in done.stderr


def test_too_little_shared_memory(tmp_path):
    command = [sys.executable, "-m", "mismatch", "check", *TINY, "--tensor-parallel-size", "2"]
    done = mounted("/dev/shm", "size=1m", command, cwd=tmp_path)
    assert_refused(done, "/dev/shm has 1 MiB free")
    assert "--shm-size" in done.stderr


TWO_CARDS = """#!/bin/sh
case "$*" in
*query-gpu=index*)
  for n in 0 1; do echo "$n, GPU-$n, NVIDIA H100 80GB HBM3, 81559, 580.95, Disabled"; done ;;
*memory.free*) for n in 0 1; do echo "GPU-$n, 81000"; done ;;
esac
"""


def test_ranks_on_gpus_need_shared_memory_too(tmp_path):
    """Played: a machine with two GPUs, and less shared memory than NCCL takes for two ranks."""
    (tmp_path / "nvidia-smi").write_text(TWO_CARDS)
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = [sys.executable, "-m", "mismatch", "check", *TINY]
    seen = {"PATH": path, "CUDA_VISIBLE_DEVICES": "0,1"}
    done = mounted("/dev/shm", "size=40m", command, cwd=tmp_path, **seen)
    assert_refused(done, "/dev/shm has 40 MiB free")
    assert "2 ranks" in done.stderr


@pytest.mark.slow
def test_a_read_only_directory(tmp_path):
    command = [sys.executable, "-m", "mismatch", "check", *TINY, "--out"]
    (tmp_path / "ro").mkdir()
    done = mounted(tmp_path / "ro", "size=64k,ro", [*command, "ro/run"], cwd=tmp_path)
    assert_refused(done, "Read-only file system")


@pytest.mark.slow
def test_a_read_only_run_is_not_worked_in_but_can_be_read(tmp_path):
    run = make_run(tmp_path / "run")
    mismatch("compare", "run", cwd=tmp_path)
    before = contents(run)
    command = [sys.executable, "-m", "mismatch"]
    options = {"cwd": tmp_path, "fill": [str(run)]}
    done = mounted(tmp_path / "ro", "size=4m,ro", [*command, "compare", "ro/run"], **options)
    assert_refused(done, "Read-only file system")
    pair = [*command, "compare", "ro/run", "--left", "transformers:decode", "--right", "fsdp"]
    pair += ["--fail-on", "unfit"]  # without its square
    done = mounted(tmp_path / "ro", "size=4m,ro", pair, **options)
    assert done.returncode == 0, done.stderr
    assert contents(run) == before


@pytest.mark.slow
def test_a_full_disk_loses_nothing(tmp_path):
    run = make_run(tmp_path / "run")
    size = sum(len(data) for data in contents(run).values())
    command = [sys.executable, "-m", "mismatch", "compare", "full/run"]
    command = ["sh", "-c", '"$@"; code=$?; cp -r full/run kept; exit $code', "sh", *command]
    room = f"size={(size // 4096 + 24) * 4}k"
    done = mounted(tmp_path / "full", room, command, cwd=tmp_path, fill=[str(run)])
    assert_refused(done, "No space left on device")
    kept, before = contents(tmp_path / "kept"), contents(run)
    assert {name: kept[name] for name in before if name != "manifest.json"} == {
        name: data for name, data in before.items() if name != "manifest.json"
    }
    assert not [name for name in kept if "partial" in name]
    assert mismatch("compare", "kept", cwd=tmp_path).returncode == 1  # its own verdict


# ---------------------------------------------------------------- artefacts


def nan_logprobs(run: Path) -> list[str]:
    samples = rollout()
    bad = scoring("fsdp", samples)
    bad.logprobs[3] = np.nan
    store.save_scoring(run, bad, samples)
    return ["compare", str(run), "--left", "transformers:decode"]


def infinite_logprobs(run: Path) -> list[str]:
    samples = rollout()
    bad = scoring("fsdp", samples)
    bad.logprobs[3] = -np.inf
    store.save_scoring(run, bad, samples)
    return ["compare", str(run), "--left", "transformers:decode"]


def truncated(run: Path) -> list[str]:
    path = run / "rollout.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    return ["compare", str(run)]


def foreign(run: Path) -> list[str]:
    (run / "manifest.json").unlink()
    pq.write_table(pa.table({"a": [1]}), run / "rollout.parquet")
    return ["compare", str(run)]


def other_schema(run: Path) -> list[str]:
    (run / "manifest.json").unlink()
    path = run / "rollout.parquet"
    table = pq.read_table(path)
    metadata = {**table.schema.metadata, b"schema": b"mismatch.rollout/7"}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return ["compare", str(run)]


def earlier_report(run: Path) -> list[str]:
    (run / "manifest.json").unlink()
    (run / "report.json").write_text('{"schema": "mismatch.report/0"}')
    return ["report", str(run)]


def changed(run: Path) -> list[str]:
    path = run / "scores" / "fsdp.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return ["compare", str(run)]


def removed(name: str, *arguments: str):
    def make(run: Path) -> list[str]:
        (run / name).unlink()
        return [arguments[0], str(run), *arguments[1:]]

    return make


def edited(name: str, text: str, *arguments: str):
    def make(run: Path) -> list[str]:
        (run / name).write_text(text)
        return [arguments[0], str(run), *arguments[1:]]

    return make


def other_tokens(run: Path) -> list[str]:
    make_run(run.parent / "other", seed=5)
    return ["compare", str(run), str(run.parent / "other")]


def on_run(verb: str, *arguments: str):
    return lambda run: [verb, str(run), *arguments]


ARTEFACTS = {
    "NaN logprobs": (nan_logprobs, "fsdp: 1 logprobs are not finite"),
    "infinite logprobs": (infinite_logprobs, "fsdp: 1 logprobs are not finite"),
    "truncated Parquet": (truncated, "rollout.parquet is truncated"),
    "foreign Parquet": (foreign, "rollout.parquet has schema none"),
    "wrong schema version": (other_schema, "mismatch.rollout/7, this version reads"),
    "checksum mismatch": (changed, "fsdp.parquet is not the file that was written"),
    "no rollout": (removed("rollout.parquet", "compare"), "mismatch rollout --model"),
    "nothing scored": (removed("scores/fsdp.parquet", "compare"), "fix: make it: mismatch score"),
    "no spec": (removed("spec.json", "compare"), "no run in"),
    "manifest of another version": (
        edited("manifest.json", '{"schema": "mismatch.manifest/9", "artefacts": {}}', "compare"),
        "mismatch.manifest/9",
    ),
    "manifest not JSON": (edited("manifest.json", "{", "compare"), "manifest.json cannot be read"),
    "spec of another version": (edited("spec.json", '{"x": 1}', "compare"), "no spec that"),
    "two runs of different tokens": (other_tokens, "two runs of different tokens"),
    "unknown scoring": (on_run("compare", "--left", "nobody"), "nobody.parquet does not exist"),
    "a scoring against itself": (on_run("compare", "--left", "fsdp"), "the same scoring"),
    "no report yet": (on_run("report"), "report.json does not exist"),
    "report of another version": (earlier_report, "mismatch.report/0"),
    "report that nothing wrote": (edited("report.json", "{}", "report"), "is not listed in"),
    "score of no run": (lambda run: ["score", "nowhere"], "no run in nowhere"),
    "score under a bad name": (on_run("score", "--name", "a/b"), "not a plain name"),
    "score with other settings": (
        on_run("score", *TINY, "--train-dtype", "fp32"),
        "dtype: 'bf16' there, 'fp32' asked",
    ),
    "model of another machine": (
        lambda run: edited(
            "spec.json",
            (run / "spec.json").read_text().replace('"tiny-gpt-oss"', '"/gone/model"'),
            "score",
        )(run),
        "/gone/model is not on this machine",
    ),
}


@pytest.mark.parametrize("name", ARTEFACTS)
def test_refused_artefacts(name, tmp_path):
    make, expected = ARTEFACTS[name]
    arguments = make(make_run(tmp_path / "run"))
    before = contents(tmp_path)
    assert_refused(mismatch(*arguments, cwd=tmp_path), expected)
    after = contents(tmp_path)
    assert {name: after.get(name) for name in before} == before, "lost or changed something"


def test_logprobs_that_are_missing_are_a_failed_check_of_the_run(tmp_path):
    run = make_run(tmp_path / "run")
    nan_logprobs(run)
    done = mismatch("compare", str(run), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    report = json.loads((run / "report.json").read_text())
    assert {c["id"] for c in report["checks"] if c["status"] == "failed"} == {"missing-logprobs"}


def test_report_of_something_that_is_no_run(tmp_path):
    assert_refused(mismatch("report", "x", cwd=tmp_path), "report.json")


def copy_of_tiny(folder: Path) -> Path:
    from mismatch.models import EMBEDDED

    return Path(shutil.copytree(EMBEDDED["tiny-gpt-oss"], folder / "model"))
