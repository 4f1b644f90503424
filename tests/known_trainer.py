"""The plain trainer with a fault of benchmarks/known_faults.py in its model, packs or prompts."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.known_faults import FAULTS, Fault
from mismatch.trainers.protocol import Facts, Scored, Tokens, TrainerJob, Variant
from tests.plain_trainer import Plain, load, score_rows

NAME = "KNOWN_FAULT"  # environment variable: the fault of this trainer
BY_NAME = {fault.name: fault for fault in FAULTS}
PACK = 4  # rows in a pack


def plant(model: Any, fault: Fault) -> None:
    """Change a model of transformers, as the benchmark changes what FSDP2 has loaded."""
    parts = {"named_parameters": model.named_parameters, "modules": model.modules}
    fault.plant(SimpleNamespace(model=model, **parts), max(fault.strengths))


def save_moved(model: str, fault: Fault, folder: str) -> None:
    """Write the checkpoint with the weights that a fault changes."""
    moved = load(model, torch.bfloat16)
    with torch.no_grad():
        plant(moved, fault)
    shutil.copytree(model, folder)  # with the tokenizer
    moved.save_pretrained(folder)


def without(tokens: Tokens, count: int) -> Tokens:
    """Return the same actions after prompts that lack so many tokens of their template."""
    keep = np.ones(len(tokens.ids), bool)
    for start in tokens.offsets[:-1]:
        keep[start + 1 : start + 1 + count] = False
    lengths = tokens.lengths - count
    return Tokens(tokens.ids[keep], np.cumsum([0, *lengths]), tokens.mask[keep])


class Planted(Plain):
    def __init__(self, job: TrainerJob) -> None:
        super().__init__(job)
        self.fault = BY_NAME[os.environ[NAME]]
        with torch.no_grad():
            plant(self.model, self.fault)

    def score(self, tokens: Tokens, variant: Variant) -> Scored:
        if self.fault.place == "template":
            tokens = without(tokens, int(max(self.fault.strengths)))
        if self.fault.place == "packing" and variant != "alone":
            return self.packed(tokens, PACK // 2 if variant == "regrouped" else PACK)
        return super().score(tokens, variant)

    def packed(self, tokens: Tokens, rows: int) -> Scored:
        """Score rows one after another as one row, without their bounds."""
        sequences, masks = tokens.sequences(), tokens.masks()
        logprobs: list[np.ndarray] = []
        for start in range(0, len(sequences), rows):
            group = slice(start, start + rows)
            row, mask = np.concatenate(sequences[group]), np.concatenate(masks[group])
            ((values, _),) = score_rows(self.model, [row], [mask], self.job.temperature)
            logprobs += np.split(values, np.cumsum([m.sum() for m in masks[group]])[:-1])
        return Scored(tuple(range(len(sequences))), tuple(logprobs))

    def facts(self) -> Facts:
        layout = "packing" if self.fault.place == "packing" else "padding"
        return replace(super().facts(), layout=layout)
