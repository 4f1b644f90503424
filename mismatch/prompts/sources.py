"""Read the prompts of a run, and render them to token ids.

:func:`read_prompts` is light and runs before anything starts; :func:`render_prompts` needs the
model's tokenizer and runs where that is loaded. One line of a prompts file has exactly one of::

    {"prompt": "Once upon a time"}                          text, used as it is
    {"messages": [{"role": "user", "content": "Hello"}]}    through the model's chat template
    {"prompt_token_ids": [1, 15, 27]}                       ids, used as they are

Other keys, blank lines and a byte order mark are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.prompts.datasets import read_dataset
from mismatch.prompts.prompt import Prompt
from mismatch.prompts.tasks import find_task
from mismatch.run.files import read_regular
from mismatch.specs import PromptSpec

MOST_PROBLEMS = 1_000_000  # of a built-in task; they are made in memory
KINDS = ("prompt", "messages", "prompt_token_ids")
EXAMPLE = 'one JSON object per line, such as {"messages": [{"role": "user", "content": "Hi"}]}'


def read_prompts(spec: PromptSpec) -> list[Prompt]:
    """Return the prompts that a spec names: ``num_prompts`` of the task, or the file's first.

    Raises:
        MismatchError: unknown task, too many problems of it, or a file that is missing, empty or
            malformed (with the line).
    """
    if spec.dataset is not None:
        return read_dataset(spec)
    if spec.file is not None:
        return read_file(spec.file)[: spec.num_prompts]
    task = find_task(spec.task)
    if spec.num_prompts > MOST_PROBLEMS:
        fault = f"--num-prompts is {spec.num_prompts:,}, the built-in task has {MOST_PROBLEMS:,}"
        raise MismatchError(fault, "give fewer, or a file of prompts: --prompts FILE")
    return task.prompts(spec.num_prompts, spec.seed)


def read_file(path: Path) -> list[Prompt]:
    """Return all prompts of a JSONL file.

    Raises:
        MismatchError: missing, not UTF-8, no prompts, or a malformed line (named).
    """
    try:
        data = read_regular(path, 128 << 20)  # prompts are held in memory
    except OSError as error:
        fault = f"prompts file {path}: {error.strerror}"
        raise MismatchError(fault, "give a readable JSONL file: --prompts FILE") from error
    prompts = []
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if raw.strip():
            prompts.append(_parse(raw, f"{path}:{number}"))
    if not prompts:
        raise MismatchError(f"prompts file {path} has no prompts", f"write {EXAMPLE}")
    return prompts


def _parse(raw: bytes, origin: str) -> Prompt:
    try:
        entry = json.loads(raw.decode("utf-8"))
        json.dumps(entry, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(origin, "not UTF-8", "save the file as UTF-8") from error
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise _bad(
            origin, f"{half} is half a character", "write the whole one, or leave it out"
        ) from error
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        reason = "nested too deeply" if deep else getattr(error, "msg", str(error))
        raise _bad(origin, f"not JSON ({reason})") from error
    if not isinstance(entry, dict):
        raise _bad(origin, f"a JSON {type(entry).__name__}, not an object")
    present = [kind for kind in KINDS if kind in entry]
    if len(present) != 1:
        keys = " and ".join(present) if present else f"none (keys: {', '.join(entry) or 'none'})"
        raise _bad(origin, f"needs exactly one of {', '.join(KINDS)}, found {keys}")
    (kind,) = present
    value: Any = entry[kind]
    right_type = isinstance(value, str if kind == "prompt" else list)
    if not right_type or not value:
        name = "string" if kind == "prompt" else "list"
        raise _bad(origin, f"{kind} must be a {name} that is not empty")
    if kind == "prompt":
        return Prompt(origin, text=value)
    if kind == "prompt_token_ids":
        for index, token in enumerate(value):
            if type(token) is not int or token < 0:
                raise _bad(origin, f"prompt_token_ids[{index}] must be an integer of at least 0")
        return Prompt(origin, token_ids=value)
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _bad(origin, f"messages[{index}] must be an object with a role")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and "tool_calls" in message):
            raise _bad(origin, f"messages[{index}].content must be a string")
    return Prompt(origin, messages=value)


def _bad(origin: str, what: str, fix: str = f"write {EXAMPLE}") -> MismatchError:
    return MismatchError(f"{origin}: {what}", fix)


# ---------------------------------------------------------------- rendering


def render_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, vocab_size: int, plain: bool = False
) -> list[list[int]]:
    """Return the token ids of every prompt.

    Text gets the tokenizer's own special tokens (a BOS), unless it already begins with the BOS.

    Args:
        plain: a question is plain text where the tokenizer has no chat template, as base models
            have none.

    Raises:
        MismatchError: no chat template for a conversation, or one that refuses it; a prompt without
            tokens, or an id outside the vocabulary.
    """
    if plain and not tokenizer.chat_template:
        prompts = [_as_text(prompt) for prompt in prompts]
    rendered = [_render(prompt, tokenizer) for prompt in prompts]
    for prompt, ids in zip(prompts, rendered, strict=True):
        if not ids:
            raise MismatchError(f"{prompt.origin}: no tokens", "give a prompt that is not empty")
        require_within(prompt, ids, vocab_size)
    return rendered


def require_within(prompt: Prompt, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse an id that the model has no row for."""
    if max(ids) >= vocab_size:
        fault = f"{prompt.origin}: token id {max(ids)} is outside the vocabulary of {vocab_size}"
        raise MismatchError(fault, "tokenise the prompt with this model's own tokenizer")


def _as_text(prompt: Prompt) -> Prompt:
    """Return the prompt with its question as text, where one user asks it."""
    turns = prompt.messages or []
    if prompt.tools or [turn["role"] for turn in turns] != ["user"]:
        return prompt
    return replace(prompt, messages=None, text=f"{turns[0]['content']}\n")


def _render(prompt: Prompt, tokenizer: Any) -> list[int]:
    if prompt.token_ids is not None:
        return prompt.token_ids
    if prompt.text is not None:
        bos = getattr(tokenizer, "bos_token", None)
        special = not (bos and prompt.text.startswith(bos))
        return list(tokenizer(prompt.text, add_special_tokens=special)["input_ids"])
    if not tokenizer.chat_template:
        fault = f"{prompt.origin}: the model's tokenizer has no chat template"
        fix = "use a chat model, or give each prompt as `prompt` or `prompt_token_ids` in a file"
        raise MismatchError(fault, fix)
    tools = {"tools": prompt.tools} if prompt.tools else {}
    try:
        ids = tokenizer.apply_chat_template(
            prompt.messages, **tools, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template raises whatever it likes
        fault = f"{prompt.origin}: the chat template refuses these messages: {error}"
        fix = "look at the roles and their order; the template is the model's chat_template.jinja"
        raise MismatchError(fault, fix) from error
    return list(ids)
