"""What a scoring captured in addition to its log-probabilities: experts, and whole distributions.

``routing/<name>.safetensors``: ``ids`` [T, L, K] in one byte per (token, layer, slot) up to 256
experts and in two above, ``present`` [T], and where they are known ``weights`` [T, L, K] and
``margin`` [T, L] in float32: a million tokens are 144 MB. ``dists/<name>.safetensors``:
``positions``, ``logprobs``, ``vocabulary``, and of a top-k ``ids`` and ``rest``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mismatch.captures import Distributions, narrowest
from mismatch.run.arrays import Arrays, load_arrays, save_arrays
from mismatch.run.manifest import readable
from mismatch.types import Routing

ROUTING_SCHEMA = "mismatch.routing/1"
DISTRIBUTIONS_SCHEMA = "mismatch.distributions/1"


def save_routing(run_dir: Path, name: str, routing: Routing) -> None:
    """Write and record a scoring's experts; ``name`` is the path inside the run directory."""
    arrays: Arrays = {
        "ids": routing.ids.astype(narrowest(routing.num_experts), copy=False),
        "present": routing.present,
    }
    if routing.weights is not None:
        arrays["weights"] = routing.weights.astype(np.float32, copy=False)
    if routing.margin is not None:
        arrays["margin"] = routing.margin.astype(np.float32, copy=False)
    header = {"layers": routing.layers, "num_experts": routing.num_experts}
    save_arrays(run_dir, name, arrays, ROUTING_SCHEMA, header)


@readable(lambda name: name)
def load_routing(run_dir: Path, name: str) -> Routing:
    """Read a scoring's experts; MismatchError if absent, damaged or of another schema."""
    file = load_arrays(run_dir, name, ROUTING_SCHEMA)
    return Routing(
        layers=tuple(file.header["layers"]),
        num_experts=file.header["num_experts"],
        ids=file.arrays["ids"],
        present=file.arrays["present"],
        weights=file.arrays.get("weights"),
        margin=file.arrays.get("margin"),
    )


def save_distributions(run_dir: Path, name: str, captured: Distributions) -> None:
    """Write and record whole distributions; ``name`` is the path inside the run directory."""
    arrays: Arrays = {"positions": captured.positions, "logprobs": captured.logprobs}
    if captured.ids is not None and captured.rest is not None:
        arrays |= {"ids": captured.ids.astype(np.int32), "rest": captured.rest}
    arrays["vocabulary"] = np.asarray([captured.vocabulary], np.int64)
    save_arrays(run_dir, name, arrays, DISTRIBUTIONS_SCHEMA, {})


@readable(lambda name: name)
def load_distributions(run_dir: Path, name: str) -> Distributions:
    """Read whole distributions; MismatchError if absent, damaged or of another schema."""
    arrays = load_arrays(run_dir, name, DISTRIBUTIONS_SCHEMA).arrays
    ids = arrays.get("ids")
    return Distributions(
        positions=arrays["positions"].astype(np.int64),
        logprobs=arrays["logprobs"].astype(np.float32),
        vocabulary=int(arrays["vocabulary"][0]),
        ids=None if ids is None else ids.astype(np.int64),
        rest=arrays.get("rest"),
    )
