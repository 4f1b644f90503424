"""What `mismatch postmortem` says first: of columns that are none, of steps, of rows."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from mismatch.reports.formatting import number

from .. import recorded_folders as made
from ..command import mismatch
from .test_recorded_folders import judged, watched


def changed(rows, rollout=lambda x: x, train=lambda x: x):
    """The rows with other numbers on one side or both."""
    return [
        replace(
            row,
            rollout=list(map(float, rollout(np.array(row.rollout)))),
            train=list(map(float, train(np.array(row.train)))),
        )
        for row in rows
    ]


@pytest.mark.parametrize(
    ("rollout", "train", "named"),
    [
        (np.negative, np.negative, "negated"),
        (np.array, np.negative, "negated"),
        (np.exp, np.exp, "probabilities"),
        (np.exp, np.array, "probabilities"),
        (np.array, np.exp, "probabilities"),
        (lambda x: x / np.log(2), np.array, "base 2"),
        (np.array, lambda x: x / np.log(2), "base 2"),
        (np.array, lambda x: x / np.log(10), "base 10"),
    ],
)
def test_numbers_that_are_no_logarithms_are_named_before_any_cause(tmp_path, rollout, train, named):
    rows = changed(made.samples(32), rollout, train)
    _, report = judged(tmp_path, made.generic(tmp_path / "rows.jsonl", rows))
    assert report["verdict"]["status"] == "broken"
    assert named in report["verdict"]["reason"]
    assert not report.get("causes", {}).get("ranked")


def test_two_columns_of_numbers_are_enough_and_a_refusal_shows_them(tmp_path):
    draws = np.random.default_rng(0)
    rows = []
    for row in range(60):
        rollout = -draws.exponential(1.0, 40) - 0.2
        train = rollout + draws.normal(0, 0.01, 40)
        columns = {"rollout_logprobs": rollout.tolist(), "train_logprobs": train.tolist()}
        rows.append(columns | {"step": row // 20})
    dump = tmp_path / "two.jsonl"
    dump.write_text("\n".join(map(json.dumps, rows)))
    _, report = judged(tmp_path, dump)
    found = report["comparisons"][0]["metrics"]["logprob_abs_diff_mean"]
    assert (found["n_tokens"], found["n_prompts"]) == (60 * 40, 60)
    deltas = [np.subtract(r["train_logprobs"], r["rollout_logprobs"]) for r in rows]
    assert found["value"] == pytest.approx(np.abs(deltas).mean(), rel=1e-5)
    (tmp_path / "other.jsonl").write_text(json.dumps({"lp": [1, 2]}) + "\n")
    refused = mismatch("postmortem", tmp_path / "other.jsonl", "--out", tmp_path / "no")
    shape = '{"rollout_logprobs": […], "train_logprobs": […]}'
    assert shape in refused.stderr
    assert set(json.loads(shape.replace("…", ""))) <= rows[0].keys()
    rows[3]["train_logprobs"].pop()
    dump.write_text("\n".join(map(json.dumps, rows)))
    assert "39" in mismatch("postmortem", dump, "--out", tmp_path / "short").stderr


def test_a_ratio_that_is_no_number_is_the_headline(tmp_path):
    rows = made.samples(32)
    far = [*rows[5].rollout[:3], -1000.0, *rows[5].rollout[4:]]
    rows[5] = replace(rows[5], rollout=far)
    dump = made.generic(tmp_path / "rows.jsonl", rows, step=3, rank=1)
    said, report = judged(tmp_path, dump)
    assert "recorded-values" in report["verdict"]["reason"]
    assert "3, rank 1" in report["verdict"]["reason"]
    assert "row 5, sampled" in " ".join(said.split())


def test_a_copied_column_decides_nothing(tmp_path):
    rows = [replace(row, train=row.rollout) for row in made.samples(32)]
    _, report = judged(tmp_path, made.generic(tmp_path / "rows.jsonl", rows))
    assert report["verdict"]["status"] == "inconclusive"
    assert "recorded-columns" in report["verdict"]["reason"]


def test_swapped_columns_are_named(tmp_path):
    """Tokens are drawn from one distribution: the mean ratio to the other is 1, not its inverse."""
    random = np.random.default_rng(0)
    rows = []
    for row in made.samples(256):
        n = len(row.response)
        logits = random.normal(0, 2, (2, n, 50)) * [[[0.35]], [[1.0]]]
        held = [logits[1], logits[0] + logits[1]]
        laws = [each - np.log(np.exp(each).sum(1, keepdims=True)) for each in held]
        ids = (np.exp(laws[0]).cumsum(1) > random.random((n, 1))).argmax(1)
        sides = [law[np.arange(n), ids].tolist() for law in laws]
        rows.append(replace(row, rollout=sides[1], train=sides[0]))
    said, _ = judged(tmp_path, made.generic(tmp_path / "rows.jsonl", rows))
    assert "other way round" in " ".join(said.split())
    said, _ = judged(tmp_path, made.generic(tmp_path / "rows.jsonl", [
        replace(row, rollout=row.train, train=row.rollout) for row in rows
    ]), "--out", tmp_path / "right")  # fmt: skip
    assert "other way round" not in " ".join(said.split())


def test_whether_columns_are_swapped_is_open_where_few_tokens_are_near_each_other(tmp_path):
    """600 tokens that are 0.012 nats apart fit both ways; 10,000 that are far apart tell."""
    rows = made.samples(32, spread=0.015)
    _, report = judged(tmp_path, made.generic(tmp_path / "rows.jsonl", rows))
    assert "swapped" in report["recorded"]["columns"]["unseen"]
    assert any("swapped" in each["reason"] for each in report["not_tested"])
    rows = made.samples(200, spread=0.3, length=(50, 51))
    (tmp_path / "far").mkdir()
    _, report = judged(tmp_path / "far", made.generic(tmp_path / "far.jsonl", rows))
    assert report["recorded"]["columns"]["unseen"] == ""


def test_a_list_that_is_short_in_every_nth_row_says_so(tmp_path):
    dump = made.generic(tmp_path / "rows.jsonl", made.samples(32))
    lines = dump.read_text().splitlines(keepends=True)
    lines[1::4] = [line[: line.rindex(",")] + "]}\n" for line in lines[1::4]]
    dump.write_text("".join(lines))
    said, report = judged(tmp_path, dump)
    assert "-1 trainer values" in said
    assert "every 4th row" in report["verdict"]["reason"]
    assert "fp16" not in said


def test_rows_whose_ids_lost_a_token_are_named(tmp_path):
    """Ids from text: the end of each response is lost, and in a few rows two tokens became one."""
    rows = made.samples(64, length=(40, 60))
    entries = []
    for n, row in enumerate(rows):
        ids, train = row.response[:-1], row.train[:-1]
        if n in (7, 20, 41):
            ids, train = ids[:15] + ids[16:], train[:15] + train[16:]
        entries.append(
            {
                "prompt_token_ids": row.prompt,
                "response_token_ids": ids,
                "rollout_logprobs": row.rollout,
                "train_logprobs": train,
            }
        )
    said, report = judged(tmp_path, made.lines(tmp_path / "rows.jsonl", entries))
    assert report["recorded"]["rows"]["shifted"] == ["7", "20", "41"]
    assert report["causes"]["ranked"][0]["id"] == "misalignment"
    assert "7, 20, 41" in " ".join(said.split())
    assert report["verdict"]["status"] == "broken"


def test_a_mask_by_another_name_is_named_with_the_flag(tmp_path):
    dump = made.generic(tmp_path / "rows.jsonl", made.samples(4))
    dump.write_text(dump.read_text().replace("action_mask", "response_mask"))
    done = mismatch("postmortem", dump, cwd=tmp_path)
    assert "response_mask: rename it" in done.stderr
    assert "--dump-format" in done.stderr


@pytest.fixture(scope="module")
def growing():
    """Ten steps that replay the same prompts and responses, and drift apart."""
    return [made.samples(32, seed=0, spread=0.01 * (1 + step)) for step in range(10)]


def test_growth_is_said_everywhere_and_replayed_rows_are_no_evidence(tmp_path, growing):
    for step, rows in enumerate(growing, start=1):
        made.generic(tmp_path / "dump" / f"step_{step}.jsonl", rows, step=step)
    said, report = judged(tmp_path, tmp_path / "dump")
    flat = " ".join(said.split())
    assert "grows over the" in flat
    assert "grows over the" in report["verdict"]["reason"]
    assert "grows over the" in (tmp_path / "run" / "report.md").read_text()
    ids = [cause["id"] for cause in report["causes"]["ranked"]]
    assert ids[0] == "stale-weights"
    assert "row-pairing" not in ids
    assert "microbatch-dependence" not in ids
    assert "×" in watched(tmp_path / "dump")[-1]


def test_one_step_that_is_off_suspects_what_was_stale_there(tmp_path):
    for step in (1, 2, 3):
        rows = made.samples(32, seed=step)
        rows = made.off(rows, range(32)) if step == 2 else rows
        made.nemo_rl(tmp_path / "dump", step, rows)
    said, report = judged(tmp_path, tmp_path / "dump")
    assert "prefix-cache-stale" in [each["id"] for each in report["causes"]["ranked"][:3]]
    assert "of step 2" in " ".join(said.split())


@pytest.mark.parametrize("files", [1, 2])
def test_numbers_that_were_read_decide_and_are_shown(tmp_path, monkeypatch, files):
    """Two prompts of one step are far apart, and are not among those that are compared."""
    import mismatch.features.recorded.command as command
    from mismatch.cli.main import main

    rows = made.samples(400, length=(50, 60))
    bad = made.off(rows, [3, 11], spread=3.0)
    for step, each in list(enumerate((rows, bad), start=1))[2 - files :]:
        made.generic(tmp_path / "dump" / f"step_{step}.jsonl", each, step=step)
    monkeypatch.setattr(command, "MOST", 3_000)
    sums = command.read_recorded(tmp_path / "dump").sums
    out = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["mismatch", "postmortem", f"{tmp_path}/dump", f"--out={out}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    report = json.loads((out / "report.json").read_text())
    assert report["run"]["n_sequences"] < 100
    k3 = report["comparisons"][0]["metrics"]["k3_kl"]
    assert k3["value"] == pytest.approx(sums.whole.step(0).k3)
    assert k3["low"] is None
    (judged,) = [each for each in report["verdict"]["judgements"] if each["metric"] == "k3_kl"]
    decides = max([sums.whole.step(0), *sums.steps()], key=lambda step: step.k3)
    assert judged["value"] == pytest.approx(decides.k3)
    assert judged["status"] == "unfit"
    shown = number(decides.k3)
    for name in ("report.md", "report.html"):
        assert shown in (out / name).read_text()
    again = mismatch("report", out)  # what is stored is what its numbers say
    assert again.returncode in (0, 1), again.stderr
    assert shown in again.stdout


def test_a_gap_that_grows_along_the_response_is_said(tmp_path):
    """Two steps, the second with longer responses: no cause of stale weights."""
    random = np.random.default_rng(0)
    for step, length in ((1, 100), (2, 800)):
        rows = []
        for row in made.samples(32, seed=step, length=(length, length + 1)):
            spread = 0.02 * np.sqrt(1 + np.arange(length))
            train = np.array(row.rollout) + spread * random.standard_normal(length) - spread**2 / 2
            rows.append(replace(row, train=np.minimum(train, -1e-6).tolist()))
        made.generic(tmp_path / "dump" / f"step_{step}.jsonl", rows, step=step)
    said, report = judged(tmp_path, tmp_path / "dump")
    assert report["recorded"]["rows"]["with_position"] > 2
    assert "grows with the" in " ".join(said.split())
    assert (
        report["causes"]["ranked"] == [] or report["causes"]["ranked"][0]["id"] != "stale-weights"
    )
    assert "grows with the" in watched(tmp_path / "dump")[-1]
