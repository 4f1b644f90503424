"""A fresh vLLM reads given tokens, and its prefix cache: healthy, then with blocks mistaken.

One engine, of a model whose layers all see the whole context: what it gives with its cache is taken
twice, the second time with blocks that are known by their place alone, so that a prompt reads the
keys and values of another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mismatch.analysis.cause_results import Causes
from mismatch.analysis.diagnosis.case import Case
from mismatch.captures import CachePair
from mismatch.codec import from_json
from mismatch.experiments.confirmation import applied, judged
from mismatch.experiments.probes import CACHE, CACHE_FILE, FRESH, PROBES, RESCORING, judged_cache
from mismatch.experiments.results import Experiment
from mismatch.keys import REFERENCE
from mismatch.processes.tasks import EngineSession, ReadCache, Score, write_session
from mismatch.run import store
from mismatch.specs import EngineSpec, RolloutSpec
from mismatch.types import Rollout, Sampling, Scoring
from tests import families
from tests.checkpoints import tokenizer
from tests.contract.conftest import MAKE, installed, work

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROMPT, RESPONSE, PROMPTS = 40, 24, 8
SCRIPT = """
import json, sys
from mismatch.codec import to_json
from mismatch.processes.workers import engine as worker, session
from benchmarks.planted_fault import cache_collision

measure = worker.artefacts.measure

def twice(engine, *rest):
    healthy = measure(engine, *rest)
    with open(sys.argv[2], "w") as file:
        json.dump(to_json(healthy), file)
    cache_collision(None, 1.0)
    assert engine.llm.reset_prefix_cache()
    return measure(engine, *rest)

worker.artefacts.measure = twice
sys.exit(session.main(sys.argv[1:2]))
"""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Case]:
    """Where a fresh engine left what it gave, and the run that it was asked about.

    Plain transformers in float32 is the decode, the trainer and the reference.
    """
    import torch

    folder = tmp_path_factory.mktemp("fresh")
    model = families.tiny("llama").eval()
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    ids = torch.randint(10, 200, (PROMPTS, PROMPT + RESPONSE), generator=torch.manual_seed(0))
    with torch.no_grad():
        law = model(ids).logits.double().log_softmax(-1)
    scores = law[:, PROMPT - 1 : -1].gather(2, ids[:, PROMPT:, None])[..., 0].numpy().ravel()
    mask = np.tile(np.arange(PROMPT + RESPONSE) >= PROMPT, PROMPTS)
    tokens = ids.numpy().ravel()
    ends = np.arange(PROMPTS + 1) * (PROMPT + RESPONSE)
    rollout = Rollout(
        tokens, ends, mask, mask.astype(np.int64), np.arange(PROMPTS), ("length",) * PROMPTS,
        Sampling(max_tokens=RESPONSE, samples_per_prompt=1), {},
    )  # fmt: skip
    store.save_rollout(folder, rollout)
    ask(folder, rollout)
    sides = [Scoring(name, tokens[mask], scores, {}) for name in ("vllm:decode", "fsdp", REFERENCE)]
    return folder, Case.of(rollout, sides[0], sides[1], {REFERENCE: sides[2]})


def ask(folder: Path, rollout: Rollout) -> None:
    """The engine's process, with the triple taken twice."""
    engine = EngineSpec(
        "vllm", str(folder / "model"), dtype="fp32", routing=False, args=(("block_size", 32),)
    )
    spec = RolloutSpec(engine, sampling=rollout.sampling, exact_kl=0)
    tasks = (Score(FRESH), ReadCache(CACHE_FILE))
    session = write_session(EngineSession(folder, spec, tasks, label="fresh"))
    (folder / "fixes").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(session), str(folder / "healthy.json")],
        cwd=ROOT,  # for benchmarks
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def read(folder: Path) -> dict[str, list[CachePair]]:
    planted = store.load_document(folder, CACHE_FILE)
    assert planted["reason"] == ""
    healthy = json.loads((folder / "healthy.json").read_text())
    both = {"healthy": healthy, "planted": planted["pairs"]}
    return {name: from_json(list[CachePair], pairs) for name, pairs in both.items()}


