"""What fixes of the trainer cost beyond their forward passes, in one training world of two ranks.

    python benchmarks/fixes.py [--sequences 64] [--tokens 512]

The trainer's own pass and six fixes score the same made-up tokens with the embedded model. Start-up
and loads are counted (one start, one load per set of weights) and left out of the ratio: what else
the world does (probes, digests, watching memory, saving) is set against the forward passes alone,
which a timer inside the workers measures. Goal: at most 1.1 times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GOAL = 1.1
FIXES = "fp32-lm-head,fp32-router,micro-batch=2048,experts-implementation=eager,fp32,fp16"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        return worker(asked.worker)
    with tempfile.TemporaryDirectory() as place:
        job, loads = prepare(Path(place), asked.sequences, asked.tokens)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *torchrun, __file__, "--worker", str(job)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            sys.stderr.write(done.stderr[-3000:])
            return 1
    found = json.loads(lines[-1])
    ratio = found["total"] / found["forward"]
    print(f"passes {found['passes']}, loads {found['loads']} of {found['load_s']:.1f} s together")
    print(f"passes took {found['total']:.1f} s, their forwards {found['forward']:.1f} s")
    good = ratio <= GOAL and found["loads"] == loads
    print(f"{'PASS' if good else 'FAIL'}: {ratio:.3f}, goal {GOAL}; loads {loads} expected")
    return 0 if good else 1


def prepare(place: Path, sequences: int, tokens: int) -> tuple[Path, int]:
    """Return a rollout and the job of one world; how many loads it should take."""
    import numpy as np

    from mismatch.experiments.fixes.context import context_of
    from mismatch.experiments.fixes.planning import parse_requests, plan_fixes
    from mismatch.experiments.scoring_passes import by_load
    from mismatch.keys import TRAIN
    from mismatch.models import resolve_model
    from mismatch.processes.tasks import TrainerSession, write_session
    from mismatch.run import store
    from mismatch.specs import CheckSpec, EngineSpec, Pass, RolloutSpec, TrainSpec, weights_key
    from mismatch.types import Rollout, Sampling

    model = resolve_model("tiny-gpt-oss")
    engine = RolloutSpec(EngineSpec(model=model))
    spec = CheckSpec(engine, TrainSpec(model), fixes=parse_requests([FIXES]))
    total, mask = sequences * tokens, np.tile(np.arange(tokens) >= tokens // 4, sequences)
    rollout = Rollout(
        token_ids=np.random.default_rng(0).integers(5, 1000, total),
        offsets=np.arange(sequences + 1) * tokens,
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=np.arange(sequences),
        finish_reason=("length",) * sequences,
        sampling=Sampling(),
        fingerprint={"engine": "none"},
    )
    store.save_rollout(place, rollout)
    variants = plan_fixes(spec, context_of(spec)).variants
    passes = by_load([Pass(TRAIN, spec.train), *(each.passes(spec)[0] for each in variants)])
    path = write_session(TrainerSession(place, tuple(passes)))
    return path, len({weights_key(pass_.spec) for pass_ in passes})


def worker(path: str) -> int:
    """Run a rank: the product's own worker with a timer around its forward passes and loads."""
    import mismatch.training.load as load
    import mismatch.training.score as score
    from mismatch.processes.workers import session, train
    from mismatch.specs import Pass

    spent = {"forward": 0.0, "load": 0.0, "loads": 0, "passes": 0, "total": 0.0}

    def timed(function: Any, key: str, count: str) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            start = time.monotonic()
            made = function(*args, **named)
            spent[key] += time.monotonic() - start
            spent[count] += 1
            return made

        return call

    def together(world: Any, *args: Any, **named: Any) -> Any:
        made = alone(world, *args, **named)
        world.barrier()  # a pass takes what its slowest rank takes
        return made

    def run(passes: train.Passes, item: Pass) -> None:
        start = time.monotonic()
        own(passes, item)
        spent["total"] += time.monotonic() - start

    kind: Any = train.Passes
    own, alone = train.Passes.score, score.run_batches
    score.run_batches = timed(together, "forward", "passes")
    load.load = timed(load.load, "load", "loads")
    kind.score = run
    code = session.main([path])
    if os.environ.get("RANK") == "0" and code == 0:
        total = spent["total"] - spent["load"]
        facts = {"total": total, "forward": spent["forward"], "load_s": spent["load"]}
        print(json.dumps(facts | {"loads": spent["loads"], "passes": spent["passes"]}), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
