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
        "Also compare the policy gradient of a batch (at most this many prompts; default "
        f"{PROMPTS}) with float32, for the trainer and each of its fixes.",
        range=Range(1, MANY),
        alone=str(PROMPTS),
    ),
)
