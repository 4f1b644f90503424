"""Two real engines against each other, and one as the other's upgrade."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Run, check_command, run_check

pytestmark = pytest.mark.slow

FLAGS = (
    *("--engine", "transformers", "--engine", "vllm", "--num-prompts", "8"),
    *("--samples-per-prompt", "2", "--max-tokens", "24", "--no-noise-floor", "--exact-kl", "0"),
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = run_check(tmp_path_factory.mktemp("both") / "run", *FLAGS)
    assert (run.code, run.report["verdict"]["correctness"]["status"]) == (1, "inconclusive")
    return run


def test_each_edge_is_measured_and_the_law_that_sampled_is_known(both: Run) -> None:
    section = both.report["engines"]
    assert [side["engine"] for side in section["sides"]] == ["transformers", "vllm"]
    assert not {"broken", "unfit"} & {side["verdict"]["status"] for side in section["sides"]}
    assert section["not_tested"] == []
    assert len(section["edges"]) == 10
    for edge in section["edges"]:
        comparison = edge["comparison"]
        assert comparison["sampled_by_left"] == (edge["kind"] == "decode")
        assert 0 < comparison["metrics"]["logprob_abs_diff_mean"]["value"] < 0.02
        assert comparison["left"].startswith(edge["parties"][0])


def test_vllm_stands_apart_from_two_that_share_a_framework(both: Run) -> None:
    """The trainer and the transformers engine run the same modules; vLLM has kernels of its own."""
    section = both.report["engines"]
    assert section["odd"] == "vllm"


def test_what_is_there_is_not_made_again(both: Run) -> None:
    before = {path: path.stat().st_mtime_ns for path in both.directory.rglob("*.parquet")}
    resume = [sys.executable, "-m", "mismatch", "check", "--resume", str(both.directory)]
    done = subprocess.run(resume, capture_output=True, text=True, timeout=540)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rescores" not in done.stdout
    after = {path: path.stat().st_mtime_ns for path in both.directory.rglob("*.parquet")}
    assert after == before


def test_one_engine_as_the_upgrade_of_the_other(both: Run, tmp_path: Path) -> None:
    new = both.directory / "engines" / "vllm"
    out = tmp_path / "against"
    line = ["compare", str(new), "--against", str(both.directory), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "mismatch", *line], capture_output=True, text=True, timeout=540
    )
    document = json.loads((out / "against.json").read_text())
    assert done.returncode == int(document["fails"])
    assert document["prompts"] == 8
    assert document["same_tokens"] is False
    assert document["outcome"] == "worse"  # vLLM is farther from the trainer than transformers is
    changed = {setting["name"]: (setting["old"], setting["new"]) for setting in document["changed"]}
    assert changed["engine"] == ("transformers", "vllm")
    assert not any(setting["where"] == "trainer" for setting in document["changed"])


def test_the_same_engine_twice_is_refused(tmp_path: Path) -> None:
    line = check_command(tmp_path / "run", "--engine", "vllm", "--engine", "vllm")
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--against" in done.stderr.partition("fix:")[2]
