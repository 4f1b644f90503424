"""A stored verdict is a claim: what contradicts it is refused, the rest is called unverified."""

import json
import shutil

import pytest

from mismatch import load
from mismatch.errors import MismatchError
from mismatch.pipeline.document import report_from_json, report_to_json
from mismatch.run import manifest

from ..command import mismatch
from ..made_run import make_run
from ..report_makers import report_of

HEALTHY = {"status": "healthy", "reason": "all is well"}


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A run of two sides that are far apart, with its report."""
    run = make_run(tmp_path_factory.mktemp("judged") / "run", shift=0.3)
    done = mismatch("compare", run)
    assert done.returncode == 1, done.stderr
    return run


@pytest.fixture
def run(judged, tmp_path):
    return shutil.copytree(judged, tmp_path / "run")


def edit(run, name, change, sign=True):
    """Edit a document of a run as a stranger would, its entry in the manifest included."""
    document = json.loads((run / name).read_text())
    change(document)
    (run / name).write_text(json.dumps(document))
    entry = manifest.entries(run)[name]
    if sign:
        manifest.record(run, name, entry["schema"], entry["made_by"], entry["inputs"])


def call_it_healthy(document):
    document["verdict"] |= HEALTHY | {"correctness": HEALTHY, "fitness": HEALTHY}
    for judgement in document["verdict"]["judgements"]:
        judgement["status"] = "healthy"


def lower_the_numbers(document):
    call_it_healthy(document)
    document["verdict"]["judgements"] = document["verdict"]["judgements"][:1]
    for pair in document["comparisons"]:
        for name in ("k3_kl", "k1_kl", "logprob_abs_diff_mean"):
            pair["metrics"][name] |= {"value": 1e-9, "low": 0.0, "high": 1e-8}
    document["checks"] = []


@pytest.mark.parametrize("change", [call_it_healthy, lower_the_numbers])
def test_a_forged_verdict_is_refused_with_its_checksum_right_too(run, change):
    edit(run, "report.json", change)
    done = mismatch("report", run)
    assert done.returncode == 2
    assert "report.json" in done.stderr
    assert f"mismatch compare {run}" in done.stderr
    assert "HEALTHY" not in done.stdout
    with pytest.raises(MismatchError):
        _ = load(run).verdict


def test_a_report_that_the_manifest_does_not_list_is_refused(run):
    edit(run, "report.json", call_it_healthy, sign=False)
    document = json.loads((run / "manifest.json").read_text())
    del document["artefacts"]["report.json"]
    (run / "manifest.json").write_text(json.dumps(document))
    done = mismatch("report", run)
    assert done.returncode == 2
    assert "is not listed" in done.stderr


def test_numbers_that_are_not_those_of_the_comparison_are_refused(run):
    def change(document):
        document["comparisons"][0]["metrics"]["ratio_mean"]["value"] += 0.01

    edit(run, "report.json", change)
    done = mismatch("report", run)
    assert done.returncode == 2
    assert "other numbers" in done.stderr


def test_what_was_edited_consistently_is_called_unverified(run):
    edit(run, "report.json", lambda document: document.update(model="another"))
    done = mismatch("report", run)
    assert done.returncode == 1
    assert "unverified" in done.stdout.splitlines()[-1]
    other = shutil.copytree(run, run.parent / "other")
    assert "unverified" in mismatch("report", run, other).stdout


@pytest.mark.slow
def test_files_that_came_without_a_manifest_are_read_again_and_again(run):
    (run / "manifest.json").unlink()
    assert mismatch("report", run).returncode == 1
    for command in ("compare", "report", "compare", "report"):
        assert mismatch(command, run).returncode == 2  # files may be missing
    assert load(run).verdict.status != "healthy"
    for name in ("rollout.parquet", "spec.json", "vocabulary.json"):  # as examples/ has them
        (run / name).unlink()
    for _ in range(2):
        assert mismatch("report", run).returncode == 2


# ---------------------------------------------------------------- breakdowns

WRONG = [
    ("by_position", "count", 0, "x"),
    ("by_position", "count", 0, None),
    ("by_position", "start", 0, 1.5),
    ("by_position", "mean_abs_delta", 0, None),
    ("by_edge", "edge", 0, 3),
    ("by_probability", "low", 0, None),
    ("routing_notes", "fact", 0, []),
    ("routing_by_layer", "disagree", 0, "0.5"),
    ("routing_layer_position", "disagree", 0, {}),
    ("routing_by_margin", "from", 0, "x"),
    ("top_tokens", "k3_share", 0, True),
]


OPTIONAL = {("top_tokens", "k3_share"), ("routing_by_layer", "disagree")}


@pytest.fixture(scope="module")
def document():
    return report_to_json(report_of("example-tiny-gpt-oss")[0])


@pytest.mark.parametrize(("table", "column", "row", "value"), WRONG)
def test_a_breakdown_of_another_kind_is_refused_with_its_place(document, table, column, row, value):
    changed = json.loads(json.dumps(document))
    held = changed["comparisons"][0]["breakdowns"][table]
    held[column][row] = value
    with pytest.raises(MismatchError, match=rf"breakdowns\.{table}\.{column}"):
        report_from_json(changed)
    held[column] = held[column][:-1]
    with pytest.raises(MismatchError, match=f"{table}: columns of"):
        report_from_json(changed)
    del held[column]
    if (table, column) not in OPTIONAL:
        with pytest.raises(MismatchError, match=f"{column}' is missing"):
            report_from_json(changed)