def farthest(pairs: list[CachePair]) -> float:
    return float(max(np.abs(np.subtract(pair.warm, pair.cold)).max() for pair in pairs))


@pytest.mark.grid
def test_a_warm_cache_gives_what_a_cold_one_gives(case: tuple[Path, Case]) -> None:
    pairs = read(case[0])["healthy"]
    assert len(pairs) == 2 * PROMPTS
    assert {pair.kind for pair in pairs} == {"warm prompt", "warm decode"}
    assert all(pair.was_read for pair in pairs)
    assert farthest(pairs) < 1e-4


@pytest.mark.grid
@pytest.mark.skipif(not installed("sglang"), reason=f"engine: no SGLang here: {MAKE['sglang']}")
def test_sglang_reads_its_radix_cache_after_prefill_and_after_decode(
    case: tuple[Path, Case], tmp_path: Path
) -> None:
    model = str(case[0] / "model")
    spec = RolloutSpec(EngineSpec("sglang", model, dtype="fp32", routing=False),
                       sampling=case[1].rollout.sampling, exact_kl=0)  # fmt: skip
    store.save_rollout(tmp_path, case[1].rollout)
    (tmp_path / "fixes").mkdir()
    done = work(tmp_path, spec, ReadCache(CACHE_FILE))
    assert done.returncode == 0, done.stdout[-3000:]
    document = store.load_document(tmp_path, CACHE_FILE)
    assert document["reason"] == ""
    pairs = from_json(list[CachePair], document["pairs"])
    assert len(pairs) == 2 * PROMPTS
    assert all(pair.was_read for pair in pairs)
    decoded = [pair for pair in pairs if pair.kind == "warm decode"]
    assert all(pair.cached > pair.prefilled for pair in decoded)  # what decode had written
    assert farthest(pairs) < 1e-4


def test_blocks_of_another_prompt_are_named_as_the_cache(case: tuple[Path, Case]) -> None:
    folder, run = case
    asked = Experiment(CACHE, "engine", PROBES[CACHE], names=PROBES[CACHE][0])
    verdicts = {name: judged_cache(asked, run, pairs, 1.0) for name, pairs in read(folder).items()}
    assert farthest(read(folder)["planted"]) > 1e-3
    assert verdicts["planted"].outcome == "confirmed"
    assert verdicts["healthy"].outcome == "ruled out"
    nothing = Causes((), (), (), (), 0.1, 0.1)
    after, confirmed, _ = applied(nothing, [verdicts["planted"]])
    assert confirmed == ("prefix-cache-stale",)
    assert (after.ranked[0].id, after.ranked[0].side) == ("prefix-cache-stale", "engine")
    assert applied(nothing, [verdicts["healthy"]])[0].ranked == ()


def test_a_fresh_engine_tells_a_decode_fault_from_a_function(case: tuple[Path, Case]) -> None:
    folder, run = case
    scoring = store.load_scoring(folder, FRESH)
    assert np.abs(scoring.logprobs - run.engine.logprobs).max() < 1e-3
    noise = 0.3 * np.random.default_rng(0).standard_normal(len(scoring.logprobs))
    asked = Experiment(RESCORING, "engine", PROBES[RESCORING], names="decode-vs-prefill")
    outcomes = []
    for decode, train in ((noise, 0 * noise), (0 * noise, noise)):
        sides = [
            Scoring(side.name, side.token_ids, side.logprobs + more, {})
            for side, more in ((run.engine, decode), (run.trainer, train))
        ]
        before = Case.of(run.rollout, sides[0], sides[1], {})
        after = Case.of(run.rollout, scoring, sides[1], {})
        outcomes.append(judged(asked, before, after, 1.0).outcome)
    assert outcomes == ["confirmed", "ruled out"]
