"""Every number is in its range before anything is read or started; no flag is without effect."""

import sys
import time
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from mismatch.cli.main import main
from mismatch.cli.options import CHECK
from mismatch.errors import MismatchError
from mismatch.pipeline.preflight import preflight_rollout, preflight_training, require_ranges
from mismatch.specs import CheckSpec, EngineSpec, Flag, PromptSpec, RolloutSpec, Sampling, TrainSpec

CHECKED = ["check", "--model", "tiny-gpt-oss", "--engine", "transformers"]


def run(arguments, monkeypatch, capsys) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["mismatch", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return ended.value.code, out, err


REFUSED = """
--seed -1; --seed 4294967296; --max-tokens -5; --max-tokens 0; --max-tokens 99999999999
--temperature nan; --temperature inf; --temperature -1; --temperature 101
--top-p nan; --top-p 0; --top-p 1.1; --top-k -2
--samples-per-prompt 0; --samples-per-prompt 9999999; --num-prompts -3; --num-prompts 1000000000000
--nproc-per-node 0; --nproc-per-node -1; --nproc-per-node 100000
--tensor-parallel-size 0; --tensor-parallel-size -1
--gpu-memory-utilization 7; --gpu-memory-utilization nan; --gpu-memory-utilization 0
--max-model-len -1; --max-model-len 1; --micro-batch-tokens 0
--budget-minutes nan; --budget-minutes inf; --budget-minutes 0
--exact-kl -1; --exact-kl-top-k 0; --gradients 0
--server-timeout nan; --server-timeout inf; --server-timeout 0; --server-concurrency 0
"""
CASES = [case.split() for line in REFUSED.strip().splitlines() for case in line.split("; ")]


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry run"])
@pytest.mark.parametrize("flags", CASES, ids=" ".join)
def test_a_number_out_of_range_is_refused_at_once(flags, dry, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    code, _, error = run([*CHECKED, *flags, *dry], monkeypatch, capsys)
    assert code == 2
    assert flags[0] in error
    assert "Traceback" not in error
    assert time.monotonic() - start < 5
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("verb", "flags"),
    [
        ("kernels", ["--time-limit", "nan"]),
        ("kernels", ["--time-limit", "inf"]),
        ("kernels", ["--seed", "-1"]),
        ("compare", ["RUN", "--against", "OLD", "--margin", "nan"]),
        ("corrections", ["RUN", "--batch", "0"]),
    ],
    ids=str,
)
def test_so_it_is_for_other_commands(verb, flags, monkeypatch, capsys):
    code, _, error = run([verb, *flags], monkeypatch, capsys)
    assert code == 2
    assert flags[-2] in error
    assert "Traceback" not in error


NOTHING = {
    "answers without a data set": (["--answer-column", "a"], "--dataset"),
    "prompts' column without a data set": (["--prompt-column", "a"], "--dataset"),
    "split without a data set": (["--dataset-split", "test"], "--dataset"),
    "configuration without a data set": (["--dataset-config", "x"], "--dataset"),
    "budget without fixes": (["--budget-minutes", "3"], "--fix"),
    "no fix": (["--fix", ""], "--fix"),
    "top-k of nothing": (["--exact-kl", "0", "--exact-kl-top-k", "3"], "--exact-kl"),
    "too many built-in prompts": (["--num-prompts", "1000000000"], "--prompts FILE"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_a_flag_without_effect_is_refused(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags, needed = NOTHING[case]
    code, _, error = run([*CHECKED, *flags], monkeypatch, capsys)
    assert code == 2
    assert flags[-2] in error
    assert needed in error


def test_a_margin_without_a_run_to_hold_against_is_refused(monkeypatch, capsys):
    code, _, error = run(["compare", "RUN", "--margin", "0.2"], monkeypatch, capsys)
    assert code == 2
    assert "--margin without --against" in error


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        ([], {"MASTER_PORT": "x"}),
        (["--prompts", "none.jsonl"], {}),
        (["--engine", "sglang"], {}),
        (["--prompts", "ids.jsonl"], {}),
    ],
    ids=["port", "prompts", "engine", "ids"],
)
def test_a_dry_run_refuses_what_a_run_refuses(flags, environment, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.jsonl").write_text(f'{{"prompt_token_ids": [1, {10**20}]}}')
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("mismatch.pipeline.preflight.own_python", lambda engine: None)
    code, _, planned = run([*CHECKED, *flags, "--dry-run"], monkeypatch, capsys)
    assert code == 2
    _, _, refused = run([*CHECKED, *flags], monkeypatch, capsys)
    assert planned.splitlines()[-2:] == refused.splitlines()[-2:]


def test_a_stored_spec_is_held_to_the_same_ranges():
    spec = RolloutSpec(engine=EngineSpec(engine="transformers", model="m"))
    with pytest.raises(MismatchError, match="--max-tokens is -5"):
        preflight_rollout(replace(spec, sampling=Sampling(max_tokens=-5)))
    with pytest.raises(MismatchError, match="--micro-batch-tokens is 0"):
        preflight_training(TrainSpec(model="m", micro_batch_tokens=0), 1)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("mismatch.pipeline.preflight.local_gpus", lambda: 2)
    with pytest.raises(MismatchError, match=r"--nproc-per-node is 3,.*\b2"):
        preflight_training(TrainSpec(model="m"), 3)


def test_every_number_that_a_flag_sets_has_a_range():
    for spec in (CheckSpec, RolloutSpec, EngineSpec, PromptSpec, Sampling, TrainSpec):
        require_ranges(spec())
        for name, hint in get_type_hints(spec, include_extras=True).items():
            kind, *notes = get_args(hint) or (None,)
            numeric = {int, float} & {kind, *get_args(kind)}
            for note in notes:
                if isinstance(note, Flag) and numeric and bool not in (kind, *get_args(kind)):
                    assert note.range is not None, f"{spec.__name__}.{name}"
    assert len(CHECK) > 60
