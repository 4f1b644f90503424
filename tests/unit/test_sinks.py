"""Numbers sent to trackers, by the real clients, offline, and read back from what they wrote.

A client that this environment lacks is a skip that says so; `make env` installs two of the four.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from mismatch.cli.options import CHECK
from mismatch.errors import MismatchError
from mismatch.reports import sinks
from mismatch.reports.sinks import CLIENTS, record_of, require_clients, send
from tests.command import mismatch
from tests.reports_fixture import make_report

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tiny-gpt-oss"
K3 = "mismatch/k3_kl"


def needs(tracker: str) -> pytest.MarkDecorator:
    module = CLIENTS[tracker]
    reason = f"client: the client of {tracker} is not installed: pip install '.[{tracker}]'"
    return pytest.mark.skipif(find_spec(module) is None, reason=reason)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("sinks") / "run"
    run.mkdir()
    for name in ("report.json", "tokens.parquet"):
        shutil.copy(EXAMPLE / name, run / name)
    return run


def report_to(tracker: str, run: Path, **environment: str) -> str:
    """The command in an interpreter of its own, for clients leave threads; its standard error."""
    call = ["report", str(run), "--names", "verl", "--log-to", tracker]
    done = subprocess.run(
        [sys.executable, "-m", "mismatch.cli.main", *call],
        cwd=run.parent,
        env={**os.environ, "HOME": str(run.parent), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("verdict: HEALTHY")
    assert "failed" not in done.stderr
    return done.stderr


def expected(run: Path) -> dict[str, float]:
    """Of report.json: ours, and what verl calls it."""
    k3 = json.loads((run / "report.json").read_text())["comparisons"][0]["metrics"]["k3_kl"]
    return {
        K3: k3["value"],
        f"{K3}_low": k3["low"],
        f"{K3}_high": k3["high"],
        "rollout_corr/k3_kl": k3["value"],
        "mismatch/exit_code": 0,
    }


def holds(numbers: dict[str, float], wanted: dict[str, float], rel: float = 1e-12) -> None:
    assert {name: numbers[name] for name in wanted} == pytest.approx(wanted, rel=rel)


@needs("tensorboard")
@pytest.mark.slow
def test_tensorboard_reads_them_back(example: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    report_to("tensorboard", example)
    (file,) = (example / "tensorboard").glob("events.out.tfevents.*")
    numbers, texts = {}, {}
    for record in tf_records(file.read_bytes()):
        for value in Event.FromString(record).summary.value:
            if value.HasField("simple_value"):
                numbers[value.tag] = value.simple_value
            else:
                texts[value.tag.removesuffix("/text_summary")] = value.tensor.string_val[0].decode()
    holds(numbers, expected(example), rel=1e-6)  # float32
    assert texts["verdict"] == "healthy"
    assert texts["model"] == "tiny-gpt-oss"


def tf_records(data: bytes) -> Iterator[bytes]:
    """Length, its checksum, the record, its checksum."""
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + size]
        at += 16 + size


@needs("wandb")
@pytest.mark.slow
def test_wandb_reads_them_back_and_knows_no_more(example: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    report_to("wandb", example, WANDB_MODE="offline", WANDB_PROJECT="of-the-test")
    (file,) = (example / "wandb").glob("offline-run-*/run-*.wandb")
    numbers, config, names = {}, {}, []
    for data in wandb_records(file.read_bytes()):
        record = Record.FromString(data)
        for item in record.history.item:
            numbers["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
        for update in (record.run.config.update, record.config.update):
            config |= {item.key: json.loads(item.value_json) for item in update}
        names += [(record.run.project, record.run.display_name)] if record.run.run_id else []
        assert not record.run.git.remote_url
    holds(numbers, expected(example))
    assert (config["verdict"], config["model"]) == ("healthy", "tiny-gpt-oss")
    assert set(names) == {("of-the-test", "run")}
    assert "--log-to" not in file.read_bytes().decode("latin-1")  # the command line


def wandb_records(data: bytes, block: int = 32768) -> Iterator[bytes]:
    """Seven bytes of header; then pieces as LevelDB's log has them: checksum, length, type."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0:
            return
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


@needs("mlflow")
@pytest.mark.parametrize("address", ["file", ""])
def test_mlflow_reads_them_back(example: Path, address: str) -> None:
    """Also without any setting, where mlflow-skinny's own default store cannot be used."""
    store = example / "ml" if address else example.parent / "mlruns"
    where = {"MLFLOW_TRACKING_URI": f"file://{store}", "MLFLOW_ALLOW_FILE_STORE": "true"}
    report_to("mlflow", example, **(where if address else {}))
    (file,) = store.glob("*/*/metrics/mismatch/k3_kl")
    run = file.parents[2]
    metrics = run / "metrics"
    numbers = {
        path.relative_to(metrics).as_posix(): float(path.read_text().split()[1])
        for path in metrics.rglob("*")
        if path.is_file()
    }
    holds(numbers, expected(example))
    assert (run / "params" / "verdict").read_text() == "healthy"


@needs("trackio")
def test_trackio_reads_them_back(example: Path) -> None:
    report_to("trackio", example, TRACKIO_DIR=str(example / "trackio"), TRACKIO_PROJECT="toy")
    (file,) = (example / "trackio").glob("toy*.db")
    with sqlite3.connect(file) as database:
        ((text,),) = database.execute("SELECT metrics FROM metrics").fetchall()
    holds(json.loads(text), expected(example))


# ---------------------------------------------------------------- without any client


def test_a_client_that_is_missing_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda module: None)
    for tracker, module in CLIENTS.items():
        with pytest.raises(MismatchError, match=module) as caught:
            require_clients([tracker])
        assert caught.value.fix == f"pip install 'train-infer-mismatch[{tracker}]'"
    with pytest.raises(MismatchError, match="no such tracker"):
        require_clients(["wandbb"])


@pytest.mark.parametrize("verb", ["check", "compare", "report"])
def test_a_wrong_tracker_ends_every_command_with_2_and_no_file(tmp_path: Path, verb: str) -> None:
    run = [] if verb == "check" else [EXAMPLE]
    done = mismatch(verb, *run, "--log-to", "wandbb", cwd=tmp_path)
    assert done.returncode == 2
    assert "no such tracker" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_client_that_fails_costs_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CLIENTS, "mlflow", "json")  # a module without what is called
    (message,) = send(["mlflow"], make_report(), tmp_path, None)
    assert message.startswith("--log-to mlflow failed: AttributeError")


def test_every_number_is_finite_and_of_the_headline() -> None:
    report = make_report()
    record = record_of(report, None, None)
    assert record.numbers[K3] == report.comparisons[0].metrics["k3_kl"].value
    assert all(abs(value) < float("inf") for value in record.numbers.values())
    assert record.settings["verdict"] == report.verdict.status


def test_every_tracker_has_an_extra() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(CLIENTS) <= set(project["optional-dependencies"])
    (option,) = (option for option in CHECK if option.name == "log_to")
    assert all(tracker in option.help for tracker in CLIENTS)
