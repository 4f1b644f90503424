"""Read prompts from a data set: a hub id, a file, or a directory that ``save_to_disk`` wrote.

The ``datasets`` library reads it (extra ``datasets``). The column with the prompts is found by its
name. Text becomes one user message and goes through the model's chat template, as in RL frameworks;
lists of messages are taken as they are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError, argument, one_line
from mismatch.prompts.prompt import Prompt, numeric_answer
from mismatch.run.hub import unknown_host
from mismatch.specs import PromptSpec

INSTALL = "pip install 'train-infer-mismatch[datasets]'"
COLUMNS = ("prompt", "question", "problem", "instruction", "messages", "conversations", "query")
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
SUFFIXES = ", ".join(FORMATS)
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


def read_dataset(spec: PromptSpec) -> list[Prompt]:
    """Draw ``num_prompts`` rows of a data set with ``seed``, in the order of the data set.

    Returns fewer where the data set has fewer. The same spec draws the same rows everywhere.

    Raises:
        MismatchError: the library is missing, the data set cannot be found or read (with an
            offline hint for the hub), no or several candidate columns, or a row without a prompt.
    """
    if spec.dataset is None:
        raise MismatchError("no data set named", "--dataset openai/gsm8k, or a file")
    table = _load(spec)
    if not len(table):
        raise MismatchError(f"{_named(spec)} has no rows", "choose another --dataset-split")
    column = prompt_column(list(table.column_names), spec)
    if spec.answer_column is not None:
        _require_column(spec.answer_column.split(".")[0], table.column_names, "--answer-column")
    return [_prompt(table[row], row, column, spec) for row in drawn_rows(len(table), spec)]


def drawn_rows(rows: int, spec: PromptSpec) -> list[int]:
    """Return the rows to take: sorted, distinct, a function of (rows, num_prompts, seed) alone.

    >>> drawn_rows(5, PromptSpec(num_prompts=9))
    [0, 1, 2, 3, 4]
    """
    if spec.num_prompts >= rows:
        return list(range(rows))
    return sorted(random.Random(spec.seed).sample(range(rows), spec.num_prompts))


def prompt_column(columns: list[str], spec: PromptSpec) -> str:
    """Return the column with the prompts: the one asked for, or the only one with a usual name.

    Raises:
        MismatchError: it does not exist, or none or several have a usual name.
    """
    if spec.prompt_column is not None:
        _require_column(spec.prompt_column, columns, "--prompt-column")
        return spec.prompt_column
    usual = [name for name in columns if name.lower() in COLUMNS]
    if len(usual) == 1:
        return usual[0]
    what = f"several could be the prompt ({', '.join(usual)})" if usual else "none has a usual name"
    fault = f"{_named(spec)}: of the columns {', '.join(columns)}, {what}"
    likely = argument(usual[0] if usual else columns[0])
    raise MismatchError(one_line(fault), f"name it: --prompt-column {likely}")


def _require_column(name: str, columns: list[str], flag: str) -> None:
    if name not in columns:
        fault = f"{flag} {name}: the data set has no such column"
        raise MismatchError(fault, one_line(f"it has {', '.join(columns)}"))


def _named(spec: PromptSpec) -> str:
    config = f" ({spec.dataset_config})" if spec.dataset_config else ""
    return f"data set {spec.dataset}{config}"


# ---------------------------------------------------------------- loading


def _load(spec: PromptSpec) -> Any:
    try:
        import datasets
    except ImportError as error:
        fault = f"{_named(spec)}: the datasets library is not installed"
        raise MismatchError(fault, f"{INSTALL}, or --prompts FILE") from error
    datasets.disable_progress_bars()
    name = str(spec.dataset)
    path = spec.file
    if path is not None:
        return (_directory if path.is_dir() else _file)(datasets, path, spec)
    if Path(name).suffix in FORMATS or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise MismatchError(f"{_named(spec)}: no such file or directory", "check the path")
    return _hub(datasets, name, spec)


def _file(datasets: Any, path: Path, spec: PromptSpec) -> Any:
    """Load one file; it has no splits, so ``dataset_split`` does not matter."""
    if path.suffix not in FORMATS:
        fault = f"{_named(spec)}: cannot read a {path.suffix or 'file without suffix'}"
        raise MismatchError(fault, f"use one of {SUFFIXES}, or a directory that save_to_disk wrote")
    import tempfile

    # A separate cache: the library's would keep a copy of every file that is ever measured with.
    with tempfile.TemporaryDirectory() as cache:
        try:
            return datasets.load_dataset(
                FORMATS[path.suffix],
                data_files=str(path),
                split="train",
                cache_dir=cache,
                keep_in_memory=True,
            )
        except Exception as error:  # the library's readers raise whatever they like
            fault = f"{_named(spec)}: not a readable {FORMATS[path.suffix]} file: {_reason(error)}"
            fix = "open it with the datasets library to see more, or write JSONL"
            raise MismatchError(fault, fix) from error


def _directory(datasets: Any, path: Path, spec: PromptSpec) -> Any:
    """Load what ``save_to_disk`` wrote (one split, or several by name), or a folder of files."""
    try:
        loaded = datasets.load_from_disk(str(path))
    except FileNotFoundError:
        if any(file.suffix in FORMATS for file in path.rglob("*")):
            return _hub(datasets, str(path), spec)  # named after their splits, as on the hub
        fault = f"{_named(spec)}: neither written by save_to_disk nor holding {SUFFIXES} files"
        raise MismatchError(fault, "give a file, or a directory that save_to_disk wrote") from None
    except Exception as error:
        fault = f"{_named(spec)}: cannot be read: {_reason(error)}"
        raise MismatchError(fault, "write it with save_to_disk again") from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if spec.dataset_split not in loaded:
        fault = f"{_named(spec)} has no split {spec.dataset_split}"
        raise MismatchError(fault, f"--dataset-split, one of {', '.join(loaded)}")
    return loaded[spec.dataset_split]


def _hub(datasets: Any, name: str, spec: PromptSpec) -> Any:
    unknown = unknown_host()
    try:
        with _cache_alone(datasets) if unknown else nullcontext():
            return datasets.load_dataset(name, spec.dataset_config, split=spec.dataset_split)
    except Exception as error:  # connection, unknown id, several configs, unknown split …
        reason = _reason(error)
        if unknown:
            reason = f"no address for {unknown[0]}, and not in the cache"
        raise _explained(error, reason, name, spec) from error


@contextmanager
def _cache_alone(datasets: Any) -> Iterator[None]:
    """Read only the cache; the library would first try the hub for half a minute."""
    from huggingface_hub import constants

    owners: list[Any] = [datasets.config, constants]
    before = [owner.HF_HUB_OFFLINE for owner in owners]
    try:
        for owner in owners:
            owner.HF_HUB_OFFLINE = True
        yield
    finally:
        for owner, value in zip(owners, before, strict=True):
            owner.HF_HUB_OFFLINE = value


def _explained(error: Exception, reason: str, name: str, spec: PromptSpec) -> MismatchError:
    """Return the error for a data set that the hub did not give, with the remedy."""
    text, kind = str(error), type(error).__name__
    message = f"{_named(spec)}: {reason}"
    if "Config name is missing" in text or "BuilderConfig" in text:
        return MismatchError(message, "choose one: --dataset-config NAME")
    if "Unknown split" in text:
        return MismatchError(message, "choose one: --dataset-split NAME")
    if kind == "DatasetNotFoundError" and "offline" not in text and "Couldn't reach" not in text:
        return MismatchError(
            message, "check the id and, for gated data, `hf auth login`; or give a local path"
        )
    arguments = ", ".join(repr(item) for item in (name, spec.dataset_config) if item)
    return MismatchError(
        message,
        f"if this machine cannot reach the hub, run datasets.load_dataset({arguments})"
        ".save_to_disk('DIR') on a machine that can, copy DIR here and give --dataset DIR; "
        "HF_HUB_OFFLINE=1 reads from a filled cache",
    )


def _reason(error: BaseException) -> str:
    """Return the first line of the innermost message, which names the cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# ---------------------------------------------------------------- rows


