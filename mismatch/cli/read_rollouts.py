"""`mismatch read-rollouts`: make a run of rollouts that a framework recorded."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mismatch.cli.command import with_flags
from mismatch.cli.flags import REQUIRED, Flags, Option, flags_of, spec_values
from mismatch.cli.options import MODEL_FLAGS, OUT
from mismatch.run.recorded import Form, read_recorded
from mismatch.specs import PROMPTS, EngineSpec, Sampling

HELP = "JSONL file that a framework recorded; docs/recorded-rollouts.md."
FILE = Option("file", Path, "", HELP, default=REQUIRED, argument=True)
FORMAT = Option("format", Form | None, PROMPTS, "Of the file; default: by its fields.")


@with_flags(
    FILE,
    MODEL_FLAGS,
    FORMAT,
    *flags_of(Sampling, "temperature top_p top_k"),
    *flags_of(EngineSpec, "dtype"),
    OUT,
)
def read_rollouts(flags: Flags) -> int:
    """Make a run of the rollouts that a framework recorded: ids and the sampler's logprobs.

    Then `mismatch score RUN` scores the same tokens under FSDP2, and `mismatch compare RUN` judges.
    Say how the tokens were sampled (--temperature, --top-p, --top-k) and in which dtype. --model
    has to hold the weights that sampled.
    """
    from mismatch.cli import session
    from mismatch.cli.to_spec import checkpoint_dtype, require_model
    from mismatch.models import resolve_model
    from mismatch.pipeline.saved_runs import keep_recorded, recorded_spec
    from mismatch.run.directory import new_directory

    model = resolve_model(require_model(flags))
    auto = partial(checkpoint_dtype, model, flags["revision"])
    engine = EngineSpec(model=model, **spec_values(EngineSpec, flags, auto=auto))
    spec = recorded_spec(engine, Sampling(**spec_values(Sampling, flags)))
    form, recorded = read_recorded(flags["file"], flags["format"])
    run_dir = new_directory(flags["out"], flags["model"])
    keep_recorded(spec, run_dir, flags["file"], form, recorded, session.command())
    session.say(f"{len(recorded.sequences)} sequences of the format {form}")
    for remark, count in recorded.remarks.items():
        session.say(f"{count}: {remark}")
    session.say(f"Everything is in {run_dir}. Score it: mismatch score {run_dir}")
    return 0
