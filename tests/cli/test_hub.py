"""Models of a hub: fetched before an engine starts, and refused where they cannot be had whole.

The hub is a server here; the client is the hub's own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mismatch.models import EMBEDDED
from tests.scripted_hub import Hub, serving

from ..command import mismatch

NAME = "some-org/tiny"
QUICK = "--depth quick --engine transformers --num-prompts 2 --samples-per-prompt 2 --max-tokens 8"
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """Weights twice, as gpt-oss has them."""
    folder = tmp_path / "model"
    shutil.copytree(str(EMBEDDED["tiny-gpt-oss"]), folder)
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"x" * 1000)
    with serving(folder, NAME) as served:
        yield served


def check(hub: Hub, tmp_path: Path, **env: str) -> Any:
    env = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")} | env
    run = ["--out", tmp_path / "run"]
    return mismatch("check", "--model", NAME, *QUICK.split(), *run, cwd=tmp_path, **env)


def cached(tmp_path: Path) -> list[str]:
    found = (tmp_path / "hf" / "hub").glob("*/snapshots/*/*")
    return sorted(path.name for path in found)


@pytest.mark.grid
def test_one_set_of_weights_is_fetched_before_the_engine_starts(tmp_path: Path, hub: Hub) -> None:
    done = check(hub, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "model.safetensors" in cached(tmp_path)
    assert "original" not in cached(tmp_path)
    assert hub.fetched.count("model.safetensors") == 1
    said = done.stdout.splitlines()
    (told,) = [number for number, line in enumerate(said) if line.startswith("downloading")]
    (began,) = [number for number, line in enumerate(said) if line.startswith("run directory")]
    assert told < began
    assert NAME in said[told]


def test_a_full_disk_is_known_before_anything_is_fetched(tmp_path: Path, hub: Hub) -> None:
    hub.claimed["model.safetensors"] = 10**16
    done = check(hub, tmp_path)
    assert done.returncode == 2
    assert "GB free" in done.stderr
    assert "HF_HOME" in done.stderr
    assert "model.safetensors" not in hub.fetched
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("index", [None, INDEX], ids=["no weights", "a shard is missing"])
def test_a_cache_without_all_weights_is_refused_offline(
    tmp_path: Path, hub: Hub, index: dict[str, Any] | None
) -> None:
    """`hf download MODEL config.json` leaves such a cache; so does a killed download."""
    weights = hub.folder / "model.safetensors"
    if index is None:
        weights.unlink()
    else:
        (hub.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    env = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    fetched = (
        "import sys; from huggingface_hub import snapshot_download; snapshot_download(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", fetched, NAME], check=True, env=os.environ | env)
    assert "config.json" in cached(tmp_path)
    done = check(hub, tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "HF_HUB_OFFLINE" in done.stderr
    assert f"hf download {NAME}" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_download_that_breaks_off_is_named(tmp_path: Path, hub: Hub) -> None:
    hub.claimed["model.safetensors"] = (hub.folder / "model.safetensors").stat().st_size + 1
    done = check(hub, tmp_path)
    assert done.returncode == 2
    last = [line for line in done.stderr.splitlines() if line.startswith(("error:", "  fix:"))]
    assert NAME in last[0]
    assert "hf download" in last[1]