def _prompt(entry: dict[str, Any], row: int, column: str, spec: PromptSpec) -> Prompt:
    origin = f"{spec.dataset} row {row}"
    messages = _messages(entry[column])
    if messages is None:
        fault = f"{origin}: {column} holds no prompt ({type(entry[column]).__name__})"
        fix = "a prompt is text, or a list of messages with role and content; --prompt-column NAME"
        raise MismatchError(fault, fix)
    answer = None
    if spec.answer_column is not None:
        value: Any = entry
        for name in spec.answer_column.split("."):  # a path such as reward_model.ground_truth
            value = value.get(name) if isinstance(value, dict) else None
        answer = numeric_answer(value)
    return Prompt(origin, messages=messages, answer=answer, grader="number")


def _messages(value: Any) -> list[dict[str, Any]] | None:
    """Return a conversation up to the turn that the model has to write; None if there is none."""
    if isinstance(value, str) and value.strip():
        return [{"role": "user", "content": value}]
    if not isinstance(value, list | tuple) or not value:
        return None
    turns = [_turn(item) for item in value]
    while turns and turns[-1] is not None and turns[-1]["role"] == "assistant":
        turns.pop()  # the data set's own answer
    messages = [turn for turn in turns if turn is not None]
    return messages if messages and len(messages) == len(turns) else None


def _turn(item: Any) -> dict[str, Any] | None:
    """Return ``{"role", "content"}``, also of ShareGPT's ``{"from", "value"}``."""
    if not isinstance(item, dict):
        return None
    role = item.get("role") or item.get("from")
    content = item.get("content") if item.get("content") is not None else item.get("value")
    if not isinstance(role, str) or not isinstance(content, str):
        return None
    return {"role": ROLES.get(role, role), "content": content}
