"""The calibration: disjoint blocks, judged by the whole verdict, and kept case by case."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import calibration, calibration_page
from benchmarks.calibration_blocks import Recorded, blocks, cut_scoring, judged
from benchmarks.planted_fault import FAULTS
from mismatch.analysis import displaced, long_sequence, results, square
from mismatch.analysis.diagnosis import pass_checks, ranking
from mismatch.analysis.displaced import LEVELS
from mismatch.pipeline import commands
from mismatch.pipeline.build import Artefacts
from mismatch.types import Routing, Scoring
from tests.texts import numbers
from tests.unit.test_square import SPEC, run_of


def recorded(sizes: dict[str, float] | None = None) -> Recorded:
    run = run_of(sizes or {})
    usable = {
        name: replace(scoring, logprobs=scoring.logprobs - 8.0)
        for name, scoring in run.usable.items()
    }
    sides = usable[run.decode.name], usable[run.train.name]
    return Recorded(Artefacts(run.rollout, usable, *sides, None), SPEC)


def test_a_block_of_prompts_is_a_run_of_its_own() -> None:
    run = recorded()
    block = run.of_prompts(np.array([3, 8, 60])).found
    old = run.found.rollout
    assert block.rollout.n_prompts == 3
    rows = np.isin(old.prompt_index[old.sequence_of_token], [3, 8, 60])[old.actions]
    np.testing.assert_array_equal(block.decode.logprobs, run.found.decode.logprobs[rows])
    assert {len(scoring.logprobs) for scoring in block.scorings.values()} == {
        block.rollout.n_actions
    }


def test_routes_and_entropies_are_cut_with_their_tokens() -> None:
    rollout = recorded().found.rollout
    tokens, actions = len(rollout.token_ids), rollout.n_actions
    ids = np.arange(tokens)[:, None, None]
    routing = Routing((0,), tokens, ids, np.ones(tokens, bool))
    scoring = Scoring("a", np.zeros(actions, np.int64), np.zeros(actions), {},
                      entropy=np.arange(actions) * 1.0, routing=routing)  # fmt: skip
    cut = cut_scoring(scoring, rollout, np.array([5]))
    rows = np.flatnonzero(rollout.prompt_index[rollout.sequence_of_token] == 5)
    assert cut.routing is not None
    assert cut.entropy is not None
    np.testing.assert_array_equal(cut.routing.ids[:, 0, 0], rows)
    np.testing.assert_array_equal(cut.entropy, np.flatnonzero(np.isin(rollout.actions, rows)))


def test_blocks_share_no_prompt_and_each_is_judged() -> None:
    parts = list(blocks(recorded(), 16))
    prompts = [set(part.found.rollout.prompt_index) for part in parts]
    assert [len(prompt) for prompt in prompts] == [16] * 4
    assert len(set.union(*prompts)) == 64
    assert [judged(part)["failed"] for part in parts] == [[]] * 4
    off = list(blocks(recorded({"vllm:decode": 3.0}), 16))
    assert all("excess-engine" in judged(part)["failed"] for part in off)
    assert {judged(part)["correctness"] for part in off} == {"broken"}


def test_a_run_of_one_block_is_judged_whole() -> None:
    (whole,) = blocks(recorded(), 100)
    assert whole.found.rollout.n_prompts == 64


def test_the_cases_of_the_calibration_can_be_made() -> None:
    planted = {case.fault.partition(":")[0] for case in calibration.CASES if case.planted}
    assert planted <= set(FAULTS)  # the others are only known issues of the field
    assert len(planted) >= 5
    assert len({case.name for case in calibration.CASES}) == len(calibration.CASES)
    clean = {case.name for case in calibration.CASES if not case.fault}
    assert {case.of for case in calibration.CASES if case.fault} <= clean


def test_a_recorded_check_ends_before_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "conclude", commands.conclude)  # put back after the test
    monkeypatch.setattr("mismatch.cli.main.main", lambda: None)
    left: list[int] = []
    monkeypatch.setattr("os._exit", left.append)
    exec(calibration.RECORD, {})
    stages: Any = SimpleNamespace(run_dir=tmp_path)
    commands.conclude(stages, None, None)
    assert (tmp_path / calibration.DONE).is_file()
    assert left == [0]


@pytest.mark.slow
def test_a_measurement_that_was_stopped_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case is kept as soon as it is measured, and none is measured twice."""
    state, page = tmp_path / "calibration.json", tmp_path / "calibration.md"
    page.write_text(f"words\n\n{calibration_page.MARK}\nold\n")
    monkeypatch.setattr(calibration, "STATE", state)
    monkeypatch.setattr(calibration_page, "PAGE", page)
    monkeypatch.setattr(calibration_page, "PICTURE", tmp_path / "images" / "a.svg")
    started: list[str] = []

    def measure(case: calibration.Case, options: Any) -> dict[str, Any]:
        if len(started) == 2:
            raise KeyboardInterrupt
        started.append(case.name)
        whole = [judged(part) for part in blocks(recorded())]
        facts = {"date": "2026-01-01", "engine": "vllm", "seconds": 60, "prompts": 64}
        return {**facts, "tokens": 5120, "blocks": whole}

    monkeypatch.setattr(calibration, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["calibration.py", str(tmp_path / "runs")])
    names = [case.name for case in calibration.CASES]
    with pytest.raises(KeyboardInterrupt):
        calibration.main()
    assert list(json.loads(state.read_text())) == names[:2]
    (counted,) = re.findall(r"\*\*(.+) disjoint", page.read_text())
    assert numbers(counted) == [0, 2]
    assert page.read_text().startswith("words\n")
    started.clear()
    with pytest.raises(KeyboardInterrupt):
        calibration.main()
    assert started == names[2:4]


