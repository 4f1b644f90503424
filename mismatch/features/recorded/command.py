"""`mismatch read-rollouts`: make a run of rollouts that a framework recorded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from mismatch.cli.command import with_flags
from mismatch.cli.flags import REQUIRED, Flags, Option, flags_of, spec_values
from mismatch.cli.options import MODEL_FLAGS, OUT
from mismatch.features.recorded.rollouts import ENGINE, Form, Recorded, as_run, read_recorded
from mismatch.specs import (
    PROMPTS,
    CheckSpec,
    EngineSpec,
    PromptSpec,
    RolloutSpec,
    Sampling,
    TrainSpec,
)

HELP = "JSONL file that a framework recorded; docs/recorded-rollouts.md."
FILE = Option("file", Path, "", HELP, default=REQUIRED, argument=True)
FORMAT = Option("format", Form | None, PROMPTS, "Of the file; default: by its fields.")
NOT_IN_A_FILE = ("routed experts", "weights as the engine holds them")


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

    Examples:
    mismatch read-rollouts dump.jsonl --model MODEL --out runs/A
    """
    from mismatch.cli import session
    from mismatch.cli.to_spec import checkpoint_dtype, require_model
    from mismatch.models import resolve_model
    from mismatch.run.directory import new_directory

    model = resolve_model(require_model(flags))
    auto = partial(checkpoint_dtype, model, flags["revision"])
    engine = EngineSpec(model=model, **spec_values(EngineSpec, flags, auto=auto))
    # The trainer takes the checkpoint that sampled.
    train = TrainSpec(
        model=model, revision=engine.revision, trust_remote_code=engine.trust_remote_code
    )
    engine = replace(engine, engine=ENGINE, routing=False, prefill=False)
    rollout = RolloutSpec(engine, sampling=Sampling(**spec_values(Sampling, flags)), exact_kl=0)
    form, recorded = read_recorded(flags["file"], flags["format"])
    run_dir = new_directory(flags["out"], flags["model"])
    spec = CheckSpec(rollout=rollout, train=train)
    keep(spec, run_dir, flags["file"].name, form, recorded, session.command())
    session.say(f"{len(recorded.sequences)} sequences of the format {form}")
    for remark, count in recorded.remarks.items():
        session.say(f"{count}: {remark}")
    session.say(f"Everything is in {run_dir}. Score it: mismatch score {run_dir}")
    return 0


def keep(
    spec: CheckSpec, run_dir: Path, file: str, form: Form, recorded: Recorded, command: str
) -> None:
    """Write the rollout, the texts of its tokens and the sampler's scoring into a new run.

    Raises:
        MismatchError: the model has no tokenizer, or an id is outside its vocabulary.
    """
    from mismatch.codec import to_json
    from mismatch.models.resolved import load_tokenizer, stop_ids, token_texts
    from mismatch.run import store
    from mismatch.run.directory import at_work
    from mismatch.types import NotTested

    engine = spec.rollout.engine
    tokenizer = load_tokenizer(engine.model, engine.revision, engine.trust_remote_code)
    longest = max(sum(row.sampled) for row in recorded.sequences)
    sampling = replace(spec.rollout.sampling, max_tokens=longest, samples_per_prompt=1)
    not_tested = [
        *(NotTested(what, "the file does not have it") for what in NOT_IN_A_FILE),
        *(NotTested(remark, f"{count}") for remark, count in recorded.remarks.items()),
    ]
    fingerprint = {
        "engine": ENGINE,
        "mode": "decode",
        "model": engine.model,
        "dtype": engine.dtype,
        "file": file,
        "format": form,
        # At another temperature nobody says whether the logprobs are before or after it.
        "logprobs_temperature": 1.0 if sampling.temperature == 1 else None,
        "stop_token_ids": list(stop_ids(engine.model, engine.revision, tokenizer)),
        "bos_token_id": tokenizer.bos_token_id,
        "not_tested": to_json(not_tested),
    }
    run = as_run(recorded, sampling, fingerprint)
    prompts = PromptSpec(num_prompts=run.rollout.n_prompts)
    spec = replace(spec, rollout=replace(spec.rollout, prompts=prompts, sampling=sampling))
    ids = sorted({token for row in recorded.sequences for token in row.token_ids})
    with at_work(run_dir, "read-rollouts", spec, command):
        store.save_rollout(run_dir, run.rollout, made_by=spec.rollout)
        store.save_vocabulary(run_dir, token_texts(tokenizer, ids))
        store.save_scoring(run_dir, run.decode, run.rollout, made_by=spec.rollout)
