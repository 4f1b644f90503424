"""Localisation: known truths of errors, sources, gains and what they explain."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast, get_args

import numpy as np
import pytest
import torch

from mismatch.analysis.catalogue import catalogue
from mismatch.analysis.cause_results import Cause, Causes, Evidence
from mismatch.analysis.causes import led_by, of_sides_at_fault, without
from mismatch.analysis.diagnosis.loaded_weights import NOT_OF_CHECKPOINT
from mismatch.analysis.results import Finding, Square, Standing
from mismatch.errors import MismatchError
from mismatch.features.locate import step
from mismatch.features.locate.errors import BEYOND, ROUNDING, Sums, site_errors
from mismatch.features.locate.judge import (
    explained,
    from_document,
    groups_of,
    judge,
    removed,
    to_document,
    with_first,
)
from mismatch.features.locate.kinds import READS, causes_of, excluded_by, fault_of, kind_of
from mismatch.features.locate.plan import actions_of, part_of, select
from mismatch.features.locate.results import (
    LAYER_SITES,
    TITLES,
    Group,
    Kind,
    Location,
    Sequence,
    SideLocation,
    Site,
    SiteError,
)
from mismatch.specs import CheckSpec, Sampling
from mismatch.types import Estimate, NotTested
from tests import checkpoints
from tests.texts import numbers

LAYERS = 2
SITES = (
    Site(None, "embedding"),
    *(Site(layer, name) for layer in range(LAYERS) for name in LAYER_SITES),
    Site(None, "final_norm"),
)


def chain(new: dict[str, float], sequences: int = 4, seed: int = 0) -> dict[Site, list[Sums]]:
    """A model whose modules pass on what enters and add noise of a known relative size."""
    draw = np.random.default_rng(seed)
    sums: dict[Site, list[Sums]] = {site: [] for site in SITES}
    for _ in range(sequences):
        reference = draw.standard_normal((40, 16))
        own = reference.copy()
        for site in SITES:
            same = own
            own = same + draw.standard_normal(same.shape) * new.get(site.key, 1e-3)
            sums[site].append(Sums.of(*map(torch.from_numpy, (own, reference, same))))
    return sums


def errors(
    side: dict[Site, list[Sums]], plain: dict[Site, list[Sums]] | None = None
) -> dict[str, SiteError]:
    return {error.location.key: error for error in site_errors(side, plain, "bf16")}


def test_the_planted_module_is_the_only_source() -> None:
    sites = errors(chain({"1.rope_q": 0.05}), chain({}, seed=1))
    assert [key for key, error in sites.items() if error.role == "source"] == ["1.rope_q"]
    assert sites["1.rope_q"].new == pytest.approx(0.05, rel=0.05)
    assert sites["1.attention"].error > 0.04  # it is passed on to everything behind it
    assert sites["0.mlp"].error < 0.02


def test_a_clean_side_has_no_source() -> None:
    for seed in range(20):
        sites = errors(chain({}, seed=seed), chain({}, seed=seed + 100))
        assert not [error for error in sites.values() if error.role == "source"], seed


def test_what_the_precision_costs_there_is_no_source() -> None:
    rough = {"0.attention": 0.05}
    sites = errors(chain(rough), chain(rough, seed=3))
    assert sites["0.attention"].role != "source"
    assert sites["0.attention"].excess == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize(
    ("site", "role", "apart", "source"),
    [
        ("q", "trainer", 0.0, False),
        ("q", "engine", 1.4, True),  # rounds as much, in other places: no product does
        ("input_norm", "trainer", 1.4, True),
        ("input_norm", "engine", 1.4, False),  # norms are put together in several ways
        ("input_norm", "engine", 2.0, True),
        ("attention", "trainer", 1.4, False),  # its kernel is not the plain forward's
        ("attention", "trainer", 2.0, True),
        ("q", "", 2.0, False),  # nobody asked
    ],
)
def test_a_module_that_rounds_otherwise_is_a_source_whatever_its_size(
    site: str, role: str, apart: float, source: bool
) -> None:
    """On the same input; the plain forward's module rounds by 2^-8 there."""
    draw, parts, size = np.random.default_rng(1), list[Sums](), 2.0**-8
    for _ in range(4):
        same = torch.from_numpy(draw.standard_normal((40, 16)))
        plain = same * (1 + size * torch.from_numpy(draw.standard_normal(same.shape)))
        own = plain + apart * size * same * torch.from_numpy(draw.standard_normal(same.shape))
        parts.append(Sums.of(own, same, same, plain=plain))
    (error,) = site_errors({Site(0, site): parts}, {Site(0, site): parts}, "bf16", role)
    assert error.unlike == pytest.approx(apart, rel=0.1)
    assert error.lowest_excess < BEYOND
    assert (error.role == "source") is source
    few = [
        parts[0],
        *(Sums.of(torch.ones(3), torch.ones(3), torch.ones(3), None, torch.ones(3)),) * 3,
    ]
    (error,) = site_errors({Site(0, site): few}, None, "bf16", role)
    assert error.role != "source"  # one sequence alone makes none


