"""`mismatch tokens`: write a run's tokens into a file, for a trainer on another machine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mismatch.cli.command import with_flags
from mismatch.cli.flags import REQUIRED, RUN, Flags, Option
from mismatch.errors import MismatchError

FILE = Option("file", Path, "", "A .parquet or .jsonl file.", default=REQUIRED, argument=True)


@with_flags(RUN, FILE)
def tokens(flags: Flags) -> int:
    """Write a run's tokens into a file: a row per sequence, with its ids and its action mask.

    Score them on your trainer's machine, add a column logprobs (natural logarithms, one per action
    token or one per token), and bring the file back: mismatch score RUN --scorer file
    --scorer-config FILE, then mismatch compare RUN. docs/how-to/your-trainer.md lists more columns.

    Examples:
    mismatch tokens runs/A tokens.parquet
    """
    from mismatch.cli import output
    from mismatch.processes.exchange import SUFFIXES, write_tokens
    from mismatch.run import store

    path: Path = flags["file"]
    if path.suffix not in SUFFIXES:
        raise MismatchError(f"{path}: no {' or '.join(SUFFIXES)} file", "tokens.parquet")
    rollout = store.load_rollout(flags["run"])
    write_tokens(path, rollout)
    output.say(f"{rollout.n_sequences} sequences, {rollout.n_actions} action tokens: {path}")
    there = all(find_spec(name) for name in ("torch", "transformers"))
    passes = "" if there else " --python train=PATH, which has torch and transformers"
    own = f"mismatch score {flags['run']} --scorer file --scorer-config FILE{passes}"
    output.say(f"add a column logprobs, then: {own}")
    return 0
