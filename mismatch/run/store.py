"""Artefacts on disk: written whole or not at all, read with their schema and checksum checked.

A run directory holds::

    run.json                  every command that worked here: versions, platform, environment
    spec.json                 the CheckSpec
    manifest.json             checksum, schema and inputs of every artefact
    rollout.parquet           one row per sequence
    vocabulary.json           text of every token id that occurs
    scores/<name>.parquet     one row per sequence: logprobs, entropy … of its action tokens
    routing/<name>.safetensors  experts per token and layer
    dists/<name>.safetensors  whole distributions at a sample of positions
    gradients.json            what --gradients measured
    comparison.json           two scorings side by side, every metric with its interval
    tokens.parquet            one row per action token: all that was measured about it
    report.json, report.html, report.md
    locate.json               what `mismatch locate` found
    jobs/, logs/, errors/     what the child processes were asked and said
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict, cast

import numpy as np

from mismatch.captures import Distributions, Likeliest
from mismatch.codec import from_json
from mismatch.errors import MismatchError
from mismatch.keys import FIRST, Key
from mismatch.run import manifest
from mismatch.run.files import parse_json, read_regular
from mismatch.run.manifest import damage_named, missing_fix, write_atomic
from mismatch.run.provenance import NUMERIC, checkpoint_digest, numeric_versions, redact
from mismatch.run.tables import (
    flat,
    numbers,
    plain,
    ragged,
    read_header,
    read_table,
    require_kinds,
    write_table,
)
from mismatch.specs import FILE_SCORER, RolloutSpec, TrainSpec, spec_hash, to_dict
from mismatch.types import Rollout, Sampling, Scoring, SideFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd


class ScoringHeader(TypedDict, total=False):
    name: Required[str]
    fingerprint: Required[SideFacts]
    spec: dict[str, Any]  # where one was given
    routing: bool
    keys: bool
    distributions: bool


ROLLOUT_SCHEMA = "mismatch.rollout/1"
SCORING_SCHEMA = "mismatch.scoring/1"
TOKENS_SCHEMA = "mismatch.tokens/2"
VOCABULARY_SCHEMA = "mismatch.vocabulary/1"
LOGPROBS = {"rollout_logprob", "train_logprob"}
REQUIRED_COLUMNS = {
    ROLLOUT_SCHEMA: {"token_ids", "action_mask", "turn", "prompt_index", "finish_reason"},
    SCORING_SCHEMA: {"token_ids", "logprobs"},
    TOKENS_SCHEMA: {"sequence", "prompt", "position", "token_id", "delta"} | LOGPROBS,
}
TEXTS = {"token", "token_class", "fix", "context", "top_tokens"}  # columns of the tokens table
LISTS = {"context", "top_tokens", "top_ids", "top_rollout", "top_train", "routing_flipped_layers"}
ROLLOUT = "rollout.parquet"
VOCABULARY = "vocabulary.json"
TOKENS = "tokens.parquet"


def write_text(path: Path, text: str) -> Path:
    """Write a file of text, without what looks like a secret."""
    safe = redact(text).encode()
    return write_atomic(path, lambda file: file.write(safe))


def write_json(path: Path, data: Any) -> Path:
    """Strict JSON: NaN and infinity are errors, not invalid documents."""
    return write_text(path, json.dumps(data, indent=1, allow_nan=False, default=plain) + "\n")


def read_json(path: Path) -> Any:
    try:
        return parse_json(read_regular(path), _no_number)
    except FileNotFoundError:
        raise MismatchError(f"{path} does not exist", missing_fix(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise MismatchError(f"{path} cannot be read: {error}", "run the stage again") from error


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def save_document(run_dir: Path | str, name: str, data: Any, **entry: Any) -> Path:
    """Write JSON data and record it; ``entry`` as :func:`mismatch.run.manifest.record` takes it."""
    path = write_json(Path(run_dir) / name, data)
    manifest.record(run_dir, name, **entry)
    return path


def load_document(run_dir: Path | str, name: str) -> Any:
    """Read JSON data after comparing it with its checksum."""
    manifest.verify(run_dir, name)
    return read_json(Path(run_dir) / name)


# ---------------------------------------------------------------- rollout


def save_rollout(run_dir: Path | str, rollout: Rollout, made_by: RolloutSpec | None = None) -> Path:
    """Write ``rollout.parquet``; ``made_by`` is kept next to it, for resuming."""
    rows: dict[str, Any] = {
        "token_ids": ragged(rollout.token_ids, rollout.offsets),
        "action_mask": ragged(rollout.action_mask, rollout.offsets),
        "turn": ragged(rollout.turn, rollout.offsets),
        "prompt_index": rollout.prompt_index,
        "finish_reason": list(rollout.finish_reason),
    }
    if rollout.rewards is not None:
        rows["reward"] = rollout.rewards
    header = {"sampling": dataclasses.asdict(rollout.sampling), "fingerprint": rollout.fingerprint}
    path = write_table(Path(run_dir) / ROLLOUT, rows, ROLLOUT_SCHEMA, header)
    manifest.record(run_dir, ROLLOUT, ROLLOUT_SCHEMA, **_made(made_by))
    return path


def load_rollout(run_dir: Path | str) -> Rollout:
    """Read ``rollout.parquet``; MismatchError if absent, damaged or of another schema."""
    with damage_named(Path(run_dir) / ROLLOUT):
        manifest.verify(run_dir, ROLLOUT)
        path = Path(run_dir) / ROLLOUT
        table, header = read_table(path, ROLLOUT_SCHEMA, REQUIRED_COLUMNS[ROLLOUT_SCHEMA])
        token_ids, offsets = flat(table, "token_ids", np.int64)
        return Rollout(
            token_ids=token_ids,
            offsets=offsets,
            action_mask=flat(table, "action_mask", np.bool_)[0],
            turn=flat(table, "turn", np.int64)[0],
            prompt_index=numbers(table["prompt_index"], "prompt_index", np.int64),
            finish_reason=from_json(
                tuple[str, ...], table.column("finish_reason").to_pylist(), "finish_reason"
            ),
            sampling=from_json(Sampling, header["sampling"]),
            fingerprint=from_json(SideFacts, header["fingerprint"]),
            rewards=numbers(table["reward"], "reward", np.float64)
            if "reward" in table.column_names
            else None,
        )


# ---------------------------------------------------------------- scorings


def save_scoring(
    run_dir: Path | str,
    scoring: Scoring,
    rollout: Rollout,
    made_by: RolloutSpec | TrainSpec | None = None,
    also_from: Sequence[str] = (),
    python: str | None = None,
) -> Path:
    """Write ``scores/<name>.parquet`` and, where experts were captured, their routing file.

    The scores are recorded last, as made from the rollout (and routing) that lie there now: a
    scoring that is recorded is complete. ``made_by`` is kept in it, for resuming; ``also_from``
    names further artefacts that it was made from.

    Args:
        python: interpreter that computed it; None: this interpreter.
    """
    run_dir = Path(run_dir)
    offsets = action_offsets(rollout)
    columns = {
        "token_ids": scoring.token_ids,
        "logprobs": scoring.logprobs.astype(np.float64),
        "entropy": scoring.entropy,
        "top1": scoring.top1,
        **{f"extra.{name}": values for name, values in scoring.extra.items()},
    }
    rows = {name: ragged(v, offsets) for name, v in columns.items() if v is not None}
    if (top := scoring.likeliest) is not None:
        ends = offsets * top.ids.shape[1]
        rows["likeliest.ids"] = ragged(top.ids.reshape(-1), ends)
        rows["likeliest.logprobs"] = ragged(top.logprobs.reshape(-1), ends)
    from mismatch.run import captured

    header: ScoringHeader = {"name": scoring.name, "fingerprint": scoring.fingerprint}
    if made_by is not None:
        header["spec"] = to_dict(made_by)
    inputs = [ROLLOUT, *also_from]
    if scoring.routing is not None:
        inputs.append(routing_file(scoring.name))
        captured.save_routing(run_dir, inputs[-1], scoring.routing)
        header["routing"] = True
    if scoring.keys is not None:
        inputs.append(keys_file(scoring.name))
        captured.save_keys(run_dir, inputs[-1], scoring.keys)
        header["keys"] = True
    if scoring.distributions is not None:
        inputs.append(distributions_file(scoring.name))
        captured.save_distributions(run_dir, inputs[-1], scoring.distributions)
        header["distributions"] = True
    name = scoring_file(scoring.name)
    path = write_table(run_dir / name, rows, SCORING_SCHEMA, header)
    manifest.record(run_dir, name, SCORING_SCHEMA, inputs=inputs, **_made(made_by, python))
    return path


def load_scoring(run_dir: Path | str, name: str) -> Scoring:
    """Read one scoring by its name, e.g. ``"vllm:decode"``."""
    with damage_named(Path(run_dir) / scoring_file(name)):
        run_dir = Path(run_dir)
        manifest.verify(run_dir, scoring_file(name))
        path = run_dir / scoring_file(name)
        table, header = read_table(path, SCORING_SCHEMA, REQUIRED_COLUMNS[SCORING_SCHEMA])
        of = {"token_ids": np.int64, "logprobs": np.float64}
        columns = {name: flat(table, name, of.get(name))[0] for name in table.column_names}
        from mismatch.run import captured

        return Scoring(
            name=from_json(str, header["name"]),
            token_ids=columns["token_ids"],
            logprobs=columns["logprobs"],
            fingerprint=from_json(SideFacts, header["fingerprint"]),
            entropy=columns.get("entropy"),
            top1=columns.get("top1"),
            routing=captured.load_routing(run_dir, routing_file(name))
            if header.get("routing")
            else None,
            extra={
                k.removeprefix("extra."): v for k, v in columns.items() if k.startswith("extra.")
            },
            distributions=load_distributions(run_dir, name)
            if header.get("distributions")
            else None,
            likeliest=_likeliest(columns),
            keys=captured.load_keys(run_dir, keys_file(name)) if header.get("keys") else None,
        )


def _likeliest(columns: dict[str, np.ndarray]) -> Likeliest | None:
    if "likeliest.ids" not in columns:
        return None
    ids, logprobs = (columns[f"likeliest.{name}"] for name in ("ids", "logprobs"))
    rows = len(columns["token_ids"])
    return Likeliest(ids.reshape(rows, -1), logprobs.reshape(rows, -1))


def load_distributions(run_dir: Path | str, name: str) -> Distributions:
    """Return the whole distributions of a scoring; MismatchError where it has none."""
    from mismatch.run import captured

    return captured.load_distributions(Path(run_dir), distributions_file(name))


def scoring_header(run_dir: Path | str, name: str) -> ScoringHeader:
    """Return what a scoring's file says of it."""
    manifest.require_no_links(run_dir)
    with damage_named(Path(run_dir) / scoring_file(name)):
        return cast(ScoringHeader, read_header(Path(run_dir) / scoring_file(name), SCORING_SCHEMA))