@pytest.mark.parametrize("router", [False, True])
def test_an_engines_kernel_of_experts_may_round_at_other_steps(router: bool) -> None:
    same = torch.ones(8, 4)
    far = Sums.of(same * (1 + 2**-7), same, same, plain=same * (1 - 2**-8))
    side = {Site(0, "mlp"): [far] * 2} | ({Site(0, "router"): [Sums()] * 2} if router else {})
    found = {e.site: e.role for e in site_errors(side, side, "bf16", "engine")}
    assert (found["mlp"] == "source") is not router


def test_one_sequence_alone_makes_no_source() -> None:
    side = chain({})
    side[Site(0, "mlp")][0] = chain({"0.mlp": 0.5})[Site(0, "mlp")][0]
    sites = errors(side, chain({}, seed=5))
    assert sites["0.mlp"].excess > BEYOND > sites["0.mlp"].lowest_excess
    assert sites["0.mlp"].role != "source"


def test_nothing_is_below_the_dtypes_rounding() -> None:
    """A module that a plain forward does without any error costs one rounding all the same."""
    tiny = dict.fromkeys((site.key for site in SITES), 0.0)
    sites = errors(chain({**tiny, "0.residual": ROUNDING["bf16"]}), chain(tiny))
    assert sites["0.residual"].excess == pytest.approx(1.0, rel=0.1)


def test_choices_between_equals_do_not_count() -> None:
    same = torch.ones(4, 3)
    own = same.clone()
    own[0] = 9.0
    counted = torch.tensor([False, True, True, True])
    assert Sums.of(own, same, same, counted).new == 0
    assert Sums.of(own, same, same).new > 0


def test_a_module_that_gives_no_numbers_is_the_source_and_what_follows_is_not() -> None:
    reference, broken = torch.ones(3, 2), torch.ones(3, 2)
    broken[1, 0] = torch.nan
    first, after = Sums.of(broken, reference, reference), Sums.of(broken, reference, broken)
    assert first.new == np.inf
    assert after.new == 0
    side = chain({})
    side[Site(0, "mlp")] = [first] * 4
    sites = errors(side, chain({}))
    assert [key for key, error in sites.items() if error.role == "source"] == ["0.mlp"]
    group = Group("mlp", (0,), np.inf, np.nan, np.nan)
    verdict = judge(location(group))
    assert verdict.status == "located"
    assert from_document(to_document(location(group))).sides[0].source is not None


def test_sources_of_one_module_are_one_group() -> None:
    side = chain({"0.attention": 0.05, "1.attention": 0.06, "1.mlp": 0.2})
    groups = [group for group, _ in groups_of(site_errors(side, chain({}), "bf16"))]
    assert [(group.site, group.layers) for group in groups] == [
        ("attention", (0, 1)),
        ("mlp", (1,)),
    ]
    assert numbers(groups[0].place) == [0, 1]


