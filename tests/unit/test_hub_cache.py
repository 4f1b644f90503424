"""What of a hub is fetched, and for whom; tests/cli/test_hub.py has a hub that answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mismatch.cli import session
from mismatch.cli.flags import Flags
from mismatch.models.sampling_defaults import generation_config
from mismatch.run.hub import INDEX, whole
from mismatch.run.messages import remedy

from ..made_run import spec

PARTS = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
BOTH = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]


@pytest.mark.parametrize(
    ("files", "index", "held"),
    [
        (["config.json"], None, False),
        (["model.safetensors"], None, True),
        (["pytorch_model-00001-of-00002.bin"], None, True),
        (["model.gguf"], None, True),
        (BOTH, PARTS, True),
        (BOTH[:1], PARTS, False),
        ([], PARTS, False),
        (["consolidated.safetensors"], PARTS, True),
        (["pytorch_model.bin"], PARTS, True),
        (["model.safetensors"], [], True),
        ([], [], False),
        (["model.safetensors"], {"weight_map": {"a": 3}}, True),
        (["model.safetensors"], {"weight_map": {"a": None, "b": [1]}}, True),
        ([], {"weight_map": {"a": "x" * 400}}, False),
    ],
)
def test_a_cache_holds_weights_in_any_layout(
    tmp_path: Path, files: list[str], index: Any, held: bool
) -> None:
    for name in files:
        (tmp_path / name).touch()
    if index is not None:
        (tmp_path / INDEX).write_text(json.dumps(index))
    assert whole(tmp_path) == held


def test_a_link_of_the_cache_without_its_file_is_no_weight(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "deleted")
    assert not whole(tmp_path)


@pytest.mark.parametrize(
    ("verb", "servers", "args", "resume", "asked"),
    [
        ("check", (), (), None, ["engine", "trainer"]),
        ("rollout", (), (), None, ["engine"]),
        ("check", ("http://127.0.0.1:1",), (), None, ["trainer"]),
        ("rollout", ("http://127.0.0.1:1",), (), None, []),
        ("check", (), (("download_dir", "elsewhere"),), None, ["trainer"]),
        ("check", (), (("load_format", "dummy"),), None, ["trainer"]),
        ("check", (), (), "newest", []),
    ],
)
def test_only_weights_that_are_read_are_fetched(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    servers: tuple[str, ...],
    args: tuple[tuple[str, Any], ...],
    resume: str | None,
    asked: list[str],
) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(session, "fetch", lambda model, *_: fetched.append(model))
    monkeypatch.chdir(tmp_path)
    check = spec()
    engine = replace(check.rollout.engine, model="engine", servers=servers, args=args)
    check = replace(check, rollout=replace(check.rollout, engine=engine))
    check = replace(check, train=replace(check.train, model="trainer"))
    session.open_run(verb, check, Flags({"model": None, "out": None, "resume": resume}))
    assert fetched == asked


def test_an_odd_number_in_a_model_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": {"__float__": []}}')
    assert generation_config(tmp_path) == {}


def test_shared_memory_is_named_by_what_failed_not_by_a_path() -> None:
    """A checkpoint may lie in /dev/shm."""
    nccl = "Error while creating shared memory segment /dev/shm/nccl-x: No space left on device"
    other = "tokenizer of /dev/shm/ckpt cannot be loaded"
    assert "--shm-size" in remedy(nccl, "")
    assert remedy(other, "save it") == "save it"
