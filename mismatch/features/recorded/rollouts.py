"""Read rollouts that a framework wrote to a file: token ids and the sampler's log-probabilities.

Files that hold only text are refused: encoded again, text may become other tokens. Pickles are
never opened: the error gives the command that converts them in the framework's own environment.
Fields were read in the frameworks' sources: torchtitan's ``experiments/rl/rollout_recorder.py``
(b5bcd76, 2026-08), open-instruct's ``rl_utils.py`` (e6c3044, 2026-08) and verl's
``verl/protocol.py`` and ``verl/utils/skip/rollout_skip.py`` (1dda039, 2026-08).
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mismatch.errors import MismatchError
from mismatch.types import Fingerprint, Rollout, Sampling, Scoring

ENGINE = "recorded"
Entry = dict[str, Any]
Form = Literal["torchtitan", "open-instruct", "generic", "verl"]


@dataclass
class Row:
    """One recorded sequence."""

    token_ids: list[int]
    sampled: list[bool]
    """Per token: whether the policy sampled it."""
    logprobs: list[float]
    """Of the sampled tokens, nats."""
    prompt: Any = None
    """What the samples of one prompt have in common; None: a prompt of its own."""
    reward: float | None = None
    finish_reason: str = "stop"


@dataclass
class Recorded:
    """The sequences of a file, and what was noticed while reading: remark -> how often."""

    sequences: list[Row] = field(default_factory=list)
    remarks: Counter[str] = field(default_factory=Counter)


def read_recorded(path: Path, form: Form | None = None) -> tuple[Form, Recorded]:
    """Return the format of a file and all its sequences.

    Args:
        form: None: decided by the fields of the first line.

    Raises:
        MismatchError: the file cannot be read, is a pickle, holds no ids and logprobs, or a line
            is wrong (named).
    """
    _require_text(path)
    recorded = Recorded()
    for number, entry in _entries(path):
        where = f"{path}:{number}"
        form = form or _form_of(entry, where)
        try:
            before = len(recorded.sequences)
            FORMS[form].read(entry, recorded)
            for row in recorded.sequences[before:]:
                _require_scorable(row)
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


# First bytes of a file by ``torch.save``, and by ``pickle.dump`` with protocol 2 and later.
ZIP, PICKLE = b"PK\x03\x04", b"\x80"
VERL_DUMPS = ("gen_batch.dp", "tq_batch.pt")
# Run in the user's environment, where importing tensordict allows its classes to torch. The batch
# in a gen_batch.dp is a torch.save inside a pickle: it is cut out of it without unpickling.
VERL_TO_JSONL = (
    "import io,json,pickletools,sys,tensordict,torch; f=open(sys.argv[1],'rb'); "
    "z=f.read(2)==b'PK'; f.seek(0); "
    "f=f if z else io.BytesIO(next(a for _,a,_ in pickletools.genops(f) "
    "if type(a) is bytes and a[:2]==b'PK')); "
    "d=torch.load(f,weights_only=True,map_location='cpu'); d=d['tensordict'] if z else d; "
    "n=[k for k in ('prompts','responses','attention_mask','response_mask',"
    "'rollout_log_probs','rm_scores') if k in d.keys()]; "
    "[print(json.dumps({k:v.tolist() for k,v in zip(n,r)}|{'padded':not z})) "
    "for r in zip(*(d[k] for k in n))]"
)


def _require_text(path: Path) -> None:
    """Refuse a pickle, and say how to convert it where it was written."""
    dump = path
    if path.is_dir():
        dump = next((path / name for name in VERL_DUMPS if (path / name).exists()), path)
    try:
        with dump.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise MismatchError(
            f"{path}: {error.strerror}", "give a JSONL file that can be read"
        ) from error
    if start.startswith((ZIP, PICKLE)):
        raise MismatchError(
            f"{dump} is a pickle, which mismatch never opens: reading one can run code",
            "convert a dump of verl in verl's environment, then read rollouts.jsonl: "
            f'python -c "{VERL_TO_JSONL}" {shlex.quote(str(dump))} > rollouts.jsonl',
        )


def _entries(path: Path) -> Iterator[tuple[int, Entry]]:
    """Yield the number and the object of every line that is not blank."""
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
                raise MismatchError(f"{path}:{number} is no JSON object", "write one per line")
            yield number, entry


def _require_scorable(row: Row) -> None:
    count = sum(row.sampled)
    if count == 0:
        raise ValueError("no token was sampled")
    if row.sampled[0]:
        raise ValueError("its first token is sampled: nothing predicts it")
    if len(row.logprobs) != count:
        raise ValueError(f"{len(row.logprobs)} logprobs for {count} sampled tokens")


# ---------------------------------------------------------------- formats


def generic(entry: Entry, recorded: Recorded) -> None:
    """Read ``prompt_token_ids``, ``response_token_ids`` and ``logprobs``; or ``token_ids``, an
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
            *(ids, sampled, _logprobs(entry, "logprobs")),
            prompt=entry.get("prompt_id"),
            reward=_reward(entry.get("reward")),
            finish_reason=str(entry.get("finish_reason", "stop")),
        )
    )


