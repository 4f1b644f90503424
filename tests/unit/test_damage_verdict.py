"""Damaged bytes never change a verdict: a clear error, or the verdict of the untouched run.

And what the schema of report.json refuses, its reader refuses.
"""

import json
import os
from random import Random

import jsonschema
import pytest

from mismatch.errors import MismatchError
from mismatch.pipeline.build import build_report
from mismatch.pipeline.document import report_from_json, report_to_json, schema
from mismatch.run import store
from mismatch.run.directory import load_spec
from mismatch.run.manifest import NAME

from .. import made_run
from ..conftest import grid
from ..fuzz import mutated, mutated_bytes
from ..report_makers import report_of

TRIALS = int(os.environ.get("MISMATCH_DAMAGE_TRIALS", "6"))  # of each file
REPORTS = ("healthy", "failing", "gradients", "fixes")


def verdict(run):
    """As `mismatch compare`, then as a resumed check, judge what lies there."""
    judged = []
    for again in (True, False):
        outcome = build_report(run, load_spec(run), None, again=again)[0].verdict
        judged.append((outcome.status, outcome.correctness, outcome.fitness))
    return judged


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose verdict is one: enough tokens, and far apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made_run, "RESPONSE", 40)
        run_dir = made_run.make_run(tmp_path_factory.mktemp("damage") / "run", shift=0.3)
    assert verdict(run_dir)[0][0] not in ("healthy", "inconclusive")
    return run_dir


FILES = ("rollout.parquet", "scores/fsdp.parquet", "scores/transformers-decode.parquet",
         "vocabulary.json", "comparison.json", "tokens.parquet", "spec.json", NAME)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(FILES, "rollout.parquet", "spec.json", NAME))
def test_damaged_bytes_are_refused_or_change_nothing(run, name):
    right, path = verdict(run), run / name
    before = {each: (run / each).read_bytes() for each in FILES}
    outcomes = {"refused": 0, "same": 0}
    for seed in range(TRIALS):
        path.write_bytes(mutated_bytes(before[name], Random(seed)))
        try:
            assert verdict(run) == right, f"{name}, seed {seed}"
            outcomes["same"] += 1
        except MismatchError:
            outcomes["refused"] += 1
        finally:
            for each, data in before.items():
                (run / each).write_bytes(data)
    print(f"{name}: {outcomes}")
    assert sum(outcomes.values()) == TRIALS


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(REPORTS, "failing", "fixes"))
def test_what_the_schema_refuses_is_not_read(name):
    validator = jsonschema.Draft202012Validator(schema())
    document = report_to_json(report_of(name)[0])
    assert validator.is_valid(document)
    report_from_json(document)
    refused = 0
    for seed in range(4 * TRIALS):
        changed = mutated(document, Random(seed))
        if validator.is_valid(changed):
            continue
        refused += 1
        print(f"seed {seed}: {next(validator.iter_errors(changed)).json_path}")
        with pytest.raises(MismatchError):
            report_from_json(changed)
    assert refused > TRIALS


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400", "9" * 400])
def test_a_number_that_is_none_is_refused(tmp_path, text):
    """In a report.json, as `mismatch report` reads it."""
    document = report_to_json(report_of("healthy")[0])
    document["comparisons"][0]["metrics"]["k3_kl"]["value"] = "HERE"
    path = tmp_path / "report.json"
    path.write_text(json.dumps(document).replace('"HERE"', text))
    with pytest.raises(MismatchError):
        report_from_json(store.read_json(path))
