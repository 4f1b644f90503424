"""The flag that asks a check for gradients."""

from mismatch.cli.flags import Option
from mismatch.specs import MANY, TRAIN, Range

GRADIENTS = "gradients"
PROMPTS = 16  # as many as a mini-batch of a small run; memory does not depend on it

FLAGS = (
    Option(
        GRADIENTS,
        int | None,
        TRAIN,
        "Also take the policy gradient of one batch, of so many prompts at most (default "
        f"{PROMPTS}), under the trainer, its float32 reference and each fix of the trainer.",
        range=Range(1, MANY),
        alone=str(PROMPTS),
    ),
)
