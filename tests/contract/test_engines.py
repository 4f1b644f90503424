"""The contract of every engine: same tests, same prompts, vLLM, SGLang and transformers alike.

The argument: in float32 an engine's logprobs are those of a plain forward under the law that it was
told to sample from. So decode equals prefill, temperature and truncation are what the fingerprint
says, and the captured experts are the router's, whatever batching, chunks and preemption did. Of
engines that give whole distributions these are of that law too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from mismatch.captures import LIKELIEST, priority
from mismatch.engines.base import UNTESTED
from mismatch.engines.registry import engine_class
from mismatch.processes.launch import engine_python, interpreter_environment, own_python
from mismatch.run import store
from mismatch.specs import EngineSpec, PromptSpec, RolloutSpec
from mismatch.types import PREFILL, NotTested, Sampling
from tests.conftest import grid
from tests.contract.conftest import (
    LAWS,
    MODEL,
    PENALISED,
    PLAIN,
    PROMPTS,
    Reference,
    Run,
    installed,
    reported,
    rescores,
    work,
)

Runs = Callable[[str, str], Run]
ENGINES = ("vllm", "sglang", "transformers")
SAME_IN_FP32 = 1e-4
UNABLE = {"sglang": {"deterministic", "distributions"}}  # what it says it cannot do
# Two experts this close (router logits) may swap places by float32 rounding alone, and what follows
# them in the sequence then differs by more than rounding. About one row in ten thousand is.
TIE = 1e-5

# SGLang has the trainer itself to agree with in `make test` (integration/test_sglang.py).
every_engine = pytest.mark.parametrize("engine", grid(ENGINES, "vllm", "transformers"))
# One start of an engine per law; `make test` takes those of which no other shows the same.
SHOWN = (*(("vllm", law) for law in ("plain", "truncated")), ("transformers", "plain"))
EVERY_LAW = [(engine, law) for engine in ENGINES for law in LAWS if law != "chunked"]
every_law = pytest.mark.parametrize(("engine", "law"), grid(EVERY_LAW, *SHOWN))
# SGLang gives no whole distributions.
DISTRIBUTIONS = [(engine, law) for engine in ("vllm", "transformers") for law in LAWS]
every_distribution = pytest.mark.parametrize(("engine", "law"), grid(DISTRIBUTIONS, *SHOWN))
POSITIONS = 512


def law_logprobs(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The sampling law in float64 numpy, written apart from the product's."""
    logits = logits / (sampling.temperature or 1.0)
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    if sampling.temperature == 0 or not sampling.truncates:
        return np.log(probs)
    for row in probs:
        ranked = np.argsort(-row)[: sampling.top_k or None]
        ranked = ranked[row[ranked] >= sampling.min_p * row.max()]
        mass = row[ranked] / row[ranked].sum()
        # The token that carries the sum past top_p is the last one kept.
        kept = ranked[: int(np.searchsorted(np.cumsum(mass), sampling.top_p)) + 1]
        cut = np.zeros_like(row)
        cut[kept] = row[kept] / row[kept].sum()
        row[:] = cut
    with np.errstate(divide="ignore"):
        return np.log(probs)


def expected_logprobs(run: Run, reference: Reference, sampling: Sampling) -> np.ndarray:
    rows = []
    masks = np.split(run.rollout.action_mask, run.rollout.offsets[1:-1])
    for ids, mask in zip(run.rollout.sequences(), masks, strict=True):
        actions = np.flatnonzero(mask)
        law = law_logprobs(reference.logits(ids)[actions - 1], sampling)
        rows.append(law[np.arange(len(actions)), ids[actions]])
    return np.concatenate(rows)


@every_law
def test_every_prompt_has_all_its_samples(engine: str, law: str, run_of: Runs) -> None:
    rollout = run_of(engine, law).rollout
    assert rollout.prompt_index.tolist() == list(np.repeat(np.arange(PROMPTS), 3))
    assert rollout.n_actions == len(run_of(engine, law).decode.logprobs)
    for ids, mask in zip(
        rollout.sequences(), np.split(rollout.action_mask, rollout.offsets[1:-1]), strict=True
    ):
        first = int(np.flatnonzero(mask)[0])
        assert first > 0
        assert mask[first:].all()
        assert 1 <= len(ids) - first <= PLAIN.max_tokens
    samples = rollout.sequences()[:3]
    prompt = int(np.flatnonzero(rollout.action_mask)[0])
    assert all((ids[:prompt] == samples[0][:prompt]).all() for ids in samples)


