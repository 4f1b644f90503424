"""One long sequence beyond the run's own: how long it is, and of which tokens.

It lies in a separate run directory, ``long/``, and shares the float32 engine's process and the
training world with the check. In float32 rounding plays no part, and what differs from some
position on is another function (rotations, windows, chunks of a prefill). Both sides also score it
as they run, next to a plain forward: kernels that refuse float32 are seen there alone.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from mismatch.errors import MismatchError
from mismatch.models.config import ModelConfig, find_config
from mismatch.run import store
from mismatch.run.long_rollout import leave
from mismatch.run.machine import free_gpu_bytes
from mismatch.specs import CheckSpec

DEFAULT, LONGEST = 2048, 16_384  # tokens
SCORES_BYTES = 4 * 3  # float32 scores of the eager reference, their softmax, and a mask


def prepare(run_dir: Path, spec: CheckSpec) -> str:
    """Write the long sequence of a run that has its tokens; say why it is shorter than asked."""
    tokens = len(store.load_rollout(run_dir).token_ids)
    length, why = length_here(spec, tokens)
    leave(run_dir, length)
    return why


def length_here(spec: CheckSpec, tokens: int) -> tuple[int, str]:
    """Return :func:`length_of` with what is free now; 0 where nothing is known of the model."""
    try:
        model = find_config(spec.train.model, spec.train.revision).model
    except MismatchError as error:  # no check ends for want of its length
        return 0, error.message
    free = min(free_gpu_bytes(), default=psutil.virtual_memory().available)
    return length_of(spec, model, tokens, free)


def length_of(spec: CheckSpec, model: ModelConfig, tokens: int, free_bytes: int) -> tuple[int, str]:
    """Return how many tokens are scored, and why fewer than were asked for ("": nobody asked).

    Asked for are those of the flag, else those of the longest response that is planned.
    The reference attends eagerly: all scores of a layer's heads are in memory at once.

    Args:
        tokens: of the run: the long sequence costs no more than a pass over them.
        free_bytes: of the memory in which the reference runs; half of it may be taken.
    """
    limits = [
        (LONGEST, "no longer one is made"),
        (tokens, "the run has no more tokens"),
        (
            int((free_bytes / 2 / SCORES_BYTES / max(model.heads, 1)) ** 0.5),
            "the reference's attention scores of a longer one do not fit into memory",
        ),
    ]
    if model.context is not None:
        limits.append((model.context - 1, "the model was made for no more"))
    if model.rope_switch:
        limits.append((model.rope_switch - 1, "LongRoPE has other factors beyond"))
    if spec.rollout.engine.max_model_len is not None:
        limits.append((spec.rollout.engine.max_model_len - 1, "--max-model-len allows no more"))
    least, why = min(limits, key=lambda pair: pair[0])
    planned = spec.rollout.sampling.max_tokens
    asked = spec.context_length or max(DEFAULT, min(planned, LONGEST))
    if asked <= least:
        return asked, ""
    return least, why if asked > DEFAULT else ""
