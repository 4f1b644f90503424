"""Use mismatch from Python: the commands with the same names for their flags, results as objects.

import mismatch

run = mismatch.check(model="tiny-gpt-oss", num_prompts=16)
run                         # Run('runs/…': healthy, …)
run.verdict.status          # "healthy"
run.tokens                  # a DataFrame, a row per token
run.to_html()               # the report's page

pair = mismatch.score_pair(rollout_logprobs, train_logprobs)   # two arrays, no engine
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.errors import MismatchError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

    from mismatch.analysis.cause_results import Cause
    from mismatch.pipeline.run_comparison import RunComparison
    from mismatch.types import Report, Verdict

__all__ = ["Run", "check", "load", "postmortem", "score_pair"]


class Metrics(dict[str, float]):
    """Values by metric; a name that is none names the nearest."""

    def __missing__(self, name: str) -> float:
        near = did_you_mean(name, self, 1) or f"has {', '.join(self)}"
        raise KeyError(f"no metric {name!r} here: {near.rstrip('; ')}")


@dataclass(frozen=True, repr=False)
class Run:
    """A run directory and what its report says."""

    directory: Path
    _kept: tempfile.TemporaryDirectory[str] | None = field(default=None, compare=False)
    """The temporary directory of a run without ``out``; deleted with this object."""

    def __repr__(self) -> str:
        try:
            return f"Run({str(self.directory)!r}: {self.verdict.status}, {self.verdict.reason})"
        except MismatchError as error:
            return f"Run({str(self.directory)!r}: {error.message})"

    @cached_property
    def report(self) -> Report:
        """The whole report, as report.json holds it.

        Raises:
            MismatchError: report.json is missing, damaged, or contradicted by the numbers in it.
        """
        from mismatch.pipeline.saved_runs import load_report

        return load_report(self.directory)

    @property
    def verdict(self) -> Verdict:
        """The verdict: ``status`` (healthy to broken), ``reason``, and both answers."""
        return self.report.verdict

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes that the data support, the most likely first."""
        found = self.report.result("causes")
        return () if found is None else tuple(found.ranked)

    @property
    def metrics(self) -> dict[str, float]:
        """Values of the headline comparison, engine against trainer, by metric."""
        if not self.report.comparisons:
            return Metrics()
        headline = self.report.comparisons[0]
        both = {**headline.metrics, **headline.routing}
        return Metrics({name: estimate.value for name, estimate in both.items()})

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """A row per action token: both log-probabilities (nats), their difference, its place."""
        from mismatch.run import store

        return store.load_tokens(self.directory)

    def compare(self, *others: Run) -> RunComparison:
        """Compare other runs with this run, metric by metric.

        Raises:
            MismatchError: they cannot be compared.
        """
        from mismatch.pipeline.run_comparison import compare_runs

        return compare_runs([self.directory, *(other.directory for other in others)])

    def to_html(self) -> str:
        """Return the report's page: one document without external parts."""
        return (self.directory / "report.html").read_text(encoding="utf-8")

    def _repr_html_(self) -> str:
        """Show the page in a notebook."""
        from html import escape

        return (
            f'<iframe srcdoc="{escape(self.to_html())}" style="width:100%;height:40em;border:0">'
            "</iframe>"
        )


def check(
    model: str | None = None,
    *,
    engine: str | None = None,
    python: str | os.PathLike[str] | None = None,
    scorer: str | None = None,
    prompts: str | os.PathLike[str] | None = None,
    num_prompts: int | None = None,
    samples_per_prompt: int | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    attention: str | None = None,
    fix: str | Sequence[str] | None = None,
    depth: str | None = None,
    out: str | os.PathLike[str] | None = None,
    verbose: bool = False,
    **flags: Any,
) -> Run:
    """Run ``mismatch check`` and return its run.

    None is the command's own default. The run is kept in ``out``, or in runs/.

    Args:
        model: short name, hub id or directory.
        engine: "vllm", "sglang", "transformers".
        python: Python of the training environment; mismatch need not be installed there.
        scorer: whose code scores: "fsdp", "verl", "trl", or ``module:name``.
        prompts: JSONL file.
        fix: fixes to try: "all", or ids.
        depth: "quick": without the float32 passes; "normal"; "full".
        verbose: print what the command prints.
        flags: the other flags of ``mismatch check``, with underscores; lists for those that repeat.

    Raises:
        MismatchError: bad input, or nothing was measured. A broken verdict raises nothing.

    Example:
        ``mismatch.check(model="gpt-oss-20b", python="~/verl/bin/python", scorer="verl")``
    """
    named: dict[str, Any] = {
        "model": model,
        "engine": engine,
        "python": python,
        "scorer": scorer,
        "fix": fix,
    }
    named |= {"prompts": prompts, "num_prompts": num_prompts, "max_tokens": max_tokens}
    named |= {"samples_per_prompt": samples_per_prompt, "temperature": temperature}
    named |= {"attention": attention, "depth": depth}
    return _command("check", [], named | flags, verbose, out or True)


def load(directory: str | os.PathLike[str]) -> Run:
    """Return a saved run.

    Its verdict is unverified: that of report.json, which the numbers in it must confirm.
    ``mismatch compare RUN`` judges the scorings again.

    Raises:
        MismatchError: the directory holds no report.
    """
    run = Run(Path(directory))
    if not (run.directory / "report.json").exists():
        fault = f"{run.directory} holds no report.json"
        raise MismatchError(fault, f"mismatch compare {run.directory}")
    return run


