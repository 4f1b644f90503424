"""What a scoring captured in addition to its log-probabilities: experts, and whole distributions.

``routing/<name>.safetensors``: ``ids`` [T, L, K] in one byte per (token, layer, slot) up to 256
experts and in two above, ``present`` [T], and where they are known ``weights`` [T, L, K] and
``margin`` [T, L] in float32: a million tokens are 144 MB. ``routing/<name>.keys.safetensors``:
``rows`` [R], ``ids`` [R, L, K] and ``margin`` [R, L] of sparse attention.
``dists/<name>.safetensors``: ``positions``, ``logprobs``, ``vocabulary``, and of a top-k ``ids``
and ``rest``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import Distributions, narrowest
from mismatch.errors import MismatchError
from mismatch.run import manifest
from mismatch.run.manifest import damage_named, require_file, require_schema, write_atomic
from mismatch.types import Routing, SparseKeys

Arrays = dict[str, NDArray[Any]]


def save_arrays(
    run_dir: Path, name: str, arrays: Arrays, schema: str, header: dict[str, Any], **entry: Any
) -> None:
    """Write one artefact and record it; ``entry`` as :func:`mismatch.run.manifest.record` takes it.

    Equal arrays and headers make equal files.
    """
    from safetensors.numpy import save

    tensors = {key: np.ascontiguousarray(values) for key, values in arrays.items()}
    # One entry alone: the library writes several in any order.
    metadata = {"mismatch": json.dumps({"schema": schema, **header}, sort_keys=True)}
    # Not its save_file: a killed writer leaves behind the temporary file that it makes.
    data = save(tensors, metadata)
    write_atomic(run_dir / name, lambda file: file.write(data))
    manifest.record(run_dir, name, schema, **entry)


def load_arrays(run_dir: Path, name: str, schema: str) -> tuple[Arrays, dict[str, Any]]:
    """Read one artefact and its header after comparing it with its checksum.

    Raises:
        MismatchError: absent, damaged, or of another schema.
    """
    from safetensors import SafetensorError, safe_open

    path = run_dir / name
    require_file(path)
    manifest.verify(run_dir, name)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        fault = f"{path} cannot be read: {error}"
        raise MismatchError(fault, "run the stage that makes it again") from error
    header = json.loads(metadata.get("mismatch", "{}"))
    require_schema(path, header.pop("schema", None), schema)
    return arrays, header


ROUTING_SCHEMA = "mismatch.routing/1"
KEYS_SCHEMA = "mismatch.keys/1"
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


def save_keys(run_dir: Path, name: str, keys: SparseKeys) -> None:
    """Write and record what sparse attention selected; ``name`` as for :func:`save_routing`."""
    chosen = keys.choices
    arrays: Arrays = {"rows": keys.rows, "ids": chosen.ids.astype(np.uint16, copy=False)}
    if chosen.margin is not None:
        arrays["margin"] = chosen.margin.astype(np.float32, copy=False)
    header = {"layers": chosen.layers, "candidates": chosen.num_experts}
    save_arrays(run_dir, name, arrays, KEYS_SCHEMA, header)


def load_keys(run_dir: Path, name: str) -> SparseKeys:
    """Read them; MismatchError if absent, damaged or of another schema."""
    with damage_named(run_dir / name):
        arrays, header = load_arrays(run_dir, name, KEYS_SCHEMA)
        rows, ids, margin = arrays["rows"], arrays["ids"], arrays.get("margin")
        layers, present = tuple(header["layers"]), np.ones(len(rows), np.bool_)
        return SparseKeys(rows, Routing(layers, header["candidates"], ids, present, margin=margin))


def load_routing(run_dir: Path, name: str) -> Routing:
    """Read a scoring's experts; MismatchError if absent, damaged or of another schema."""
    with damage_named(run_dir / name):
        arrays, header = load_arrays(run_dir, name, ROUTING_SCHEMA)
        return Routing(
            layers=tuple(header["layers"]),
            num_experts=header["num_experts"],
            ids=arrays["ids"],
            present=arrays["present"],
            weights=arrays.get("weights"),
            margin=arrays.get("margin"),
        )


def save_distributions(run_dir: Path, name: str, captured: Distributions) -> None:
    """Write and record whole distributions; ``name`` is the path inside the run directory."""
    arrays: Arrays = {"positions": captured.positions, "logprobs": captured.logprobs}
    if captured.ids is not None and captured.rest is not None:
        arrays |= {"ids": captured.ids.astype(np.int32), "rest": captured.rest}
    arrays["vocabulary"] = np.asarray([captured.vocabulary], np.int64)
    save_arrays(run_dir, name, arrays, DISTRIBUTIONS_SCHEMA, {})


def load_distributions(run_dir: Path, name: str) -> Distributions:
    """Read whole distributions; MismatchError if absent, damaged or of another schema."""
    with damage_named(run_dir / name):
        arrays = load_arrays(run_dir, name, DISTRIBUTIONS_SCHEMA)[0]
        ids = arrays.get("ids")
        return Distributions(
            positions=arrays["positions"].astype(np.int64),
            logprobs=arrays["logprobs"].astype(np.float32),
            vocabulary=int(arrays["vocabulary"][0]),
            ids=None if ids is None else ids.astype(np.int64),
            rest=arrays.get("rest"),
        )
