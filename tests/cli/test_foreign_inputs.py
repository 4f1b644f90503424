"""Every command over a stranger's run or recipe: nothing is run, overwritten or waited for.

The rows of the table of tests/foreign.py that take a run meet all attacks on a run here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..command import mismatch
from ..foreign import INPUTS, call
from ..made_run import make_run
from ..unit.test_verl_config import PRINTED

RUNS = [
    (command, row) for command, rows in INPUTS.items() for row in rows.values() if row.kind == "run"
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("finished") / "run")
    done = mismatch("compare", run)
    assert done.returncode in (0, 1), done.stderr
    return run


def link_file(name: str) -> Callable[[Path, Path], None]:
    def attack(run: Path, victim: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(victim / "mine")

    return attack


def link_folder(name: str) -> Callable[[Path, Path], None]:
    """Replace a folder of the run by a link to a copy of it, so that all readers are content."""

    def attack(run: Path, victim: Path) -> None:
        if (run / name).exists():
            shutil.move(run / name, victim / name)
        else:
            (victim / name).mkdir()
        (run / name).symlink_to(victim / name)

    return attack


def pipe(name: str) -> Callable[[Path, Path], None]:
    """Replace a file by a pipe, which a reader would wait for."""

    def attack(run: Path, victim: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return attack


def entry(name: str) -> Callable[[Path, Path], None]:
    def attack(run: Path, victim: Path) -> None:
        document = json.loads((run / "manifest.json").read_text())
        made = {"sha256": "", "bytes": 1, "schema": "", "made_by": "", "inputs": {}}
        document["artefacts"][name] = made
        (run / "manifest.json").write_text(json.dumps(document))

    return attack


# A name that a writer could have guessed, what commands write, and what they read.
ATTACKS: dict[str, Callable[[Path, Path], None]] = {
    "link at a temporary name": link_file(".manifest.json.4711.partial"),
    "link at report.html": link_file("report.html"),
    "link at scores/": link_folder("scores"),
    "pipe at manifest.json": pipe("manifest.json"),
    "entry of two lines": entry("report.json\n::error::mine"),
}
MORE: dict[str, Callable[[Path, Path], None]] = {
    **{f"link at {name}": link_file(name) for name in ("spec.json", "run.json", "manifest.json")},
    **{f"link at {name}": link_file(name) for name in ("report.json", "locate.json")},
    **{f"pipe at {name}": pipe(name) for name in ("spec.json", "run.json", "report.json")},
    **{f"link at {name}/": link_folder(name) for name in ("logs", "jobs", "fixes")},
    "entry ../mine": entry("../mine"),
    "entry /mine": entry("/mine"),
}


@pytest.mark.parametrize(
    "attack", [*ATTACKS, *(pytest.param(name, marks=pytest.mark.grid) for name in MORE)]
)
def test_no_command_goes_through_a_strangers_run(
    attack: str, finished: Path, tmp_path: Path
) -> None:
    for number, (command, row) in enumerate(RUNS):
        folder, victim = tmp_path / f"{number}", tmp_path / f"victim-{number}"
        folder.mkdir()
        victim.mkdir()
        (victim / "mine").write_text("mine")
        shutil.copytree(finished, folder / "run")
        (ATTACKS | MORE)[attack](folder / "run", victim)
        before = files_of(victim)
        done = call(command, row, folder / "run", folder, GOOD=finished)
        code, said, second = done.returncode, done.stdout + done.stderr, "GOOD" in row.line
        if attack.startswith("link"):
            assert code == 2, (command, row, said)
            assert "symbolic link" in said, (command, row, said)
        elif not attack.startswith("pipe"):  # not every command reads every file
            assert code == 2 or not second, (command, row, said)
        assert files_of(victim) == before, (command, row)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_is_written_is_its_owners_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        run = make_run(tmp_path / "run")
        assert mismatch("compare", run).returncode in (0, 1)
    finally:
        os.umask(old)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {path.name: oct(path.stat().st_mode & 0o077) for path in files} == {
        path.name: "0o0" for path in files
    }


# What a recipe that people download may ask for, and what the user has to type to have it.
CODE_OF_VERL = {
    "model.trust_remote_code: true": "--trust-remote-code",
    "model.override_config: {attn_implementation: 'evil:f'}": "--attention",
    "model.override_config: {attn_implementation: org/kernels}": "--attention",
    "rollout.engine_kwargs: {vllm: {worker_cls: evil.Worker}}": "--engine-arg",
    "rollout.engine_kwargs: {vllm: {logits_processors: ['evil:P']}}": "--engine-arg",
    "rollout.engine_kwargs: {vllm: {kv_transfer_config: {kv_connector_module_path: evil}}}": (
        "--engine-arg"
    ),
}
CODE_OF_TRL = {
    "trust_remote_code: true": "--trust-remote-code",
    "attn_implementation: 'evil:f'": "--attention",
    "attn_implementation: org/kernels": "--attention",
    "model_init_kwargs: {attn_implementation: 'evil:f'}": "--attention",
}


def first(asked: dict[str, str], number: int) -> list[Any]:
    """Return the first cases, and the others for the longer grid: a plan imports torch."""
    return [
        pytest.param(each, marks=[pytest.mark.grid] * (at >= number))
        for at, each in enumerate(asked)
    ]


@pytest.mark.parametrize("asked", first(dict(reversed(CODE_OF_VERL.items())), 2))
def test_a_verl_config_runs_no_code_that_nobody_asked_for(asked: str, tmp_path: Path) -> None:
    place, _, value = asked.partition(": ")
    tree = yaml.safe_load(PRINTED)
    tree["actor_rollout_ref"]["rollout"] |= {"tensor_model_parallel_size": 1, "dtype": "bfloat16"}
    section, key = place.split(".")
    tree["actor_rollout_ref"][section][key] = yaml.safe_load(value)
    refused(["--framework-config", yaml.safe_dump(tree)], CODE_OF_VERL[asked], tmp_path)


@pytest.mark.parametrize("asked", first(dict(reversed(CODE_OF_TRL.items())), 1))
def test_a_trl_config_runs_no_code_that_nobody_asked_for(asked: str, tmp_path: Path) -> None:
    text = f"model_name_or_path: tiny-gpt-oss\nmax_completion_length: 8\n{asked}\n"
    refused(["--framework-config", text], CODE_OF_TRL[asked], tmp_path)


def refused(given: list[str], flag: str, folder: Path) -> None:
    """Plan a check of a file, in a folder with the module that it names: nothing imports that."""
    (folder / "evil.py").write_text("open('ran', 'w').close()\ndef f(): pass\nWorker = P = f\n")
    (folder / "recipe.yaml").write_text(given[1])
    command = ["check", given[0], "recipe.yaml", "--model", "tiny-gpt-oss", "--dry-run"]
    done = mismatch(*command, cwd=folder)
    assert "Traceback" not in done.stderr
    assert not (folder / "ran").exists()
    assert f"needs {flag}" in " ".join((done.stdout + done.stderr).split())


# Your own code, by the flag that names it: a plan looks the package up, and imports nothing.
OWN_CODE = {
    "check": ("--scorer", "--attention", "--experts-implementation", "--environment"),
    "loop": ("--attention", "--reward"),
    "sync-probe": ("--push",),
}


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        pytest.param(command, flag, marks=[pytest.mark.grid] * (command == "loop"))
        for command, flags in OWN_CODE.items()
        for flag in flags
    ],
)
def test_a_plan_imports_no_module_of_the_user(command: str, flag: str, tmp_path: Path) -> None:
    (tmp_path / "evil").mkdir()
    for name in ("__init__", "inner"):
        text = f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef f(*a, **k): pass\n"
        (tmp_path / "evil" / f"{name}.py").write_text(text)
    flags = ["--model", "tiny-gpt-oss", "--engine", "transformers", "--dry-run"]
    done = mismatch(command, *flags, flag, "evil.inner:f", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
    if flag == "--attention" and command == "check":
        done = mismatch(command, *flags, flag, "absent.inner:f", cwd=tmp_path)
        assert done.returncode == 2
        assert "absent" in done.stderr
