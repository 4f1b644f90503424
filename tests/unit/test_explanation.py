"""Experiments of --explain: planned for the leading causes, judged by what goes with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch.analysis.cause_results import Cause, Causes
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.ranking import diagnose
from mismatch.captures import CachePair
from mismatch.codec import from_json, to_json
from mismatch.engines.artefacts import NEW, context_of, measure, pair_of
from mismatch.engines.base import Continued
from mismatch.errors import MismatchError
from mismatch.experiments.confirmation import applied, gone, judged
from mismatch.experiments.explanation import names_of, plan, rank_of, taken
from mismatch.experiments.fixes.catalogue import fix_named
from mismatch.experiments.fixes.context import Context, ModelFacts
from mismatch.experiments.probes import (
    CACHE,
    PROBES,
    RESCORING,
    judged_cache,
    own_rounding,
)
from mismatch.experiments.results import TESTS, Experiment, Explanation
from mismatch.pipeline.commands import wants_experiments
from mismatch.reports.sections.experiments import section
from mismatch.run.directory import load_spec, require_same_spec
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec
from mismatch.types import Check, Estimate, Verdict
from tests import drawn_pair as drawn
from tests.made_run import make_run
from tests.reports_fixture import make_report

SPEC = CheckSpec(
    rollout=RolloutSpec(engine=EngineSpec(engine="vllm", model="m")),
    train=TrainSpec(model="m", attention="user.kernels:flash"),
)
ENGINES = replace(SPEC, train=TrainSpec(model="m"))
PLANTED = replace(SPEC, train=TrainSpec(model="m", attention="no-sinks", layout="packing"))
FACTS = ModelFacts(sinks=True, experts=4)


def suspected(id: str, side: str, *alike: str, effect: float | None = 0.9) -> Causes:
    share = None if effect is None else drawn_share(effect)
    cause = Cause(id, "suspected", side, share, (), alike)  # type: ignore[arg-type]
    return Causes((cause,), (), (), (), 0.1, 0.1)


def drawn_share(value: float) -> Estimate:
    return Estimate(value, value - 0.02, value + 0.02, 1000, 64, 32)


def planned(causes: Causes, spec: CheckSpec = SPEC) -> list[str]:
    rows = plan(spec, Context(spec, FACTS), drawn.draw(0).case(), causes)
    return [experiment.id for experiment, variant in rows if variant is not None]


def probes(case: Case, causes: Causes, broken: bool = False) -> list[Experiment]:
    rows = plan(SPEC, Context(SPEC, FACTS), case, causes, broken=broken)
    return [experiment for experiment, variant in rows if variant is None]


@pytest.mark.parametrize(
    ("asked", "status", "cause", "quick", "wanted"),
    [
        (None, "broken", None, False, True),
        (None, "broken", "suspected", False, True),
        (None, "broken", "confirmed", False, False),
        (None, "broken", None, True, False),
        (None, "inconclusive", None, False, False),
        (False, "broken", None, False, False),
        (True, "healthy", None, False, True),
    ],
)
def test_experiments_follow_where_a_broken_run_has_no_confirmed_cause(
    asked: bool | None, status: str, cause: str | None, quick: bool, wanted: bool
) -> None:
    found = () if cause is None else (Cause("side-off", cause, "engine", None, ()),)  # type: ignore[arg-type]
    failed = Check("excess-engine", "failed", "1.5 times")
    report = replace(
        make_report(),
        verdict=Verdict(status, "", "", ()),  # type: ignore[arg-type]
        checks=(failed,),
    ).with_analyses(causes=Causes(found, (), (), (), 0.01, 1.0))
    spec = replace(CheckSpec(), explain=asked, quick=quick)
    assert wants_experiments(spec, report) is wanted


def experiment_of(
    id: str, share: float, width: float = 0.02, spec: CheckSpec = PLANTED
) -> Experiment:
    test = taken(id, spec)
    assert test is not None
    outcome = "confirmed" if share - width > 0.3 else "ruled out"
    if share + width >= 0.1 and share - width <= 0.3:
        outcome = "undecided"
    return Experiment(id, test.side, (*test.own, *test.wide), outcome, 5.0,  # type: ignore[arg-type]
                      drawn_share(share), wide=test.wide)  # fmt: skip


def test_every_experiment_is_a_fix_and_takes_out_causes_of_the_catalogue() -> None:
    from mismatch.analysis.catalogue import catalogue

    for id, test in TESTS.items():
        assert fix_named(id).id == id
        assert {*test.own, *test.wide} <= catalogue().keys(), id


def test_nothing_is_planned_where_nothing_is_suspected() -> None:
    healthy = diagnose(drawn.draw(3).case(), detectors())
    assert healthy.ranked == ()
    assert planned(healthy) == []
    done = suspected("attention-sinks", "trainer")
    done = replace(done, ranked=(replace(done.ranked[0], status="confirmed"),))
    assert planned(done) == []


def test_only_experiments_that_can_say_something_of_these_causes_are_planned() -> None:
    kernel = suspected("function-differs", "trainer", "attention-sinks", "packing-leak")
    assert set(planned(kernel)) == {"attention-sinks", "plain-attention"}  # nothing is packed
    engine = suspected("function-differs", "engine", "attention-sinks", "rope-config")
    assert planned(engine) == []  # a kernel of the user's may be what "no-sinks" replaces
    assert planned(engine, ENGINES) == ["no-sinks"]  # the trainer imitates the fault
    cache = suspected("decode-vs-prefill", "engine")
    assert planned(cache)[0] == "no-prefix-cache"


def test_the_runs_own_tokens_come_first_then_the_leading_cause() -> None:
    fp8 = replace(SPEC.rollout.engine, args=(("kv_cache_dtype", "fp8"),))
    spec = replace(ENGINES, rollout=replace(SPEC.rollout, engine=fp8))
    causes = suspected("fp8-kv", "either", "attention-sinks", "rope-config")
    order = planned(causes, spec)
    assert order.index("bf16-kv-cache") > order.index("no-sinks")  # its engine samples again
    second = replace(causes.ranked[0], id="bf16-lm-head", side="trainer", alike=())
    two = replace(
        suspected("precision", "trainer"),
        ranked=(second, *suspected("precision", "trainer").ranked),
    )
    assert planned(two)[0] == "fp32-lm-head"


def test_a_cause_that_is_not_suspected_is_not_asked_about() -> None:
    names = names_of(suspected("fp8-kv", "engine", "fp8-kv-tile"))
    assert names == [("fp8-kv", "engine"), ("fp8-kv-tile", "engine")]
    assert rank_of(names, "engine", ("bf16-lm-head",)) is None
    assert rank_of(names, "trainer", ("fp8-kv",)) is None  # the other side's
    assert rank_of(names, "engine", ("fp8-kv-tile", "fp8-kv")) == 0


# ---------------------------------------------------------------- what they say


def test_what_goes_is_measured_on_the_same_tokens_or_by_prompt() -> None:
    fault = drawn.other_function(0, 1.0)
    mended = replace(fault, right=fault.left + 0.25 * fault.delta)
    share = gone(fault, mended)
    assert share.value == pytest.approx(0.75)
    assert share.low == pytest.approx(0.75, abs=1e-6)
    anew = drawn.other_function(5, 1.0)  # the same prompts, other tokens
    other = gone(fault, anew)
    assert abs(other.value) < 0.3
    assert other.low is not None
    assert other.low < 0 < (other.high or 0)


@pytest.mark.parametrize(("left", "outcome"), [(0.05, "confirmed"), (1.0, "ruled out")])
def test_an_experiment_is_judged_by_its_interval(left: float, outcome: str) -> None:
    fault = drawn.other_function(0, 1.0)
    after = replace(fault, right=fault.left + left * fault.delta)
    fp32 = Experiment("fp32", "trainer", ("precision",))
    assert judged(fp32, fault, after, 3.0).outcome == outcome


def test_few_prompts_decide_nothing() -> None:
    fault = drawn.other_function(0, 1.0)
    rng = np.random.default_rng(0)
    noisy = fault.delta * np.where(rng.random(fault.n_prompts) < 0.8, 1.0, 0.0)[fault.prompt]
    fp32 = Experiment("fp32", "trainer", ("precision",))
    assert judged(fp32, fault, replace(fault, right=fault.left + noisy), 1.0).outcome == "undecided"


def test_the_narrowest_experiment_names_the_cause() -> None:
    causes = suspected("function-differs", "trainer", "attention-sinks", "rope-config")
    after, confirmed, ruled_out = applied(
        causes, [experiment_of("attention-sinks", 0.95), experiment_of("plain-attention", 0.96)]
    )
    assert (after.ranked[0].id, after.ranked[0].status) == ("attention-sinks", "confirmed")
    assert (confirmed, ruled_out) == (("attention-sinks",), ())
    assert after.ranked[0].alike == ()


def test_a_wide_experiment_confirms_without_inventing_a_name() -> None:
    causes = suspected("function-differs", "trainer", "attention-sinks", "rope-config")
    after, _, ruled_out = applied(
        causes, [experiment_of("attention-sinks", 0.01), experiment_of("plain-attention", 0.96)]
    )
    assert (after.ranked[0].id, after.ranked[0].status) == ("function-differs", "confirmed")
    assert "attention-sinks" not in after.ranked[0].alike
    assert ruled_out == ("attention-sinks",)


def test_a_cause_of_either_side_needs_both_sides_ruled_out() -> None:
    causes = suspected("attention-sinks", "either")
    sinks = experiment_of("attention-sinks", 0.0)
    assert applied(causes, [sinks])[0].ranked != ()
    after, _, ruled_out = applied(causes, [sinks, experiment_of("no-sinks", 0.0)])
    assert after.ranked == ()
    assert ruled_out == ("attention-sinks",)
    assert after.ruled_out[-1].causes == ("attention-sinks",)
    after, _, _ = applied(causes, [sinks, experiment_of("no-sinks", 0.9)])
    assert (after.ranked[0].side, after.ranked[0].status) == ("engine", "confirmed")


def test_an_experiment_that_is_undecided_changes_nothing() -> None:
    causes = suspected("attention-sinks", "trainer")
    after, confirmed, ruled_out = applied(causes, [experiment_of("attention-sinks", 0.2)])
    assert (after, confirmed, ruled_out) == (causes, (), ())


def test_the_report_says_what_it_confirmed_and_ruled_out_at_what_cost() -> None:
    experiments = (experiment_of("attention-sinks", 0.95), experiment_of("fp32-lm-head", 0.0))
    result = Explanation(experiments, ("attention-sinks",), ("bf16-lm-head",), 41.0)
    assert from_json(Explanation, to_json(result)) == result
    shown = section(result, make_report())
    assert len(shown.tables[0].rows) == 2
    assert "attention-sinks" in shown.sentences[0]
    assert "41 s" in shown.sentences[0]
    assert "bf16-lm-head" in shown.sentences[1]


def test_what_reading_the_cache_changed_is_told_in_its_row() -> None:
    case = drawn.draw(0).case()
    read = judged_cache(ASKED, case, [*pairs(0.0), *pairs(1.0, "warm decode")], 9.0)
    result = Explanation((read,), ("prefix-cache-stale",), (), 41.0)
    assert from_json(Explanation, to_json(result)) == result
    shown = section(result, make_report())
    note = str(shown.tables[0].rows[0])
    assert "warm prompt" in note
    assert "warm decode" in note
    assert "1 experiment" in shown.sentences[0]


def test_cases_of_other_tokens_are_not_taken_for_the_same() -> None:
    first, second = (drawn.draw(seed).case() for seed in (0, 1))
    assert isinstance(first, Case)
    assert gone(first, second).value != pytest.approx(gone(first, first).value)
    assert gone(first, first).value == 0


def test_a_finished_run_may_be_explained_later(tmp_path: Path) -> None:
    """--explain adds to a run, as --fix does; any other setting would mix two runs."""
    run = make_run(tmp_path / "run")
    spec = load_spec(run)
    require_same_spec(run, replace(spec, explain=True))
    with pytest.raises(MismatchError, match="seed"):
        require_same_spec(run, replace(spec, explain=True, seed=spec.seed + 1))


# ---------------------------------------------------------------- a fresh engine


def pairs(moved: float, kind: str = "warm prompt", cached: int = 64) -> list[CachePair]:
    """Eight contexts of six tokens, each moved by that much, nats, give or take a tenth."""
    rng = np.random.default_rng(0)
    cold = -rng.random((8, 6))
    warm = cold + moved * (1 + 0.1 * rng.standard_normal((8, 6)))
    rows = zip(cold.tolist(), warm.tolist(), strict=True)
    return [CachePair(kind, 80, 40, cached, tuple(a), tuple(b)) for a, b in rows]  # type: ignore[arg-type]


ASKED = Experiment(CACHE, "engine", PROBES[CACHE], names="prefix-cache-stale")


@pytest.mark.parametrize(
    ("prompt", "decode", "outcome"),
    [(0.0, 0.0, "ruled out"), (0.0, 1.0, "confirmed"), (1.0, 0.0, "confirmed")],
)
def test_a_warm_cache_is_judged_against_the_engines_own_rounding(
    prompt: float, decode: float, outcome: str
) -> None:
    case = drawn.draw(0).case()
    read = [*pairs(prompt), *pairs(decode, "warm decode")]
    experiment = judged_cache(ASKED, case, read, 9.0)
    assert (experiment.outcome, experiment.seconds, experiment.reason) == (outcome, 9.0, "")
    noise = [*pairs(own_rounding(case)), *pairs(own_rounding(case), "warm decode")]
    assert judged_cache(ASKED, case, noise, 9.0).outcome == "ruled out"


def test_contexts_that_part_at_once_count_as_much_as_those_that_do_not() -> None:
    same, moved = pairs(0.0), pairs(3.0)
    parted = [replace(p, cold=p.cold[:1], warm=p.warm[:1], parts=0) for p in moved]
    case = drawn.draw(0).case()
    assert judged_cache(ASKED, case, [*same[:1], *parted[1:]], 9.0).outcome == "confirmed"


def test_a_decode_that_read_a_broken_cache_is_no_yardstick_for_it() -> None:
    case = drawn.draw(0).case()
    broken = replace(case, engine=replace(case.engine, logprobs=case.engine.logprobs - 3.0))
    assert own_rounding(broken) < 2 * own_rounding(case)


def test_a_cache_that_was_not_read_says_nothing() -> None:
    case = drawn.draw(0).case()
    unread = pairs(1.0, "warm decode", cached=32)  # of the prompt alone
    experiment = judged_cache(ASKED, case, [*pairs(1.0, cached=0), *unread], 9.0)
    assert (experiment.outcome, experiment.evidence) == ("not run", ())
    assert experiment.reason
    half = judged_cache(ASKED, case, [*pairs(0.0), *unread], 9.0)
    assert (half.outcome, half.reason) == ("undecided", "")
    assert [isinstance(item.value, str) for item in half.evidence] == [False, True]
    assert judged_cache(ASKED, case, [*pairs(1.0), *unread], 9.0).outcome == "confirmed"


def test_a_fresh_engine_is_asked_where_decoding_or_its_state_is_in_question() -> None:
    case = drawn.draw(0).case()
    cached = replace(case.engine, fingerprint=case.engine.fingerprint | {"prefix_caching": True})
    with_cache = replace(case, engine=cached)
    decode = suspected("decode-vs-prefill", "engine", "spec-decode", "prefix-cache-stale")
    decode = replace(decode, ranked=(replace(decode.ranked[0], status="confirmed"),))

    def asked(case: Case, causes: Causes, broken: bool = False) -> list[str]:
        return [probe.id for probe in probes(case, causes, broken)]

    assert set(asked(with_cache, decode)) == {CACHE, RESCORING}
    assert asked(case, decode) == [RESCORING]  # the run had no prefix cache
    nothing = replace(decode, ranked=())
    assert asked(with_cache, nothing) == []
    assert set(asked(with_cache, nothing, broken=True)) == {CACHE, RESCORING}
    sinks = suspected("attention-sinks", "trainer")
    assert asked(case, sinks) == [RESCORING]  # the run holds no rescoring
    own = {"vllm:prefill": replace(case.engine, name="vllm:prefill")}
    assert asked(replace(case, others=case.others | own), sinks) == []


def test_an_experiment_names_a_cause_that_no_detector_suspected() -> None:
    fresh = Experiment(RESCORING, "engine", PROBES[RESCORING], "confirmed", 5.0,
                       drawn_share(0.9), names="decode-vs-prefill")  # fmt: skip
    cache = replace(ASKED, outcome="confirmed", seconds=5.0)
    nothing = replace(suspected("precision", "trainer"), ranked=())
    after, confirmed, _ = applied(nothing, [fresh, cache])
    assert confirmed == ("prefix-cache-stale",)  # the narrower name of the same thing
    assert [(c.id, c.status, c.side) for c in after.ranked] == [
        ("prefix-cache-stale", "confirmed", "engine")
    ]
    causes = suspected("decode-vs-prefill", "engine", "prefix-cache-stale")
    after, _, _ = applied(causes, [fresh, cache])
    assert [c.id for c in after.ranked] == ["prefix-cache-stale"]
    missed = replace(fresh, outcome="undecided")
    assert applied(nothing, [missed])[0].ranked == ()


def test_a_fresh_engine_confirms_the_decode_path_and_no_single_part_of_it() -> None:
    onset = suspected("onset", "engine", "fp8-kv-tile", "sliding-window")
    (planned,) = probes(drawn.draw(0).case(), onset)
    fresh = replace(planned, outcome="confirmed", seconds=5.0, gone=drawn_share(0.9))
    after, confirmed, _ = applied(onset, [fresh])
    assert confirmed == ("decode-vs-prefill",)
    assert {c.id: c.status for c in after.ranked} == {
        "decode-vs-prefill": "confirmed", "onset": "suspected",
    }  # fmt: skip


def test_a_cause_that_is_ruled_out_goes_on_under_the_name_of_what_it_could_also_be() -> None:
    causes = suspected("bf16-lm-head", "trainer", "rope-config", "logit-softcap")
    after, _, ruled_out = applied(causes, [experiment_of("fp32-lm-head", 0.0)])
    assert ruled_out == ("bf16-lm-head",)
    assert (after.ranked[0].id, after.ranked[0].alike) == ("rope-config", ("logit-softcap",))


def test_continuations_that_part_are_compared_on_the_cold_ones_token() -> None:
    cold = Continued([5, 6, 7], [{5: -0.1}, {6: -0.2, 8: -2.0}, {7: -0.3}], 0)
    warm = Continued([5, 8, 9], [{5: -0.1}, {8: -0.1, 9: -4.0}, {9: -0.3}], 32)
    pair = pair_of("warm prompt", (40, 40), cold, warm)
    assert (pair.parts, pair.cached, pair.cold) == (1, 32, (-0.1, -0.2))
    assert pair.warm == (-0.1, -4.0)  # at most that likely: it is not among the likeliest
    assert pair_of("warm prompt", (40, 40), cold, cold).parts is None


class Scripted:
    """Continues every context by its length, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, bool]] = []
        self.always = 0

    def continue_greedily(
        self, contexts: list[list[int]], max_tokens: int, read_cache: bool, progress: object
    ) -> list[Continued]:
        self.asked += [(ids, max_tokens, read_cache) for ids in contexts]
        rows = [[len(ids) + n for n in range(max_tokens)] for ids in contexts]
        return [Continued(r, [{t: -0.5} for t in r], 16 * read_cache or self.always) for r in rows]


