"""A thousand inputs that are nearly right: refused with words, or of no consequence; no traceback.

``python -m benchmarks.fuzz --trials 20000`` runs more of the same; its table is in
docs/evidence/reliability.md.
"""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mismatch.run import store
from mismatch.run.directory import RUN, RUN_SCHEMA

from ..conftest import grid
from ..fuzz import TARGETS
from ..made_run import make_run

# Trials of those that take long; of the others 200.
TRIALS = {"report": 40, "table": 60, "checkpoint": 25, "Parquet dump": 100}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run_dir = make_run(tmp_path_factory.mktemp("fuzz") / "run")
    entry = {"verb": "check", "spec_hash": "0", "finished": None, "command": "mismatch check"}
    store.write_json(run_dir / RUN, {"schema": RUN_SCHEMA, "invocations": [entry]})
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("target", grid(TARGETS, "artefact", "dump", "server", "config", "levels"))
def test_no_input_is_a_traceback(target, run):
    outcomes = {"refused": 0, "same": 0}

    @settings(
        max_examples=TRIALS.get(target, 200),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def trial(random):
        outcomes[TARGETS[target](random, run)] += 1

    before = json.dumps(sorted(map(str, run.rglob("*"))))
    trial()
    print(f"{target}: {outcomes}")
    assert outcomes["refused"] > min(10, TRIALS.get(target, 200) / 8)
    assert json.dumps(sorted(map(str, run.rglob("*")))) == before
