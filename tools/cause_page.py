"""Write docs/causes.md and docs/causes/ from mismatch/analysis/causes.toml and the detectors."""

from __future__ import annotations

from pathlib import Path

from mismatch.analysis.diagnosis.catalogue import Entry, catalogue
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.experiments.explanation import TESTS
from mismatch.experiments.fixes.catalogue import FIXES
from mismatch.experiments.fixes.guides import settings_of
from mismatch.experiments.probes import PROBES
from mismatch.frameworks import FRAMEWORKS

DOCS = Path(__file__).parent.parent / "docs"
MARK = "<!-- Made by tools/cause_page.py; edit mismatch/analysis/causes.toml. -->"
NARROW = 3  # fixes that take out more causes than this are no mend of one
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
  looks alike was part of the run (a re-pairing, a rescoring, a second pass, a fix that was
  measured). Its share is then that of the experiment.
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

A check with `--fix` has experiments already: a fix that was measured and takes out a suspected
cause confirms it or rules it out, whenever the run is reported. `mismatch check … --explain`, or
`mismatch check --resume RUN --explain` for a finished run, makes those that are missing to tell the
leading causes apart: fixes of `mismatch fixes` applied and measured, and probes that mend nothing:

- `no-sinks`: the trainer imitates an engine that ignores sinks; `plain-attention`: attention as its
  definition says.
- `engine-rescoring`: a fresh engine reads the run's tokens at once. What goes with it belongs to
  decoding or to the state of the process that sampled; what stays is the function that the engine
  computes with what it loads.
- `prefix-cache`, where the run had one (vLLM, SGLang): 16 of the run's prompts are continued
  greedily with the cache unread (cold), and read after prefill (warm prompt) and after decode (warm
  decode) had written it. The cache is at fault where log-probabilities move by more than 1.6 times
  what rounding costs the nearest pass of this run (by the whole interval over prompts), and ruled
  out where both move by less.
- `regenerate`: 24 prompts sampled anew by a fresh engine, with another seed: whether the mismatch
  was in the state of the process that sampled.

- `locate`, last, where another function or other weights are named and nothing confirmed them:
  `mismatch locate` on 4 sequences. Confirmed where more than 30 % of a side's distance from float32
  goes without the new error of its first module.

First what `--quick` or `--no-noise-floor` left out; then passes of the trainer over the run's
tokens, in one world; then engines, one start at a time, those of the leading cause first, until no
suspected cause is left to ask about, four engines were started or `--budget-minutes` is used up.
The two probes that read share a start. The report says which, by what, and how long it took;
`report.json` has it under `explain`. An experiment that fails, whatever the error, is a row with
its reason, and the others go on.

How an experiment is judged, whether `--fix` or `--explain` asked for it:

- On the same tokens where the trainer alone changed; by prompt where the engine sampled anew.
- A cause is **confirmed** where more than 30 % of mean |delta| goes with the experiment that takes
  it out, by the whole 95 % interval.
- An experiment that takes out several causes confirms what is true of them all: a float32 trainer
  confirms `precision`, and `bf16-lm-head` only where experiments have ruled out all else that goes
  with it. `plain-attention` confirms that the trainer's kernel is at fault, and no kind of fault. A
  cause that it does not tell from others stays suspected, with the share that went as evidence.
- A kernel of your own (`--attention package.module:function`) that `attention-sinks` replaces may
  have been wrong in any way: the kernel is confirmed, the sinks are not.
- A cause is **ruled out** where less than 10 % goes, and less than half of what this cause would
  take along: 1 - sqrt(1 - share²), since independent errors add in quadrature. A small cause under
  a large one is not ruled out by an experiment that could not have shown it.
- What a side states for certain (a kernel that ignores sinks) is there, and is not ruled out: it
  and its experiment are **of little weight**, with the share that went, and what the data see
  beside it keeps its place under the name of its kind.
- A fix that failed, several fixes at once, and corrections of the loss (TIS …) confirm nothing; nor
  does a fix that helps although it takes no suspected cause out, such as router replay where sinks
  are missing (40 % went in examples/tiny-gpt-oss-no-sinks).

Measured: tiny-gpt-oss in vLLM with an fp8 KV cache (`--engine-arg kv_cache_dtype=fp8
--explain`, 64 prompts, a CPU). One experiment was made, `bf16-kv-cache`: the engine sampled anew,
66 % of mean |delta| went (62 to 69 %), and fp8-kv on the engine's side was confirmed after 59 s.

[Gallery](gallery.md): what the causes look like, planted and measured.

