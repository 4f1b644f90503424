"""What each command reads that somebody else may have made: the table of the tests from outside.

:data:`INPUTS` has a row for each flag and argument that takes a foreign input: its kind, and a
command line. The attacks of a kind are in the tests (:data:`TESTED_BY`). A new command, a new flag
of text or a path, or a new kind fails tests/cli/test_foreign_table.py until it is entered here.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .command import Done, mismatch

TINY = "--model tiny-gpt-oss --engine transformers --dry-run"


class Row(NamedTuple):
    """IN stands for the input, GOOD for a run, DUMP for a dump, OUT for a new path.

    suffix: of the file's name. read: False: this line only passes the name on, and may end well.
    """

    kind: str
    line: str
    suffix: str = ""
    read: bool = True


TESTED_BY = {
    "run": "test_foreign_inputs.py",
    "dump": "test_foreign_files.py",
    "dumps": "test_foreign_files.py",
    "file": "test_foreign_files.py",
    "model": "test_foreign_files.py",
    "server": "test_foreign_files.py",
}
CHECK = {
    "config": Row("file", f"--config IN {TINY}", ".toml"),
    "prompts": Row("file", f"--prompts IN {TINY}", ".jsonl"),
    "dataset": Row("file", f"--dataset IN {TINY}", ".jsonl"),
    "framework_config": Row("file", f"--framework-config IN {TINY}", ".yaml"),
    "model": Row("model", "--model IN --engine transformers --dry-run"),
    "train_model": Row("model", f"{TINY} --train-model IN"),
    "adapter": Row("model", f"{TINY} --adapter IN"),
    "train_adapter": Row("model", f"{TINY} --train-adapter IN"),
    "scorer_config": Row("file", f"{TINY} --scorer file --scorer-config IN", ".parquet"),
    "accelerate_config": Row("file", f"{TINY} --scorer trl --accelerate-config IN", ".yaml"),
}


def of_check(names: str, more: str, read: bool = True) -> dict[str, Row]:
    """Return rows of a check as those of a command that takes the same flags, with others."""
    return {
        name: CHECK[name]._replace(line=CHECK[name].line.replace(TINY, more), read=read)
        for name in names.split()
    }


ALONE = "--model tiny-gpt-oss --engine transformers"
# Commands, and their flags by name.
INPUTS: dict[str, dict[str, Row]] = {
    "check": CHECK
    | {
        "resume": Row("run", "--resume IN"),
        "thresholds": Row("file", f"--thresholds IN {TINY}", ".toml"),
        "server": Row("server", "--model tiny-gpt-oss --server IN --out OUT"),
    },
    "rollout": of_check("config prompts dataset adapter", f"{ALONE} --out OUT")
    | {
        "resume": Row("run", "--resume IN"),
        "model": Row("model", "--model IN --engine transformers --out OUT"),
        "server": Row("server", "--model tiny-gpt-oss --server IN --out OUT"),
    },
    "score": {
        "run": Row("run", "IN"),
        "config": Row("file", "GOOD --config IN", ".toml"),
        "model": Row("model", "GOOD --model IN"),
        "train_adapter": Row("model", "GOOD --train-adapter IN"),
        "scorer_config": Row("file", "GOOD --scorer file --scorer-config IN", ".parquet"),
        "accelerate_config": Row("file", "GOOD --scorer trl --accelerate-config IN", ".yaml"),
    },
    "compare": {
        "run": Row("run", "IN"),
        "other": Row("run", "GOOD IN"),
        "against": Row("run", "GOOD --against IN"),
        "config": Row("file", "GOOD --config IN", ".toml"),
        "thresholds": Row("file", "GOOD --thresholds IN", ".toml"),
    },
    "report": {"runs": Row("run", "IN"), "runs, the second": Row("run", "GOOD IN")},
    "read-rollouts": {
        "file": Row("dump", "IN --model tiny-gpt-oss --out OUT", ".jsonl"),
        "model": Row("model", "DUMP --model IN --out OUT"),
    },
    "corrections": {"run": Row("run", "IN")},
    "tokens": {"run": Row("run", "IN OUT.parquet")},
    "locate": {"run": Row("run", "IN")},
    "loop": {
        "like": Row("run", "--like IN"),
        "resume": Row("run", "--resume IN"),
        "prompts": Row("file", f"--prompts IN {TINY}", ".jsonl", read=False),
        "model": Row("model", "--model IN --engine transformers --dry-run", read=False),
    },
    "postmortem": {
        "file": Row("dump", "IN --out OUT", ".jsonl"),
        "thresholds": Row("file", "DUMP --thresholds IN --out OUT", ".toml"),
        "model": Row("model", "DUMP --model IN --out OUT"),
    },
    "watch": {"file": Row("dumps", "IN --once")},
    "fixes": of_check("config", "--model tiny-gpt-oss")
    | {"like": Row("run", "--like IN"), "model": Row("model", "--model IN", read=False)},
    "kernels": {"model": Row("model", "--model IN")},
    "sync-probe": {"model": Row("model", "--model IN --engine transformers --dry-run")},
    "template": {
        "model": Row("model", "--model IN", read=False),
        "chat_template": Row(
            "file", "--model tiny-gpt-oss --chat-template IN", ".jinja", read=False
        ),
    },
    "losses": {},
    "metrics": {},
    "explain": {},
    "demo": {},
    "doctor": {},
}
# Flags of text or a path that name no foreign input: names and choices, your own code, the
# interpreters of your machine, and where the output goes.
OWN = {
    *("out", "python", "weights"),
    *("attention", "experts_implementation", "environment", "framework", "kernel"),
    *("kernel_experts", "push", "reward", "scorer", "engine", "engine_arg", "framework_override"),
    *("inject", "arms", "fix", "id", "name", "left", "right", "path", "scoring", "seeds"),
    *("task", "dtype", "gpus", "revision", "served_model", "answer_column", "prompt_column"),
    *("dataset_config", "dataset_split", "dask", "log_to", "require"),
}


def call(command: str, row: Row, given: object, folder: Path, **more: object) -> Done:
    """Run a command over a foreign input; ``more``: what GOOD and other words stand for."""
    words = {"IN": given, **more}
    arguments = [
        folder / each.lower() if each.startswith("OUT") else words.get(each, each)
        for each in row.line.split()
    ]
    done = mismatch(command, *arguments, cwd=folder, timeout=120, HF_HUB_OFFLINE="1")
    for word in ("Traceback", "bug in mismatch", "internal error", "\n::error"):
        assert word not in done.stdout + done.stderr, (command, row, done.stdout + done.stderr)
    assert done.returncode in (0, 1, 2), (command, row, done.stderr)
    return done
