"""The flag that asks a check for its batches."""

from mismatch.cli.flags import Option
from mismatch.specs import TRAIN, Range

BATCH_PROBE, SEQUENCES = "batch_probe", 16
FLAGS = (
    Option(
        BATCH_PROBE,
        int | None,
        TRAIN,
        "Also score the same tokens at batch 1, in a batch of N sequences (default "
        f"{SEQUENCES}) and shuffled, on both sides, and count unequal bits.",
        range=Range(2, 1024),
        alone=str(SEQUENCES),
    ),
)
