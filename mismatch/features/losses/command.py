"""`mismatch losses`: is a framework's loss, and its gradient, what the formula says?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from mismatch.cli.command import with_flags
from mismatch.cli.flags import JSON, REQUIRED, Flags, Option
from mismatch.errors import MismatchError, did_you_mean
from mismatch.features.losses.cases import CASES, KINDS, Outcome, closed_form, judged, made
from mismatch.reports.formatting import number, plural, text
from mismatch.reports.section import Column, Section, Table
from mismatch.types import Judged

BUILT_IN = ("verl", "trl")
PANEL = "Whose loss"
WHOSE = "verl, trl, or your package.module:function."
LIMIT_S = 600.0
FLAGS = (
    Option("framework", str, PANEL, WHOSE, default=REQUIRED),
    Option(
        "python", str | None, PANEL, "Interpreter of its environment; default: that of mismatch."
    ),
)
LEAD = (
    "The loss of {code} got made log-probabilities, masks, advantages and weights. It and its "
    "gradient by each log-probability are compared with the formula."
)
SPLIT = "in 2: the batch as two micro-batches, losses and gradients summed."


@with_flags(FLAGS, JSON)
def losses(flags: Flags) -> int:
    """Compare a framework's loss and gradient with the formula.

    PPO's clip, GSPO and CISPO, with and without importance weights, as one batch and as two
    micro-batches. Runs verl's ppo_loss, TRL's GRPOTrainer, or your function (case, part) -> loss.

    Exit code 0: all cases agree. 1: one does not. 2: nothing was compared.

    Examples:
    mismatch losses --framework verl --python ENV/bin/python
    """
    from mismatch.cli import output
    from mismatch.codec import to_json

    code, outcomes = measured(flags["framework"], flags["python"] or sys.executable)
    wrong = sum(bool(outcome.remark) for outcome in outcomes)
    verdict = Judged("healthy", f"all {len(outcomes)} cases agree with the formula", 0)
    if wrong:
        verdict = Judged("broken", f"{plural(wrong, 'case')} of {len(outcomes)} differ", 1)
    document = {"schema": "mismatch.losses/1", "code": code, "cases": to_json(outcomes)}
    return output.conclude_alone(shown(code, outcomes), verdict, document, None, "", flags)


def measured(framework: str, python: str) -> tuple[str, list[Outcome]]:
    """Run the loss function in its environment; return its name and version, and the outcomes.

    Args:
        framework: ``verl``, ``trl``, or ``package.module:function``.
        python: interpreter of the environment that holds it.

    Raises:
        MismatchError: no such framework, or its process ended without a loss.
    """
    from mismatch.models import EMBEDDED
    from mismatch.processes.launch import worker_path
    from mismatch.run.interpreters import look_into

    packages = (framework,) if framework in BUILT_IN else ()
    if not packages and ":" not in framework:
        fix = f"{did_you_mean(framework, BUILT_IN)}one of {WHOSE}"
        raise MismatchError(f"--framework {framework}: no such loss", fix)
    there = look_into(python, ("numpy", "torch"), packages)
    absent = [*(name for name in packages if name not in there.packages), *there.missing]
    if absent:
        fix = "name the interpreter of your training environment: --python PATH"
        raise MismatchError(f"{python} has no {absent[0]}", fix)
    with tempfile.TemporaryDirectory(prefix="mismatch-losses-") as scratch:
        room = Path(scratch)
        job, out = room / "job.json", room / "losses.json"
        asked = {"framework": framework, "model": str(EMBEDDED["tiny-gpt-oss"]), "out": str(out)}
        job.write_text(json.dumps(asked), "utf-8")
        command = [python, "-W", "ignore", "-m", "mismatch.features.losses.worker", str(job)]
        own = os.environ | worker_path(room) | {"PYTHONSAFEPATH": "1"}
        try:
            done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise MismatchError(f"{framework} gave no loss within {LIMIT_S:g} s") from error
        rows = json.loads(out.read_text("utf-8")) if out.exists() else []
    if all("error" in row for row in rows):
        said = rows[0]["error"] if rows else (done.stderr.strip().splitlines() or ["nothing"])[-1]
        fix = "use verl 0.9 or TRL 1.16, or your own function: --framework package.module:function"
        raise MismatchError(f"{framework} gave no loss in any case: {said}", fix)
    batch, outcomes = made(), []
    for case, row in zip(CASES, rows, strict=True):
        if "error" in row:
            expected, _ = closed_form(batch, case)
            outcomes.append(Outcome(case.name, None, expected, None, row["error"]))
        else:
            outcomes.append(judged(batch, case, row["loss"], np.array(row["gradient"])))
    return " ".join([framework, *there.packages.values()]), outcomes


def shown(code: str, outcomes: list[Outcome]) -> Section:
    """Return the table of cases."""
    columns = (
        Column("case", text),
        Column("loss", number),
        Column("formula", number),
        Column("worst gradient", number, detail="relative to the largest"),
        Column("result", text),
    )
    rows = [(o.case, o.loss, o.expected, o.error, o.remark or "agrees") for o in outcomes]
    return Section(
        "losses",
        "Loss and gradient against the formula",
        LEAD.format(code=code),
        tables=[Table(columns, rows)],
        notes=[*(f"{kind}: {words}." for kind, words in KINDS.items()), SPLIT],
    )
