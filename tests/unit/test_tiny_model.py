"""The embedded checkpoint is what its card says: gpt-oss, small, trained, not perfect."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from mismatch.errors import MismatchError, did_you_mean
from mismatch.models import EMBEDDED, resolve_model
from mismatch.prompts.arithmetic import arithmetic_problems, reward

MODEL = EMBEDDED["tiny-gpt-oss"]
PROMPTS = 96


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((MODEL / "config.json").read_text())


@pytest.fixture(scope="module")
def provenance() -> dict[str, Any]:
    return json.loads((MODEL / "training.json").read_text())


@pytest.fixture(scope="module")
def model() -> Any:
    transformers = pytest.importorskip("transformers", reason="engine: no transformers here")
    return transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, dtype="float32", attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers", reason="engine: no transformers here")
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_weights_are_small_and_the_ones_the_card_describes(name: str) -> None:
    model = EMBEDDED[name]
    weights = (model / "model.safetensors").read_bytes()
    provenance = json.loads((model / "training.json").read_text())
    assert len(weights) < 8_000_000
    assert hashlib.sha256(weights).hexdigest() == provenance["model_sha256"]
    assert provenance["model_sha256"] in (model / "README.md").read_text()
    assert (model / "README.md").read_text().count(f"# {name}\n") == 1


def test_the_sibling_calls_its_tool_part_of_the_time() -> None:
    record = json.loads((EMBEDDED["tiny-gpt-oss-tools"] / "training.json").read_text())
    task = record["arithmetic"]
    assert 0.3 < task["called_share"] < 0.95
    assert task["accuracy_called"] > 0.2
    assert 1.3 < task["turns_mean"] < 4.0
    assert all(min(router["load"]) > 0.01 for router in record["held_out"]["routers"])


def test_the_sibling_s_template_is_harmony_as_it_samples() -> None:
    """A rendered history is the sampled tokens, with the calls that the tool reads."""
    from mismatch.models.tokenizers import load_tokenizer
    from mismatch.prompts.environments import Calculator, between_turns
    from mismatch.prompts.prompt import Prompt

    directory = EMBEDDED["tiny-gpt-oss-tools"]
    chat = load_tokenizer(str(directory))
    stops = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert chat.convert_ids_to_tokens(stops) == ["<|return|>", "<|call|>", "<|endoftext|>"]
    function = {"name": "calculator", "arguments": {"expression": "2 + 2"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What is 2 + 2?"},
        {
            "role": "assistant",
            "thinking": "We ask.",
            "tool_calls": [{"type": "function", "function": function}],
        },
    ]
    given: dict[str, Any] = {"tools": [Calculator.tool], "tokenize": False}
    prompt = chat.apply_chat_template(messages[:1], add_generation_prompt=True, **given)
    before = chat.apply_chat_template(messages, **given)
    sampled = before.removeprefix(prompt)
    assert sampled == (
        "<|channel|>analysis<|message|>We ask.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.calculator <|constrain|>json<|message|>{"expression": "2 + 2"}<|call|>'
    )
    reply = Calculator(Prompt("p")).reply(sampled)
    assert reply is not None
    whole = chat.apply_chat_template([*messages, reply], add_generation_prompt=True, **given)
    ids = chat(before)["input_ids"] + between_turns(chat, reply, stops)
    assert ids == chat(whole)["input_ids"]
    assert whole.endswith("<|message|>4<|end|><|start|>assistant")


def test_the_config_is_gpt_oss_with_all_that_makes_it_hard_to_match(config: dict[str, Any]) -> None:
    assert config["architectures"] == ["GptOssForCausalLM"]
    assert set(config["layer_types"]) == {"sliding_attention", "full_attention"}
    assert config["sliding_window"] == 32
    assert config["num_local_experts"] == 8
    assert config["num_experts_per_tok"] == 2
    assert config["dtype"] == "bfloat16"


def test_the_config_carries_every_yarn_field_that_vllm_reads(config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    assert rope["rope_type"] == "yarn"
    needed = {"rope_theta", "factor", "beta_fast", "beta_slow", "truncate"}
    assert needed | {"original_max_position_embeddings"} <= rope.keys()


def test_two_to_three_million_parameters_and_one_sink_per_head(model: Any) -> None:
    assert 2e6 < sum(p.numel() for p in model.parameters()) < 3e6
    sinks = [p for name, p in model.named_parameters() if name.endswith("sinks")]
    assert len(sinks) == 4
    assert all(len(p) == 8 for p in sinks)


def test_the_sinks_matter_and_were_trained(model: Any, provenance: dict[str, Any]) -> None:
    """A sink s takes exp(s) of the softmax's denominator: at 2, as much as 7 keys of logit 0."""
    for layer, before in zip(model.model.layers, provenance["sinks_before"], strict=True):
        after = layer.self_attn.sinks.detach()
        assert after.max() > 2.0
        assert max(abs(a - b) for a, b in zip(after.tolist(), before, strict=True)) > 0.1


