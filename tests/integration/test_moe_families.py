"""Routing is captured and replayed in every MoE family of transformers, and in vLLM where it runs.

The argument for the trainer's side: knocking out an expert changes exactly the tokens that went to
it, whatever the router looks like; the capture must name the same experts. For the engine: in
float32 both sides are the same function, so not one expert may differ, and no logprob by more than
rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch.metrics.routing_pairs import pair_routing
from mismatch.run import manifest, store
from mismatch.types import KEYS
from tests import families
from tests.command import mismatch
from tests.conftest import grid
from tests.contract.conftest import installed
from tests.integration.conftest import Run, run_check
from tests.sameness import FLIPS
from tools import moe_families as page

ENGINE_FAMILIES = ("mixtral",)  # others: benchmarks/families.py
SAME_IN_FP32 = 1e-4
# Two plain routers, one with shared experts and groups, one that routes some layers by token id.
SHOWN = ("gpt_oss", "qwen3_moe", "deepseek_v3", "deepseek_v4")
every_family = pytest.mark.parametrize("family", grid(families.tried(), *SHOWN))


@every_family
def test_what_is_captured_is_what_ran(family: str) -> None:
    tried = families.trial(family)
    assert tried.wrong == 0
    assert len(tried.layers) >= 2
    assert tried.margin == (family != "deepseek_v4")  # it routes some layers by token id


@every_family
def test_given_experts_run_instead(family: str) -> None:
    replay = families.trial(family).replay
    assert (replay == "yes") == (family not in page.REPLAY), replay


def test_knocking_out_finds_a_wrong_capture() -> None:
    model, ids = families.tiny("mixtral"), families.token_ids()
    layers, routes = families.captured(model, ids)
    ran = families.experts_that_ran(model, layers[-1], ids)
    moved = (routes[-1].ids + 1) % 8
    assert (ran == families.chosen(routes[-1].ids, 8)).all()
    assert (ran != families.chosen(moved, 8)).sum() >= len(moved)


@pytest.mark.parametrize(("whole", "text"), families.COMPOSITES.items())
def test_composites_are_read_through_their_text_model(whole: str, text: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from mismatch.training.routing.capture import family_of

    config = CONFIG_MAPPING[whole](text_config=families.configuration(text).to_dict())
    assert config.get_text_config().model_type == text
    assert family_of(config) is family_of(families.configuration(text))


@pytest.mark.grid
def test_the_page_is_up_to_date() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), (
        "make it again: .venv/bin/python tools/moe_families.py"
    )


# ---------------------------------------------------------------- with vLLM


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    runs: dict[str, Run] = {}

    def get(family: str) -> Run:
        if not installed("vllm"):
            pytest.skip("engine: vllm is not installed: make env")
        if family not in runs:
            folder = tmp_path_factory.mktemp(family)
            model = families.write(family, folder / "model")
            prompts = families.write_prompts(folder / "prompts.jsonl", 4)
            flags = ["--model", model, "--prompts", prompts, "--dtype", "fp32"]
            flags += ["--train-dtype", "fp32", "--no-noise-floor", "--nproc-per-node", "1"]
            flags += ["--samples-per-prompt", "2", "--max-tokens", "16"]
            runs[family] = run_check(folder / "run", *map(str, flags))
            runs[family].require_judged()
        return runs[family]

    return get


@pytest.mark.grid  # make test has tiny-gpt-oss in test_check
@pytest.mark.parametrize("family", ENGINE_FAMILIES)
def test_vllm_and_the_trainer_route_alike_in_fp32(family: str, run_of: Any) -> None:
    run = run_of(family)
    routing = run.headline["routing"]
    assert routing["routing_disagree_layer"]["value"] <= FLIPS
    assert routing["routing_disagree_layer"]["n_tokens"] > 100
    assert run.tokens["delta"].abs().max() <= SAME_IN_FP32
    engine = store.load_scoring(run.directory, "vllm:decode").routing
    trainer = store.load_scoring(run.directory, "fsdp").routing
    assert engine is not None
    assert trainer is not None
    assert engine.layers == trainer.layers == families.trial(family).layers
    assert engine.ids.dtype == trainer.ids.dtype == "uint8"


@pytest.mark.grid
def test_layers_keep_their_numbers_between_dense_ones(run_of: Any) -> None:
    run = run_of("qwen2_moe")
    assert store.load_scoring(run.directory, "vllm:decode").routing.layers == (1, 3)
    by_layer = run.headline["breakdowns"]["routing_by_layer"]
    assert by_layer["layer"] == [1, 3]


def test_last_tokens_have_no_row_in_the_engine(run_of: Any) -> None:
    run = run_of("qwen2_moe")
    rollout = store.load_rollout(run.directory)
    present = store.load_scoring(run.directory, "vllm:decode").routing.present
    assert (~present).nonzero()[0].tolist() == (rollout.offsets[1:] - 1).tolist()


# ---------------------------------------------------------------- refused


def test_a_family_that_cannot_be_captured_says_so_before_weights_load(tmp_path: Path) -> None:
    from mismatch.errors import MismatchError
    from mismatch.specs import TrainSpec
    from mismatch.training.load import require_runnable

    model = families.write("doge", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(MismatchError, match="captured: doge") as caught:
        require_runnable(TrainSpec(model=str(model)))
    assert "--no-routing" in caught.value.fix
    require_runnable(TrainSpec(model=str(model), routing=False))


def test_experts_in_an_unknown_place_are_not_taken_for_a_dense_model() -> None:
    from mismatch.training.routing.capture import why_unreadable

    model = families.tiny("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(8)])
    assert "unknown way" in (why_unreadable(model.config, model) or "")
    assert why_unreadable(families.configuration("mixtral"), families.tiny("mixtral")) is None


def test_layers_of_different_width_are_refused() -> None:
    from mismatch.training.routing.capture import why_unreadable

    config = families.configuration("hunyuan_v1_moe", moe_topk=[1, 2, 2, 2])
    assert "moe_topk" in (why_unreadable(config, torch.nn.Linear(1, 1)) or "")


# ---------------------------------------------------------------- sparse attention


@pytest.mark.grid
def test_keys_of_sparse_attention_are_compared_and_replayed(tmp_path: Path) -> None:
    model = families.write("deepseek_v32", tmp_path / "model", index_topk=8)
    prompts = families.write_prompts(tmp_path / "prompts.jsonl", 4)
    flags = ["--model", model, "--prompts", prompts, "--engine", "transformers"]
    flags += ["--nproc-per-node", "2", "--samples-per-prompt", "2", "--max-tokens", "16"]
    run = run_check(tmp_path / "run", *map(str, flags))
    run.require_judged()
    assert KEYS not in {entry["what"] for entry in run.report["not_tested"]}
    routing = run.headline["routing"]
    assert 100 < routing["keys_disagree_layer"]["n_tokens"] <= run.report["run"]["n_tokens"]
    assert routing["keys_overlap"]["value"] > 0.9
    done = mismatch("score", run.directory, "--replay-routing", "ids", "--name", "replayed")
    assert done.returncode == 0, done.stderr
    sides = ("transformers:decode", "fsdp", "replayed")
    decode, plain, replayed = (store.load_scoring(run.directory, name) for name in sides)
    assert decode.keys is not None
    assert plain.keys is not None
    assert replayed.keys is not None
    assert replayed.fingerprint["replay"]["keys"] == len(decode.keys.rows)
    made = manifest.entries(run.directory)["scores/replayed.parquet"]
    assert "routing/transformers-decode.keys.safetensors" in made["inputs"]
    rollout, rows = store.load_rollout(run.directory), np.arange(len(decode.keys.rows))
    own, chosen = decode.keys.choices, (plain.keys.choices, replayed.keys.choices)
    other, same = (pair_routing(rollout, own, each, rows).differs for each in chosen)
    assert not same.any()
    assert other.any()
