"""A loss function against its closed form: a right one agrees, published bugs are found."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mismatch.cli.main import app
from mismatch.errors import MismatchError
from mismatch.features.losses.cases import CASES, CLIP, Case, closed_form, judged, made
from mismatch.features.losses.worker import run_case


def policy_loss(case, part, bug=""):
    """The loss of every case, written for autograd; ``bug`` plants one."""
    new, old, mask = part["new"], part["old"], part["mask"].double()
    advantage, weights = part["advantages"][:, None], part["weights"]
    log_ratio = new - old
    if case.kind == "gspo":
        mean = (log_ratio * mask).sum(1, keepdim=True)
        mean = mean if bug == "sum of log-ratios" else mean / mask.sum(1, keepdim=True)
        log_ratio = new - new.detach() + mean.detach()
    ratio = log_ratio.exp()
    if case.kind == "cispo":
        cut = ratio.clamp(max=1 + CLIP)
        each = -(cut if bug == "weight not detached" else cut.detach()) * advantage * new
    else:
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        each = -torch.minimum(ratio * advantage, clipped * advantage)
    if bug == "clip ignored" and case.kind != "cispo":
        each = -ratio * advantage
    if weights is not None and bug != "weights ignored":
        each = each * weights
    counted = part["present"].double() if bug == "mask ignored" else mask
    each = each * counted
    if case.kind in ("ppo-token-mean", "cispo") or bug == "mean ignored":
        tokens = part["tokens"]
        if bug == "micro-batch's own tokens":
            tokens = mask.sum()
        if bug == "excluded tokens in the denominator":
            tokens = part["tokens"] * part["present"].sum() / mask.sum()
        loss = each.sum() / tokens
    else:
        loss = (each.sum(1) / counted.sum(1)).sum() / part["sequences"]
    return loss / case.micro_batches if bug == "divided by micro-batches again" else loss


def outcomes(bug=""):
    found = {}
    for case in CASES:
        row = run_case(partial(policy_loss, bug=bug), made(), case)
        found[case] = judged(made(), case, row["loss"], np.array(row["gradient"]))
    return found


def failing(bug):
    return {case for case, outcome in outcomes(bug).items() if outcome.remark}


def cases(**wanted):
    return {case for case in CASES if all(getattr(case, k) in v for k, v in wanted.items())}


BY_TOKEN = ("ppo-token-mean", "cispo")
# Published: verl 5625 and 7200, TRL 5031 and Liger 1082, TRL 6369, ms-swift 10117, verl 1083.
PLANTED = {
    "micro-batch's own tokens": cases(kind=BY_TOKEN, micro_batches=[2]),
    "weights ignored": cases(weighted=[True]),
    "excluded tokens in the denominator": cases(kind=BY_TOKEN),
    "divided by micro-batches again": cases(micro_batches=[2]),
    "mean ignored": cases(kind=["ppo-sequence-mean", "gspo"]),
    "mask ignored": set(CASES),
    "weight not detached": cases(kind=["cispo"]),
    "sum of log-ratios": cases(kind=["gspo"]),
    "clip ignored": cases(kind=["ppo-token-mean", "ppo-sequence-mean", "gspo"]),
}


def test_a_right_loss_agrees_in_every_case() -> None:
    assert len(CASES) == 16
    for outcome in outcomes().values():
        assert not outcome.remark
        assert outcome.error < 1e-12
        assert outcome.loss == pytest.approx(outcome.expected, rel=1e-12)


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found_in_the_cases_that_show_it(bug: str) -> None:
    assert failing(bug) == PLANTED[bug]


def test_the_closed_form_by_hand() -> None:
    """One response of two tokens is left: ratios 1 and 1.5, advantage 1, so the second is cut."""
    batch = made()
    batch.mask[:] = False
    batch.mask[0, :2] = True
    batch.new[0, :2], batch.old[0, :2] = (-1.0, -2.0), (-1.0, -2.0 - np.log(1.5))
    batch.advantages[0] = 1.0
    assert batch.weights(Case("ppo-token-mean", True, 1))[0, :2] == pytest.approx([0.5, 1.25])
    loss, gradient = closed_form(batch, Case("ppo-token-mean", True, 1))
    assert loss == pytest.approx((0.5 * -1.0 + 1.25 * -1.2) / 2)
    assert gradient[0, :2] == pytest.approx([-0.25, 0.0])
    loss, gradient = closed_form(batch, Case("cispo", False, 1))
    assert loss == pytest.approx((1.0 + 1.2 * 2.0) / 2)
    assert gradient[0, :2] == pytest.approx([-0.5, -0.6])
    assert not gradient[1:].any()


def test_what_is_seen_of_a_difference() -> None:
    again = outcomes("divided by micro-batches again")[Case("gspo", False, 2)]
    assert "0.5 times" in again.remark
    assert "mask" in outcomes("mask ignored")[CASES[0]].remark
    batch = made()
    loss, slope = closed_form(batch, CASES[0])
    assert judged(batch, CASES[0], loss + 1e-3, slope).remark
    assert "finite" in judged(batch, CASES[0], loss, slope * np.nan).remark


# ---- the command, in a process of its own ----

OWN = "from tests.unit.test_losses import policy_loss\n\n\ndef right(case, part):\n"


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "code"), [("", 0), ("weights ignored", 1)])
def test_your_own_function(tmp_path, monkeypatch, bug, code) -> None:
    (tmp_path / "mine.py").write_text(f"{OWN}    return policy_loss(case, part, {bug!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["losses", "--framework", "mine:right", "--format", "json"], standalone_mode=False
    )
    assert done.return_value == code, done.output
    document = json.loads(done.output)
    assert document["schema"] == "mismatch.losses/1"
    assert len([row for row in document["cases"] if row["remark"]]) == (8 if code else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "words"),
    [("trll", "did you mean trl"), ("no.such:loss", "No module"), ("json:loads", "any case")],
)
def test_what_is_no_loss_is_refused(framework: str, words: str) -> None:
    with pytest.raises(MismatchError) as refused:
        CliRunner().invoke(app, ["losses", "--framework", framework], catch_exceptions=False)
    assert words in f"{refused.value} {refused.value.fix}"
