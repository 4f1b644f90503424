"""Real vLLM serves MXFP4 experts in bf16 and float32 by our loader, as it serves the copy in bf16.

Each engine has a process of its own. The copy is what SGLang and transformers still read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mismatch.models import derived
from mismatch.run.hub import INDEX
from tests.checkpoints import make_mxfp4

pytestmark = pytest.mark.slow
SERVE = """
import json, sys
from mismatch.engines.vllm.engine import VllmEngine
from mismatch.errors import MismatchError
from mismatch.models.derived import in_form
from mismatch.specs import EngineSpec
from mismatch.types import Sampling

if __name__ == "__main__":
    model, dtype, copied, args, out = sys.argv[1:]
    args = tuple(json.loads(args).items())
    spec = EngineSpec("vllm", model, dtype=dtype, weights="bf16", routing=False, args=args)
    try:
        served = in_form(spec, copied=copied == "copied")
        with VllmEngine(served, Sampling(temperature=0.0, max_tokens=1), 64) as engine:
            ids = [[5 + (7 * i + j * j) % 90 for j in range(40)] for i in range(4)]
            scores = engine.prefill(ids, [1] * len(ids), 1.0, lambda *done: None)
            weights, facts = engine.weights(), engine.fingerprint("prefill")
            result = {
                "scores": [[float(x).hex() for x in row] for row in scores],
                "digests": {name: list(held) for name, held in weights.digests.items()},
                "unmapped": list(weights.unmapped),
                "facts": {n: facts[n] for n in ("dtype", "quantization", "weights_form")},
                "context": engine.config.model_config.hf_config.max_position_embeddings,
            }
    except MismatchError as error:
        result = {"error": error.message, "fix": error.fix}
    open(out, "w").write(json.dumps(result))
"""
SPAWNED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


def serve(
    place: Path, model: Path, dtype: str, copied: bool = False, env: Any = None, **args: Any
) -> dict[str, Any]:
    place.mkdir(parents=True, exist_ok=True)
    script, out = place / "serve.py", place / "out.json"
    script.write_text(SERVE)
    how = "copied" if copied else "loaded"
    done = subprocess.run(
        [sys.executable, str(script), str(model), dtype, how, json.dumps(args), str(out)],
        env={**os.environ, "MISMATCH_CACHE": str(place / "cache"), **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.exists(), done.stdout + done.stderr
    result: dict[str, Any] = json.loads(out.read_text())
    return result | {"log": done.stdout + done.stderr}


@pytest.fixture(scope="module")
def in_one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mxfp4")
    return make_mxfp4(place / "released", place / "plain", head_dim=32)


@pytest.fixture(scope="module")
def in_two_files(tmp_path_factory: pytest.TempPathFactory, in_one_file: Path) -> Path:
    """Return the same with all exponents in the first file and the blocks in the second."""
    place = tmp_path_factory.mktemp("apart") / "released"
    place.mkdir()
    for path in in_one_file.iterdir():
        if path.suffix != ".safetensors":
            (place / path.name).write_bytes(path.read_bytes())
    state = load_file(in_one_file / "model.safetensors")
    files = {"model-1.safetensors": lambda name: not name.endswith("_blocks")}
    files["model-2.safetensors"] = lambda name: name.endswith("_blocks")
    index = {}
    for file, holds in files.items():
        part = {name: tensor for name, tensor in state.items() if holds(name)}
        save_file(part, place / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return place


@pytest.mark.grid
@pytest.mark.parametrize(
    ("dtype", "env"),
    [
        ("bf16", {}),
        pytest.param("fp32", {}, marks=pytest.mark.grid),
        pytest.param("bf16", SPAWNED, id="bf16-spawned", marks=pytest.mark.grid),
    ],
)
def test_the_loader_gives_what_the_copy_gives_bit_by_bit(
    tmp_path: Path, in_one_file: Path, in_two_files: Path, dtype: str, env: dict[str, str]
) -> None:
    copy = serve(tmp_path / "copied", in_one_file, dtype, copied=True)
    assert [path.name for path in (tmp_path / "copied/cache/weights").glob("*-bf16")]
    loaded = serve(tmp_path / "loaded", in_two_files, dtype, env=env)
    assert not (tmp_path / "loaded/cache").exists()  # nothing was written
    assert loaded.get("scores"), loaded["log"]
    for name in ("scores", "digests", "unmapped", "facts"):
        assert loaded[name] == copy[name], name
    assert loaded["facts"] == {"dtype": dtype, "quantization": None, "weights_form": "bf16"}
    assert any(name.endswith("experts.gate_up_proj") for name in loaded["digests"])


@pytest.mark.grid
def test_the_first_layers_are_cached_packed_and_the_users_overrides_are_kept(
    tmp_path: Path, in_two_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "cut/cache"))
    cut = derived.derive(in_two_files, "as-stored", 1)
    overrides = {"max_position_embeddings": 200}
    served = serve(tmp_path / "cut", cut, "fp32", hf_overrides=overrides)
    assert served.get("scores"), served["log"]
    assert served["context"] == 200
    assert [path.name for path in (tmp_path / "cut/cache/weights").glob("*-layers")] == [cut.name]


@pytest.mark.grid
@pytest.mark.parametrize("env", [{}, pytest.param(SPAWNED, marks=pytest.mark.grid)])
def test_missing_exponents_are_named(
    tmp_path: Path, in_one_file: Path, env: dict[str, str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in in_one_file.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    state = load_file(broken / "model.safetensors")
    lost = next(name for name in state if name.endswith("down_proj_scales"))
    del state[lost]
    save_file(state, broken / "model.safetensors", {"format": "pt"})
    served = serve(tmp_path / "run", broken, "bf16", env=env)
    said = served["log"] if env else served["error"]
    assert f"holds no {lost}" in said


@pytest.mark.grid
def test_another_load_format_is_refused(tmp_path: Path, in_one_file: Path) -> None:
    served = serve(tmp_path, in_one_file, "bf16", load_format="dummy")
    assert "load_format: mismatch needs" in served["error"]
