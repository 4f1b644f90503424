"""Float32 of less than the run, from the command line: of first layers, and of first samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import make
from tests.texts import numbers

from .conftest import Run, check_command

LAYERS = 6
# The command on a machine whose memory lacks one byte for the engine in float32.
SMALL = """
import dataclasses, sys
import mismatch.doctor.plan as planner
from mismatch.cli import session

def small(spec):
    here = planner.inspect_machine()
    whole = planner.memory_of(spec, here).sides[-1]
    assert whole.side.endswith(" in float32")
    ram = {"ram_bytes": whole.needed - 1, "ram_free_bytes": whole.needed - 1}
    return planner.memory_of(spec, dataclasses.replace(here, **ram))

session.memory_of = small
from mismatch.__main__ import main
main()
"""
FLAGS = (
    *("--num-prompts", "8", "--samples-per-prompt", "2", "--max-tokens", "24"),
    *("--nproc-per-node", "1", "--context-length", "0"),
)
pytestmark = [pytest.mark.slow, pytest.mark.grid]


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def cut_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("small")
    model = make("qwen3", place / "model", num_hidden_layers=LAYERS, head_dim=32)
    flags = ("--model", str(model), "--engine", request.param, *FLAGS)
    command = check_command(place / "run", *flags)[3:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MISMATCH_CACHE", str(place / "cache"))
        done = subprocess.run(
            [sys.executable, "-c", SMALL, *command], capture_output=True, text=True, timeout=300
        )
    return Run(place / "run", done.returncode, done.stdout + done.stderr)


def test_the_function_is_checked_on_the_first_layers(cut_run: Run) -> None:
    cut_run.require_judged()
    assert cut_run.checks["implementation-gap"] == "passed", cut_run.output
    check = next(each for each in cut_run.report["checks"] if each["id"] == "implementation-gap")
    assert numbers(check["detail"])[-2:] == [2, LAYERS]
    square = cut_run.report["square"]
    left = [gap["left"] for gap in square["gaps"]]
    assert left[0].endswith(":first-layers:fp32")
    assert left[1:] == ["fsdp:fp32"]
    assert square["unmeasured"] == []
    later = [
        numbers(each["reason"])
        for each in cut_run.report["not_tested"]
        if "later layers" in each["what"] + each["reason"]
    ]
    assert [2, LAYERS] in later


def test_nothing_else_is_compared_with_them(cut_run: Run) -> None:
    names = {path.stem for path in (cut_run.directory / "scores").iterdir()}
    assert sum("first-layers" in name for name in names) == 3
    assert not any("first-layers" in name for name in cut_run.report["fingerprints"])
    pairs = [*cut_run.report["comparisons"], *cut_run.report["noise_floor"]]
    assert "first-layers" not in json.dumps(
        [(p["rollout"], p["train"]) for p in pairs if "rollout" in p]
    )


# The command on a machine on which all samples in float32 would take long.
SLOW = """
import dataclasses
from mismatch.cli import session
import mismatch.doctor.plan as planner

session.memory_of = lambda spec: dataclasses.replace(planner.memory_of(spec), float32_few=True)
from mismatch.__main__ import main
main()
"""


def check_slowly(directory: Path, *flags: str) -> Run:
    command = check_command(directory, "--engine", "transformers", *FLAGS, *flags)[3:]
    done = subprocess.run(
        [sys.executable, "-c", SLOW, *command], capture_output=True, text=True, timeout=300
    )
    return Run(directory, done.returncode, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def few_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("few")
    model = make("qwen3", place / "model", num_hidden_layers=2, head_dim=32)
    return check_slowly(place / "run", "--model", str(model))


def test_both_sides_score_first_samples_in_float32(few_run: Run) -> None:
    few_run.require_judged()
    gaps = {gap["left"]: gap["size"] for gap in few_run.report["square"]["gaps"]}
    assert gaps.keys() == {"transformers:fp32", "fsdp:fp32"}
    prompts, sequences = 8, 16
    counts = {(each["n_prompts"], each["n_sequences"]) for each in gaps.values()}
    assert counts == {(prompts, sequences // 2)}
    assert {few_run.checks[f"implementation-gap{side}"] for side in ("", "-trainer")} == {"passed"}
    unseen = [each["what"] for each in few_run.report["not_tested"]]
    assert sum("other samples" in what for what in unseen) == 2
    assert not {"transformers:fp32", "fsdp:fp32"}.intersection(unseen)


def test_a_run_of_first_samples_goes_on_without_starting_anything(few_run: Run) -> None:
    before = (few_run.directory / "report.json").read_bytes()
    command = ["check", "--resume", str(few_run.directory)]
    done = subprocess.run(
        [sys.executable, "-c", SLOW, *command], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == few_run.code, done.stdout + done.stderr
    assert "fsdp:fp32" not in done.stdout + done.stderr
    square = [
        json.loads(each)["square"]
        for each in (before, (few_run.directory / "report.json").read_bytes())
    ]
    assert square[0]["gaps"] == square[1]["gaps"]


def test_another_function_is_found_on_first_samples(tmp_path: Path) -> None:
    run = check_slowly(tmp_path / "run", "--model", "tiny-gpt-oss", "--attention", "no-sinks")
    run.require_judged()
    assert run.code == 1
    assert run.checks["implementation-gap-trainer"] == "failed", run.output
    assert run.report["verdict"]["status"] == "broken"