def test_runs_of_default_size_are_counted_by_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "calibration.md"
    page.write_text(calibration_page.MARK)
    monkeypatch.setattr(calibration_page, "PAGE", page)
    monkeypatch.setattr(calibration_page, "PICTURE", tmp_path / "a.svg")
    block = judged(recorded())
    other = block | {"verdict": "inconclusive"}
    made = {"date": "2026-01-01", "seconds": 60, "tokens": 9000, "blocks": [block, block, other]}
    case = next(case for case in calibration.CASES if case.name == "default-llama")
    calibration_page.write({case.name: made}, [case])
    (row,) = [line for line in page.read_text().splitlines() if line.startswith("| llama |")]
    cells = row.strip("| ").split(" | ")
    assert cells[1] == "3,000"
    others = [f"2 {block['verdict']}"] * (block["verdict"] != "healthy") + ["1 inconclusive"]
    assert cells[3] == ", ".join(others)
    (counted,) = [line for line in page.read_text().splitlines() if "INCONCLUSIVE" in line]
    passed = 2 if block["verdict"] in ("healthy", "tolerable") else 0
    assert numbers(counted.partition("of ")[2])[0] == 3
    assert numbers(counted.partition("code 0 in ")[2])[0] == passed


def test_levels_say_where_they_were_measured() -> None:
    for level in LEVELS.values():
        assert 1.0 < level.excess < 2.0
        assert level.gap_bounds(None, None).passed == level.least_gap
        assert (Path(__file__).parents[2] / level.source).is_file()


MODULES = {m.__name__.rpartition(".")[2]: m for m in (displaced, long_sequence, ranking)}
ALSO = {"square": square, "results": results, "pass_checks": pass_checks}


def numbers_of(value: object) -> list[float]:
    """A number, or a tuple of numbers, as a list; of anything else nothing."""
    parts = value if isinstance(value, tuple) else (value,)
    plain = all(isinstance(part, (int, float)) and not isinstance(part, bool) for part in parts)
    return [float(part) for part in parts] if plain else []


def test_every_constant_of_the_rules_stands_in_one_table_with_its_value_and_its_source() -> None:
    text = Path("docs/explain/square.md").read_text()
    said: dict[str, list[float]] = {}
    for line in text.splitlines():
        if not (names := re.findall(r"`([a-z_]+\.\w+)`", line)) or line.count("|") != 4:
            continue
        _, _, value, source, _ = (cell.strip() for cell in line.split("|"))
        assert source, line
        values = [float(Fraction(part.replace(" ", ""))) for part in value.split(", ")]
        if len(values) == 1:
            values *= len(names)
        for name in names:
            count = len(values) if len(names) == 1 else 1
            said[name], values = values[:count], values[count:]
    levels = {f"{of}.{key}": [number] for of, level in LEVELS.items()
              for key, number in asdict(level).items() if key != "source"}  # fmt: skip
    own = {f"{of}.{name}": found for of, module in MODULES.items()
           for name, value in vars(module).items()
           if name.isupper() and (found := numbers_of(value)) and is_of(module, name)}  # fmt: skip
    also = {name: numbers_of(getattr(ALSO[of], key)) for name in said
            for of, _, key in [name.partition(".")] if of in ALSO}  # fmt: skip
    assert len(own) > 10
    assert {name: pytest.approx(value) for name, value in said.items()} == levels | own | also


def is_of(module: Any, name: str) -> bool:
    """Whether a module sets a name itself."""
    return re.search(rf"^{name}\b[^=]*= ", Path(module.__file__).read_text(), re.M) is not None
