"""Rollouts that a framework wrote down, as a rollout and a scoring: ids and their logprobs.

Only formats that hold token ids and the sampler's log-probabilities can be scored again; text would
have to be tokenised anew, and would then be other tokens. Fields of the frameworks' files were read
in their sources: torchtitan's ``experiments/rl/rollout_recorder.py`` (b5bcd76, 2026-08),
open-instruct's ``rl_utils.py`` (e6c3044, 2026-08), and verl's (:mod:`mismatch.run.verl_dump`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mismatch.errors import MismatchError
from mismatch.run import verl_dump
from mismatch.types import Fingerprint, Rollout, Sampling, Scoring

ENGINE = "recorded"
Entry = dict[str, Any]
VERL = (*verl_dump.REQUIRED, "attention_mask", "rm_scores")
Form = Literal["torchtitan", "open-instruct", "generic", "verl"]


@dataclass
class Row:
    """One recorded sequence.

    Attributes:
        token_ids, sampled, turn: [tokens], as in :class:`Rollout`.
        logprobs: of the sampled tokens, nats.
        prompt: what its samples have in common; None: a prompt of its own.
    """

    token_ids: list[int]
    sampled: list[bool]
    turn: list[int]
    logprobs: list[float]
    prompt: Any = None
    reward: float | None = None
    finish_reason: str = "stop"


@dataclass
class Recorded:
    """Sequences of a file, and what was noticed in reading: remark -> how often."""

    sequences: list[Row] = field(default_factory=list)
    remarks: Counter[str] = field(default_factory=Counter)


# ---------------------------------------------------------------- formats


def generic(entry: Entry, recorded: Recorded) -> None:
    """``prompt_token_ids``, ``response_token_ids``, ``logprobs``; or ``token_ids`` with an
    ``action_mask`` and the logprobs of the tokens that it marks. Optional: ``prompt_id``,
    ``reward``, ``finish_reason``."""
    if "token_ids" in entry:
        ids = _ids(entry, "token_ids")
        sampled = [bool(value) for value in _list(entry, "action_mask")]
        if len(sampled) != len(ids):
            raise ValueError(f"action_mask has {len(sampled)} entries for {len(ids)} token_ids")
    else:
        prompt, response = _ids(entry, "prompt_token_ids"), _ids(entry, "response_token_ids")
        ids = prompt + response
        sampled = [False] * len(prompt) + [True] * len(response)
    recorded.sequences.append(
        Row(
            *(ids, sampled, turns_of(sampled), _numbers(entry, "logprobs")),
            prompt=entry.get("prompt_id"),
            reward=_reward(entry.get("reward")),
            finish_reason=str(entry.get("finish_reason", "stop")),
        )
    )


def open_instruct(entry: Entry, read: Recorded) -> None:
    """open-instruct's ``*_rollouts_*.jsonl``; a sequence that called a tool is left out: the file
    does not say which of its response's tokens were sampled."""
    if any((entry.get("request_info") or {}).get(name) for name in ("num_calls", "tool_calleds")):
        read.remarks["left out: it called a tool, and no mask says which tokens were sampled"] += 1
        return
    if entry.get("logprobs") is None:
        raise ValueError("no logprobs")
    prompt, response = _ids(entry, "prompt_tokens"), _ids(entry, "response_tokens")
    sampled = [False] * len(prompt) + [True] * len(response)
    read.sequences.append(
        Row(
            *(prompt + response, sampled, turns_of(sampled), _numbers(entry, "logprobs")),
            prompt=(entry.get("step"), entry.get("prompt_idx")),
            reward=_reward(entry.get("reward")),
            finish_reason=str(entry.get("finish_reason", "stop")),
        )
    )


def torchtitan(entry: Entry, recorded: Recorded) -> None:
    """torchtitan's ``rollout_samples.jsonl``, written with ``log_tensors`` and ``log_logprobs``.

    Turns become one sequence as long as each turn's prompt begins with the ids before it; a turn
    whose prompt does not is a sequence of its own, with the context that its engine saw.
    """
    now: Row | None = None
    for number, turn in enumerate(_list(entry, "turns"), start=1):
        for name, switch in (
            ("completion_token_ids", "log_tensors"),
            ("completion_logprobs", "log_logprobs"),
        ):
            if name not in turn:
                raise ValueError(f"turn {number} has no {name}: record with {switch}=True")
        context, ids = _ids(turn, "prompt_token_ids"), _ids(turn, "completion_token_ids")
        logprobs = _numbers(turn, "completion_logprobs")
        if turn.get("min_policy_version") != turn.get("max_policy_version"):
            recorded.remarks["turns that were sampled by more than one version of the weights"] += 1
        grows = now is not None and context[: len(now.token_ids)] == now.token_ids
        if now is None or not grows:
            if now is not None:
                recorded.remarks["turns whose prompt has other ids than the turns before"] += 1
            now = Row([], [], [], [], entry.get("group_id"), _reward(entry.get("reward")))
            recorded.sequences.append(now)
        new = len(context) - len(now.token_ids)
        now.token_ids = context + ids
        now.sampled += [False] * new + [True] * len(ids)
        now.logprobs += logprobs
        now.turn = turns_of(now.sampled)


