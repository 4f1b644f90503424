"""Write docs/causes.md from mismatch/analysis/causes.toml and the detectors."""

from __future__ import annotations

from pathlib import Path

from mismatch.analysis.diagnosis.catalogue import Entry, catalogue
from mismatch.analysis.diagnosis.detector import detectors

PAGE = Path(__file__).parent.parent / "docs" / "causes.md"
INTRO = """# Causes

Why do the two sides differ? Every check ends with an answer: the causes that its data speak for, in
their order, or the sentence that none stands out. `report.json` has it under `causes`.

Detectors read the numbers of both sides (log-probabilities, the trainer's entropy, routed experts,
every other pass of the run) and, where a side states them, digests of its weights and its settings.
What a side states is evidence, never a precondition.

- **Share**: how much of mean |delta| goes when the cause is taken out, with a 95 % interval by
  prompt. A difference that is certain, such as a digest, may have no share: the run did not
  measure it.
- **Suspected**: its mark is in the data. **Confirmed**: the experiment that separates it from what
  looks alike was part of the run (a re-pairing, a rescoring, a second pass).
- **Side**: whose numbers are off. For laws: the law that sampled has the largest mean
  log-probability, so the sign of mean delta names the other. Else: whose distance from float32 is
  larger, which needs the pass `reference:fp32` and one dtype on both sides.
- **Two at once**: the most specific cause is taken out first and all detectors look at what is
  left. What is gone then was a consequence and gets no advice of its own. Where a cause can be
  taken out only by a fitted curve (a temperature without the trainer's untempered pass), and where
  a side computes another function, no second cause of that kind is looked for behind it.
- **Not told apart**: causes with the same mark in the data at hand are named with the leading one.
- **Not tested**: data that a detector needs and the run lacks. A detector that fails is named in a
  warning, and its causes count as not looked for.

## Experiments

`mismatch check … --explain`, or `mismatch check --resume RUN --explain` for a finished run, makes
the experiments that tell the leading causes apart: fixes of `mismatch fixes` applied and
measured, and two probes that mend nothing (`no-sinks`: the trainer imitates an engine that
ignores sinks; `plain-attention`: attention as its definition says). First what `--quick` or
`--no-noise-floor` left out; then passes of the trainer over the run's tokens, in one world; then
engines that sample anew, one at a time, the best by expected information per second first, until
nothing is left to be told apart or `--budget-minutes` is used up. A cause is confirmed where more
than 30 % of mean |delta| goes with the experiment that takes it out (by the whole 95 % interval),
and ruled out where less than 10 % goes. The report says which, by what, and how long it took;
`report.json` has it under `explain`.

Causes name; they do not change the verdict. A side that is 1.5 times as far from float32 as the
other is named; smaller faults are not. A fault that both sides and the float32 reference share is
not seen.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([INTRO, _detectors(), *map(_entry, catalogue().values())])


def _detectors() -> str:
    lines = ["## Detectors", "", "| detector | names | needs |", "| --- | --- | --- |"]
    for detector in detectors():
        names = ", ".join(f"[{id}](#{id})" for id in detector.causes)
        needs = detector.needs or "both log-probabilities"
        lines.append(f"| `{detector.id}` | {names} | {needs} |")
    return "\n".join([*lines, ""])


def _entry(entry: Entry) -> str:
    lines = [
        f"## {entry.id}",
        "",
        f"**{entry.title}.**",
        "",
        f"- What you see: {entry.see}",
        f"- Why: {entry.why}",
        f"- Confirm: {entry.confirm}",
        f"- Mend: {entry.mend}",
    ]
    if entry.seen:
        lines.append(f"- Seen in: {', '.join(entry.seen)}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
