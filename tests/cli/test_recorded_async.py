"""`mismatch postmortem` and `watch` of asynchronous runs: staleness, labels, anchor, drift."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..command import mismatch
from .test_recorded_folders import judged, watched


def dump(path: Path, edit: Any = None, steps: int = 6, rows: int = 48, tokens: int = 60) -> Path:
    """Write a run whose odd rows were sampled one version earlier; ``edit(row, step, entry)``."""
    draws = np.random.default_rng(0)
    entries = []
    for step in range(steps):
        for row in range(rows):
            rollout = -draws.exponential(1.0, tokens) - 0.01
            scale, late = np.sqrt(-rollout), row % 2
            old = rollout + 0.02 * scale * draws.standard_normal(tokens)
            train = old + late * 0.02 * scale * draws.standard_normal(tokens)
            entry = {
                "prompt_token_ids": [3 + row // 4, 4 + step],
                "response_token_ids": draws.integers(5, 900, tokens).tolist(),
                "rollout_logprobs": rollout,
                "train_logprobs": train,
                "old": old,
                "step": step,
                "weight_version": step - late,
            }
            if edit is not None:
                edit(row, step, entry)
            entry.pop("old", None)
            entries.append({k: v.tolist() if isinstance(v, np.ndarray) else v
                            for k, v in entry.items()})  # fmt: skip
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def check(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in report["checks"] if each["id"] == name]
    return found


def test_versions_tell_staleness_from_mismatch(tmp_path: Path) -> None:
    _, report = judged(tmp_path, dump(tmp_path / "run.jsonl"))
    (split,) = report["staleness"]["splits"]
    assert split["by"] == "lag"
    assert split["staleness"]["value"] == pytest.approx(split["mismatch"]["value"], rel=0.2)
    assert [lag["lag"] for lag in split["lags"]] == [0, 1]
    assert check(report, "version-labels")["status"] == "passed"
    assert check(report, "drift")["status"] == "passed"


def test_gates_of_frameworks_are_an_output(tmp_path: Path) -> None:
    _, report = judged(tmp_path, dump(tmp_path / "run.jsonl", steps=20, rows=16))
    done = mismatch("report", tmp_path / "run", "--format", "gates")
    prime, kl, factor = json.loads(done.stdout)["gates"]
    k3 = [step["k3"] for step in report["recorded"]["steps"]]
    assert (prime["steps"], prime["passed"]) == (20, True)
    assert prime["value"] == pytest.approx(np.mean(k3))
    assert kl["value"] == report["headline"]["k3_kl"]
    assert 1 < factor["value"] < 1.1
    assert mismatch("report", tmp_path / "run", tmp_path, "--format", "gates").returncode == 2


def test_two_columns_are_read_both_ways(tmp_path: Path) -> None:
    def unlabelled(row: int, step: int, entry: dict[str, Any]) -> None:
        del entry["weight_version"]

    _, report = judged(tmp_path, dump(tmp_path / "run.jsonl", unlabelled))
    assert report["staleness"]["splits"] == []
    page = (tmp_path / "run" / "report.html").read_text()
    assert "read-rollouts" in page
    assert "old_logprobs" in page


def test_an_old_column_splits_and_names_the_anchor(tmp_path: Path) -> None:
    def third(row: int, step: int, entry: dict[str, Any]) -> None:
        del entry["weight_version"]
        entry["old_logprobs"] = entry["old"]

    _, report = judged(tmp_path, dump(tmp_path / "run.jsonl", third))
    (split,) = report["staleness"]["splits"]
    assert split["by"] == "old"
    assert split["mismatch"]["value"] == pytest.approx(0.02, rel=0.1)
    assert split["staleness"]["value"] == pytest.approx(0.02 / np.sqrt(2), rel=0.1)
    assert "recomputed" in report["recorded"]["anchor"]


@pytest.mark.parametrize(("of", "anchor"), [("sampler", "sampler"), ("itself", "own pass")])
def test_the_anchor_is_read_from_recorded_ratios(tmp_path: Path, of: str, anchor: str) -> None:
    def ratio(row: int, step: int, entry: dict[str, Any]) -> None:
        delta = entry["train_logprobs"] - entry["rollout_logprobs"]
        entry["importance_ratio"] = np.exp(delta if of == "sampler" else 0 * delta)

    _, report = judged(tmp_path, dump(tmp_path / "run.jsonl", ratio))
    assert anchor in report["recorded"]["anchor"]
    assert report["recorded"]["idle"] == ""


def test_an_idle_clip_is_named(tmp_path: Path) -> None:
    def apart(row: int, step: int, entry: dict[str, Any]) -> None:
        entry["importance_ratio"] = np.exp(entry["train_logprobs"] - entry["old"])
        far = 0.02 * 2**step * np.sin(np.arange(60) + row)
        for name in ("old", "train_logprobs"):
            entry[name] = entry[name] + far

    _, report = judged(tmp_path, dump(tmp_path / "run.jsonl", apart, steps=8))
    assert check(report, "recorded-clip")["status"] == "warning"
    first, last = report["recorded"]["steps"][0], report["recorded"]["steps"][-1]
    assert last["k3"] > 20 * first["k3"]
    assert last["clipped"] > 0.1


def test_rows_of_a_recovered_engine_are_named_with_their_versions(tmp_path: Path) -> None:
    """Of step 4, every sixth row claims version 4 and was sampled by weights of long before."""
    wrong = [row for row in range(48) if row % 6 == 0]

    def recovered(row: int, step: int, entry: dict[str, Any]) -> None:
        off = np.random.default_rng([row, step]).standard_normal(60)
        if row % 2 or (step == 4 and row in wrong):
            entry["train_logprobs"] = entry["train_logprobs"] + 0.02 * 10 * off

    _, report = judged(tmp_path, dump(tmp_path / "run.jsonl", recovered))
    (label,) = report["staleness"]["labels"]
    assert (label["claimed"], label["fits"]) == ("4", "3")
    assert label["rows"] == [str(4 * 48 + row) for row in wrong]
    assert check(report, "version-labels")["status"] == "warning"
    assert report["causes"]["ranked"][0]["id"] == "stale-weights"


def test_a_bias_is_named_by_postmortem_and_watch(tmp_path: Path) -> None:
    def biased(row: int, step: int, entry: dict[str, Any]) -> None:
        entry["train_logprobs"] = entry["train_logprobs"] + 2e-3

    folder = tmp_path / "dumps"
    folder.mkdir()
    path = dump(folder / "run.jsonl", biased, tokens=200)
    _, report = judged(tmp_path, path)
    assert check(report, "drift")["status"] == "warning"
    assert report["drift"]["bias"] == pytest.approx(2e-3, rel=0.3)
    assert len(report["drift"]["steps"]) == 6
    (line, *_) = watched(folder)
    assert "bias" in line
    assert "staleness" in line