def test_rope_of_queries_and_keys_is_one_source() -> None:
    side = site_errors(chain({"1.rope_q": 0.05, "1.rope_k": 0.05}), chain({}), "bf16")
    ((group, sites),) = groups_of(side)
    assert (group.site, group.layers) == ("rope_q", (1,))
    assert [site.key for site in sites] == ["1.rope_q", "1.rope_k"]
    ((group, _),) = groups_of(site_errors(chain({"1.rope_k": 0.05}), chain({}), "bf16"))
    assert group.site == "rope_k"


def test_sources_that_matter_together_alone_are_named_by_the_first() -> None:
    result = location(Group("q", (0,), 9.0, -0.5, -0.2), Group("k", (0,), 9.0, -0.5, -0.2))
    assert result.sides[0].source is None
    together = with_first(replace(result.sides[0], explained=0.9, removed=0.8))
    assert together.source == together.groups[0]


def test_explained_and_removed_are_shares() -> None:
    end = np.array([1.0, -2.0, 0.5])
    assert explained(end, end) == 1.0
    assert explained(end, 0 * end) == 0.0
    assert explained(end, -end) == pytest.approx(-3.0)
    assert removed(end, 0 * end) == 1.0
    assert removed(end, end) == 0.0


def location(*groups: Group, distance: float = 0.01) -> Location:
    side = SideLocation(
        "fsdp", "trainer", "bf16", distance, 0.01, 0.0,
        tuple(site_errors(chain({}), None, "bf16")), groups,
    )  # fmt: skip
    return Location(
        "tiny", "/m", (Sequence(0, 40, "worst"),), 30, (with_first(side),),
        (NotTested("the modules of sglang", "no hooks reach them yet", "use --engine vllm"),),
    )  # fmt: skip


def test_the_first_source_is_the_first_that_matters() -> None:
    idle, real = Group("q", (0,), 9.0, 0.001, 0.002), Group("mlp", (1,), 50.0, 0.9, 0.95)
    assert location(idle, real).sides[0].source == real
    assert judge(location(idle, real)).status == "located"
    assert judge(location(idle)).status == "none"
    hidden = replace(idle, moves=0.3)  # by the rounding of what follows
    assert location(hidden, real).sides[0].source == hidden
    assert judge(location()).code == 0


def test_a_side_that_is_off_without_a_source_is_not_clean() -> None:
    verdict = judge(location(distance=0.05))
    assert (verdict.status, verdict.code) == ("unlocated", 1)


def with_distances(own: tuple[float, ...], why: str) -> Location:
    """Of sequences that were taken as ``why`` says, a letter each; a plain forward is at 0.01."""
    result = location(distance=float(np.mean(own)))
    taken = tuple(
        Sequence(n, 40, "worst" if letter == "w" else "random") for n, letter in enumerate(why)
    )
    side = replace(result.sides[0], distances=own, plain_distances=(0.01,) * len(own))
    return replace(result, sequences=taken, sides=(side,))


def test_sequences_that_were_chosen_for_their_errors_do_not_put_a_side_off() -> None:
    unlucky = with_distances((0.3, 0.2, 0.01, 0.01), "wwrr")
    assert judge(unlucky).status == "none"
    assert judge(with_distances((0.01, 0.01, 0.3, 0.01, 0.01), "wwrrr")).status == "none"
    off = with_distances((0.03, 0.03, 0.03, 0.03), "wwrr")
    assert (judge(off).status, judge(off).code) == ("unlocated", 1)


def test_what_is_not_what_the_run_recorded_is_never_clean() -> None:
    result = location()
    other = replace(result, sides=(replace(result.sides[0], held=0.1),))
    assert (judge(other).status, judge(other).code) == ("unlocated", 1)
    assert 0.1 in numbers(judge(other).reason)
    within = replace(result.sides[0], held=0.005)  # a plain forward's distance from what was held
    near = replace(result, sides=(within,))
    assert judge(near).status == "none"


def test_without_a_side_nothing_was_measured() -> None:
    with pytest.raises(MismatchError):
        judge(replace(location(), sides=()))


def test_an_engine_that_cannot_be_located_is_said_and_never_clears_a_broken_run() -> None:
    sound = judge(location())
    assert (sound.status, sound.code) == ("none", 0)
    assert "engine" in sound.reason
    broken = judge(replace(location(), broken=True))
    assert (broken.status, broken.code) == ("unlocated", 1)
    both = replace(location().sides[0], name="vllm:prefill", role="engine")
    seen = replace(location(), broken=True, sides=(both, *location().sides))
    assert (judge(seen).status, "engine" in judge(seen).reason) == ("none", False)