def test_the_triple_reads_what_prefill_and_what_decode_had_written() -> None:
    engine = Scripted()
    triple = measure(engine, [[1, 2, 3]], 16, lambda *_: None)  # type: ignore[arg-type]
    (first, new, read), (again, _, warm), (longer, _, warm_decode), (last, _, cold) = engine.asked
    assert (read, warm, warm_decode, cold) == (False, True, True, False)
    assert first == again
    assert len(first) > 16  # a whole block can be read
    assert longer == last == first + [len(first) + n for n in range(new)]
    assert new > 16  # a whole block is written by decode
    assert len(longer) + NEW <= context_of(3)
    assert [(p.kind, p.prefilled) for p in triple] == [
        ("warm prompt", len(first)),
        ("warm decode", len(first)),
    ]
    with pytest.raises(MismatchError, match="256"):
        measure(engine, [[1]], 256, lambda *_: None)  # type: ignore[arg-type]
    engine.always = 8
    with pytest.raises(MismatchError, match="cache"):  # a cold pass that is none compares nothing
        measure(engine, [[1, 2, 3]], 16, lambda *_: None)  # type: ignore[arg-type]


def test_a_fresh_engine_does_not_rule_out_weights_that_it_loads_again() -> None:
    """Digests that differ stay named: the same files are wrong in every process."""
    causes = suspected("stale-weights", "engine", "sleep-level-2", "double-load", effect=None)
    reread = Experiment(RESCORING, "engine", PROBES[RESCORING], "ruled out", 5.0, drawn_share(0.0))
    after, _, ruled_out = applied(causes, [reread, experiment_of("regenerate", 0.0)])
    assert [(c.id, c.alike) for c in after.ranked] == [("stale-weights", ())]
    assert {"sleep-level-2", "double-load"} <= set(ruled_out)
