"""`mismatch explain` and `mismatch demo`: every name of a report, offline, without an engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mismatch.errors import MismatchError
from mismatch.metrics import METRICS
from mismatch.metrics.framework_names import aliases
from mismatch.reports.meanings import meanings_of, names
from tests.command import mismatch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", names())
def test_every_name_has_a_meaning(kind: str) -> None:
    for name in names()[kind]:
        for asked in name.split(", "):
            found = [meaning for meaning in meanings_of(asked) if meaning.kind == kind]
            assert found, name
            assert all(all(each.facts.values()) for each in found), name


@pytest.mark.parametrize("run", ["tiny-gpt-oss", "tiny-gpt-oss-no-sinks"])
def test_every_name_in_a_report_has_one(run: str) -> None:
    report = json.loads((ROOT / "examples" / run / "report.json").read_text())
    told = {check["id"] for check in report["checks"]} | {*report["comparisons"][0]["metrics"]}
    told |= {cause["id"] for cause in (report.get("causes") or {}).get("ranked", [])}
    for name in told:
        meanings_of(name)


def test_a_frameworks_name_is_found_with_and_without_its_group() -> None:
    for metric, held in aliases().items():
        for alias in held:
            for asked in (alias.name, alias.name.rpartition("/")[2], f"actor/{alias.name}"):
                assert metric in [meaning.name for meaning in meanings_of(asked)]


def test_a_metric_is_found_by_the_label_of_tables_and_of_the_verdict() -> None:
    for metric in METRICS.values():
        for label in {metric.label, metric.label.partition(",")[0]} - {""}:
            found = meanings_of(label)
            assert metric.name in [each.name for each in found] or found[0].kind == "word"


def test_a_name_of_several_kinds_is_told_of_each() -> None:
    kinds = [meaning.kind for meaning in meanings_of("attention-sinks")]
    assert kinds == ["check", "cause", "fix"]


def test_levels_are_those_that_judge() -> None:
    (meaning,) = meanings_of("k3_kl")
    assert "0.002" in meaning.facts["level, bf16 MoE"]
    assert "0.013" in meaning.facts["level, bf16 MoE"]
    assert "NeMo-RL" in meaning.facts["others call it"]
    (unjudged,) = meanings_of("ratio_max")
    assert "none" in unjudged.facts["level"]


def test_an_unknown_name_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(MismatchError) as raised:
        meanings_of("rollout_prob_diff_mean")
    assert "rollout_probs_diff_mean" in raised.value.fix
    done = mismatch("explain", "k3", "--format", "json", cwd=tmp_path)
    assert json.loads(done.stdout)["meanings"][0]["kind"] == "word"
    assert mismatch("explain", "no such name", cwd=tmp_path).returncode == 2


def test_the_demo_is_the_page_of_the_broken_example(tmp_path: Path) -> None:
    done = mismatch("demo", "--no-browser", cwd=tmp_path)
    assert done.returncode == 0
    page = Path(re.search(r"/\S+no-sinks\.html", done.stdout)[0])  # type: ignore[index]
    assert page.read_text() == (ROOT / "examples/tiny-gpt-oss-no-sinks/report.html").read_text()
    assert list(tmp_path.iterdir()) == []
