"""`mismatch postmortem` and `mismatch read-rollouts`: runs that a framework recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mismatch.cli.command import with_flags
from mismatch.cli.flags import (
    FAIL_ON,
    LEVELS,
    LOG_TO,
    NAME_FLAGS,
    REQUIRE,
    REQUIRED,
    Flags,
    Option,
    flags_of,
    spec_values,
    switch,
)
from mismatch.cli.options import MODEL_FLAGS, OUT
from mismatch.errors import MismatchError, one_line
from mismatch.features.recorded.dumps import Form, Recorded, read_recorded
from mismatch.features.recorded.parts import Unreadable
from mismatch.plugins import features, load
from mismatch.processes.spread import Where
from mismatch.reports.formatting import number, plural
from mismatch.specs import (
    OUTPUT,
    PROMPTS,
    CheckSpec,
    EngineSpec,
    Range,
    RolloutSpec,
    Sampling,
    TrainSpec,
)

HELP = "File or folder that a framework recorded; docs/how-to/recorded-runs.md."
DUMP = Option("file", Path, "", HELP, default=REQUIRED, argument=True)
FORMAT_HELP = "Format of the dump; default: found by its fields."
PYTHON_HELP = "Interpreter of the environment that wrote the dump, to read torch files and pickles."
READING = (
    Option("dump_format", Form | None, PROMPTS, FORMAT_HELP),
    Option("python", str | None, PROMPTS, PYTHON_HELP),
)
TORN = switch("skip_torn", PROMPTS, "Leave out lines that are no JSON objects, wherever they are.")
# Why a format has one side alone.
ONE_SIDED = {"verl": "; verl writes its rollouts before the trainer has scored them. The plug-in "
             "records both sides: docs/how-to/monitor.md"}  # fmt: skip
MOST = 1_000_000  # tokens of a dump that are judged; of a larger one, prompts are drawn
PROCESSES = "Processes that read the dump; default: one per core for a large one."
WHERE = (
    Option("workers", int | None, OUTPUT, PROCESSES, range=Range(1, 1024)),
    Option("dask", str | None, OUTPUT, "Address of a Dask scheduler whose workers read the dump."),
)
READS = "Seconds between reads of the folder."
EVERY = Option("every", float, OUTPUT, READS, default=5.0, range=Range(0.1, 86400))
STEP = Option("step", int | None, OUTPUT, "Report this step alone; default: all steps of the dump.")
MOE = switch("moe", OUTPUT, "Judge by levels of MoE models; else --model's config.json says it.")
LAW = flags_of(Sampling, "temperature top_p top_k min_p repetition_penalty")
SAMPLED = (*LAW, *flags_of(EngineSpec, "dtype"))
GATES = (FAIL_ON, REQUIRE)
JUDGED: Any = (*SAMPLED, *flags_of(TrainSpec, "dtype"), OUT, LEVELS, NAME_FLAGS, LOG_TO, *GATES)


@with_flags(DUMP, MODEL_FLAGS, MOE, *READING, TORN, STEP, *WHERE, *JUDGED)
def postmortem(flags: Flags) -> int:
    """Judge a run that already happened, from a dump with both log-probabilities, or its log.

    No model is loaded. The report names causes that the two arrays show, which rows are off, how
    the mismatch grew over steps, and what corrections would do. Of a log (console, JSON lines,
    TensorBoard, W&B offline) it shows the curves of its metrics and what is wrong with them.
    Whether a side is broken needs the model: `mismatch score RUN` or `mismatch check` adds that.
    Exit code as of a quick check.

    Examples:
    mismatch postmortem logs/exp_001/train_data_step12.jsonl
    mismatch postmortem outputs/token_exports --step 40
    mismatch postmortem train.log
    """
    from mismatch.cli import output, session
    from mismatch.features.recorded.run import UNKNOWN_MODEL, keep
    from mismatch.pipeline.commands import run_compare
    from mismatch.reports.files import write_report
    from mismatch.run.directory import new_directory

    for feature in features():
        code = load(feature.files)(flags) if feature.files else None
        if code is not None:
            return int(code)
    asked = flags["file"], flags["dump_format"], flags["python"]
    where = Where(flags["workers"], flags["dask"])
    recorded = read_recorded(
        *asked, step=flags["step"], most=MOST, on=where, skip_torn=flags["skip_torn"]
    )
    sums = recorded.sums
    if sums.one_sided:
        why = ONE_SIDED.get(recorded.form or "", "")
        raise MismatchError(
            f"{flags['file']}: {sums.one_sided:,} of {sums.rows:,} sequences hold no "
            f"log-probabilities of the trainer{why}",
            "docs/how-to/recorded-runs.md says what records them; or score the rollouts again: "
            "mismatch read-rollouts FILE --model MODEL, then mismatch score RUN",
        )
    if not sums.whole.tokens:
        raise MismatchError(
            f"{flags['file']}: no token has a number on both sides; {sums.unnumbered()}",
            "record what both sides computed, before anything is masked or cast",
        )
    run_dir = new_directory(flags["out"], flags["model"] or flags["file"].stem)
    spec = spec_of(flags, flags["model"] or UNKNOWN_MODEL)
    spec = replace(spec, quick=True, noise_floor=False)
    keep(spec, run_dir, flags["file"], recorded, session.command(), True, flags["moe"])
    output.say(summary(recorded))
    levels = session.levels(flags)
    report = run_compare(run_dir, session.narrator(), levels, session.command(), write_report)
    return output.conclude(report, run_dir, flags)


@with_flags(DUMP, MODEL_FLAGS, *READING, TORN, *SAMPLED, OUT)
def read_rollouts(flags: Flags) -> int:
    """Make a run from rollouts that a framework recorded: ids and the engine's logprobs.

    Then `mismatch score RUN` scores the same tokens under FSDP2, and `mismatch compare RUN` judges.
    Say how the tokens were sampled (--temperature, --top-p, --top-k, --min-p) and in which dtype.
    --model has to hold the weights that sampled. A dump that holds the trainer's log-probabilities
    as well is judged by `mismatch postmortem`.

    Examples:
    mismatch read-rollouts dump.jsonl --model MODEL --out runs/A
    """
    from mismatch.cli import output, session
    from mismatch.cli.to_spec import require_model
    from mismatch.features.recorded.run import keep
    from mismatch.models import resolve_model
    from mismatch.run.directory import new_directory

    model = resolve_model(require_model(flags))
    spec = spec_of(flags, model)
    asked = flags["file"], flags["dump_format"], flags["python"]
    recorded = read_recorded(*asked, skip_torn=flags["skip_torn"])
    run_dir = new_directory(flags["out"], flags["model"])
    keep(spec, run_dir, flags["file"], recorded, session.command(), both=False)
    output.say(summary(recorded))
    if all(row.train_logprobs is not None for row in recorded.sequences):
        output.say("It holds the trainer's log-probabilities too: mismatch postmortem judges them")
    output.say(f"Everything is in {run_dir}. Score it: mismatch score {run_dir}")
    return 0


@with_flags(
    replace(DUMP, help="Folder that a run writes its dumps to."),
    READING[1],
    EVERY,
    switch("once", OUTPUT, "Show the existing steps and stop."),
)
def watch(flags: Flags) -> int:
    """Follow the dumps of a run while it trains: a line per step.

    Each line has the headline numbers, their growth, and the rows that are off. Ctrl-C ends it.
    docs/how-to/monitor.md shows how verl and TRL write the folder.

    Examples:
    mismatch watch outputs/token_exports
    mismatch watch runs/watch --once
    """
    from mismatch.cli import output
    from mismatch.features.recorded.watch import follow

    if not flags["file"].is_dir():
        raise MismatchError(f"{flags['file']} is no folder", "give the folder of the dumps")
    lines = 0
    asked = flags["file"], flags["every"], flags["once"], output.say, flags["python"]
    for text in follow(*asked):
        lines += 1
        output.say(text)
    if not lines:
        fault = f"{flags['file']} holds no step with both log-probabilities"
        raise MismatchError(fault, "docs/how-to/monitor.md says how verl and TRL write them")
    return 0


def spec_of(flags: Flags, model: str) -> CheckSpec:
    """Return the spec of a recorded run: sampled as the flags say, by nobody here."""
    from mismatch.cli.to_spec import checkpoint_dtype
    from mismatch.features.recorded.run import ENGINE, UNKNOWN_MODEL
    from mismatch.models import resolve_model

    if model == UNKNOWN_MODEL:
        dtype: Any = "bf16" if flags["dtype"] == "auto" else flags["dtype"]
        engine = EngineSpec(model=model, dtype=dtype)
    else:
        model = resolve_model(model)
        auto = partial(checkpoint_dtype, model, flags["revision"])
        engine = EngineSpec(model=model, **spec_values(EngineSpec, flags, auto=auto))
    # The trainer takes the checkpoint that sampled.
    train = TrainSpec(
        model=model,
        revision=engine.revision,
        trust_remote_code=engine.trust_remote_code,
        dtype=flags.get("train_dtype") or engine.dtype,
    )
    engine = replace(engine, engine=ENGINE, routing=False, prefill=False)
    sampling = Sampling(**spec_values(Sampling, flags))
    return CheckSpec(rollout=RolloutSpec(engine, sampling=sampling, exact_kl=0), train=train)


def passed_over(errors: Sequence[Unreadable]) -> str:
    """Say once which files of a folder were not read, files of one kind together."""
    kinds = dict[str, int]()
    for error in errors:
        what = "hold no rows of a known format" if error.foreign else error.headline
        kinds[what] = kinds.get(what, 0) + 1
    said = [what if n == 1 and "hold" not in what else f"{plural(n, 'file')} {what}"
            for what, n in kinds.items()]  # fmt: skip
    return f"passed over: {'; '.join(said)}"


def summary(recorded: Recorded) -> str:
    """Return what was read, and what was noticed, in lines."""
    lines = [f"{recorded.sums.rows:,} sequences of the format {recorded.form}"]
    if len(recorded.sequences) < recorded.sums.rows:
        lines[0] += (
            f", {recorded.sums.tokens:,} tokens: sums and steps are of all, everything else of "
            f"{len(recorded.sequences):,} sequences, drawn by prompt"
        )
    lines += [f"{count}: {remark}" for remark, count in recorded.remarks.items()]
    done = f"cut to fit at the {recorded.ends} value" if recorded.ends else "left out"
    lines += [f"{count} {done}: {misfit}" for misfit, count in recorded.misfits.items()]
    if recorded.passed_over:
        lines.append(passed_over(recorded.passed_over))
    if (masked := recorded.masked.whole).tokens:
        of = masked.step(0)
        lines.append(
            f"{of.sequences:,} sequences apart, which the framework leaves out of the loss: mean "
            f"|delta| {number(of.abs_diff)}, k3 {number(of.k3)} ({of.tokens:,} tokens)"
        )
    if said := recorded.ratios.sentence():
        lines.append(said)
    if recorded.sums.one_sided < recorded.sums.rows:
        lines.append(f"PPO's ratio is anchored to {recorded.ratios.anchor(recorded.form or '')}")
    if recorded.unread:
        lines.append(f"not read: the columns {', '.join(sorted(recorded.unread))}")
    return "\n".join(map(one_line, lines))