def scoring_names(run_dir: Path | str, first: bool = False) -> list[str]:
    """Return names of all scorings in a run directory, sorted.

    Args:
        first: those by the first layers alone, which nothing else is compared with.
    """
    manifest.require_no_links(run_dir)
    with damage_named(Path(run_dir) / "scores"):
        files = sorted((Path(run_dir) / "scores").glob("*.parquet"))
        names = [from_json(str, read_header(file, SCORING_SCHEMA)["name"]) for file in files]
    return [name for name in names if (Key(name).kind == FIRST) is first]


def scoring_file(name: str) -> str:
    """Return the path of a scoring inside its run directory."""
    return f"scores/{_stem(name)}.parquet"


def routing_file(name: str) -> str:
    """Return the path of a scoring's experts inside its run directory."""
    return f"routing/{_stem(name)}.safetensors"


def keys_file(name: str) -> str:
    """Return the path of a scoring's sparse selections inside its run directory."""
    return f"routing/{_stem(name)}.keys.safetensors"


def distributions_file(name: str) -> str:
    """Return the path of a scoring's whole distributions inside its run directory."""
    return f"dists/{_stem(name)}.safetensors"


def action_offsets(rollout: Rollout) -> np.ndarray:
    """Return offsets of every sequence into the action tokens, [N + 1]."""
    starts = np.concatenate([[0], np.cumsum(rollout.action_mask)])
    return starts[rollout.offsets].astype(np.int64)


