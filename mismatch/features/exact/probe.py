"""``mismatch check --batch-probe``: the same tokens at batch 1, at N and shuffled, on both sides.

An engine that batches its prefill is asked for it; next to it vLLM continues the same contexts
greedily, and transformers decodes the same tokens again. The trainer scores them one sequence per
micro-batch, all in one, and in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mismatch.codec import from_json, to_json
from mismatch.errors import EmptyComparison, MismatchError
from mismatch.features.exact.flags import BATCH_PROBE
from mismatch.features.exact.measure import ulps
from mismatch.features.exact.results import FILE, SCHEMA, BatchProbe, Pair, Place
from mismatch.processes.launch import started
from mismatch.processes.stages import Stages, engine_command, world_command
from mismatch.run import manifest, store
from mismatch.specs import OWN_SCORER, spec_hash, to_dict
from mismatch.types import Floats, Ints, NotTested, Rollout

LONGEST = 128  # tokens of a sequence that are scored
FOLDER = "batch-probe"
WORKER = "mismatch.features.exact.worker"
ALONE, TOGETHER, SHUFFLED, AGAIN = "alone", "together", "shuffled", "again"


def choose(rollout: Rollout, count: int) -> Ints:
    """Return the sequences that are probed, [N]: of as many prompts as there are, in seeded order.

    Raises:
        EmptyComparison: the rollout has one sequence, of which no batch can be made.
    """
    if rollout.n_sequences < 2:
        raise EmptyComparison("--batch-probe: a batch needs two sequences", "--num-prompts 2")
    order = np.random.default_rng(0).permutation(rollout.n_sequences)
    seen: dict[int, int] = {}
    ranks = []
    for index in order.tolist():  # the first of every prompt, then the second …
        prompt = int(rollout.prompt_index[index])
        ranks.append(seen.get(prompt, 0))
        seen[prompt] = ranks[-1] + 1
    chosen: Ints = np.sort(order[np.argsort(ranks, kind="stable")][:count])
    return chosen


def cut(rollout: Rollout, chosen: Ints) -> list[list[int]]:
    """Return the token ids of these sequences, as far as they are probed."""
    every = rollout.sequences()
    return [every[index][:LONGEST].tolist() for index in chosen]


def orders(count: int) -> dict[str, list[int]]:
    """Return in which order each way takes the sequences; ``alone``: one at a time."""
    shuffled = np.random.default_rng(1).permutation(count)
    if (shuffled == np.arange(count)).all():
        shuffled = shuffled[::-1]
    rows = list(range(count))
    return {ALONE: rows, TOGETHER: rows, AGAIN: rows, SHUFFLED: shuffled.tolist()}


def probe(stages: Stages) -> None:
    """Make what ``--batch-probe`` asks for, unless it is there; leave ``batch-probe.json``.

    Raises:
        MismatchError: no side could be probed.
    """
    run_dir, spec = stages.run_dir, stages.spec
    count = spec.extra(BATCH_PROBE)
    if count is None:
        return
    made_by = f"{count}:{spec_hash(spec.rollout)}:{spec_hash(spec.train)}"
    if manifest.is_current(run_dir, FILE, made_by):
        stages.narrator.note("batch probe: there already")
        return
    rollout = store.load_rollout(run_dir)
    chosen = choose(rollout, int(count))
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    missing: list[NotTested] = []
    job: dict[str, Any] = {"run_dir": str(run_dir), "sequences": chosen.tolist()}
    engine = spec.rollout.engine
    sides: list[tuple[str, dict[str, Any], str]] = []
    if engine.servers:
        reason = "a server's batches depend on what else it has to do"
        missing.append(NotTested("batches of the engine", reason, "check a local engine"))
    else:
        asked = replace(spec.rollout, engine=replace(engine, routing=False, prefill=True))
        sides.append(("engine", {"engine": to_dict(replace(asked, exact_kl=0))}, engine.engine))
    if spec.train.scorer != OWN_SCORER:
        reason = "the framework makes its micro-batches itself"
        missing.append(NotTested(f"batches of {spec.train.scorer}", reason))
    else:
        train = replace(spec.train, routing=False, replay_routing=None, replay_source=None)
        sides.append(("trainer", {"trainer": to_dict(replace(train, grad=False))}, "trainer"))
    pairs: list[Pair] = []
    for side, own, name in sides:
        label = f"{FOLDER}-{side}"
        path = store.write_json(run_dir / "jobs" / f"{label}.json", job | own | {"label": label})
        if side == "engine":
            command, env = engine_command(engine, stages.placement, WORKER, path)
        else:
            command, env = world_command(spec, stages.placement, WORKER, path)
        try:
            with started(label, command, run_dir, env=env) as worker:
                stages.wait(worker, label, f"batch probe: {name}, {len(chosen)} sequences")
        except MismatchError as error:
            missing.append(NotTested(f"batches of the {side}", error.message, error.fix))
            continue
        with np.load(folder / f"{side}.npz") as file:
            pairs += compared(side, dict(file), rollout, chosen)
        missing += from_json(list[NotTested], store.read_json(folder / f"{side}.json"))
    if not pairs:
        raise MismatchError(f"no side was probed: {missing[0].reason}", missing[0].how)
    found = BatchProbe(len(chosen), tuple(pairs), tuple(missing))
    document = {"schema": SCHEMA, BATCH_PROBE: to_json(found)}
    made = {"schema": SCHEMA, "made_by": made_by, "inputs": (store.ROLLOUT,)}
    store.save_document(run_dir, FILE, document, **made)


def compared(
    side: str, scores: Mapping[str, Floats], rollout: Rollout, chosen: Ints
) -> Iterator[Pair]:
    """Yield the pairs of one side from what its worker left.

    Args:
        scores: "PHASE WAY N" -> [tokens, 2 or 3] of sequence N: position, log-probability and,
            where the side chose the tokens, their ids.
    """
    phases = dict.fromkeys(key.split()[0] for key in scores)
    for phase in phases:
        ways = {
            way: [scores[f"{phase} {way} {n}"] for n in range(len(chosen))]
            for way in (ALONE, TOGETHER, SHUFFLED, AGAIN)
        }
        size = len(chosen)
        for words, left, right in (
            (f"batch of 1 / {size}", ALONE, TOGETHER),
            (f"batch of {size} / shuffled", TOGETHER, SHUFFLED),
            (f"batch of {size} / repeated", TOGETHER, AGAIN),
        ):
            names = f"{side}:{phase}:{left}", f"{side}:{phase}:{right}"
            yield _pair(
                f"{side}, {phase}: {words}", names, ways[left], ways[right], rollout, chosen
            )


def _pair(
    what: str,
    names: tuple[str, str],
    left: Sequence[Floats],
    right: Sequence[Floats],
    rollout: Rollout,
    chosen: Ints,
) -> Pair:
    """Compare the tokens of several sequences, see :func:`compared`."""
    n = unequal = largest = 0
    first: Place | None = None
    for index, a, b in zip(chosen.tolist(), left, right, strict=True):
        rows = min(len(a), len(b))
        a, b = a[:rows], b[:rows]
        off = np.flatnonzero((a != b).any(axis=1))
        n += rows
        unequal += len(off)
        apart = ulps(a[:, 1].astype(np.float32), b[:, 1].astype(np.float32))
        largest = max(largest, int(apart.max(initial=0)))
        if len(off) and first is None:
            position = int(a[off[0], 0])
            tokens = rollout.sequences()[index]
            token = int(tokens[position]) if position < len(tokens) else -1
            first = Place(int(rollout.prompt_index[index]), index, position, token)
    return Pair(what, *names, "one side", "token", n, unequal, largest, "float32", first)