@every_law
def test_logprobs_are_finite_and_not_positive(engine: str, law: str, run_of: Runs) -> None:
    for scoring in run_of(engine, law).scorings:
        assert np.isfinite(scoring.logprobs).all()
        assert scoring.logprobs.max() <= 1e-6
        assert scoring.logprobs.min() < -0.1


@every_engine
def test_a_sampled_stop_token_is_kept_as_an_action(engine: str, run_of: Runs) -> None:
    run = run_of(engine, "plain")
    stop_ids = run.decode.fingerprint["stop_token_ids"]
    assert stop_ids
    assert set(run.rollout.finish_reason) == {"stop", "length"}
    for reason, response in zip(run.rollout.finish_reason, run.responses(), strict=True):
        assert not set(response[:-1]) & set(stop_ids)
        assert (response[-1] in stop_ids) == (reason == "stop")
        assert reason == "stop" or len(response) == PLAIN.max_tokens


@pytest.mark.parametrize("engine", grid(ENGINES, "vllm"))
def test_a_penalty_moves_the_tokens_that_were_there_before(
    engine: str, run_of: Runs, reference: Reference
) -> None:
    run = run_of(engine, "penalised")
    expected = []
    masks = np.split(run.rollout.action_mask, run.rollout.offsets[1:-1])
    for ids, mask in zip(run.rollout.sequences(), masks, strict=True):
        first = int(np.flatnonzero(mask)[0])
        logits = reference.logits(ids).copy()
        for at in range(first, len(ids)):
            # SGLang counts tokens of the response alone; its scheduler does not know the last yet.
            counted = ids[first : at - 1] if engine == "sglang" else ids[:at]
            row, before = logits[at - 1], np.unique(counted)
            row[before] *= np.where(row[before] > 0, 1 / 1.3, 1.3)
            expected.append(law_logprobs(row[None], PENALISED)[0, ids[at]])
    assert (np.abs(run.decode.logprobs - expected) > SAME_IN_FP32).mean() < 0.01  # ties of experts
    assert run.decode.fingerprint["logprobs_penalised"] is True
    assert run.decode.fingerprint["sampling"]["repetition_penalty"] == 1.3
    assert UNTESTED["distributions"] in {
        entry.what for entry in NotTested.of(run.decode.fingerprint)
    }
    assert not any(each.fingerprint["logprobs_penalised"] for each in run.scorings[1:])


@every_engine
def test_samples_of_a_prompt_differ(engine: str, run_of: Runs) -> None:
    responses = run_of(engine, "plain").responses()
    different = [len({tuple(r) for r in responses[i : i + 3]}) for i in range(0, 3 * PROMPTS, 3)]
    assert np.mean(different) > 2


@pytest.mark.parametrize("engine", grid(ENGINES, "transformers"))
def test_greedy_takes_the_most_likely_token(
    engine: str, run_of: Runs, reference: Reference
) -> None:
    run = run_of(engine, "greedy")
    responses = run.responses()
    assert all(responses[i] == responses[i + 1] == responses[i + 2] for i in range(0, 36, 3))
    best = expected_logprobs(run, reference, PLAIN)
    masks = np.split(run.rollout.action_mask, run.rollout.offsets[1:-1])
    highest = np.concatenate(
        [
            law_logprobs(reference.logits(ids)[np.flatnonzero(mask) - 1], PLAIN).max(-1)
            for ids, mask in zip(run.rollout.sequences(), masks, strict=True)
        ]
    )
    assert np.abs(best - highest).max() < 1e-5