def test_the_routers_are_peaked_but_every_expert_works(provenance: dict[str, Any]) -> None:
    """A uniform router gives 1/8 to every expert; an unused expert has load 0."""
    for router in provenance["held_out"]["routers"]:
        assert router["sorted_probabilities"][0] > 0.3
        assert min(router["load"]) > 0.01


def test_the_chat_template_closes_turns_so_that_a_history_is_the_sampled_tokens(
    tokenizer: Any,
) -> None:
    question = [{"role": "user", "content": "Say hi."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|start|>user<|message|>Say hi.<|end|><|start|>assistant<|message|>"
    call = {"function": {"name": "calculator", "arguments": {"expression": "1 + 2"}}}
    messages = [
        *question,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "hi"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        prompt + 'calculator {"expression": "1 + 2"}<|call|><|start|>tool<|message|>3<|end|>'
        "<|start|>assistant<|message|>hi<|return|>"
    )


def test_special_tokens_are_single_ids_and_the_model_stops_at_them(tokenizer: Any) -> None:
    stops = json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(stops) == ["<|return|>", "<|call|>", "<|endoftext|>"]
    assert tokenizer.encode("<|return|>") == [tokenizer.eos_token_id]
    text = 'Zoë  has\n12 "plums" = ✓'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 1024


@pytest.mark.slow
def test_it_answers_20_to_80_percent_of_the_default_prompts_at_temperature_1(
    model: Any, tokenizer: Any, record_property: Any
) -> None:
    import torch

    problems = arithmetic_problems(PROMPTS, seed=0)
    tokenizer.padding_side = "left"
    encoded = tokenizer.apply_chat_template(
        [problem.messages for problem in problems],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    torch.manual_seed(0)
    out = model.generate(**encoded, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=96)
    responses = tokenizer.batch_decode(
        out[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True
    )
    rewards = [reward(r, p.answer) for r, p in zip(responses, problems, strict=True)]
    accuracy = sum(rewards) / PROMPTS
    record_property("accuracy", accuracy)
    assert 0.2 <= accuracy <= 0.8, f"accuracy {accuracy:.2f}"


def test_a_model_name_becomes_a_path(tmp_path: Path) -> None:
    assert resolve_model("tiny-gpt-oss") == str(MODEL)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("openai/gpt-oss-20b") == "openai/gpt-oss-20b"


@pytest.mark.parametrize("name", ["tiny-gptoss", "tiny_gpt_oss", "Tiny-GPT-OSS"])
def test_a_misspelt_model_names_the_near_miss(name: str) -> None:
    with pytest.raises(MismatchError) as error:
        resolve_model(name)
    assert error.value.fix.startswith(did_you_mean(name, ["tiny-gpt-oss"]).rstrip("? "))


@pytest.mark.parametrize("name", ["", "qwen", "./missing/model", "/missing/model", "a/b/c"])
def test_an_unknown_model_is_an_error_with_a_fix(name: str) -> None:
    with pytest.raises(MismatchError) as error:
        resolve_model(name)
    assert "tiny-gpt-oss" in error.value.fix


def test_a_directory_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