def test_the_document_comes_back() -> None:
    result = location(Group("mlp", (1,), 50.0, 0.9, 0.95))
    document = to_document(result)
    assert from_document(document) == result
    assert document["verdict"]["status"] == "located"
    with pytest.raises(MismatchError):
        from_document({**document, "schema": "mismatch.locate/0"})
    with pytest.raises(MismatchError):
        from_document({key: value for key, value in document.items() if key != "sides"})


def test_worst_sequences_are_taken_and_keep_their_beginning() -> None:
    rollout = checkpoints.rollout()
    delta = np.zeros(rollout.n_actions)
    owner = rollout.sequence_of_token[rollout.actions]
    delta[owner == 3] = 0.5
    chosen = select(rollout, delta, 2, 20)
    assert [sequence.index for sequence in chosen if sequence.why == "worst"] == [3]
    assert len(chosen) == 2
    part = part_of(rollout, chosen)
    assert part.n_sequences == 2
    assert int(np.diff(part.offsets).max()) <= 20
    np.testing.assert_array_equal(
        rollout.token_ids[rollout.actions][actions_of(rollout, chosen)],
        part.token_ids[part.actions],
    )


def test_the_law_is_that_of_all_tokens() -> None:
    rollout = checkpoints.rollout(sampling=Sampling(temperature=0.7, top_p=0.8, top_k=20))
    law = part_of(rollout, select(rollout, None, 2, 40)).sampling
    assert not law.truncates
    assert law.temperature == 0.7


def test_sequences_that_begin_without_actions_are_refused() -> None:
    with pytest.raises(MismatchError):
        select(checkpoints.rollout(), None, 2, 2)


@pytest.mark.parametrize("site", SITES)
def test_keys_come_back_in_order(site: Site) -> None:
    assert Site.of(site.key) == site
    assert sorted({*SITES}, key=Site.order) == list(SITES)


# ---------------------------------------------------------------- what differs there, as a cause

K_BIAS, SINKS = "model.layers.1.self_attn.k_proj.bias", "model.layers.1.self_attn.sinks"
DIGESTS = {name: [number, 2, 3, 4, 5, 6] for number, name in enumerate((K_BIAS, SINKS))}


def side(group: Group, role: Literal["engine", "trainer"], dtype: str) -> SideLocation:
    name = "fsdp" if role == "trainer" else "vllm:prefill"
    return with_first(SideLocation(name, role, dtype, 0.01, None, 0.0, (), (group,)))


def square(engine_gap: Standing, trainer_gap: Standing) -> Square:
    number = Estimate(1e-3, 1e-3, 1e-3, 9, 9, 9)
    findings = (
        Finding("either", "gap", "vllm:fp32", number, 1e-6, engine_gap),
        Finding("trainer", "gap", "fsdp:fp32", number, 1e-6, trainer_gap),
    )
    return Square("cpu", True, (), (), None, findings, (), {})


@pytest.mark.parametrize(
    ("site", "differ", "role", "dtype", "gaps", "kind"),
    [
        ("k", K_BIAS, "engine", "fp32", ("beyond", "within"), "weights"),
        ("mlp", SINKS, "engine", "fp32", ("beyond", "within"), "function"),  # of another module
        ("attention", SINKS, "trainer", "bf16", ("within", "within"), "weights"),
        ("rope_q", K_BIAS, "engine", "fp32", ("beyond", "within"), "function"),
        ("attention", "", "engine", "bf16", ("within", "beyond"), "rounding"),
        ("attention", "", "trainer", "bf16", ("within", "beyond"), None),  # its function may differ
    ],
)
def test_what_differs_is_said_by_evidence(
    site: str,
    differ: str,
    role: Literal["engine", "trainer"],
    dtype: str,
    gaps: tuple[Standing, Standing],
    kind: str | None,
) -> None:
    ours = {"weights": DIGESTS | ({differ: [9, 9, 9, 9, 9, 9]} if differ else {})}
    found = side(Group(site, (1,), 90.0, 0.9, 0.9), role, dtype)
    assert kind_of(found, ours, {"weights": DIGESTS}, square(*gaps)) == kind
    assert kind_of(found, ours, {"weights": DIGESTS}, None) in (kind, None)


