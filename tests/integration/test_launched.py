"""`mismatch score` in a world that another launcher started: two torchrun agents play two nodes.

The argument: a world of two nodes is a world of two ranks, so its scorings are those that
`mismatch score` makes by itself with two ranks, to the last bit; and only rank 0 writes.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from mismatch.errors import MismatchError
from mismatch.processes.launched import launched
from mismatch.run import store

from .conftest import TINY_SAMPLING

pytestmark = pytest.mark.slow


def environment() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    return clean | {"OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Node:
    """A machine: the command that enters it, and the address where all meet."""

    enter: tuple[str, ...] = ()
    address: str = "127.0.0.1"


HERE = Node()


@pytest.fixture
def machines() -> Iterator[tuple[Node, Node]]:
    """Two network namespaces with an address each; without the right to make them, this machine."""
    names, card = [f"mismatch-{os.getpid()}-{number}" for number in (0, 1)], "mm0"
    link = ("link", "add", card, "netns", names[0], "type", "veth")
    commands = [("netns", "add", name) for name in names]
    commands.append((*link, "peer", "name", card, "netns", names[1]))
    for number, name in enumerate(names):
        commands.append(("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", card))
        commands += [("-n", name, "link", "set", device, "up") for device in ("lo", card)]
    try:
        made = [subprocess.run(["ip", *each], capture_output=True).returncode for each in commands]
        enter = ("env", f"GLOO_SOCKET_IFNAME={card}")
        nodes = [Node(("ip", "netns", "exec", name, *enter), "10.77.0.1") for name in names]
        yield (nodes[0], nodes[1]) if not any(made) else (HERE, HERE)
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    except FileNotFoundError:  # no iproute2
        yield HERE, HERE


def node(
    number: int, port: int, cwd: Path, *flags: str, machine: Node = HERE
) -> subprocess.Popen[str]:
    """One torchrun agent of two, with a rank of its own."""
    meeting = ("--master-addr", machine.address, "--master-port", str(port))
    launch = ("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1", *meeting)
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "mismatch", "score"]
    return subprocess.Popen(
        [*machine.enter, *command, "run", *flags],
        cwd=cwd, env=environment(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ended(nodes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    return [(n.returncode, output) for n in nodes for output in [n.communicate(timeout=240)[0]]]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sampled")
    command = (sys.executable, "-m", "mismatch", "rollout", *TINY_SAMPLING, "--out", "run")
    subprocess.run(command, cwd=directory, env=environment(), check=True, capture_output=True)
    return directory / "run"


@pytest.fixture
def folder(sampled: Path, tmp_path: Path) -> Path:
    shutil.copytree(sampled, tmp_path / "run")
    return tmp_path


@pytest.mark.grid
def test_two_nodes_score_as_two_ranks_of_one_do(tiny_run: Path, tmp_path: Path) -> None:
    """The check made its own world of two ranks."""
    alone = store.load_scoring(tiny_run, "fsdp")
    scored = ("fsdp*", "reference*", "report*", "comparison*", "tokens*")
    shutil.copytree(tiny_run, tmp_path / "run", ignore=shutil.ignore_patterns(*scored))
    flags = ("--no-noise-floor", "--attention", alone.fingerprint["attention"])
    port = free_port()
    results = ended([node(number, port, tmp_path, *flags) for number in (0, 1)])
    assert [code for code, _ in results] == [0, 0], results
    assert "2 ranks" in results[0][1]
    assert results[1][1].count("Compare:") == 0  # one speaker
    scoring = store.load_scoring(tmp_path / "run", "fsdp")
    assert scoring.fingerprint["world_size"] == alone.fingerprint["world_size"] == 2
    assert np.array_equal(scoring.logprobs, alone.logprobs)


def rank_of(agent: subprocess.Popen[str]) -> psutil.Process:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        for child in psutil.Process(agent.pid).children():
            with suppress(psutil.Error):  # not yet its own program, or gone again
                if "mismatch" in " ".join(child.cmdline()):
                    return child
        time.sleep(0.05)
    raise AssertionError("no rank was started")


@pytest.mark.grid
def test_a_killed_rank_ends_the_others_and_the_same_command_goes_on(folder: Path) -> None:
    port = free_port()
    flags = ("--attention", "sink-sdpa", "--micro-batch-tokens", "64")
    nodes = [node(number, port, folder, *flags) for number in (0, 1)]
    victim = rank_of(nodes[1])
    done = folder / "run" / store.scoring_file("fsdp")
    end = time.monotonic() + 200
    while not done.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    results = ended(nodes)
    assert all(code != 0 for code, _ in results), results
    assert "lost the others" in results[0][1] or "SIGTERM" in results[0][1], results[0][1][-3000:]
    before = done.read_bytes()
    port = free_port()
    results = ended([node(number, port, folder, *flags) for number in (0, 1)])
    assert [code for code, _ in results] == [0, 0], results
    assert done.read_bytes() == before
    names = set(store.scoring_names(folder / "run"))
    assert {"fsdp", "fsdp:regrouped", "fsdp:repeated", "fsdp:grad", "reference:fp32"} <= names
    again = ended([node(number, port, folder, *flags) for number in (0, 1)])
    assert [code for code, _ in again] == [0, 0], again
    assert "there already" in again[0][1]


# Its ranks need each other, as those of verl and TRL do; what it returns is known.
GROUPED = """
import os
import numpy as np
import torch
import torch.distributed as dist
from mismatch.trainers.protocol import Facts, Scored