def verl(path: Path) -> Recorded:
    """verl's RolloutSkip dumps: rows padded on both sides, or of their own lengths.

    Raises:
        MismatchError: see :func:`verl_dump.read_dump`; or a row is wrong (named).
    """
    fields, prompts = verl_dump.read_dump(path)
    recorded = Recorded()
    for number in range(len(fields["responses"])):
        try:
            row = {name: fields[name][number] for name in VERL if name in fields}
            sequence = _padded(
                row, prompts[number] if prompts else None, isinstance(fields["responses"], list)
            )
            if any(sequence.sampled):
                _require_whole(sequence)
                recorded.sequences.append(sequence)
            else:
                recorded.remarks["left out: no token of it was sampled"] += 1
        except (ValueError, IndexError, TypeError, AttributeError) as error:
            what = f"{path}, row {number}: {error}"
            raise MismatchError(what, "docs/recorded-rollouts.md lists what is read") from error
    if not recorded.sequences:
        raise MismatchError(f"{path} has no sequence that can be scored")
    return recorded


def _padded(row: dict[str, Any], prompt: str | None, jagged: bool) -> Row:
    """A row of verl's tensors without its padding; one without an attention_mask has none."""
    width = len(row["prompts"])
    whole = width + len(row["responses"])
    there = np.asarray(row.get("attention_mask", np.ones(whole)), bool)
    if len(there) != whole:
        raise ValueError(f"attention_mask has {len(there)} entries for {whole} tokens")
    of_prompt, of_response = there[:width], there[width:]
    mask = row["response_mask"].astype(bool)[of_response]
    sampled = [False] * int(of_prompt.sum()) + mask.tolist()
    ids = [*row["prompts"][of_prompt].tolist(), *row["responses"][of_response].tolist()]
    logprobs = row["rollout_log_probs"][of_response][mask].tolist()
    # What ended a sequence is not recorded: a tool has the last word, a response that leaves no
    # padding was cut. In rows of their own lengths nothing tells that from one that ended.
    reason = "stop" if mask[-1:].any() else "environment"
    reason = "length" if there[-1] and not jagged else reason
    return Row(
        *(_ids({"ids": ids}, "ids"), sampled, turns_of(sampled)),
        logprobs=_numbers({"rollout_log_probs": logprobs}, "rollout_log_probs"),
        prompt=prompt,
        reward=_reward(float(row["rm_scores"].sum())) if "rm_scores" in row else None,
        finish_reason=reason,
    )


def turns_of(sampled: Sequence[bool]) -> list[int]:
    """Turn of every token: 0 before the first sampled one, n from the start of the n-th response.

    >>> turns_of([False, True, True, False, True])
    [0, 1, 1, 1, 2]
    """
    starts = np.diff(np.asarray([False, *sampled], np.int8)) == 1
    return np.cumsum(starts).tolist()  # type: ignore[no-any-return]


LINES: dict[Form, tuple[Callable[[Entry], bool], Callable[[Entry, Recorded], None]]] = {
    "torchtitan": (lambda entry: isinstance(entry.get("turns"), list), torchtitan),
    "open-instruct": (lambda entry: "response_tokens" in entry, open_instruct),
    "generic": (lambda entry: "token_ids" in entry or "response_token_ids" in entry, generic),
}
# Files that many have and that cannot be scored: fields that mark them, what they are, the remedy.
TEXT_ONLY = (
    (
        {"input", "output", "gts"},
        "verl's rollout_data_dir holds text alone",
        "no setting of it records ids; write them from the batch: responses, response_mask and "
        "rollout_log_probs (actor_rollout_ref.rollout.calculate_log_probs=True)",
    ),
    (
        {"prompt", "completion"},
        "a record of TRL's completions holds text alone",
        "no setting of it records ids; a callback can write prompt_ids, completion_ids and "
        "sampling_per_token_logps",
    ),
)


# ---------------------------------------------------------------- reading


