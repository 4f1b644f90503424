"""Tokenizers read without transformers give what transformers gives: ids, texts, templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from mismatch.engines import model_info
from mismatch.engines.model_info import read_model_info
from mismatch.errors import MismatchError
from mismatch.features.turns.template import examine
from mismatch.models import EMBEDDED
from mismatch.models import tokenizers as loading
from mismatch.models.file_tokenizer import FileTokenizer
from mismatch.models.tokenizers import special_texts, token_texts
from mismatch.prompts.environments import Calculator, between_turns, encoded
from mismatch.prompts.prompt import Prompt
from mismatch.prompts.sources import render_prompts
from mismatch.specs import EngineSpec

TEXTS = (
    "Once  upon a time,\n12 + 34 = 46.",
    "<|start|>user<|end|>  é世🙂",
    "<s>[INST] x [/INST]",
    "",
)
ASK = {"role": "user", "content": "How <much> is “1 + 2”? é"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "<think>hm</think>3"}
FUNCTION = {"name": "calculator", "arguments": {"expression": "1 + 2 < é"}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": FUNCTION}],
}
RESULT = {"role": "tool", "name": "calculator", "content": "3"}
DIALOGUES: dict[str, tuple[list[Any], list[Any] | None]] = {
    "one question": ([ASK], None),
    "a system's message": ([SYSTEM, ASK], None),
    "several turns": ([SYSTEM, ASK, ANSWER, ASK, ANSWER, ASK], None),
    "tools": ([SYSTEM, ASK], [Calculator.tool]),
    "a call": ([ASK, CALL, RESULT], [Calculator.tool]),
    "two system messages": ([ASK, SYSTEM, SYSTEM], None),  # some templates refuse them
}
# Written after templates of these families; together they use all that transformers gives them.
TEMPLATES = {
    "chatml": """{% for m in messages %}
    {%- if not loop.first %}{{ '\\n' }}{% endif %}