def _stem(name: str) -> str:
    return name.replace(":", "-").replace("/", "-")


def _made(spec: RolloutSpec | TrainSpec | None, python: str | None = None) -> dict[str, Any]:
    if spec is None:
        return {}
    return {"made_by": spec_hash(spec), "made_with": made_with(spec, python)}


def made_with(spec: RolloutSpec | TrainSpec, python: str | None = None) -> dict[str, str]:
    """Return versions and weights: what numbers depend on in addition to a spec.

    Args:
        python: interpreter that computes them; None: this interpreter.
    """
    side = spec.engine if isinstance(spec, RolloutSpec) else spec
    if isinstance(spec, RolloutSpec) and spec.engine.servers:
        return {}  # the fingerprint says what servers ran
    digest = checkpoint_digest(side.model, side.revision)
    if isinstance(spec, TrainSpec) and spec.scorer == FILE_SCORER:
        versions = {}  # of another machine
    elif python is None:
        versions = numeric_versions()
    else:
        from mismatch.run.interpreters import look_into

        versions = look_into(python, packages=tuple(sorted(NUMERIC))).packages
    return versions | ({"weights": digest} if digest else {})


# ---------------------------------------------------------------- token table


def save_vocabulary(run_dir: Path | str, texts: dict[int, str]) -> Path:
    """Write ``vocabulary.json``: the text of every id that occurs in the rollout."""
    data = {str(token): text for token, text in texts.items()}
    return save_document(run_dir, VOCABULARY, data, schema=VOCABULARY_SCHEMA)


