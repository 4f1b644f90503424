"""What other passes of a run say of digests that differ, as facts in the sides' fingerprints.

A digest also sees what a loader does to a parameter, as an engine that holds Mamba's A for the
checkpoint's A_log. Parameters of loaders that are known have no digest, so that runs without these
passes are right too (mismatch/engines/held_weights.py); the others are found here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mismatch.analysis.diagnosis.loaded_weights import (
    IN_ENGINES_FORM,
    UNDESCRIBED,
    Difference,
    comparable,
    kind_of,
    unlike_its_checkpoint,
)
from mismatch.analysis.square import PlainCost, incomparable, precision_of
from mismatch.keys import FLOAT32, REFERENCE, TRAINER_FLOAT32, WEIGHTS, Key
from mismatch.types import Scoring, SideFacts

# Times the float32 rounding that is expected of the model. Clean runs: 1 to 8 without experts that
# change place; 0.03 % of noise in the matrices of one layer: 80 (docs/evidence/calibration.md).
FLOOR = 10.0
LEAST = 1e-6  # nats. A clean hybrid: 2e-7; with one value of D in each layer off by 0.8 %: 5e-6
MOST = 0.5  # share of the parameters; stale weights differ nearly everywhere, a loader's do not
# Parameters that every token of a text runs through. A fault of the others (a row of the embedding,
# an expert, what only chooses experts or keys, towers of images) may leave all numbers as they are.
USED = re.compile(
    r"(model\.|language_model\.|transformer\.|backbone\.)*(layers|h)\.\d+\."
    r"(?!.*(expert|router|\bgate\.|score|indexer|embed|cross))"
)


def with_passes(
    engine: Scoring, trainer: Scoring, others: Mapping[str, Scoring]
) -> tuple[Scoring, Scoring]:
    """Return the two sides of the headline with these facts."""
    facts, own = engine.fingerprint, trainer.fingerprint
    others = {k: v for k, v in others.items() if v.logprobs.shape == trainer.logprobs.shape}
    names, held = undescribed(engine, trainer, others), others.get(WEIGHTS)
    if names:
        engine = replace(engine, fingerprint=facts | {UNDESCRIBED: names})
    if held is not None and comparable(facts, held.fingerprint) is not None:
        forms = [each.get("weights_form", "as-stored") for each in (facts, own, held.fingerprint)]
        if forms[0] == forms[2] != forms[1]:
            more: SideFacts = {IN_ENGINES_FORM: held.fingerprint["weights"]}
            trainer = replace(trainer, fingerprint=own | more)
    return engine, trainer


def undescribed(engine: Scoring, trainer: Scoring, others: Mapping[str, Scoring]) -> list[str]:
    """Return the parameters whose digests differ by a loader's work alone; [] if that is not known.

    One side alone differs from its checkpoint, in every layer alike, in parameters that every token
    uses; each side in float32 holds the same digests as the side that ran, and is as near to the
    reference as rounding allows.
    """
    sides = engine.fingerprint, trainer.fingerprint
    held, reference = comparable(*sides), others.get(REFERENCE)
    if held is None or reference is None or unlike_its_checkpoint(*sides) is None:
        return []
    found, floor = Difference.of(*held), PlainCost.of(others, reference.logprobs).floor
    differ = {kind_of(name) for name in found.differ}
    members = Counter(map(kind_of, found.common))
    alike = Counter(map(kind_of, found.values)) == {kind: members[kind] for kind in differ}
    used = all(members[kind] > 1 for kind in differ) and all(map(USED.match, found.differ))
    if floor is None or not (alike and used) or len(found.differ) > MOST * len(found.common):
        return []
    passes = Key.of(engine.key.side, precision=FLOAT32), TRAINER_FLOAT32
    for side, name in zip((engine, trainer), passes, strict=True):
        exact = side if precision_of(side.fingerprint) == "fp32" else others.get(name)
        if exact is None or incomparable(exact, reference):
            return []
        # The float32 engine loads the checkpoint: it may not hold weights that were synced since.
        own, its = side.fingerprint["weights"], exact.fingerprint.get("weights") or {}
        gap = float(np.abs(exact.logprobs - reference.logprobs).mean())
        same = all(list(own[label]) == list(its.get(label, ())) for label in found.differ)
        if not (same and gap <= max(LEAST, FLOOR * floor)):  # or not a number
            return []
    return list(found.differ)