def open_instruct(entry: Entry, recorded: Recorded) -> None:
    """Read a line of open-instruct's ``*_rollouts_*.jsonl``. A sequence that called a tool is left
    out: the file does not say which tokens of its response were sampled."""
    if any((entry.get("request_info") or {}).get(name) for name in ("num_calls", "tool_calleds")):
        recorded.remarks[
            "left out: it called a tool, and no mask says which tokens were sampled"
        ] += 1
        return
    if entry.get("logprobs") is None:
        raise ValueError("no logprobs")
    prompt, response = _ids(entry, "prompt_tokens"), _ids(entry, "response_tokens")
    sampled = [False] * len(prompt) + [True] * len(response)
    recorded.sequences.append(
        Row(
            *(prompt + response, sampled, _logprobs(entry, "logprobs")),
            prompt=(entry.get("step"), entry.get("prompt_idx")),
            reward=_reward(entry.get("reward")),
            finish_reason=str(entry.get("finish_reason", "stop")),
        )
    )


def torchtitan(entry: Entry, recorded: Recorded) -> None:
    """Read a line of torchtitan's ``rollout_samples.jsonl`` (``log_tensors``, ``log_logprobs``).

    Turns become one sequence as long as the prompt of each turn begins with the ids before it; a
    turn whose prompt does not is a sequence of its own, with the context that its engine saw.
    """
    row: Row | None = None
    for number, turn in enumerate(_list(entry, "turns"), start=1):
        for name, switch in (
            ("completion_token_ids", "log_tensors"),
            ("completion_logprobs", "log_logprobs"),
        ):
            if name not in turn:
                raise ValueError(f"turn {number} has no {name}: record with {switch}=True")
        context, ids = _ids(turn, "prompt_token_ids"), _ids(turn, "completion_token_ids")
        if turn.get("min_policy_version") != turn.get("max_policy_version"):
            recorded.remarks["turns that were sampled by more than one version of the weights"] += 1
        if row is None or context[: len(row.token_ids)] != row.token_ids:
            if row is not None:
                recorded.remarks["turns whose prompt has other ids than the turns before"] += 1
            row = Row([], [], [], entry.get("group_id"), _reward(entry.get("reward")))
            recorded.sequences.append(row)
        observed = len(context) - len(row.token_ids)
        row.token_ids = context + ids
        row.sampled += [False] * observed + [True] * len(ids)
        row.logprobs += _logprobs(turn, "completion_logprobs")


