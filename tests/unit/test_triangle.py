"""Two engines and the trainer, on invented numbers: who stands apart, and what is only chance."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from rich.console import Console

from mismatch.analysis.levels import default_thresholds
from mismatch.cli.command import read_config
from mismatch.cli.flags import Flags
from mismatch.cli.options import CHECK
from mismatch.cli.to_spec import engine_names, other_engine
from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError
from mismatch.experiments.engine_pair import (
    FLOOR,
    FLOOR_TEXT,
    MEASURE,
    TRAINER,
    Contrast,
    Triangle,
    other_folder,
    other_spec,
    outlier,
    triangle,
)
from mismatch.metrics import METRICS
from mismatch.pipeline.commands import run_check
from mismatch.pipeline.document import report_from_json, report_to_json, schema
from mismatch.pipeline.scoring_pair import SecondEngine, dry_run_lines
from mismatch.processes.stages import Stages
from mismatch.reports.html import to_html
from mismatch.reports.section import Section, cell_text
from mismatch.reports.sections import square
from mismatch.reports.terminal import print_section
from mismatch.run import store
from mismatch.run.directory import at_work
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec, to_dict
from mismatch.types import PREFILL, Estimate, NotTested, Report, Rollout, Sampling, Scoring
from tests.reports_fixture import make_report, make_tokens
from tests.texts import numbers

A, B = "vllm", "transformers"
PROMPTS, SAMPLES, PROMPT, RESPONSE = 16, 2, 3, 24
LAW = Sampling(max_tokens=RESPONSE, samples_per_prompt=SAMPLES)
UNABLE = "prefill: at T = 1 only"
Noise = dict[str, float]  # party -> how far it stands from the truth, nats
ODD_A: Noise = {A: 0.02, B: 0.004, TRAINER: 0.004}
ALIKE: Noise = {A: 0.01, B: 0.01, TRAINER: 0.01}


def spec_of(law: Sampling = LAW) -> CheckSpec:
    rollout = RolloutSpec(engine=EngineSpec(engine=A, model="m"), sampling=law)
    return CheckSpec(
        rollout=rollout, train=TrainSpec(model="m"), other_engine=EngineSpec(engine=B, model="m")
    )


def fill(
    run_dir: Path, sampler: str, other: str, noise: Noise, seed: int, unable: str = ""
) -> None:
    """One set of tokens, and what the three parties say of it: the truth and their own noise."""
    n = PROMPTS * SAMPLES
    draw = np.random.default_rng(seed)
    ids = draw.integers(5, 500, (n, PROMPT + RESPONSE))
    mask = np.tile(np.arange(PROMPT + RESPONSE) >= PROMPT, n)
    facts = {"engine": sampler, "version": "1", "dtype": "bf16", "logprobs_temperature": 1.0}
    rollout = Rollout(
        token_ids=ids.ravel(),
        offsets=np.arange(n + 1) * (PROMPT + RESPONSE),
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=np.repeat(np.arange(PROMPTS), SAMPLES),
        finish_reason=("length",) * n,
        sampling=LAW,
        fingerprint=facts,
    )
    truth = -0.2 - draw.exponential(1.0, n * RESPONSE)

    def scoring(name: str, party: str, **more: Any) -> Scoring:
        own = noise[party] * draw.standard_normal(len(truth))
        return Scoring(name, rollout.token_ids[rollout.actions], truth + own, more)

    run_dir.mkdir(parents=True, exist_ok=True)
    entries = [to_json(NotTested(PREFILL, f"{sampler}: {UNABLE}"))] * (unable == sampler)
    decode = facts | {"mode": "decode", "prefill": unable != sampler, "not_tested": entries}
    train = {"mode": "train", "dtype": "bf16", "logprobs_temperature": 1.0}
    store.save_rollout(run_dir, rollout)
    store.save_scoring(run_dir, scoring(f"{sampler}:decode", sampler, **decode), rollout)
    store.save_scoring(run_dir, scoring("fsdp", TRAINER, **train), rollout)
    for engine in (sampler, other):
        if engine != unable:
            prefill = facts | {"engine": engine, "mode": "prefill"}
            store.save_scoring(run_dir, scoring(f"{engine}:prefill", engine, **prefill), rollout)


def make(
    run_dir: Path, noise: Noise, noise_of_b: Noise | None = None, seed: int = 0, unable: str = ""
) -> Triangle:
    spec = spec_of()
    fill(run_dir, A, B, noise, seed, unable)
    fill(run_dir / other_folder(spec), B, A, noise_of_b or noise, seed + 1000, unable)
    return triangle(run_dir, spec)


# ---------------------------------------------------------------- who stands apart


@pytest.mark.parametrize("odd", [A, B, TRAINER])
def test_the_party_with_five_times_the_noise_stands_apart(tmp_path: Path, odd: str) -> None:
    noise = dict.fromkeys((A, B, TRAINER), 0.004) | {odd: 0.02}
    result = make(tmp_path, noise)
    assert result.odd == odd
    assert result.factor is not None
    # E|x - y| of two normal errors is their root sum of squares: √(0.02² + 0.004²) / (0.004 √2).
    assert result.factor == pytest.approx(3.6, rel=0.1)
    assert len(result.contrasts) == 12  # three parties, two edges each, two sets of tokens
    first, *_ = result.reason.split(":")
    assert first.startswith("the trainer" if odd == TRAINER else odd)
    assert numbers(result.reason) == [pytest.approx(result.factor, abs=0.1)]


def test_the_factor_is_the_least_over_both_sets_of_tokens(tmp_path: Path) -> None:
    result = make(tmp_path, ODD_A, {A: 0.008, B: 0.004, TRAINER: 0.004})
    assert result.odd == A
    assert result.factor == pytest.approx(1.58, rel=0.1)  # √(0.008² + 0.004²) / (0.004 √2)


@pytest.mark.slow
def test_three_alike_do_not_stand_apart(tmp_path: Path) -> None:
    odd_ones = [make(tmp_path / str(seed), ALIKE, seed=seed).odd for seed in range(8)]
    assert odd_ones == [None] * 8


def decided(factor: float, low: float, low_of_last: float) -> str | None:
    """What is decided of party A whose two edges are ``factor`` times the third, on one set."""
    edges = {
        frozenset((A, B)): factor,
        frozenset((A, TRAINER)): factor,
        frozenset((B, TRAINER)): 1.0,
    }
    contrasts = [
        Contrast(party, other, A, Estimate(0.0, bound, 1.0, 9, 9, 9))
        for party, other, bound in (
            (A, B, low), (A, TRAINER, low_of_last), (B, A, low), (B, TRAINER, -1.0),
            (TRAINER, A, low), (TRAINER, B, -1.0),
        )
    ]  # fmt: skip
    return outlier(contrasts, {A: edges})[0]


def test_both_edges_have_to_be_longer_by_more_than_chance_and_by_a_tenth() -> None:
    assert decided(2.0, 0.1, 0.1) == A
    assert decided(2.0, 0.1, -0.1) is None
    assert decided(1.05, 0.1, 0.1) is None


def test_all_three_agree_where_every_edge_is_rounding(tmp_path: Path) -> None:
    result = make(tmp_path, {A: 2e-6, B: 4e-7, TRAINER: 4e-7})
    assert (result.odd, result.factor) == (None, None)
    reason = (
        "all three agree: on both sets of tokens, mean |delta| of every edge is below 1e-5 nats"
    )
    assert result.reason == reason
    above = make(tmp_path / "above", {A: 2e-4, B: 4e-5, TRAINER: 4e-5})
    assert above.odd == A


def test_what_is_rounding_is_what_the_levels_call_healthy_in_float32() -> None:
    assert default_thresholds()[MEASURE]["fp32"].healthy == FLOOR
    assert float(FLOOR_TEXT) == FLOOR


def test_a_certain_but_small_difference_is_not_odd(tmp_path: Path) -> None:
    result = make(tmp_path, {A: 0.0112, B: 0.01, TRAINER: 0.01})
    lows = [c.difference.low for c in result.contrasts if c.party == A]
    assert any(low is not None and low > 0 for low in lows)  # told from chance
    assert result.odd is None


def test_both_sets_of_tokens_have_to_agree(tmp_path: Path) -> None:
    result = make(tmp_path, ODD_A, {A: 0.004, B: 0.004, TRAINER: 0.02})
    assert result.odd is None
    assert result.reason.startswith("none stands out")


# ---------------------------------------------------------------- the edges


def test_edges_know_who_sampled(tmp_path: Path) -> None:
    result = make(tmp_path, ODD_A)
    by_key = {(edge.parties, edge.tokens, edge.kind): edge.comparison for edge in result.edges}
    assert len(by_key) == 10
    by_law = {key: pair.sampled_by_left for key, pair in by_key.items() if pair is not None}
    assert len(by_law) == 10
    assert {key for key, law in by_law.items() if law} == {
        ((A, B), A, "decode"),
        ((A, TRAINER), A, "decode"),
        ((B, A), B, "decode"),
        ((B, TRAINER), B, "decode"),
    }


def test_an_edge_is_the_comparison_of_its_two_scorings(tmp_path: Path) -> None:
    result = make(tmp_path, ODD_A)
    edge = result.edge(B, A, B, "prefill")
    assert edge is not None
    assert edge.comparison is not None
    second = tmp_path / other_folder(spec_of())
    left, right = (store.load_scoring(second, f"{name}:prefill").logprobs for name in edge.parties)
    for name in ("kl", "logprob_abs_diff_mean"):
        assert edge.comparison.metrics[name].value == pytest.approx(METRICS[name](right - left))
    assert (edge.comparison.left, edge.comparison.right) == (f"{B}:prefill", f"{A}:prefill")


def test_an_engine_that_cannot_rescore_is_not_tested_with_its_reason(tmp_path: Path) -> None:
    result = make(tmp_path, ODD_A, unable=B)
    assert result.odd is None
    assert result.reason.startswith("not tested")
    missing = [edge for edge in result.edges if edge.comparison is None]
    assert all(B in edge.parties for edge in missing)
    assert all(edge.reason == f"{B}: {UNABLE}" for edge in missing)
    assert len(missing) == 5  # what it said while it sampled is compared all the same
    (reason,) = result.not_tested  # one reason, all its edges
    assert reason.endswith(f": {B}: {UNABLE}")
    assert reason.count(" against ") == 5
    assert result.contrasts == ()
    tested = result.edge(A, TRAINER, B, "prefill")
    assert tested is not None
    assert tested.comparison is not None  # the one that can has scored the other's tokens


# ---------------------------------------------------------------- how it is written


def shown(result: Triangle, run: Path) -> Any:
    report = make_report().with_analyses(engines=result)
    facts = {
        name: store.scoring_header(run / side.place, name)["fingerprint"]
        for side in result.sides
        for name in (f"{side.engine}:decode",)
    }
    return replace(report, fingerprints=report.fingerprints | facts)


@pytest.mark.parametrize("unable", ["", B])
def test_the_document_is_strict_and_reads_back(tmp_path: Path, unable: str) -> None:
    report = shown(make(tmp_path, ODD_A, unable=unable), tmp_path)
    document = json.loads(json.dumps(report_to_json(report), allow_nan=False))
    jsonschema.validate(document, schema())
    assert report_from_json(document).result("engines") == report.result("engines")
    del document["engines"]["edges"][0]["reason"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema())


def section(report: Report) -> Section:
    return square.engines(report.result("engines"), report)


@pytest.mark.slow
def test_the_section_names_the_odd_one_and_every_edge(tmp_path: Path) -> None:
    report = shown(make(tmp_path, ODD_A), tmp_path)
    part = section(report)
    assert part.sentences[0].lower().startswith(A)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_section(part, console)
    terminal = console.export_text()
    assert max(map(len, terminal.splitlines())) <= 80
    (edges,) = part.tables
    for row in edges.cells():
        assert cell_text(row[3], edges.columns[3]) in terminal
    assert len(part.parts[0].tables[0].rows) == 6  # three pairs of edges, two sets of tokens


@pytest.mark.slow
def test_three_that_agree_are_written_so(tmp_path: Path) -> None:
    part = section(shown(make(tmp_path, {A: 2e-6, B: 4e-7, TRAINER: 4e-7}), tmp_path))
    assert part.sentences[0].startswith("All three agree")
    assert numbers(part.sentences[0]) == [FLOOR]
    assert FLOOR in numbers(part.parts[0].lead)


@pytest.mark.slow
def test_an_incomplete_triangle_says_what_is_missing(tmp_path: Path) -> None:
    part = section(shown(make(tmp_path, ODD_A, unable=B), tmp_path))
    assert any(row[0].note.startswith("not tested: ") for row in part.tables[0].cells())
    assert any("not tested" in sentence.lower() for sentence in part.sentences)


@pytest.mark.slow
def test_names_of_engines_are_foreign_text(tmp_path: Path) -> None:
    report = shown(make(tmp_path, ODD_A), tmp_path)
    evil = "<b>x</b>"
    rows = tuple(replace(row, version=evil) for row in report.result("engines").sides)
    changed = report.with_analyses(
        engines=replace(report.result("engines"), sides=rows, reason=evil)
    )
    assert evil not in to_html(changed, make_tokens())


# ---------------------------------------------------------------- flags and stages


def flags(**given: Any) -> Flags:
    values: dict[str, Any] = {
        "engine": [A, B], "vllm_python": None, "dtype": "bf16", "engine_arg": None,
        "other_engine_arg": None, "rollout_weights": "as-stored", "verl_config": None,
        "tensor_parallel_size": 1, "max_model_len": None, "gpu_memory_utilization": None,
        "prefill": True, "revision": None, "trust_remote_code": False, "routing": True,
    }  # fmt: skip
    return Flags(values | given)


def test_the_second_engine_has_its_own_arguments() -> None:
    engine = other_engine(flags(other_engine_arg=["max_num_seqs=8"], engine_arg=["seed=1"]), "m")
    assert engine == EngineSpec(engine=B, model="m", args=(("max_num_seqs", 8),))
    assert other_engine(flags(engine=None), "m") is None
    assert engine_names(flags(engine=None)) == ["vllm"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engine": [A, A]}, "given twice"),
        ({"engine": [A, B, A]}, "given 3 times"),
        ({"prefill": False}, "--no-prefill"),
        ({"verl_config": "x.yaml"}, "--verl-config"),
        ({"engine": [A], "other_engine_arg": ["a=1"]}, "with one engine"),
    ],
)
def test_flags_that_do_not_fit_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(MismatchError, match=words):
        other_engine(flags(**given), "m")


@pytest.mark.parametrize("value", ['"vllm"', '["vllm", "sglang"]'])
def test_a_config_file_names_one_engine_or_two(tmp_path: Path, value: str) -> None:
    path = tmp_path / "check.toml"
    path.write_text(f"engine = {value}\n")
    engines = read_config(path, CHECK)["engine"]
    assert engines == (["vllm"] if value == '"vllm"' else ["vllm", "sglang"])


def test_a_spec_with_two_engines_survives_the_disk() -> None:
    assert from_json(CheckSpec, json.loads(json.dumps(to_dict(spec_of())))) == spec_of()


class Quiet:
    @contextmanager
    def stage(self, title: str) -> Iterator[Any]:
        yield lambda line: None

    def note(self, text: str) -> None: ...


class Pretend(Stages):
    """Stages that note who samples and rescores what; ``broken`` engines fail."""

    seen: list[tuple[str, str, list[str]]]
    broken = ""

    def measure(self, passes: Any, sample: bool = True, extra: Any = None) -> None:
        Pretend.seen.append(("jobs", "", [job.run_dir.name for job in extra.jobs]))
        extra.prepare()


def noted(self: Stages, *beside: Any, also: Sequence[Path] = ()) -> None:
    engine = self.spec.rollout.engine.engine
    if engine == Pretend.broken:
        raise MismatchError("out of memory", "use less")
    Pretend.seen.append((engine, self.run_dir.name, [other.name for other in also]))


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    monkeypatch.setattr(Stages, "sample", noted)
    monkeypatch.setattr(Pretend, "seen", [], raising=False)
    monkeypatch.setattr(Pretend, "broken", "")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with at_work(run_dir, "check", spec_of(), "mismatch check") as journal:
        yield Pretend(spec_of(), run_dir, Quiet(), journal)


def test_each_engine_rescores_the_others_tokens_and_one_world_scores_both(staged: Stages) -> None:
    from mismatch.pipeline.scoring_pair import measure_two

    measure_two(staged, [])
    assert Pretend.seen == [
        ("jobs", "", [B]),
        (B, B, ["run"]),  # the second engine samples in its own directory, and scores the first's
        (A, "run", [B]),
    ]
    assert (staged.run_dir / "engines" / B / "spec.json").exists()


def test_a_second_engine_that_fails_is_named(
    staged: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pretend, "broken", B)
    with pytest.raises(MismatchError, match=f"second engine, {B}.*memory") as caught:
        SecondEngine(staged).prepare()
    assert caught.value.fix == "use less"


def test_the_second_engines_run_is_a_plain_check() -> None:
    spec = other_spec(replace(spec_of(), fixes=("fp32",), noise_floor=True))
    assert spec.other_engine is None
    assert spec.fixes == ()
    assert spec.rollout.engine.engine == B
    assert spec.rollout.sampling == LAW
    (line,) = dry_run_lines(spec_of())
    assert 0 < line.index(A) < line.index(B)
    assert dry_run_lines(CheckSpec()) == []


def test_a_check_with_two_engines_reports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    make(run_dir, ODD_A)
    monkeypatch.setattr(Stages, "measure", lambda *_, **__: None)
    report = run_check(replace(spec_of(), noise_floor=False), run_dir, Quiet())
    assert report.result("engines") is not None
    assert report.result("engines").odd == A
    assert f"{B}:decode" in report.fingerprints
    assert report.comparisons[0].rollout == f"{A}:decode"
    assert not any(B in entry.what for entry in report.not_tested)


@pytest.mark.parametrize("name", [f"{B}:decode", f"{A}:prefill", "fsdp"])
def test_a_nan_on_the_second_engines_tokens_is_broken(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    make(run_dir, ALIKE)
    second = run_dir / other_folder(spec_of())
    scoring = store.load_scoring(second, name)
    logprobs = scoring.logprobs.copy()
    logprobs[5] = np.nan
    store.save_scoring(second, replace(scoring, logprobs=logprobs), store.load_rollout(second))
    monkeypatch.setattr(Stages, "measure", lambda *_, **__: None)
    report = run_check(replace(spec_of(), noise_floor=False), run_dir, Quiet())
    assert report.verdict.status == "broken"
    assert report.verdict.correctness.status == "broken"
    assert [check.id for check in report.checks if check.status == "failed"] == ["engines-finite"]
    assert report.result("engines") is None


def test_what_the_second_engine_cannot_do_is_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    make(run_dir, ODD_A, unable=B)
    monkeypatch.setattr(Stages, "measure", lambda *_, **__: None)
    report = run_check(replace(spec_of(), noise_floor=False), run_dir, Quiet())
    (entry,) = [entry for entry in report.not_tested if "T = 1" in entry.reason]  # not per edge
    assert entry.what == "two engines"