@every_law
def test_decode_logprobs_are_of_the_law_that_sampled(
    engine: str, law: str, run_of: Runs, reference: Reference
) -> None:
    run = run_of(engine, law)
    expected = expected_logprobs(run, reference, reported(engine, run.sampling))
    sure = settled(run, reference)
    assert largest(expected, run.decode.logprobs, sure) < SAME_IN_FP32


@every_law
def test_the_likeliest_tokens_are_those_of_the_reported_law(
    engine: str, law: str, run_of: Runs, reference: Reference
) -> None:
    run = run_of(engine, law)
    top, sampling = run.decode.likeliest, reported(engine, run.sampling)
    assert top is not None
    assert top.ids.shape == (run.rollout.n_actions, LIKELIEST)
    masks = np.split(run.rollout.action_mask, run.rollout.offsets[1:-1])
    laws = [
        law_logprobs(reference.logits(ids)[np.flatnonzero(mask) - 1], sampling)
        for ids, mask in zip(run.rollout.sequences(), masks, strict=True)
    ]
    highest = np.concatenate([-np.sort(-rows, axis=1)[:, :LIKELIEST] for rows in laws])
    sure = settled(run, reference)
    assert (np.isfinite(highest) == np.isfinite(top.logprobs))[sure].all()
    finite = np.isfinite(highest) & sure[:, None]
    own = np.take_along_axis(np.concatenate(laws), top.ids.astype(np.int64), axis=1)
    for expected in (highest, own):
        assert np.abs(expected[finite] - top.logprobs[finite]).max() < SAME_IN_FP32
    named = top.ids == run.decode.token_ids[:, None]
    logprobs = np.broadcast_to(run.decode.logprobs[:, None], named.shape)
    assert np.abs(top.logprobs - logprobs)[named].max() < 1e-5


@every_law
def test_prefill_scores_the_same_tokens_at_the_same_temperature(
    engine: str, law: str, run_of: Runs, reference: Reference
) -> None:
    run = run_of(engine, law)
    if not rescores(engine, run.sampling):
        assert PREFILL in {entry.what for entry in NotTested.of(run.decode.fingerprint)}
        assert store.scoring_names(run.directory) == [f"{engine}:decode"]
        return
    untruncated = Sampling(temperature=run.sampling.temperature)
    expected = expected_logprobs(run, reference, untruncated)
    sure = settled(run, reference)
    assert largest(expected, run.prefill.logprobs, sure) < SAME_IN_FP32
    if not run.sampling.truncates:
        assert largest(run.decode.logprobs, run.prefill.logprobs, sure) < SAME_IN_FP32


@pytest.mark.grid
@every_engine
def test_another_temperature_would_have_been_seen(
    engine: str, run_of: Runs, reference: Reference
) -> None:
    run = run_of(engine, "tempered")
    raw = expected_logprobs(run, reference, PLAIN)
    assert np.abs(raw - run.decode.logprobs).mean() > 100 * SAME_IN_FP32


@every_law
def test_experts_are_the_routers(engine: str, law: str, run_of: Runs, reference: Reference) -> None:
    run = run_of(engine, law)
    check_experts(run, reference)


# ---------------------------------------------------------------- whole distributions


@every_distribution
def test_the_positions_are_the_seeded_choice(engine: str, law: str, run_of: Runs) -> None:
    """The same for every engine."""
    run = run_of(engine, law)
    laws = run.decode.distributions
    assert laws is not None
    rollout = run.rollout
    actions = rollout.actions
    sequence = rollout.sequence_of_token[actions]
    index = np.arange(len(actions)) - np.searchsorted(sequence, sequence)
    numbers = priority(run.sampling.seed, sequence, index)
    chosen = np.sort(np.argsort(numbers)[: min(POSITIONS, len(actions))])
    # What was computed past a sequence's end took a place, and was dropped.
    assert set(laws.positions) <= set(chosen)
    assert len(laws.positions) >= 0.9 * len(chosen)


