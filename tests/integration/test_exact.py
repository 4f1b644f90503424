"""Level EXACT on pairs that really exist here; planted changes are named, module by module."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mismatch.run import store
from tests.command import mismatch
from tests.exact_pair import EXPECTED, PLANTS
from tests.integration.conftest import Run, run_check

TINY = (
    *(
        "--model",
        "tiny-gpt-oss",
        "--engine",
        "transformers",
        "--nproc-per-node",
        "1",
        "--depth",
        "quick",
    ),
    *("--num-prompts", "6", "--samples-per-prompt", "2", "--max-tokens", "16"),
    *("--context-length", "0", "--micro-batch-tokens", "1", "--fail-on", "broken"),
)


def pairs_of(run: Run) -> dict[str, Any]:
    exact = run.report["exact"]
    return {pair["what"]: pair for pair in (*exact["pairs"], *exact["others"])}


def first_unequal(folder: Path, dtype: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.exact_pair", str(folder), dtype]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=env)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.grid)])
def test_an_exact_pair_is_equal_and_each_planted_change_is_named(
    tmp_path: Path, dtype: str
) -> None:
    """Engine and trainer in one process; one change at a time, on either side."""
    expected = {"both nothing": EXPECTED["nothing"]}
    for side in ("engine", "trainer"):
        expected |= {f"{side} {name}": EXPECTED[name] for name in PLANTS}
    assert first_unequal(tmp_path, dtype) == expected


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_check_of_the_exact_pair_counts_no_unequal_token(tmp_path: Path, dtype: str) -> None:
    run = run_check(tmp_path / "run", *TINY, "--dtype", dtype, "--train-dtype", dtype)
    run.require_judged()
    pairs = pairs_of(run)
    prefill = pairs["engine's prefill / trainer"]
    assert (prefill["unequal"], prefill["n"]) == (0, pairs["engine / trainer"]["n"])
    assert pairs["trainer: repeated"]["unequal"] == pairs["weights"]["unequal"] == 0
    sides = ("--left", "transformers:prefill", "--right", "fsdp", "--fail-on", "broken")
    command = [sys.executable, "-m", "mismatch", "compare", str(run.directory), *sides]
    done = subprocess.run([*command, "--require", "exact"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    located = [
        sys.executable,
        "-m",
        "mismatch",
        "locate",
        str(run.directory),
        "--exact",
        "--format",
        "json",
    ]
    found = subprocess.run(located, capture_output=True, text=True, timeout=500)
    phases = {each["phase"]: each for each in json.loads(found.stdout)["phases"]}
    assert not any(site["unequal_values"] for site in phases["prefill"]["sites"]), found.stderr
    assert phases["prefill"]["as_run"] == [phases["prefill"]["tokens"]] * 2
    assert phases["decode"]["tokens"] == phases["prefill"]["tokens"]


@pytest.mark.slow
@pytest.mark.grid
def test_batches_are_probed_and_a_fix_for_equal_bits_is_counted(tmp_path: Path) -> None:
    """On this machine's kernels, whatever they do: the counts are those of the scorings."""
    run = run_check(tmp_path / "run", *TINY, "--batch-probe", "6", "--fix", "exact")
    run.require_judged()
    probe = run.report["batch_probe"]
    assert probe["sequences"] == 6
    repeated = [pair for pair in probe["pairs"] if pair["what"].endswith("repeated")]
    assert {pair["left"].split(":")[0] for pair in repeated} == {"engine", "trainer"}
    assert all(pair["unequal"] == 0 < pair["n"] for pair in repeated)
    (fix,) = run.report["exact_fixes"]["fixes"]
    before = pairs_of(run)["engine / trainer"]
    assert (fix["before"]["unequal"], fix["before"]["n"]) == (before["unequal"], before["n"])
    sides = [
        store.load_scoring(run.directory / "fixes" / "exact", name)
        for name in ("transformers:decode", "fix:exact")
    ]
    assert fix["after"]["unequal"] == int((sides[0].logprobs != sides[1].logprobs).sum())
    assert min(*fix["engine_s"], *fix["trainer_s"]) > 0
    page = (run.directory / "report.html").read_text()
    assert 'id="batch-probe"' in page
    assert 'id="exact-fixes"' in page


@pytest.mark.slow
@pytest.mark.grid
def test_a_dry_run_says_what_excludes_equal_bits() -> None:
    done = mismatch("check", "--model", "tiny-gpt-oss", "--train-dtype", "fp32", "--dry-run")
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "--train-dtype alike" in shown
    assert shown.index("excluded") < shown.rindex("it fits")


@pytest.mark.slow
@pytest.mark.grid
def test_vllm_on_a_cpu_is_counted_and_its_first_module_is_named(
    default_run: Run, tmp_path: Path
) -> None:
    """No promise of equal bits: only that the count is the scorings' own, and a module is named."""
    sides = [store.load_scoring(default_run.directory, name) for name in ("vllm:decode", "fsdp")]
    unequal = int((sides[0].logprobs != sides[1].logprobs).sum())
    pair = pairs_of(default_run)["engine / trainer"]
    assert (pair["unequal"], pair["n"]) == (unequal, len(sides[0].logprobs))
    run = tmp_path / "run"
    shutil.copytree(default_run.directory, run)
    command = [sys.executable, "-m", "mismatch", "locate", str(run), "--exact", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    document = json.loads(done.stdout)
    (prefill,) = document["phases"]
    sites = prefill["sites"]
    assert {"head", "logprobs", "embedding"} <= {site["site"] for site in sites}
    off = [site for site in sites if site["unequal_values"]]
    assert done.returncode == int(bool(off)), done.stderr
    assert not off or off[0]["operation"] in document["verdict"]["reason"]
    (missing,) = document["not_tested"]
    assert "decodes" in missing["what"]
    assert (run / "report.html").read_text().count('id="locate-exact-prefill"') == 1