def score_pair(
    rollout_logprobs: Sequence[Sequence[float]],
    train_logprobs: Sequence[Sequence[float]],
    mask: Sequence[Sequence[float]] | None = None,
    *,
    token_ids: Sequence[Sequence[int]] | None = None,
    entropy: Sequence[Sequence[float]] | None = None,
    prompts: Sequence[Any] | None = None,
    rewards: Sequence[float] | None = None,
    attributes: Mapping[str, Sequence[Any]] | None = None,
    out: str | os.PathLike[str] | None = None,
    verbose: bool = False,
    **flags: Any,
) -> Run:
    """Judge two arrays of log-probabilities of the same tokens, without an engine or a model.

    All arrays have a row per response and a column per token of it; rows may differ in length. Two
    flat arrays are one response each.

    Args:
        rollout_logprobs: [N, T] the sampler's, nats; or [T].
        train_logprobs: [N, T] the trainer's, nats.
        mask: [N, T] 1 where the policy sampled the token; None: everywhere.
        token_ids: [N, T] the responses' ids; None: unknown, so nothing is said of ids.
        entropy: [N, T] of the trainer's distribution, nats.
        prompts: [N] what the samples of one prompt have in common; None: all rows differ.
        rewards: [N].
        attributes: further facts per row, ``replica``, ``rank``, ``weight_version``, ``step`` or
            ``environment``: named where the rows that are off share one.
        out: directory of the run; None: a temporary one, which lives as long as the result.
        flags: of ``mismatch postmortem``, such as ``dtype`` and ``temperature``.

    Raises:
        MismatchError: rows without tokens, or of different lengths.
    """
    from mismatch.metrics.registry import plain_array

    values: dict[str, Any] = {
        "rollout_logprobs": rollout_logprobs,
        "train_logprobs": train_logprobs,
    }
    more = {"entropy": entropy, "action_mask": mask, "token_ids": token_ids}
    values |= {name: held for name, held in more.items() if held is not None}
    if len(rollout_logprobs) and np.ndim(rollout_logprobs[0]) == 0:
        values = {name: [held] for name, held in values.items()}
    count = len(values["rollout_logprobs"])
    for name, held in values.items():
        if len(held) != count:
            fault = f"{len(held)} rows of {name} for {count} of rollout_logprobs"
            raise MismatchError(fault, "give one row per response in every array")
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "pair.jsonl"
        # A prompt of one token comes first: something has to predict the first token of a response.
        # Its id is the prompt's number, because prompts of equal ids count as one.
        number_of: dict[str, int] = {}
        with dump.open("w") as file:
            for row in range(count):
                entry: dict[str, Any] = {
                    name: plain_array(name, held[row]).tolist() for name, held in values.items()
                }
                size = len(entry["rollout_logprobs"])
                for name, held in entry.items():
                    if len(held) != size:
                        fault = f"row {row}: {len(held)} {name} for {size} rollout_logprobs"
                        fix = "give one value per token of the response in every array"
                        raise MismatchError(fault, fix)
                sampled = [int(bool(value)) for value in entry.pop("action_mask", [1] * size)]
                ids = entry.pop("token_ids", [0] * size)
                entry = {name: [0.0, *held] for name, held in entry.items()}
                prompt = str(row if prompts is None else prompts[row])
                first = number_of.setdefault(prompt, len(number_of))
                entry |= {"token_ids": [first, *ids], "action_mask": [0, *sampled]}
                entry |= {name: held[row] for name, held in (attributes or {}).items()}
                entry |= {} if prompts is None else {"prompt_id": prompt}
                entry |= {} if rewards is None else {"reward": float(rewards[row])}
                file.write(json.dumps(entry) + "\n")
        return _command("postmortem", [str(dump)], flags, verbose, out)


def postmortem(
    dump: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    verbose: bool = False,
    **flags: Any,
) -> Run:
    """Judge a run that already happened, from a file or a folder that it left.

    Args:
        out: directory of the run; None: a temporary one, which lives as long as the result.
        flags: of ``mismatch postmortem``, with underscores.

    Raises:
        MismatchError: the dump holds nothing that can be judged.
    """
    return _command("postmortem", [os.fspath(dump)], flags, verbose, out)


def _command(
    verb: str,
    positional: list[str],
    flags: dict[str, Any],
    verbose: bool,
    out: str | os.PathLike[str] | bool | None,
) -> Run:
    """Run a command in this process, and return the run that it made.

    Args:
        out: its directory; True: a new one in runs/; None: a temporary one.
    """
    import typer

    from mismatch.cli.flags import flag_of
    from mismatch.cli.main import app
    from mismatch.run.directory import new_directory

    kept = None
    if out is None:
        kept = tempfile.TemporaryDirectory(prefix="mismatch-")
        out = Path(kept.name) / "run"
    given = None if isinstance(out, bool) else Path(out)
    directory = new_directory(given, flags.get("model") or verb)
    arguments = [verb, *positional, "--out", str(directory)]
    for name, value in flags.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            arguments.append(flag if value else f"--no-{flag[2:]}")
        elif value is not None:
            several = value if isinstance(value, list | tuple) else [value]
            arguments += [part for each in several for part in (flag, str(each))]
    command = typer.main.get_command(app)
    with nullcontext() if verbose else redirect_stdout(io.StringIO()):
        try:
            command.main(arguments, prog_name="mismatch", standalone_mode=False)
        except Exception as error:
            if not hasattr(error, "format_message"):  # a usage error of typer
                raise
            raise MismatchError(error.format_message(), f"mismatch {verb} --help-all") from error
    return Run(load(directory).directory, kept)