@every_distribution
def test_they_are_the_law_of_a_plain_forward(
    engine: str, law: str, run_of: Runs, reference: Reference
) -> None:
    run = run_of(engine, law)
    rollout, laws = run.rollout, run.decode.distributions
    assert laws is not None
    assert laws.whole
    actions = rollout.actions[laws.positions]
    sequences = rollout.sequence_of_token[actions]
    off = []
    for n in np.unique(sequences):
        start, end = rollout.offsets[n], rollout.offsets[n + 1]
        rows = reference.logits(rollout.token_ids[start:end])[actions[sequences == n] - start - 1]
        expected = np.exp(law_logprobs(rows, run.sampling))
        given = np.exp(laws.law()[sequences == n])
        off.append(np.abs(given - expected).max(axis=1))
    gaps = np.concatenate(off)
    assert np.median(gaps) < 1e-6
    # A tie at an expert, or at the edge of top-p, may go the other way by rounding alone.
    assert np.mean(gaps < SAME_IN_FP32) > 0.98


# ---------------------------------------------------------------- experts


def margins(run: Run, reference: Reference) -> np.ndarray:
    """[T, L] gap between the last chosen and the first rejected expert."""
    routers = np.concatenate([reference.routers(ids) for ids in run.rollout.sequences()])
    top_k = reference.model.config.num_experts_per_tok
    ranked = -np.sort(-routers, axis=-1)
    return ranked[..., top_k - 1] - ranked[..., top_k]


def settled(run: Run, reference: Reference) -> np.ndarray:
    """[A] actions that no earlier tie between experts can have changed; nearly all."""
    tied = (margins(run, reference) < TIE).any(-1)
    pieces = np.split(tied, run.rollout.offsets[1:-1])
    before = np.concatenate([np.concatenate([[0], np.cumsum(piece)[:-1]]) for piece in pieces])
    sure = before[run.rollout.actions] == 0
    assert sure.mean() > 0.95
    return sure


def largest(expected: np.ndarray, given: np.ndarray, sure: np.ndarray) -> float:
    return float(np.abs(expected - given)[sure].max())


def check_experts(run: Run, reference: Reference) -> None:
    routing = run.decode.routing
    assert routing is not None
    assert routing.layers == tuple(range(reference.model.config.num_hidden_layers))
    last = run.rollout.offsets[1:] - 1
    assert np.flatnonzero(~routing.present).tolist() == last.tolist()
    routers = np.concatenate([reference.routers(ids) for ids in run.rollout.sequences()])
    want = np.argsort(-routers, axis=-1)[..., : routing.top_k]
    differ = (np.sort(want, -1) != np.sort(routing.ids, -1)).any(-1)[routing.present]
    # A tie that falls the other way moves a few of the routers after it.
    assert differ[margins(run, reference)[routing.present] > 1e-2].sum() == 0
    assert differ.mean() < 1e-3


@pytest.mark.parametrize("engine", grid(["vllm", "transformers"], "vllm"))
def test_the_seed_decides_the_tokens_whatever_the_batch(engine: str, run_of: Runs) -> None:
    assert run_of(engine, "crowded").responses() == run_of(engine, "plain").responses()


@pytest.mark.grid
def test_chunked_prefill_changes_neither_logprobs_nor_experts(
    run_of: Runs, reference: Reference
) -> None:
    run = run_of("vllm", "chunked")
    assert run.decode.fingerprint["chunked_prefill"] is True
    assert run.decode.fingerprint["seeding"] == "engine"
    expected = expected_logprobs(run, reference, run.sampling)
    sure = settled(run, reference)
    assert largest(expected, run.decode.logprobs, sure) < SAME_IN_FP32
    assert largest(expected, run.prefill.logprobs, sure) < SAME_IN_FP32
    check_experts(run, reference)


@every_engine
def test_weights_as_loaded_are_the_checkpoints(engine: str, run_of: Runs) -> None:
    from safetensors.torch import load_file

    from mismatch.models.digests import digest_tensor

    fingerprint = run_of(engine, "plain").decode.fingerprint
    checkpoint = load_file(MODEL / "model.safetensors")
    digests = fingerprint["weights"]
    want = {name: list(digest_tensor(tensor)) for name, tensor in checkpoint.items()}
    assert digests == {name: digest[: len(digests.get(name, ()))] for name, digest in want.items()}
    assert {name for name, digest in digests.items() if len(digest) < 4} == set()
    assert {len(digest) for name, digest in digests.items() if "experts" not in name} == {6}
    assert fingerprint["unmapped_weights"] == []