def test_a_projection_has_no_function_but_its_weights_unless_those_in_memory_are_known() -> None:
    engine, trainer = ({"weights": DIGESTS} for _ in range(2))
    found = side(Group("k", (1,), 90.0, 0.9, 0.9), "engine", "fp32")
    assert kind_of(found, {}, trainer, None) == "weights"
    assert kind_of(found, engine, trainer, None) == "weights"  # equal as read from disk
    assert kind_of(found, engine | {"weights_in_memory": True}, trainer, None) == "function"
    assert kind_of(replace(found, role="trainer"), engine, trainer, None) == "function"


def located_cause(
    kind: Kind | None, role: Literal["engine", "trainer"] = "engine", share: float = 0.9
) -> Cause:
    found = replace(side(Group("attention", (1,), 90.0, share, share), role, "fp32"), kind=kind)
    found = replace(found, fault=fault_of(found, {}, {}))
    (cause,) = causes_of(replace(location(), sides=(found,)))
    return cause


def ranked(*causes: Cause) -> Causes:
    return Causes(causes, (), (), (), 0.01, 0.1)


SHARE = Estimate(0.8, 0.7, 0.9, 9, 9, 9)


def test_a_module_that_was_found_leads_and_what_only_guessed_goes() -> None:
    vague = Cause("side-off", "suspected", "either", SHARE, ())
    other = Cause("row-pairing", "confirmed", "trainer", SHARE, ())
    found = located_cause("function")
    first, second = led_by(ranked(vague, other), [found]).ranked
    assert (first.id, first.side, first.status, first.effect) == (
        "function-differs", "either", "confirmed", SHARE,
    )  # fmt: skip
    assert numbers(str(first.evidence[0].value)) == [1]
    assert second == other


def right(role: Literal["engine", "trainer"], dtype: str, excess: float = 1.3) -> SideLocation:
    """A side none of whose modules differs."""
    site = SiteError(0, "mlp", 0.01, 0.01, 0.01, excess, excess, "passed on")
    name = "fsdp" if role == "trainer" else "vllm:prefill"
    return SideLocation(name, role, dtype, 0.01, None, 0.0, (site,))


def test_a_side_whose_modules_are_right_alone_has_no_other_function_or_weights() -> None:
    """What only a batch, a cache or its start can do is left; of the engine alone nothing goes."""
    both = replace(location(), sides=(right("engine", "fp32"), right("trainer", "fp32")))
    names = ("norm-eps", "packing-leak")
    vague = Cause("function-differs", "suspected", "trainer", SHARE, (), names)
    stated = Cause("rope-config", "confirmed", "engine", SHARE, (), fact=True)
    after = without(ranked(vague, stated), "locate", excluded_by(both))
    first, second = after.ranked
    assert (first.id, first.alike) == ("side-off", ("packing-leak",))
    assert first.evidence[-1].value == pytest.approx(1.3)
    assert second == stated
    (looked,) = after.ruled_out
    assert looked.detector == "locate"
    assert {"weights-differ", "norm-eps", "attention-sinks"} <= set(looked.causes)
    assert not {"rope-config", "packing-leak", "decode-vs-prefill"} & set(looked.causes)
    alone = excluded_by(replace(both, sides=both.sides[:1]))
    assert without(ranked(vague), "locate", alone) == ranked(vague)
    either = replace(vague, side="either")
    assert without(ranked(either), "locate", alone).ranked == (either,)  # the trainer may be it
    assert without(ranked(either), "locate", excluded_by(both)).ranked[0].id == "side-off"


