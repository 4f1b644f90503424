"""Router replay in real worlds: two FSDP2 ranks, both layouts, any micro-batches, and real vLLM.

The argument: one's own routes given back are the same scoring bit for bit; routes that somebody
made up are the routes that run, and what they give depends neither on layout nor on micro-batches.
Then vLLM's own routes, replayed, leave no router to disagree, and do not mend a kernel without
sinks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.analysis.comparison import paired_routing
from mismatch.processes.tasks import TrainerSession, write_session
from mismatch.run.store import load_rollout, load_scoring, save_rollout, save_scoring
from mismatch.specs import Pass, TrainSpec
from mismatch.types import Routing, Scoring
from tests.checkpoints import make, rollout

from .conftest import Run

pytestmark = pytest.mark.slow
ROLLOUT = rollout(((5, 12), (5, 30), (6, 0), (9, 7), (9, 40), (3, 21), (30, 45)))
EXPERTS, TOP_K, LAYERS = 8, 2, 2
GIVEN = {"replay_routing": "ids"}  # of the rollout's engine, "none"
OWN = {"replay_routing": "ids", "replay_source": "fsdp"}
NOISE = {"inject": (("router-noise", 0.5),), "inject_seed": 3}
PASSES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "own": OWN,
    "own:grad": OWN | {"grad": True},
    "own:weights": OWN | {"replay_routing": "ids+weights"},
    "given": GIVEN,
    "given:packed": GIVEN | {"layout": "packing", "micro_batch_tokens": 100},
    "given:regrouped": GIVEN | {"micro_batch_tokens": 64},
    "given:grad": GIVEN | {"grad": True},
    "noisy": NOISE,
    "noisy:packed": NOISE | {"layout": "packing", "micro_batch_tokens": 100},
    "noisy:own": NOISE | OWN,
    "noisy:weights": NOISE | OWN | {"replay_routing": "ids+weights"},
}


def _made_up_routes() -> Routing:
    draw = np.random.default_rng(11)
    tokens = len(ROLLOUT.token_ids)
    ids = [draw.permutation(EXPERTS)[:TOP_K] for _ in range(tokens * LAYERS)]
    present = np.ones(tokens, bool)
    present[ROLLOUT.offsets[1:] - 1] = False  # an engine never forwards the last token
    return Routing((0, 1), EXPERTS, np.reshape(ids, (tokens, LAYERS, TOP_K)).astype("u1"), present)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every pass of ``PASSES``, in one world of two ranks."""
    root = tmp_path_factory.mktemp("replay")
    base = TrainSpec(str(make("gpt_oss", root / "model")), dtype="fp32")
    save_rollout(root, ROLLOUT)
    actions = ROLLOUT.token_ids[ROLLOUT.actions]
    made_up = Scoring("none:decode", actions, np.zeros(len(actions)), {}, routing=_made_up_routes())
    save_scoring(root, made_up, ROLLOUT)
    passes = [Pass(name, replace(base, **fields)) for name, fields in PASSES.items()]
    job = write_session(TrainerSession(root, tuple(passes)))
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "mismatch.processes.workers.session", str(job)],
        env={**outside, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize("name", ["own", "own:weights"])
def test_ones_own_routes_given_back_are_the_same_scoring(world: Path, name: str) -> None:
    plain, again = load_scoring(world, "fsdp"), load_scoring(world, name)
    assert np.array_equal(plain.logprobs, again.logprobs)
    assert plain.routing is not None
    assert again.routing is not None
    assert np.array_equal(plain.routing.ids, again.routing.ids)
    tokens = len(ROLLOUT.token_ids)
    wanted = {"source": "fsdp", "rows_replayed": tokens, "rows_own": 0, "overruled": 0}
    facts = again.fingerprint["replay"]
    assert {key: facts[key] for key in wanted} == wanted
    assert plain.fingerprint["replay"] is None


@pytest.mark.parametrize("name", ["given", "given:packed", "given:regrouped", "given:grad"])
def test_made_up_routes_run_whatever_the_layout(world: Path, name: str) -> None:
    made_up, ran = _made_up_routes(), load_scoring(world, name)
    assert ran.routing is not None
    assert np.array_equal(ran.routing.ids[made_up.present], made_up.ids[made_up.present])
    facts = ran.fingerprint["replay"]
    assert (facts["mode"], facts["source"], facts["rows_own"]) == ("ids", "none:decode", 7)
    assert facts["overruled"] > 0.5 * facts["rows_replayed"] * LAYERS  # of 28 sets, one is right
    plain, given = load_scoring(world, "fsdp"), load_scoring(world, "given")
    assert np.abs(given.logprobs - plain.logprobs).mean() > 0.05
    assert np.abs(ran.logprobs - given.logprobs).max() <= 2e-5


def test_a_pass_with_gradients_replays_too(world: Path) -> None:
    plain, grad = load_scoring(world, "fsdp"), load_scoring(world, "own:grad")
    assert np.abs(grad.logprobs - plain.logprobs).max() <= 2e-5


def test_noise_follows_the_token_and_replay_takes_its_flips_away(world: Path) -> None:
    names = ("fsdp", "noisy", "noisy:packed", "noisy:own", "noisy:weights")
    plain, noisy, packed, own, weights = (load_scoring(world, name) for name in names)
    off = [np.abs(scoring.logprobs - plain.logprobs).mean() for scoring in (noisy, own, weights)]
    assert np.abs(packed.logprobs - noisy.logprobs).max() <= 2e-5
    assert off[0] > off[1] > 0
    assert off[2] == 0  # the routers' outputs are not used at all
    assert noisy.fingerprint["injected"] == {"router-noise": 0.5, "seed": 3}
    assert plain.fingerprint["injected"] is None
    flips = [paired_routing(ROLLOUT, plain, scoring) for scoring in (noisy, own)]
    assert flips[0] is not None
    assert flips[1] is not None
    assert flips[0].differs.any()
    assert not flips[1].differs.any()


# ---------------------------------------------------------------- from the command line


def _score(source: Path, directory: Path, *flags: str) -> Path:
    """A copy of a run with one more scoring in it."""
    copy = Path(shutil.copytree(source, directory))
    _mismatch("score", str(copy), *flags)
    return copy


def _mismatch(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mismatch", *arguments], capture_output=True, text=True, timeout=300
    )
    output = done.stdout + done.stderr
    if arguments[0] == "compare":
        Run(Path(arguments[1]), done.returncode, output).require_judged()
    else:
        assert done.returncode == 0, output
    return done.stdout


def _k3(directory: Path, name: str) -> float:
    decode, train = load_scoring(directory, "vllm:decode"), load_scoring(directory, name)
    delta = train.logprobs - decode.logprobs
    return float((np.expm1(delta) - delta).mean())


@pytest.mark.grid  # test_fixes replays them in a whole check
def test_routes_of_vllm_replayed_leave_no_router_to_disagree(
    default_run: Run, tmp_path: Path
) -> None:
    flags = ("--name", "replayed", "--replay-routing", "ids")
    run = _score(default_run.directory, tmp_path / "run", *flags)
    rollout = load_rollout(run)
    decode, plain, replayed = (
        load_scoring(run, name) for name in ("vllm:decode", "fsdp", "replayed")
    )
    before, after = (paired_routing(rollout, decode, side) for side in (plain, replayed))
    assert before is not None
    assert after is not None
    assert before.differs.mean() > 0
    assert not after.differs.any()
    facts = replayed.fingerprint["replay"]
    assert (facts["source"], facts["rows_own"]) == ("vllm:decode", rollout.n_sequences)
    assert 0 < facts["overruled"] < 0.2 * facts["rows_replayed"] * len(after.layers)
    # bf16: the tail that flips carry goes, rounding stays. Measured: 1.02e-4 and 5.5e-5.
    assert 0 < _k3(run, "replayed") <= _k3(run, "fsdp")


@pytest.mark.grid  # test_fixes has the same of a whole check
def test_replay_alone_does_not_mend_a_kernel_without_sinks(
    no_sinks_run: Run, default_run: Run, tmp_path: Path
) -> None:
    flags = ("--attention", "no-sinks", "--name", "replayed", "--replay-routing", "ids")
    run = _score(no_sinks_run.directory, tmp_path / "run", *flags)
    healthy = default_run.value("k3_kl")
    before, after = _k3(run, "fsdp"), _k3(run, "replayed")
    assert before > 200 * healthy
    assert before > after > 50 * healthy  # measured: 6.1e-2, 2.3e-2 and 1.0e-4


def test_two_passes_are_in_every_report_with_a_noise_floor(default_run: Run) -> None:
    section = default_run.report["two_passes"]
    assert [variant["id"] for variant in section["variants"]] == ["as-run", "on-policy-override"]
    assert section["injected"] == ""
    assert section["variants"][0]["scoring"] == "fsdp:regrouped"
    assert section["variants"][0]["metrics"]["ratio_off_mean"]["value"] < 1e-3  # a CPU


@pytest.mark.grid
def test_injected_noise_is_named_wherever_it_shows(tiny_run: Path, tmp_path: Path) -> None:
    run = _score(tiny_run, tmp_path / "run", "--inject", "router-noise=0.3", "--two-passes")
    output = _mismatch("compare", str(run))
    report = json.loads((run / "report.json").read_text())
    plain, replayed, override = report["two_passes"]["variants"]
    assert report["two_passes"]["injected"] == "router-noise=0.3 (seed 0)"
    assert plain["metrics"]["ratio_not_one"]["value"] > 0.5
    assert plain["routing"]["routing_disagree_layer"]["value"] > 0
    assert replayed["routing"]["routing_disagree_layer"]["value"] == 0
    off = [variant["metrics"]["ratio_off_mean"]["value"] for variant in (plain, replayed)]
    assert off[0] > off[1] > 0
    assert override["scoring"] is None
    words = "injected on purpose: router-noise=0.3 (seed 0) in fsdp:new"
    assert words in report["verdict"]["reason"]
    assert words in output.strip().splitlines()[-1]
    assert report["fingerprints"]["fsdp:new"]["injected"] == {"router-noise": 0.3, "seed": 0}
    assert report["fingerprints"]["fsdp"]["injected"] is None
    for name in ("report.md", "report.html"):
        assert "router-noise=0.3 (seed 0)" in (run / name).read_text().replace("\u00a0", " ")
    # The headline is not touched: what is judged has no noise in it.
    before = json.loads((tiny_run / "report.json").read_text())
    for name in ("k3_kl", "logprob_abs_diff_mean"):
        assert (
            report["comparisons"][0]["metrics"][name] == before["comparisons"][0]["metrics"][name]
        )


@pytest.mark.grid
def test_a_trainer_that_replays_says_so(tiny_run: Path, tmp_path: Path) -> None:
    spec = json.loads((tiny_run / "spec.json").read_text())
    copy = tmp_path / "run"
    ignored = shutil.ignore_patterns("fsdp*", "reference*", "report*", "comparison*", "tokens*")
    shutil.copytree(tiny_run, copy, ignore=ignored)
    _mismatch("score", str(copy), "--replay-routing", "ids", "--no-noise-floor")
    _mismatch("compare", str(copy))
    report = json.loads((copy / "report.json").read_text())
    assert spec["train"]["replay_routing"] is None
    assert report["comparisons"][0]["routing"]["routing_disagree_any"]["value"] == 0
    assert any("0 by construction" in entry["reason"] for entry in report["not_tested"])
    page = (copy / "report.html").read_text().replace("\u00a0", " ")
    notes = report["comparisons"][0]["breakdowns"]["routing_notes"]
    replayed = dict(zip(notes["fact"], notes["value"], strict=True))["replayed"]
    assert all(name in replayed for name in ("fsdp", "ids", "transformers:decode"))
    assert replayed in page
