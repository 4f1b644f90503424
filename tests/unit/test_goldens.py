"""Three reports word by word, and the numbers of the saved runs.

After an intended change run ``python -m tests.unit.test_goldens``, which writes the files again,
and read their diff.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mismatch.analysis.comparison import compare
from mismatch.codec import from_json
from mismatch.pipeline.document import comparisons_to_json, report_to_json
from mismatch.reports.summary import next_steps
from mismatch.specs import CheckSpec, spec_hash
from mismatch.types import Scoring
from tests.made_run import make_run
from tests.report_makers import EXAMPLES, MAKERS, ROOT, rendered, report_of
from tests.routing_fixture import rollout_of
from tests.sameness import differing_json, differing_text

GOLDENS = ROOT / "tests" / "goldens"
ARTEFACTS = GOLDENS / "artefacts.json"
REPORTS = ("healthy", "inconclusive", "example-tiny-gpt-oss-no-sinks")
SUFFIXES = ("md", "terminal.txt")


def _golden(name: str, suffix: str) -> Path:
    return GOLDENS / f"{name}.{suffix}"


def _saved(example: str) -> dict[str, Any]:
    path = ROOT / "examples" / example / "report.json"
    return json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", REPORTS)
def test_rendering_is_the_golden_one(name: str, suffix: str) -> None:
    golden = _golden(name, suffix).read_text("utf-8")
    assert differing_text(rendered(name)[suffix], golden) == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_saved_report_is_read_and_written_again_without_a_change(example: str) -> None:
    report, _ = report_of(f"example-{example}")
    assert differing_json(report_to_json(report, next_steps(report)), _saved(example)) == []


@pytest.mark.parametrize("name", MAKERS)
def test_comparison_json_is_that_part_of_the_report(name: str) -> None:
    report, _ = report_of(name)
    whole = report_to_json(report)
    part = {key: whole[key] for key in ("comparisons", "noise_floor")}
    document = comparisons_to_json(report.comparisons, report.noise_floor)
    for pair in [*document["comparisons"], *document["noise_floor"]]:  # report.json's names
        names = {name: name.replace(".", "_") for name in pair["metrics"]} | {"kl": "k1_kl"}
        pair["metrics"] = {names[name]: value for name, value in pair["metrics"].items()}
    assert differing_json(document, part) == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_numbers_of_a_saved_run_come_again_from_its_tokens(example: str) -> None:
    """Values and intervals, with the run's seed, from the two columns of log-probabilities."""
    _, tokens = report_of(f"example-{example}")
    saved = _saved(example)
    headline = saved["comparisons"][0]
    rollout = rollout_of(tokens)
    ids = rollout.token_ids[rollout.actions]
    decode = Scoring(headline["rollout"], ids, tokens["rollout_logprob"].to_numpy(), {})
    train = Scoring(
        headline["train"], ids, tokens["train_logprob"].to_numpy(), {},
        entropy=tokens["entropy"].to_numpy(np.float32),
    )  # fmt: skip
    seed = saved["run"]["spec"]["seed"]
    again = compare(rollout, decode, train, sampled_by_left=headline["sampled_by_left"], seed=seed)
    now = comparisons_to_json([again], [])["comparisons"][0]["metrics"]
    now = {{"kl": "k1_kl"}.get(name, name.replace(".", "_")): each for name, each in now.items()}
    golden = {name: each for name, each in headline["metrics"].items() if name in now}
    assert len(golden) > 20
    # Flags depend on what only the run knows: how often routes flip, what positions share.
    for metrics in (now, golden):
        for each in metrics.values():
            each.pop("flags")
    assert differing_json({name: now[name] for name in golden}, golden) == []


def _artefacts(run_dir: Path) -> dict[str, Any]:
    """Return a made run's manifest; checksums of Parquet files depend on pyarrow's version."""
    manifest = json.loads((make_run(run_dir / "run") / "manifest.json").read_text("utf-8"))
    for entry in manifest["artefacts"].values():
        entry.pop("made_with", None)  # versions of this environment
    hashes = {
        name: spec_hash(from_json(CheckSpec, _saved(name)["run"]["spec"])) for name in EXAMPLES
    }
    return {"pyarrow": pa.__version__, "spec_hashes": hashes, **manifest}


def test_artefacts_are_the_same_bytes_made_by_the_same_hash(tmp_path: Path) -> None:
    """A run of an earlier commit can be resumed: nothing that resuming compares has changed."""
    golden, now = json.loads(ARTEFACTS.read_text("utf-8")), _artefacts(tmp_path)
    if golden["pyarrow"] != now["pyarrow"]:
        for entry in (*golden["artefacts"].values(), *now["artefacts"].values()):
            entry.update(sha256="", bytes=0, inputs={})
        golden["pyarrow"] = now["pyarrow"]
    assert differing_json(now, golden) == []


def test_saved_runs_name_packaged_models_shortly() -> None:
    """The examples are of any machine."""
    for name in EXAMPLES:
        for file in (ROOT / "examples" / name).glob("report.*"):
            assert "mismatch/models/tiny" not in file.read_text("utf-8"), file.name


if __name__ == "__main__":
    for report in REPORTS:
        for suffix in SUFFIXES:
            _golden(report, suffix).write_text(rendered(report)[suffix], "utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        text = json.dumps(_artefacts(Path(scratch)), indent=1, allow_nan=False) + "\n"
        ARTEFACTS.write_text(text, "utf-8")
