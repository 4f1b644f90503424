"""What the modules of the transformers engine give, under canonical names."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def record(
    engine: Any, sequences: list[list[int]], starts: list[int], temperature: float, folder: Path
) -> list[Any]:
    """Score sequences one by one, as ``prefill`` does, and leave ``N.safetensors`` of each.

    Args:
        engine: a :class:`mismatch.engines.transformers.engine.TransformersEngine` at work.

    Returns:
        The log-probabilities of each sequence from its start on.

    Raises:
        MismatchError: a model whose modules cannot be told apart.
    """
    from safetensors.torch import save_file

    from mismatch.training.module_capture import Boundaries, Recorder, decoder_of

    scores = []
    for number, (ids, start) in enumerate(zip(sequences, starts, strict=True)):
        recorder = Recorder()
        with Boundaries(decoder_of(engine.model), recorder).shown():
            scores += engine.prefill([ids], [start], temperature, lambda *done: None)
        save_file(recorder.values, folder / f"{number}.safetensors")
    return scores
