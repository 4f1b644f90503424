"""The tokens table: every action token of a run, with all that was measured about it.

Lists are Arrow lists, so that a million of them are two flat arrays and not a million objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.analysis.breakdowns import special_ids, token_class
from mismatch.analysis.comparison import paired_routing
from mismatch.analysis.routing_tables import flipped_layers
from mismatch.captures import LIKELIEST, Likeliest, why_incomparable
from mismatch.keys import FIX, Key
from mismatch.run import manifest, store
from mismatch.types import Floats, Ints, Report, Rollout, Scoring

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

WORST = 1000  # tokens of largest |delta| whose likeliest outcomes are in the table
PAIRED = ("rollout_logprob", "train_logprob", "delta", "entropy")


def token_table(
    run_dir: Path,
    rollout: Rollout,
    decode: Scoring,
    train: Scoring,
    reference: Scoring | None = None,
) -> pd.DataFrame:
    """Return one row per action token, [A]; docs/reference/report-json.md lists the columns.

    Args:
        run_dir: whose vocabulary holds the tokens' texts.
        reference: the trainer in float32.
    """
    import pandas as pd

    texts = store.load_vocabulary(run_dir)
    frame = pd.DataFrame(_places(rollout) | _words(rollout, texts, special_ids(decode.fingerprint)))
    if len(decode.logprobs) == len(train.logprobs) == len(frame):
        frame["rollout_logprob"] = decode.logprobs
        frame["train_logprob"] = train.logprobs
        frame["delta"] = train.logprobs - decode.logprobs
        frame["entropy"] = np.nan if train.entropy is None else train.entropy
    else:  # the check same-token-ids has failed: nothing can be paired
        for name in PAIRED:
            frame[name] = np.nan
    if reference is not None and len(reference.logprobs) == len(frame):
        frame["reference_logprob"] = reference.logprobs
    return frame.assign(
        **_routes(rollout, decode, train),
        context=arrow_lists(*_contexts(rollout, texts), "string"),
        **_likeliest(decode, train, texts, len(frame)),
    )


def record_best_fix(run_dir: Path, report: Report, tokens: pd.DataFrame) -> pd.DataFrame:
    """Return the table with log-probabilities of the best fix, where it kept the tokens.

    A fix of the engine samples new tokens, which have no row here.
    """
    table = report.result("fixes")
    names = [] if table is None else [id for id in (table.best_together, table.best) if id]
    held = set(store.scoring_names(run_dir)) if names else set()
    name = next((name for name in names if Key.of(FIX, name) in held), None)
    if name is None:
        return tokens
    logprobs = store.load_scoring(run_dir, Key.of(FIX, name)).logprobs
    if len(logprobs) != len(tokens):
        return tokens
    tokens = tokens.assign(fix=name, fix_logprob=logprobs)
    entry = manifest.entries(run_dir).get(store.TOKENS, {})
    kept = {key: entry[key] for key in ("made_by", "inputs") if key in entry}
    store.save_tokens(run_dir, tokens, **kept)
    return tokens


def _places(rollout: Rollout) -> dict[str, Any]:
    """Where each token is, and the reward of its sequence."""
    import pandas as pd

    actions = rollout.actions
    sequence, prompts = rollout.sequence_of_token[actions], pd.Series(rollout.prompt_index)
    sample = prompts.groupby(prompts).cumcount().to_numpy()  # which of its prompt's, from 0
    columns = {
        "sequence": sequence,
        "prompt": rollout.prompt_index[sequence],
        "sample": sample[sequence],
        "position": actions - rollout.offsets[sequence],
        "turn": rollout.turn[actions],
    }
    return columns if rollout.rewards is None else columns | {"reward": rollout.rewards[sequence]}


def _words(rollout: Rollout, texts: dict[int, str], special: set[int]) -> dict[str, Any]:
    ids, which = np.unique(rollout.token_ids[rollout.actions], return_inverse=True)
    names = np.array([_text(texts, int(i)) for i in ids] or [""], dtype=object)
    classes = [token_class(texts.get(int(i)), int(i) in special) for i in ids]
    return {
        "token_id": ids[which],
        "token": names[which],
        "token_class": np.array(classes or [""], dtype=object)[which],
    }


def _text(texts: dict[int, str], token: int) -> str:
    """Return what an id stands for; half a surrogate pair, which no file can hold, as U+FFFD."""
    text = texts.get(token, f"<{token}>")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _routes(rollout: Rollout, decode: Scoring, train: Scoring) -> dict[str, Any]:
    """Flipped layers of each token, and its smallest gap between a chosen and a rejected expert."""
    import pandas as pd

    nothing = pd.array([pd.NA] * rollout.n_actions, dtype="Int16")
    routes = paired_routing(rollout, decode, train)
    if routes is None:
        return {"routing_flips": nothing}
    layers, offsets = flipped_layers(routes)
    columns: dict[str, Any] = {
        "routing_flips": pd.array(routes.flips, dtype="Int16"),
        "routing_flipped_layers": arrow_lists(layers.astype(np.int16), offsets),
    }
    margin = routes.arrays.get("margin")
    if margin is not None:
        columns["routing_margin"] = margin.min(axis=1)
    return columns


def _contexts(rollout: Rollout, texts: dict[int, str]) -> tuple[Any, Ints]:
    """Texts of the tokens between the action before and each action, and offsets [A + 1]."""
    actions = rollout.actions
    sequence = rollout.sequence_of_token[actions]
    first = rollout.offsets[sequence]
    start = np.maximum(np.concatenate([[0], actions[:-1] + 1]), first)
    offsets = np.concatenate([[0], np.cumsum(actions - start)])
    given = np.flatnonzero(~rollout.action_mask)
    last = np.maximum.reduceat(np.where(rollout.action_mask, np.arange(len(rollout.token_ids)), -1),
                               rollout.offsets[:-1])  # fmt: skip
    given = given[given < last[rollout.sequence_of_token[given]]]
    return [_text(texts, int(i)) for i in rollout.token_ids[given]], offsets


def _likeliest(decode: Scoring, train: Scoring, texts: dict[int, str], size: int) -> dict[str, Any]:
    """Return what either side thinks likeliest: of the worst tokens, and where both give all.

    A probability that a side did not say (it is below those that it gave) is NaN.
    """
    rows = _of_worst(decode, train) | _of_distributions(decode, train)
    if not rows:
        return {}
    places = sorted(rows)
    counts = np.zeros(size, np.int64)
    counts[places] = [len(rows[position][0]) for position in places]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    parts = zip(*(rows[position] for position in places), strict=True)
    ids, first, second = (np.concatenate(part) for part in parts)
    return {
        "top_ids": arrow_lists(ids, offsets),
        "top_tokens": arrow_lists([_text(texts, int(i)) for i in ids], offsets, "string"),
        "top_rollout": arrow_lists(first, offsets),
        "top_train": arrow_lists(second, offsets),
    }


Outcomes = tuple[Ints, Floats, Floats]  # ids, and their log-probabilities on either side


def _of_distributions(decode: Scoring, train: Scoring) -> dict[int, Outcomes]:
    """By row, where both sides keep their distribution."""
    left, right = decode.distributions, train.distributions
    if left is None or right is None or why_incomparable(left, right):
        return {}
    rows: dict[int, Outcomes] = {}
    for index, position in enumerate(left.positions.tolist()):
        sides = left.logprobs[index], right.logprobs[index]
        likeliest = [np.argsort(-side, kind="stable")[:LIKELIEST] for side in sides]
        columns = np.unique(np.concatenate(likeliest))
        columns = columns[np.argsort(-np.maximum(*sides)[columns], kind="stable")]
        ids = columns if left.ids is None else left.ids[index][columns]
        rows[position] = ids, *(side[columns].astype(np.float64) for side in sides)
    return rows


def _of_worst(decode: Scoring, train: Scoring) -> dict[int, Outcomes]:
    """By row of the largest |delta|: the likeliest of either side, and the sampled token."""
    left, right = decode.likeliest, train.likeliest
    if left is None or right is None or len(decode.logprobs) != len(train.logprobs):
        return {}
    size = np.abs(train.logprobs - decode.logprobs)
    worst = np.argsort(-size, kind="stable")[:WORST]
    return {int(row): _outcomes(int(row), (decode, left), (train, right)) for row in worst}


def _outcomes(row: int, *sides: tuple[Scoring, Likeliest]) -> Outcomes:
    sampled = int(sides[0][0].token_ids[row])
    logs = [
        dict(zip(top.ids[row].tolist(), top.logprobs[row].tolist(), strict=True))
        | {sampled: float(scoring.logprobs[row])}
        for scoring, top in sides
    ]
    ids = sorted(set().union(*logs), key=lambda i: -max(side.get(i, -np.inf) for side in logs))
    first, second = ([side.get(i, np.nan) for i in ids] for side in logs)
    return np.asarray(ids, np.int64), np.asarray(first), np.asarray(second)


def arrow_lists(values: Sequence[Any] | np.ndarray, offsets: Ints, kind: str | None = None) -> Any:
    """Flat values as a pandas column of Arrow lists, [len(offsets) - 1]."""
    import pandas as pd
    import pyarrow as pa

    flat: pa.Array = pa.array(values, None if kind is None else pa.type_for_alias(kind))
    lists = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), flat)
    return pd.array(lists, dtype=pd.ArrowDtype(lists.type))