def test_what_has_a_source_or_was_not_run_in_float32_excludes_no_function() -> None:
    with_source = side(Group("mlp", (1,), 90.0, 0.9, 0.9), "engine", "fp32")
    assert excluded_by(replace(location(), sides=(with_source,))) == ()
    rough = replace(location(), sides=(right("engine", "bf16"),))
    assert excluded_by(rough) == ()
    (other,) = excluded_by(replace(rough, alike=True))
    assert "rounding-differs" in other.causes
    assert "function-differs" not in other.causes


def test_a_module_that_rounds_otherwise_is_confirmed_with_its_distance() -> None:
    group = Group("q", (0, 1), 1.2, 0.01, 0.02, 0.2, unlike=1.1)
    found = replace(side(group, "trainer", "bf16"), kind="rounding")
    (cause,) = causes_of(replace(location(), sides=(found,)))
    assert (cause.id, cause.side, cause.status) == ("rounding-differs", "trainer", "confirmed")
    assert cause.evidence[1].value == pytest.approx(1.1)
    assert numbers(judge(replace(location(), sides=(found,))).reason) == [0, 1, 1.1]


def test_the_other_sides_finding_stays() -> None:
    trainer = Cause("side-off", "suspected", "trainer", SHARE, ())
    assert trainer in led_by(ranked(trainer), [located_cause("function")]).ranked
    voted = replace(trainer, side="engine")  # by a third implementation
    assert [c.side for c in led_by(ranked(voted), [located_cause("function")]).ranked] == ["engine"]


@pytest.mark.parametrize(
    ("gaps", "sides"),
    [
        (("within", "within"), []),
        (("beyond", "within"), ["either"]),
        (("within", "beyond"), ["trainer"]),
        (("beyond", "beyond"), ["either", "trainer"]),
    ],
)
def test_a_module_names_no_cause_on_a_side_that_is_right(
    gaps: tuple[Standing, Standing], sides: list[str]
) -> None:
    both = [located_cause("function"), located_cause("function", "trainer")]
    assert [cause.side for cause in of_sides_at_fault(both, square(*gaps))] == sides
    assert of_sides_at_fault(both, None) == []


def test_the_side_that_is_farther_off_comes_first_though_its_share_is_not_known() -> None:
    """Rounding of the run's precision drowns the share of what float32 shows."""
    near = side(Group("mlp", (1,), 90.0, 0.9, 0.9), "engine", "fp32")
    far = replace(side(Group("attention", (1,), 90.0, 0.9, 0.9), "trainer", "fp32"), distance=0.3)
    both = replace(location(), sides=tuple(replace(s, kind="function") for s in (near, far)))
    found = causes_of(both)
    assert [cause.side for cause in found] == ["trainer", "either"]
    small = Cause("side-off", "suspected", "either", replace(SHARE, value=0.01), ())
    assert [cause.side for cause in led_by(ranked(small), found).ranked] == ["trainer", "either"]
    little = replace(small, side="trainer")
    assert [cause.side for cause in led_by(ranked(little), found).ranked] == ["trainer", "either"]


@pytest.mark.parametrize("site", [name for name in TITLES if name != "mlp"])
def test_advice_names_fields_that_the_site_reads_and_the_model_has(site: str) -> None:
    found = replace(
        side(Group(site, (1,), 90.0, 0.9, 0.9), "engine", "fp32"), kind=cast("Any", "function")
    )
    fields = {field for reads in READS.values() for field in reads.fields}
    for has in (sorted(fields), ["rms_norm_eps", "sliding_window"], []):
        (cause,) = causes_of(replace(location(), sides=(found,), fields=tuple(has)))
        named = {field for field in fields if re.search(rf"\b{field}\b", cause.advice)}
        assert named == set(READS[site].fields) & set(has)


def test_no_cause_is_named_that_the_model_cannot_have() -> None:
    found = replace(
        side(Group("attention", (1,), 90.0, 0.9, 0.9), "trainer", "fp32"),
        kind=cast("Any", "function"),
    )
    cannot = ("attention-sinks", "packing-leak")
    (cause,) = causes_of(replace(location(), sides=(found,), impossible=cannot))
    assert cause.alike
    assert not {*cause.alike} & {*cannot}


