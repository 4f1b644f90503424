"""The first layers of a model, in real vLLM and FSDP2: both sides agree, and the report says it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mismatch.models import resolve_model
from tests.texts import numbers

from .conftest import Run, check_command, run_check

FEW = (
    *("--num-prompts", "8", "--samples-per-prompt", "2", "--max-tokens", "24"),
    *("--nproc-per-node", "1"),
)
pytestmark = [pytest.mark.slow, pytest.mark.grid]


@pytest.fixture(scope="module")
def cut_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MISMATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        place = tmp_path_factory.mktemp("layers") / "run"
        run = run_check(place, "--layers", "2", *FEW)
    run.require_judged()
    return run


def test_it_is_tolerable_at_best_and_says_why(cut_run: Run) -> None:
    report = cut_run.report
    assert report["verdict"]["status"] == "tolerable", cut_run.output
    check = next(check for check in report["checks"] if check["id"] == "whole-model")
    assert check["status"] == "warning"
    assert numbers(check["detail"]) == [2, 4]
    assert check["detail"] in report["verdict"]["reason"]
    page = (cut_run.directory / "report.html").read_text()
    assert page.count(check["detail"]) > 1  # among the facts, and as the reason
    missing = [entry["what"] for entry in report["not_tested"]]
    assert [2, 3] in [numbers(what) for what in missing if what.startswith("layers")]
    assert report["run"]["mean_reward"] is None


def test_both_sides_ran_the_same_layers(cut_run: Run) -> None:
    sides = cut_run.report["fingerprints"]
    assert sides["vllm:decode"]["layers"] == [2, 4]
    assert cut_run.checks["source-files"] == cut_run.checks["weights-as-loaded"] == "passed"
    names = load_file(Path(resolve_model("tiny-gpt-oss")) / "model.safetensors")
    first = [name for name in names if ".layers.2." not in name and ".layers.3." not in name]
    held = {sides[name]["weights_parameters"] for name in ("vllm:decode", "fsdp")}
    assert held == {len(first)}
    routes = cut_run.report["comparisons"][0]["routing"]
    assert routes["routing_disagree_layer"]["value"] < 0.1


def test_a_run_goes_on_with_its_own_layers_alone(cut_run: Run) -> None:
    spec = cut_run.report["run"]["spec"]
    assert spec["rollout"]["engine"]["layers"] == spec["train"]["layers"] == 2
    command = [*check_command(cut_run.directory, "--resume", str(cut_run.directory)), *FEW]
    command = [part for part in command if part not in ("--out", str(cut_run.directory))]
    command.insert(command.index("--resume") + 1, str(cut_run.directory))
    done = subprocess.run([*command, "--layers", "3"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    line = next(line for line in done.stderr.splitlines() if "rollout.engine.layers" in line)
    assert numbers(line) == [2, 3]
