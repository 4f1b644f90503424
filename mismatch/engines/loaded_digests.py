"""Digests of an engine's weights, taken once they are loaded, under the checkpoint's names.

Digests add up and ignore zeros, so that padding and fused names need no care; only the order of
packed experts is known, and the slices of a rank have none.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from mismatch.engines.held_weights import EXPERT_LEAVES, experts_prefix, packed_in, parts_of
from mismatch.models.digests import OF_EXPERTS, UNORDERED, digest_tensor

Owned = Callable[[Any, str, str], bool]  # (module, its unfused name, leaf)
Digests = tuple[dict[str, list[int]], list[str]]
NO_DIGESTS: Digests = ({}, ["(all)"])


def loaded_digests(model: Any, owned: Owned | None = None) -> Digests:
    """Return name (the engine's, unfused) -> digest, and parameters that are not understood.

    It runs while the engine loads its weights, so a failure must not cost the engine: the log has
    it, and no weight is compared.

    Args:
        owned: whether this rank counts a part; None: it counts all.
    """
    try:
        return _digests(model, owned)
    except Exception:
        print("weight digests could not be taken:")
        traceback.print_exc()
        return NO_DIGESTS


def _digests(model: Any, owned: Owned | None) -> Digests:

    digests: dict[str, list[int]] = {}
    unknown: list[str] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    packed = packed_in(model)
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Under its first name; a tied head also under the head's name, as trainers name it.
        if id(parameter) in seen and not name.endswith("lm_head.weight"):
            continue
        seen.add(id(parameter))
        if not parameter.is_floating_point():
            unknown.append(name)  # quantised: packed integers, not the checkpoint's values
            continue
        path, _, leaf = name.rpartition(".")
        if leaf in EXPERT_LEAVES:  # of all ranks: each holds a different share
            digests[f"{experts_prefix(path)}.{EXPERT_LEAVES[leaf]}"] = list(
                digest_tensor(parameter.data)[:OF_EXPERTS]
            )
            continue
        module = modules[path]
        parts = UNORDERED if getattr(module, "tp_size", 1) > 1 else None
        for part, tensor in parts_of(path, parameter.data, module, packed):
            if owned is None or owned(module, part.rpartition(".")[2], leaf):
                digests[f"{part}.{leaf}".lstrip(".")] = list(digest_tensor(tensor)[:parts])
    return digests, unknown