def test_what_a_side_leaves_out_of_the_checkpoint_is_its_fault() -> None:
    group = Group("q", (0, 1), 90.0, 0.9, 0.9, form="no-qk-norm")
    found = side(group, "engine", "fp32")
    normed = {"weights": {"model.layers.1.self_attn.q_norm.weight": [1, 2, 3]}}
    assert kind_of(replace(found, groups=(replace(group, form=""),)), normed, normed, None) is None
    assert kind_of(found, normed, normed, None) == "function"
    found = replace(found, kind="function", fault=fault_of(found, normed, normed))
    (cause,) = causes_of(replace(location(), sides=(found,)))
    assert (cause.id, cause.side, cause.status) == ("function-differs", "engine", "confirmed")
    assert "q_norm" in cause.advice


def test_weights_that_equal_the_files_on_both_sides_differ_in_the_engine_alone() -> None:
    same = {"weights": DIGESTS}
    found = replace(side(Group("k", (1,), 90.0, 0.9, 0.9), "engine", "fp32"), kind="weights")
    assert fault_of(found, same, same) == "engine"  # as read from disk
    other = {"weights": DIGESTS | {K_BIAS: [9, 9, 9, 9, 9, 9]}}
    assert fault_of(found, other, same) == "either"
    held = other | {"adapter_held_otherwise": [K_BIAS]}
    assert fault_of(found, held, same) == "engine"
    of_files = {NOT_OF_CHECKPOINT: []}, {NOT_OF_CHECKPOINT: [K_BIAS]}
    assert fault_of(found, other | of_files[0], same | of_files[1]) == "trainer"


def test_modules_that_computed_something_else_than_the_run_name_no_cause() -> None:
    found = side(Group("attention", (1,), 90.0, 0.9, 0.9), "engine", "fp32")
    assert causes_of(replace(location(), sides=(found,)))
    assert not causes_of(replace(location(), sides=(replace(found, held=0.5),)))


def test_a_fact_stays_first_and_takes_the_module_as_evidence() -> None:
    listed = (Evidence("what differs", "1 of 71 parameters differ"),)
    fact = Cause("experts-differ", "suspected", "either", None, listed, fact=True)
    vague = Cause("side-off", "suspected", "either", SHARE, ())
    (only,) = led_by(ranked(fact, vague), [located_cause("weights")]).ranked
    assert (only.id, only.status, only.effect) == ("experts-differ", "confirmed", SHARE)
    assert only.evidence[0] == listed[0]
    assert len(only.evidence) > 1
    first, second = led_by(ranked(fact), [located_cause("function")]).ranked
    assert (first, second.id) == (fact, "function-differs")


def test_a_cause_that_the_module_could_be_keeps_its_name() -> None:
    window = Cause("sliding-window", "suspected", "either", SHARE, ())
    shift = Cause("misalignment", "suspected", "engine", SHARE, ())
    first, second = led_by(ranked(shift, window), [located_cause("function")]).ranked
    assert (first.id, second) == ("sliding-window", shift)


def test_a_source_of_little_effect_stays_suspected_and_every_kind_has_its_page() -> None:
    assert located_cause("rounding", share=0.2).status == "suspected"
    assert located_cause("rounding").side == "engine"
    assert located_cause("function", "trainer").side == "trainer"
    for kind in (*get_args(Kind), None):
        cause = located_cause(kind)
        assert {cause.id, *cause.alike} <= set(catalogue())


@pytest.mark.parametrize(
    ("gaps", "needed"), [(("beyond", "within"), True), (("within", "beyond"), False)]
)
def test_an_engine_that_cannot_be_recorded_ends_it_only_where_the_engine_may_be_wrong(
    gaps: tuple[Standing, Standing], needed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(step, "square_of", lambda *_: square(*gaps))
    monkeypatch.setattr(step, "locate_in", lambda *_, **given: asked.append(given))
    monkeypatch.setattr(step.manifest, "is_current", lambda *_: False)
    stages = SimpleNamespace(run_dir=tmp_path, spec=CheckSpec(), narrator=None)
    step.locate_failed(cast("Any", stages))
    assert [given["both"] for given in asked] == [needed]
    assert asked[0]["gap"] is not None
