"""A check whose float32 gap or excess fails names the module, as ``mismatch locate`` does.

So does a check whose sides do not round alike, in the precision of the run.

A check that has neither costs nothing here but one reading of its scorings.
"""

from __future__ import annotations

from mismatch.analysis.results import Displaced, Finding, rounds_alike
from mismatch.errors import MismatchError
from mismatch.features.locate.flags import NO_LOCATE
from mismatch.features.locate.judge import FILE
from mismatch.features.locate.recording import locate_in
from mismatch.keys import REFERENCE
from mismatch.pipeline.build import square_of
from mismatch.processes.stages import Stages
from mismatch.run import manifest
from mismatch.specs import OWN_SCORER

SEQUENCES = 4  # the worst two, and two at random
LONGEST_S = 600.0  # of all that it starts, whatever the check itself took


def locate_failed(stages: Stages) -> None:
    """Locate what failed, unless that is there; leave ``locate.json``.

    Raises:
        MismatchError: a side cannot be run module by module, or the time was used up.
    """
    run_dir, spec = stages.run_dir, stages.spec
    current = manifest.is_current(run_dir, FILE, "")
    if not current:
        manifest.forget(run_dir, FILE)  # of other scorings than those that are there now
    if spec.extra(NO_LOCATE) or current:
        return
    square = square_of(run_dir, spec)
    if square is None:
        return
    # Gaps first: float32 shows a fault without its rounding.
    findings = sorted(square.findings, key=lambda finding: finding.evidence != "gap")
    every: list[Finding | Displaced] = [*findings, *square.displaced]
    failed = [f for f in every if f.standing == "beyond" and f.side != "other-engine"]
    if not failed and rounds_alike(square) is not False:
        return
    if spec.train.scorer != OWN_SCORER:
        fault = f"the modules of {spec.train.scorer}'s own trainer cannot be recorded"
        raise MismatchError(fault, "mismatch locate RUN on a check of the built-in trainer")
    first, gap = next(iter(failed), None), None
    if isinstance(first, Finding) and first.evidence == "gap":
        gap = first.scoring, REFERENCE
    locate_in(
        run_dir,
        spec,
        stages.narrator,
        sequences=SEQUENCES,
        limit_s=LONGEST_S,
        # The trainer's modules can be recorded without the engine's.
        both=first is not None and first.side != "trainer",
        gap=gap,
        alike=gap is None and square.calibrated,
    )