def read_recorded(path: Path, form: Form | None = None) -> tuple[Form, Recorded]:
    """All sequences of a file, and its format.

    Args:
        form: None: by the fields of the first line, "verl" for a dump or a folder that has one.

    Raises:
        MismatchError: it cannot be read, holds no ids and logprobs, or a line is wrong (named).
    """
    if path.is_dir():
        names = (verl_dump.NAME, verl_dump.QUEUE)
        path = next((path / name for name in names if (path / name).exists()), path / names[0])
    if form == "verl" or (form is None and path.suffix in (".dp", ".pt")):
        return "verl", verl(path)
    recorded = Recorded()
    for number, entry in _entries(path):
        where = f"{path}:{number}"
        form = form or _form_of(entry, where)
        try:
            before = len(recorded.sequences)
            LINES[form][1](entry, recorded)
            for sequence in recorded.sequences[before:]:
                _require_whole(sequence)
        except (ValueError, TypeError, AttributeError) as error:
            raise MismatchError(
                f"{where}: no sequence of the format {form}: {error}",
                "docs/recorded-rollouts.md lists the fields; --format names another",
            ) from error
    if form is None:
        raise MismatchError(f"{path} is empty", "give a file with one JSON object per line")
    if not recorded.sequences:
        left = "; ".join(recorded.remarks) or "no line has a sampled token"
        raise MismatchError(f"{path} has no sequence that can be scored: {left}")
    return form, recorded


def _entries(path: Path) -> Iterator[tuple[int, Entry]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line.decode("utf-8"))
                except (ValueError, RecursionError) as error:
                    raise MismatchError(
                        f"{path}:{number} is not JSON: {error}",
                        "was it cut off? one JSON object per line is expected",
                    ) from error
                if not isinstance(entry, dict):
                    raise MismatchError(f"{path}:{number} is no JSON object", "one per line")
                yield number, entry
    except OSError as error:
        raise MismatchError(
            f"{path}: {error.strerror}", "give a JSONL file that can be read"
        ) from error


def _form_of(entry: Entry, where: str) -> Form:
    for form, (fits, _) in LINES.items():
        if fits(entry):
            return form
    for fields, what, remedy in TEXT_ONLY:
        if fields <= set(entry):
            raise MismatchError(f"{where}: {what}, and tokens are what is compared", remedy)
    raise MismatchError(
        f"{where}: no known format (fields: {', '.join(sorted(entry)) or 'none'})",
        f"one of {', '.join(LINES)}: docs/recorded-rollouts.md lists their fields",
    )


def _require_whole(sequence: Row) -> None:
    count = sum(sequence.sampled)
    if count == 0:
        raise ValueError("no token was sampled")
    if sequence.sampled[0]:
        raise ValueError("its first token is sampled: nothing predicts it")
    if len(sequence.logprobs) != count:
        raise ValueError(f"{len(sequence.logprobs)} logprobs for {count} sampled tokens")


def _list(entry: Entry, name: str) -> list[Any]:
    value = entry.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{name} is no list")
    return value


def _ids(entry: Entry, name: str) -> list[int]:
    ids = _list(entry, name)
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"{name} holds what is no token id")
    return ids


def _numbers(entry: Entry, name: str) -> list[float]:
    values = _list(entry, name)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value <= 0:
            raise ValueError(f"{name} holds {value!r}, which is no log-probability")
    return [float(value) for value in values]


def _reward(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) else None


# ---------------------------------------------------------------- as a run


def as_rollout(
    recorded: Recorded, sampling: Sampling, fingerprint: Fingerprint
) -> tuple[Rollout, Scoring]:
    """The sequences of one prompt next to each other, and their sampler's scoring."""
    groups: dict[Any, int] = {}
    for number, sequence in enumerate(recorded.sequences):
        key = ("alone", number) if sequence.prompt is None else ("shared", str(sequence.prompt))
        sequence.prompt = groups.setdefault(key, len(groups))
    ordered = sorted(recorded.sequences, key=lambda sequence: sequence.prompt)
    rewards = [sequence.reward for sequence in ordered]
    given = [reward for reward in rewards if reward is not None]
    rollout = Rollout(
        token_ids=_flat((s.token_ids for s in ordered), np.int64),
        offsets=np.cumsum([0, *(len(s.token_ids) for s in ordered)]).astype(np.int64),
        action_mask=_flat((s.sampled for s in ordered), np.bool_),
        turn=_flat((s.turn for s in ordered), np.int64),
        prompt_index=np.asarray([s.prompt for s in ordered], np.int64),
        finish_reason=tuple(s.finish_reason for s in ordered),
        sampling=sampling,
        fingerprint=fingerprint,
        rewards=np.asarray(given) if len(given) == len(ordered) else None,
    )
    logprobs = _flat((s.logprobs for s in ordered), np.float64)
    ids = rollout.token_ids[rollout.actions]
    return rollout, Scoring(f"{ENGINE}:decode", ids, logprobs, fingerprint)


def _flat(parts: Iterable[Sequence[Any]], kind: type[np.generic]) -> Any:
    return np.concatenate([np.asarray(part, kind) for part in parts])
