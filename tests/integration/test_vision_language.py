"""Models that read images: their language model is checked, and images are listed as not tested.

The engine is transformers: vLLM's code for such models imports torchvision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import tokenizer

from .conftest import run_check

pytestmark = pytest.mark.slow
TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIZES = {"hidden_size": 32, "intermediate_size": 32}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}


def qwen3_vl() -> Any:
    import transformers

    vision = {**SIZES, "depth": 2, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    text, tokens = TEXT | {"rope_parameters": ROPE}, {"image_token_id": 300, "video_token_id": 301}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen3VLForConditionalGeneration(config)


def gemma3() -> Any:
    import transformers

    vision = {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    text = TEXT | {"sliding_window": 16, "query_pre_attn_scalar": 16}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=300
    )
    return transformers.Gemma3ForConditionalGeneration(config)


@pytest.mark.grid
@pytest.mark.parametrize("make", [qwen3_vl, pytest.param(gemma3, marks=pytest.mark.grid)])
def test_the_language_model_of_one_that_reads_images_is_checked(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(3)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    few = ("--num-prompts", "8", "--samples-per-prompt", "2", "--max-tokens", "24")
    one = ("--engine", "transformers", "--nproc-per-node", "1", "--no-locate", "--no-explain")
    run = run_check(tmp_path / "run", "--model", str(tmp_path / "model"), *few, *one)
    run.require_judged()
    assert run.report["verdict"]["status"] != "broken", run.report["verdict"]["reason"]
    assert run.checks["implementation-gap"] == run.checks["implementation-gap-trainer"] == "passed"
    assert "images" in {each["what"] for each in run.report["not_tested"]}
