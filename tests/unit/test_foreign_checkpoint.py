"""Files of a stranger's checkpoint are read within bounds, and named where they are none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mismatch.errors import MismatchError
from mismatch.models.derived import form_name, layers_held
from mismatch.models.digests import RECORD, source_hashes
from mismatch.run.files import LARGEST_JSON
from mismatch.run.hub import INDEX, weight_places, whole
from mismatch.training.source import header_dtypes

DEEP, LISTS = "[" * 10_000, f"[{'[],' * (2 << 20)}[]]"
TEXTS: dict[str, str | bytes] = {
    "deep": DEEP,
    "many lists": LISTS,
    "no text": bytes(range(128, 256)),
    "empty": "",
    "null": "null",
    "a list": "[3]",
    "other types": json.dumps({"weight_map": ["a"], "sizes": "x", "source_files": [], "form": 3}),
    "too large": json.dumps("x" * LARGEST_JSON),
}
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "weight_places": (INDEX, weight_places),
    "source_hashes": (RECORD, source_hashes),
    "layers_held": (RECORD, layers_held),
    "form_name": (RECORD, lambda folder: form_name("bf16", folder)),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_none_is_named_with_what_helps(
    reader: str, text: str, tmp_path: Path
) -> None:
    name, read = READERS[reader]
    (tmp_path / "config.json").write_text("{}")
    data = TEXTS[text]
    (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(MismatchError, match="cannot be read") as caught:
        read(tmp_path)
    assert name in caught.value.message
    assert "checkpoint" in caught.value.fix


@pytest.mark.timeout(20)
@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_is_not_waited_for(reader: str, tmp_path: Path) -> None:
    """It is none of the checkpoint's files for transformers and vLLM; an index is one for us."""
    name, read = READERS[reader]
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / name)
    if name == INDEX:
        with pytest.raises(MismatchError, match="no regular file"):
            read(tmp_path)
    else:
        read(tmp_path)
    assert not whole(tmp_path)


@pytest.mark.parametrize("header", [DEEP, LISTS, "null", '{"a": 3}', '{"a": {"dtype": []}}', ""])
def test_a_header_of_weights_that_is_none_tells_no_dtypes(header: str, tmp_path: Path) -> None:
    """Loading the weights says what is wrong with them."""
    path = tmp_path / "model.safetensors"
    for size in (len(header), 2**63, 0):
        path.write_bytes(size.to_bytes(8, "little") + header.encode())
        assert header_dtypes(path) == set()
