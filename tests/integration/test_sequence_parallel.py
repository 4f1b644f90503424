"""Two ranks that share every sequence compute what each computes alone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import Qwen3Config, Qwen3NextConfig

from mismatch.errors import MismatchError
from mismatch.processes.tasks import TrainerSession, write_session
from mismatch.run.store import load_scoring, save_rollout
from mismatch.specs import Pass, TrainSpec
from mismatch.training.sequence_parallel import SequenceParallel, require_splittable
from mismatch.types import Sampling, Scoring
from tests.checkpoints import make, rollout

# Odd lengths, one sequence of a token, windows of 16 crossed by the cut, several micro-batches.
ROLLOUT = rollout(
    ((5, 12), (5, 30), (6, 0), (9, 7), (9, 40), (3, 21), (30, 45), (1, 2)),
    sampling=Sampling(temperature=0.7, top_p=0.9),
)
WAYS = {
    "padded": {},
    "packed": {"layout": "packing"},
    "eager": {"attention": "eager"},
    "grad": {"grad": True},
    "noise": {"inject": (("router-noise", 0.5),)},
    "wrong": {"attention": "no-sinks"},
    "one-group": {},  # a single key and value head for two ranks
    "one-group-packed": {"layout": "packing"},
}


@dataclass(frozen=True)
class Ran:
    root: Path

    def scoring(self, way: str, ranks: int) -> Scoring:
        return load_scoring(self.root, f"{way}:{ranks}")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    root = tmp_path_factory.mktemp("parallel")
    gpt_oss = str(make("gpt_oss", root / "gpt_oss"))
    dense = str(make("qwen3", root / "dense", num_key_value_heads=1))
    passes = [
        Pass(
            f"{way}:{ranks}",
            TrainSpec(
                dense if way.startswith("one") else gpt_oss,
                dtype="fp32",
                sequence_parallel=ranks,
                micro_batch_tokens=200,
                **settings,
            ),
        )
        for ranks in (1, 2)
        for way, settings in WAYS.items()
    ]
    save_rollout(root, ROLLOUT)
    session = write_session(TrainerSession(root, tuple(passes)))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "mismatch.processes.workers.session", str(session)]
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *command],
        env=outside | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Ran(root)


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_score_what_one_does(ran: Ran, way: str) -> None:
    alone, shared = ran.scoring(way, 1), ran.scoring(way, 2)
    assert shared.fingerprint["sequence_parallel"] == 2
    assert "sequence_parallel" not in alone.fingerprint
    for field in ("logprobs", "entropy"):
        assert np.abs(getattr(alone, field) - getattr(shared, field)).max() <= 2e-5, field
    assert shared.extra.keys() == alone.extra.keys()
    for name, values in alone.extra.items():
        assert np.abs(values - shared.extra[name]).max() <= 2e-4, name


@pytest.mark.parametrize("way", ["padded", "packed", "eager", "grad", "noise"])
def test_every_token_keeps_its_experts(ran: Ran, way: str) -> None:
    alone, shared = ran.scoring(way, 1).routing, ran.scoring(way, 2).routing
    assert alone is not None
    assert shared is not None
    assert np.array_equal(alone.ids, shared.ids)
    assert np.abs(alone.weights - shared.weights).max() <= 1e-5  # type: ignore[operator]


def test_what_should_differ_differs(ran: Ran) -> None:
    """Sinks, noise and padding reach the kernels of both: the equalities above are not empty."""
    padded = ran.scoring("padded", 2).logprobs
    for way in ("wrong", "noise"):
        assert np.abs(ran.scoring(way, 2).logprobs - padded).mean() > 1e-3


@pytest.mark.parametrize(
    ("count", "config"), [(3, Qwen3Config(num_attention_heads=4)), (2, Qwen3NextConfig())]
)
def test_what_cannot_be_split_is_refused_before_weights_load(count: int, config: object) -> None:
    with pytest.raises(MismatchError, match="--sequence-parallel"):
        require_splittable(TrainSpec(sequence_parallel=count), config)
    require_splittable(TrainSpec(), config)


def test_a_world_that_cannot_be_cut_is_refused() -> None:
    world = SimpleNamespace(size=3, rank=0)
    with pytest.raises(MismatchError, match=r"--sequence-parallel 2\b.*\b3"):
        SequenceParallel.of(world, 2)  # type: ignore[arg-type]
