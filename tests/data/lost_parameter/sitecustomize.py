"""Lose one parameter of a loop's weights on their way to the engine: ``LOST=STEP NAME``.

A folder for PYTHONPATH: every interpreter that is started with it imports this first.
"""

import os
from itertools import count
from pathlib import Path

from safetensors.torch import load_file, save_file

from mismatch.features.loop import optimiser

AT, NAME = os.environ["LOST"].split()
EXPORT, STEP = optimiser.export, count()


def export(world, loaded, base, target, dtype):
    EXPORT(world, loaded, base, target, dtype)
    if next(STEP) == int(AT):
        for file in Path(target).glob("*.safetensors"):
            tensors = load_file(file)
            if NAME in tensors:
                tensors[NAME] = tensors[NAME].roll(1, 0)
                save_file(tensors, file, {"format": "pt"})


optimiser.export = export