class Grouped:
    def __init__(self, job):
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        if os.environ["RANK"] == "1" and job.precision in os.environ.get("FAILS", ""):
            raise RuntimeError(f"no kernels for {job.precision}")

    def score(self, tokens, variant):
        ranks = torch.tensor(dist.get_rank())
        dist.all_reduce(ranks)
        assert int(ranks) == 1  # 0 + 1
        own = tuple(range(dist.get_rank(), len(tokens.lengths), 2))
        rows = [tokens.sequences()[n][tokens.masks()[n]] for n in own]
        return Scored(own, tuple(-(row % 7).astype(np.float32) for row in rows))

    def facts(self):
        return Facts("grouped", "bf16")
"""
THEIRS = ("fsdp", "fsdp:regrouped", "fsdp:repeated", "fsdp:alone")


def require_known(run: Path, *names: str) -> None:
    rollout = store.load_rollout(run)
    for name in names:
        scoring = store.load_scoring(run, name)
        assert np.array_equal(scoring.logprobs, -(rollout.token_ids[rollout.actions] % 7))
        assert scoring.fingerprint["world_size"] == 2


@pytest.mark.grid
def test_a_trainers_own_code_and_our_passes_run_on_two_machines(
    folder: Path, machines: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 fails on one rank and is left out; what was scored before is there."""
    (folder / "their.py").write_text(GROUPED)
    monkeypatch.setenv("FAILS", "fp32")
    flags, port = ("--scorer", "their:Grouped"), free_port()
    pairs = list(enumerate(machines))
    results = ended([node(n, port, folder, *flags, machine=each) for n, each in pairs])
    assert [code for code, _ in results] == [0, 0], results
    run = folder / "run"
    require_known(run, *THEIRS)
    ours = {name for name in store.scoring_names(run) if name.startswith(("reference", "plain"))}
    assert ours == {"reference:fp32", "plain:bf16"}
    assert "fsdp:fp32" not in store.scoring_names(run)
    assert "for fp32" in (run / "errors" / "pass-fsdp-fp32.json").read_text()


@pytest.mark.grid
@pytest.mark.parametrize("fails", ["", "own"])
def test_a_trainers_own_code_runs_under_srun(
    folder: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of two tasks, by the variables that srun sets."""
    (folder / "their.py").write_text(GROUPED)
    monkeypatch.setenv("FAILS", fails)
    step = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    step |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0"}
    command = [sys.executable, "-m", "mismatch", "score", "run", "--scorer", "their:Grouped"]
    tasks = [
        subprocess.Popen(
            [*command, "--no-noise-floor"],
            cwd=folder, env=environment() | step | {"SLURM_PROCID": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    results = ended(tasks)
    if fails:
        assert [code for code, _ in results] == [2, 2]
        assert all("for own" in output for _, output in results), results
    else:
        assert [code for code, _ in results] == [0, 0], results
        require_known(folder / "run", "fsdp")


def test_the_variables_of_srun_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert launched() is None
    monkeypatch.setenv("SLURM_PROCID", "9")  # in a batch script: no step, no world
    assert launched() is None
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    with pytest.raises(MismatchError, match="MASTER_ADDR"):
        launched()
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "")
    monkeypatch.delenv("MASTER_PORT")
    launch = launched()
    assert launch is not None
    assert (launch.rank, launch.size, launch.local_size) == (9, 16, 8)
    assert os.environ["LOCAL_RANK"] == "1"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        del os.environ[name]
