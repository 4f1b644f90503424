"""Names of the scorings of a run directory."""

from __future__ import annotations

TRAIN = "fsdp"
REFERENCE = "reference:fp32"
REGROUPED = f"{TRAIN}:regrouped"
NEW = f"{TRAIN}:new"  # the second pass with injected noise
NEW_REPLAYED = f"{TRAIN}:new-replayed"  # the second pass with the first one's routes
REPLAYED = f"{TRAIN}:replayed"  # the trainer with the engine's routes
WEIGHTS = f"{TRAIN}:other-weights"  # the same trainer, its experts in another form
PLAIN = "plain"  # plain:<precision>: a plain forward at the precision of a side
FLOAT32 = "fp32"  # <engine>:fp32: the engine's implementation, started in float32