def verl(entry: Entry, recorded: Recorded) -> None:
    """Read a row of verl's batch, as ``VERL_TO_JSONL`` writes it, without its padding.

    In a ``gen_batch.dp`` rows are padded, the prompt on the left and the response on the right. In
    a ``tq_batch.pt`` (``"padded": false``) every row has its own length.
    """
    if "rollout_log_probs" not in entry:
        raise ValueError(
            "no rollout_log_probs: record with actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    prompt, response = _ids(entry, "prompts"), _ids(entry, "responses")
    mask, logprobs = _list(entry, "response_mask"), _list(entry, "rollout_log_probs")
    whole = len(prompt) + len(response)
    masked = "attention_mask" in entry
    attended = _list(entry, "attention_mask") if masked else [1] * whole
    if len(attended) != whole:
        raise ValueError(f"attention_mask has {len(attended)} entries for {whole} tokens")
    rows = zip(response, mask, logprobs, attended[len(prompt) :], strict=True)
    kept = [(token, bool(m), logprob) for token, m, logprob, there in rows if there]
    prompt = [token for token, there in zip(prompt, attended, strict=False) if there]
    if not any(m for _, m, _ in kept):
        recorded.remarks["left out: no token of it was sampled"] += 1
        return
    # A row does not say what ended it. A response that leaves no padding was cut; where the last
    # token was not sampled, the environment had the last word. Rows of their own lengths do not
    # tell a response that was cut from one that ended.
    reason = "stop" if kept[-1][1] else "environment"
    sampled_logprobs = {"rollout_log_probs": [logprob for _, m, logprob in kept if m]}
    cut = masked and bool(attended[-1]) and bool(entry.get("padded", True))
    scores = entry.get("rm_scores")
    recorded.sequences.append(
        Row(
            prompt + [token for token, _, _ in kept],
            [False] * len(prompt) + [m for _, m, _ in kept],
            _logprobs(sampled_logprobs, "rollout_log_probs"),
            prompt=tuple(prompt),
            reward=None if scores is None else _reward(float(sum(scores))),
            finish_reason="length" if cut else reason,
        )
    )


@dataclass(frozen=True)
class Format:
    """One format of lines."""

    fits: Callable[[Entry], bool]
    """Whether a line has the fields that tell this format from the others."""
    read: Callable[[Entry, Recorded], None]
    """Add the sequences of a line."""


FORMS: dict[Form, Format] = {
    "torchtitan": Format(lambda entry: isinstance(entry.get("turns"), list), torchtitan),
    "open-instruct": Format(lambda entry: "response_tokens" in entry, open_instruct),
    "generic": Format(lambda e: "token_ids" in e or "response_token_ids" in e, generic),
    "verl": Format(lambda entry: {"responses", "response_mask"} <= set(entry), verl),
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


def _form_of(entry: Entry, where: str) -> Form:
    for form, known in FORMS.items():
        if known.fits(entry):
            return form
    for fields, what, remedy in TEXT_ONLY:
        if fields <= set(entry):
            raise MismatchError(f"{where}: {what}, and tokens are what is compared", remedy)
    raise MismatchError(
        f"{where}: no known format (fields: {', '.join(sorted(entry)) or 'none'})",
        f"one of {', '.join(FORMS)}: docs/recorded-rollouts.md lists their fields",
    )


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


def _logprobs(entry: Entry, name: str) -> list[float]:
    values = _list(entry, name)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value <= 0:
            raise ValueError(f"{name} holds {value!r}, which is no log-probability")
    return [float(value) for value in values]


def _reward(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) else None


# ---------------------------------------------------------------- as a run


@dataclass(frozen=True)
class RecordedRun:
    """What a file becomes in a run directory."""

    rollout: Rollout
    decode: Scoring


def as_run(recorded: Recorded, sampling: Sampling, fingerprint: Fingerprint) -> RecordedRun:
    """Return the rollout, sequences of one prompt next to each other, and its sampler's scoring."""
    number_of: dict[Any, int] = {}
    prompts = []
    for number, row in enumerate(recorded.sequences):
        key = ("alone", number) if row.prompt is None else ("shared", str(row.prompt))
        prompts.append(number_of.setdefault(key, len(number_of)))
    order = np.argsort(prompts, kind="stable")
    rows = [recorded.sequences[number] for number in order]
    rewards = [row.reward for row in rows if row.reward is not None]
    rollout = Rollout(
        token_ids=_flat((row.token_ids for row in rows), np.int64),
        offsets=np.cumsum([0, *(len(row.token_ids) for row in rows)]).astype(np.int64),
        action_mask=_flat((row.sampled for row in rows), np.bool_),
        turn=_flat((turns_of(row.sampled) for row in rows), np.int64),
        prompt_index=np.asarray(prompts, np.int64)[order],
        finish_reason=tuple(row.finish_reason for row in rows),
        sampling=sampling,
        fingerprint=fingerprint,
        rewards=np.asarray(rewards) if len(rewards) == len(rows) else None,
    )
    logprobs = _flat((row.logprobs for row in rows), np.float64)
    ids = rollout.token_ids[rollout.actions]
    return RecordedRun(rollout, Scoring(f"{ENGINE}:decode", ids, logprobs, fingerprint))


def turns_of(sampled: Sequence[bool]) -> list[int]:
    """Return the turn of every token: 0 before the first sampled one, n from the n-th response on.

    >>> turns_of([False, True, True, False, True])
    [0, 1, 1, 1, 2]
    """
    starts = np.diff(np.asarray([False, *sampled], np.int8)) == 1
    return np.cumsum(starts).tolist()  # type: ignore[no-any-return]


def _flat(parts: Iterable[Sequence[Any]], kind: type[np.generic]) -> Any:
    return np.concatenate([np.asarray(part, kind) for part in parts])