@every_law
def test_the_fingerprint_tells_the_law(engine: str, law: str, run_of: Runs) -> None:
    run = run_of(engine, law)
    decode, asked = run.decode.fingerprint, run.sampling
    assert [scoring.fingerprint["mode"] for scoring in run.scorings] == ["decode", "prefill"][
        : len(run.scorings)
    ]
    for scoring in run.scorings:
        assert scoring.fingerprint["logprobs_temperature"] == (asked.temperature or 1.0)
    for scoring in run.scorings[1:]:
        assert scoring.fingerprint["logprobs_truncated"] is False
    assert decode["logprobs_truncated"] == reported(engine, asked).truncates
    for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens"):
        assert decode["sampling"][name] == getattr(asked, name)
    assert decode["engine"] == engine
    assert decode["dtype"] == decode["kv_cache_dtype"] == "fp32"
    assert decode["moe"] is True
    for name in ("version", "attention", "moe_backend", "device", "seed", "max_model_len"):
        assert decode[name] not in (None, "", "unknown")
    assert decode["source_files"]["model.safetensors"]
    unable = UNABLE.get(engine, set()) | (set() if rescores(engine, asked) else {"prefill"})
    assert sorted(e.what for e in NotTested.of(decode)) == sorted(UNTESTED[name] for name in unable)


@every_engine
def test_rewards_are_of_the_arithmetic_task(engine: str, run_of: Runs) -> None:
    from transformers import AutoTokenizer

    from mismatch.prompts.arithmetic import arithmetic_problems, reward

    run = run_of(engine, "plain")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    problems = arithmetic_problems(PROMPTS, 0)
    want = [
        reward(tokenizer.decode(response, skip_special_tokens=True), problems[prompt].answer)
        for response, prompt in zip(run.responses(), run.rollout.prompt_index, strict=True)
    ]
    assert run.rollout.rewards is not None
    assert run.rollout.rewards.tolist() == want


@every_engine
def test_capabilities_are_known_before_anything_is_loaded(engine: str) -> None:
    if not installed(engine):
        pytest.skip(f"engine: {engine} is not installed: make env")
    code = (
        "import sys\n"
        "from mismatch.engines.registry import engine_class\n"
        "from mismatch.specs import EngineSpec\n"
        "from mismatch.types import Sampling\n"
        f"able = engine_class({engine!r}).capabilities(EngineSpec({engine!r}), Sampling())\n"
        "assert able.decode and able.prefill and able.routed_experts\n"
        f"lacks = {engine!r} == 'sglang'\n"
        "for name in ('prefill_tempered', 'processed_logprobs', 'deterministic'):\n"
        "    assert getattr(able, name) is not lacks, name\n"
        "    assert (name in able.reasons) is lacks, name\n"
        "assert not {'torch', 'vllm', 'sglang', 'transformers'} & sys.modules.keys()\n"
    )
    spec = EngineSpec(engine)
    done = subprocess.run(
        [engine_python(spec), "-c", code],
        env={**os.environ, **interpreter_environment(own_python(spec))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@every_engine
def test_an_unknown_engine_argument_is_refused(engine: str, tmp_path) -> None:
    if not installed(engine):
        pytest.skip(f"engine: {engine} is not installed: make env")
    near = {"sglang": "max_running_requests"}.get(engine, "max_num_seqs")
    wrong = near[:-1].replace("_", "-")
    spec = EngineSpec(engine, str(MODEL), args=((wrong, 4),))
    done = work(tmp_path, RolloutSpec(spec, PromptSpec(num_prompts=2), PLAIN))
    assert done.returncode == 1
    error = store.read_json(tmp_path / "errors" / "engine.json")
    assert wrong in error["message"]
    assert near in error["fix"]


def test_vllm_is_never_imported_by_these_tests() -> None:
    assert engine_class("transformers").name == "transformers"
    assert not any(name == "vllm" or name.startswith("vllm.") for name in sys.modules)