<|im_start|>{{ m['role'] }}
{{ m['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "llama 3": """{{- bos_token }}{% set date = strftime_now("%d %b %Y") %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
    {%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{{- 'Today: ' + date + '\\n' + system }}
{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ raise_exception('one system message, first') }}{% endif %}
    {%- if 'tool_calls' in m %}{{ m.tool_calls[0].function.arguments | tojson }}
    {%- else %}{{ '[' + m.role + ']' + m.content }}{% endif %}{{ eos_token }}
{%- endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}""",
    "qwen 3": """{%- set ns = namespace(last=-1) %}
{%- for m in messages[::-1] %}{% set at = messages | length - 1 - loop.index0 %}
    {%- if m.role == 'user' and ns.last < 0 %}{% set ns.last = at %}{% break %}{% endif %}
{%- endfor %}
{%- for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}
{%- if m.role == 'assistant' and loop.index0 < ns.last %}
    {{- m.content.split('</think>')[-1].lstrip('\\n') }}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}
{{- documents is defined and not documents }}""",
    "trained on": """{% set ended = 'no' %}{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{% set ended = 'yes' %}{{ m.content }}{{ ended }}{% endgeneration %}
{% endif %}{{ ended }}{% endfor %}""",
    "unsafe": "{{ messages.append(1) }}{{ messages.__class__.__mro__ }}",
}


def llama_like(folder: Path, **config: Any) -> Path:
    """A tokenizer with a BOS of its post-processor, byte tokens and files of an older kind."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    vocabulary = {word: index for index, word in enumerate(words)}
    model = models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    prepend = normalizers.Prepend("▁")
    made.normalizer = normalizers.Sequence([prepend, normalizers.Replace(" ", "▁")])
    space, fuse = decoders.Replace("▁", " "), decoders.Fuse()
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([space, decoders.ByteFallback(), fuse, strip])
    made.post_processor = TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    made.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    made.enable_truncation(4)
    made.enable_padding(length=32, pad_token="<unk>")
    return saved(folder, made, **config)


def byte_level(folder: Path, **config: Any) -> Path:
    """A tokenizer without a BOS, as Qwen's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return saved(folder, made, **config)


def saved(folder: Path, made: Tokenizer, **config: Any) -> Path:
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def plain_added(folder: Path) -> Path:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    token = {"__type": "AddedToken", "content": "<|im_end|>", **flags}
    added = {"256": {**flags, "content": "<|im_start|>", "special": True}}
    added |= {"257": {**flags, "content": "<tool_call>", "special": False}}
    added |= {"258": {**flags, "content": "<|im_end|>", "special": True}}
    extra = {"image_token": "<image>"}
    return byte_level(
        folder,
        eos_token=token,
        bos_token=None,
        added_tokens_decoder=added,
        extra_special_tokens=extra,
        audio_token="<audio>",
        chat_template=TEMPLATES["chatml"],
    )


def with_map(folder: Path) -> Path:
    llama_like(folder, add_bos_token=False, chat_template=None)
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    return folder


def two_templates(folder: Path) -> Path:
    named = [{"name": "default", "template": TEMPLATES["chatml"]}]
    named += [{"name": "tool_use", "template": TEMPLATES["qwen 3"]}]
    return llama_like(folder, bos_token="<s>", eos_token="</s>", chat_template=named)


def template_files(folder: Path) -> Path:
    with_map(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATES["qwen 3"])
    return folder


MADE = (plain_added, with_map, two_templates, template_files)


@pytest.fixture(
    scope="module", params=[*EMBEDDED, *MADE], ids=lambda one: getattr(one, "__name__", one)
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer of transformers, and ours."""
    made = request.param
    folder = (
        Path(EMBEDDED[made]) if isinstance(made, str) else made(tmp_path_factory.mktemp("t") / "t")
    )
    return AutoTokenizer.from_pretrained(folder), FileTokenizer(folder)


def test_ids_and_texts_are_those_of_transformers(pair: Any) -> None:
    theirs, ours = pair
    for text in (*TEXTS, "<image><audio><tool_call>a</tool_call><|im_start|> a<|im_end|>"):
        for special in (False, True):
            ids = ours(text, add_special_tokens=special)["input_ids"]
            assert ids == theirs(text, add_special_tokens=special)["input_ids"], text
            for skip in (False, True):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip)
    every = range(len(theirs))
    assert token_texts(ours, every) == token_texts(theirs, every)
    assert special_texts(ours) == special_texts(theirs)
    for name in ("vocab_size", "bos_token", "bos_token_id", "eos_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("dialogue", DIALOGUES)
def test_a_chat_is_rendered_as_by_transformers(pair: Any, dialogue: str) -> None:
    theirs, ours = pair
    messages, tools = DIALOGUES[dialogue]
    prompt = Prompt("p", messages=messages, tools=tools)
    ids = render_prompts([prompt], ours, 10**6)
    assert ids == render_prompts([prompt], theirs, 10**6)
    assert len(ids[0]) > 10


def test_turns_and_text_prompts_are_those_of_transformers(pair: Any) -> None:
    theirs, ours = pair
    prompts = [Prompt("p", text=text) for text in ("Once", "<s>Once")]
    assert render_prompts(prompts, ours, 10**6) == render_prompts(prompts, theirs, 10**6)
    ends = [token for token in (theirs.eos_token_id,) if token is not None]
    assert between_turns(ours, ASK, ends) == between_turns(theirs, ASK, ends)
    assert encoded(ours, "a\ue000<s>") == encoded(theirs, "a\ue000<s>")


def test_a_template_is_examined_as_with_transformers(pair: Any) -> None:
    theirs, ours = pair
    stops = [token for token in (theirs.eos_token_id,) if token is not None]
    assert examine("m", ours, stops) == examine("m", theirs, stops)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("dialogue", DIALOGUES)
def test_templates_have_what_transformers_gives_them(
    template: str, dialogue: str, tmp_path: Path
) -> None:
    folder = llama_like(tmp_path / "t", bos_token="<s>", eos_token="</s>")
    (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    messages, tools = DIALOGUES[dialogue]
    given = {"tools": tools} if tools else {}

    def rendered(tokenizer: Any, ask: bool) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages, add_generation_prompt=ask, tokenize=False, **given
                )
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    theirs, ours = AutoTokenizer.from_pretrained(folder), FileTokenizer(folder)
    for ask in (True, False):
        assert rendered(ours, ask) == rendered(theirs, ask)
    assert ("Error" in rendered(ours, True)) == (
        template == "unsafe" or (template, dialogue) == ("llama 3", "two system messages")
    )


@pytest.mark.parametrize("own", [True, False])
def test_what_only_transformers_reads_names_the_flag(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = byte_level(
        tmp_path / "t", **({"auto_map": {"AutoTokenizer": ["x.Y", None]}} if own else {})
    )
    if not own:
        (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(MismatchError) as caught:
        loading.load_tokenizer(str(folder))
    assert "--python PATH" in caught.value.fix


def without_transformers(patch: pytest.MonkeyPatch) -> None:
    for module in (loading, model_info):
        patch.setattr(module, "find_spec", lambda name: None)


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_model_is_described_as_with_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = EngineSpec("server", str(EMBEDDED[name]))
    info = read_model_info(spec)
    without_transformers(monkeypatch)
    assert read_model_info(spec) == info
    assert info.stop_ids
    assert info.moe


def test_end_tokens_come_from_three_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = llama_like(tmp_path / "t", eos_token="</s>")
    text = {"vocab_size": 300, "eos_token_id": [7, 8], "max_position_embeddings": 64}
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **text}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 8]}')
    (folder / "model.safetensors").touch()
    spec = EngineSpec("server", str(folder))
    without_transformers(monkeypatch)
    assert read_model_info(spec).stop_ids == (2, 7, 8, 9)
    del text["vocab_size"]
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    with pytest.raises(MismatchError) as caught:
        read_model_info(spec)
    assert "--python PATH" in caught.value.fix