Causes name; they do not change the verdict. A side that is 1.5 times as far from float32 as the
other is named, and where clean runs of the device are known (`excess`) one that is 1.1 times as far
as the other and as a plain forward; smaller faults are not. A fault that both sides and the float32
reference share is not seen.
"""


EVERYWHERE = ("verl", "TRL", "NeMo-RL", "prime-rl", "slime", "SkyRL")
READ = (  # what `frameworks` of causes.toml was read from
    f"Read in {', '.join(FRAMEWORKS[id].read_in for id in ('verl', 'trl', 'skyrl'))}, NeMo-RL of "
    "2026-08-22, "
    "prime-rl and slime of 2026-08-21; a line that names a fix has the versions on the fix's page. "
    "What is passed on to vLLM, SGLang, Megatron or transformers is named as it is named there."
)
COMMAND = """```bash
mismatch check … --explain
mismatch check --resume RUN --explain   # of a finished run
```
"""


def pages() -> dict[str, str]:
    """The index, and a page a cause, by their paths under docs."""
    made = {f"causes/{entry.id}.md": _page(entry) for entry in catalogue().values()}
    return {"causes.md": "\n".join([INTRO, _detectors(), _index()]), **made}


def _detectors() -> str:
    lines = ["## Detectors", "", "| detector | names | needs |", "| --- | --- | --- |"]
    for detector in detectors():
        names = ", ".join(f"[{id}](causes/{id}.md)" for id in detector.causes)
        needs = detector.needs or "both log-probabilities"
        lines.append(f"| `{detector.id}` | {names} | {needs} |")
    return "\n".join([*lines, ""])


def _index() -> str:
    lines = ["## Causes", "", "| cause | what it is | what you see |", "| --- | --- | --- |"]
    for entry in catalogue().values():
        see = entry.see.replace("|delta|", "abs(delta)")
        lines.append(f"| [{entry.id}](causes/{entry.id}.md) | {entry.title} | {see} |")
    return "\n".join([*lines, ""])


def _page(entry: Entry) -> str:
    fixes = [fix for fix, one in TESTS.items() if entry.id in (*one.own, *one.wide)]
    probes = [probe for probe, tests in PROBES.items() if entry.id in tests]
    parts = [
        f"# {entry.title.rstrip('.')}",
        f"`{entry.id}` · [all causes](../causes.md)",
        f"{MARK}",
        "## What you see",
        entry.see,
        *_picture(entry),
        "## Why",
        entry.why,
        "## Confirm",
        entry.confirm,
        *_by_experiment(entry, fixes, probes),
        "## Mend",
        entry.mend,
        *_settings(entry, fixes),
        "## How it is found",
        *_found(entry),
    ]
    if entry.seen:
        parts += ["## Seen in", ", ".join(entry.seen)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _picture(entry: Entry) -> list[str]:
    """The figure of the planted fault; benchmarks/gallery.py draws it."""
    if not (DOCS / "images" / "gallery" / f"{entry.id}.svg").is_file():
        return [entry.picture]
    return [f"![{entry.title}](../images/gallery/{entry.id}.svg)",
            "Planted and measured: [gallery](../gallery.md)."]  # fmt: skip


def _found(entry: Entry) -> list[str]:
    looking = [detector for detector in detectors() if entry.id in detector.causes]
    if not looking:
        return ["No detector names it from the numbers alone: others name it as a look-alike."]
    return [
        f"Detector `{one.id}`; needs {one.needs or 'both log-probabilities'}." for one in looking
    ]


def _by_experiment(entry: Entry, fixes: list[str], probes: list[str]) -> list[str]:
    if not fixes and not probes:
        return []
    alone = [id for id in fixes if entry.id in TESTS[id].own]
    among = [id for id in fixes if entry.id in TESTS[id].wide]
    made = _listed([*alone, *probes, *among])
    known = [fix.id for fix in FIXES if fix.id in alone]
    parts = [f"`--explain` makes this experiment where it applies: {made}."]
    if known:
        parts.append(f"Measured as a fix it says the same: `--fix {known[0]}`.")
    if among:
        parts.append(
            f"Other causes go with {_listed(among)} too: this one is confirmed only where "
            "experiments have ruled those out."
        )
    return [" ".join(parts), COMMAND]


def _listed(ids: list[str]) -> str:
    return ", ".join(f"`{id}`" for id in ids)


def _settings(entry: Entry, fixes: list[str]) -> list[str]:
    """What is known of each framework, read at its source; what is not known is said."""
    known: dict[str, list[str]] = {name: [] for name in EVERYWHERE}
    for id in fixes:
        narrow = len(TESTS[id].own) + len(TESTS[id].wide) <= NARROW
        for setting in settings_of(id) if narrow else ():
            parts = known.setdefault(setting.framework, [])
            remark = "; ".join(text for text in (setting.remark, setting.source) if text)
            parts.append(f"- {setting.framework} ([{id}](../fixes/{id}.md)): {remark}")
            if setting.lines:
                lines = "\n".join(f"  {text}" for text in setting.lines)
                parts.append(f"  ```\n{lines}\n  ```")
    for name, text in entry.frameworks.items():
        known.setdefault(name, []).append(f"- {name}: {text}.")
    rest = [name for name in EVERYWHERE if not known[name]]
    unread = f"- {', '.join(rest)}: not read at the source; look for what is named under Mend."
    lines_of = [line for parts in known.values() for line in parts]
    read = [READ] if entry.frameworks else []
    return ["## In the frameworks", *read, "\n".join([*lines_of, *([unread] if rest else [])])]


if __name__ == "__main__":
    made = pages()
    (DOCS / "causes").mkdir(exist_ok=True)
    for known in (DOCS / "causes").glob("*.md"):
        if f"causes/{known.name}" not in made:
            known.unlink()
    for name, text in made.items():
        (DOCS / name).write_text(text, encoding="utf-8")
    print(f"{len(made)} pages in {DOCS}")