def load_vocabulary(run_dir: Path | str) -> dict[int, str]:
    """Return texts of the ids in the rollout; empty where none were saved."""
    with damage_named(Path(run_dir) / VOCABULARY):
        if not (Path(run_dir) / VOCABULARY).exists():
            return {}
        return from_json(dict[int, str], load_document(run_dir, VOCABULARY), VOCABULARY)


def save_tokens(run_dir: Path | str, frame: pd.DataFrame, **entry: Any) -> Path:
    """Write ``tokens.parquet``: one row per action token, both sides next to each other."""
    columns = {name: frame[name].array for name in frame.columns}
    path = write_table(Path(run_dir) / TOKENS, columns, TOKENS_SCHEMA, {})
    manifest.record(run_dir, TOKENS, TOKENS_SCHEMA, **entry)
    return path


def load_tokens(run_dir: Path | str) -> pd.DataFrame:
    """Read ``tokens.parquet``; lists are Arrow lists."""
    with damage_named(Path(run_dir) / TOKENS):
        import pandas as pd
        import pyarrow as pa

        manifest.verify(run_dir, TOKENS)
        path = Path(run_dir) / TOKENS
        table, _ = read_table(path, TOKENS_SCHEMA, REQUIRED_COLUMNS[TOKENS_SCHEMA])
        require_kinds(table, TEXTS, LISTS)
        frame: pd.DataFrame = table.to_pandas(
            types_mapper=lambda kind: pd.ArrowDtype(kind) if pa.types.is_large_list(kind) else None
        )
        return frame
