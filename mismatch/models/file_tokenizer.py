"""A tokenizer read from its files alone, for an environment without transformers.

It gives the ids and texts that transformers' ``AutoTokenizer`` gives: that, too, leaves a text's
own special tokens to tokenizer.json, and renders chat templates with jinja2.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from mismatch.errors import MismatchError
from mismatch.models.config import read_config
from mismatch.run.files import read_regular


class FileTokenizer:
    """The part of transformers' interface that a check uses."""

    def __init__(self, folder: Path) -> None:
        config, file = _read(folder / "tokenizer_config.json"), folder / "tokenizer.json"
        own_code = "AutoTokenizer" in (config.get("auto_map") or ())
        if own_code or not file.is_file():
            why = "its class comes with the model" if own_code else "there is no tokenizer.json"
            fix = "--python PATH names an environment that has transformers"
            raise MismatchError(f"only transformers reads the tokenizer of {folder}: {why}", fix)
        self.backend = Tokenizer.from_file(str(file))
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=False)
        added: Mapping[str, Any] | None = config.get("added_tokens_decoder")
        if added is None:
            config |= _read(folder / "special_tokens_map.json")
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        if isinstance(extra, Mapping):
            config, extra = config | dict(extra), []
        given = {name: token for name, token in config.items() if name.endswith("_token")}
        self.named = {n: _text(t) for n, t in given.items() if isinstance(t, str | Mapping)}
        self.all_special_tokens = [*self.named.values(), *map(_text, extra)]
        tokens = [AddedToken(**(added or {})[index]) for index in sorted(added or (), key=int)]
        tokens += [AddedToken(text, special=True) for text in self.all_special_tokens]
        self.backend.add_tokens(tokens)  # those that it lacks
        self.added_tokens_decoder = self.backend.get_added_tokens_decoder()
        self.bos_token = self.named.get("bos_token")
        self.bos_token_id = self.backend.token_to_id(self.bos_token or "")
        self.eos_token_id = self.backend.token_to_id(self.named.get("eos_token", ""))
        self.convert_ids_to_tokens = self.backend.id_to_token
        self.chat_template = _templates(folder) or config.get("chat_template")

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.backend.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens))

    def apply_chat_template(
        self, messages: Any, tokenize: bool = True, return_dict: bool = False, **given: Any
    ) -> Any:
        """Return the ids of messages, or their text; what else is given is the template's."""
        template, names = self.chat_template, {"tools": None, "documents": None, **self.named}
        if isinstance(template, list):
            several = {each["name"]: each["template"] for each in template}
            template = several.get("tool_use" if given.get("tools") else "") or several["default"]
        text = _compiled(template).render(names | given, messages=messages)
        return self(text, add_special_tokens=False)["input_ids"] if tokenize else text


class _Generation(Extension):
    """``{% generation %}`` marks what an assistant generates; it renders as what is inside."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), True), lineno=line)


@functools.cache
def _compiled(template: str) -> Template:
    """Return a template with the names that transformers documents for templates."""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    room = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=(_Generation, loopcontrols)
    )
    room.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    room.globals["raise_exception"] = raise_exception
    room.globals["strftime_now"] = lambda how: datetime.now().strftime(how)
    return room.from_string(template)


def _templates(folder: Path) -> list[dict[str, str]]:
    further = (folder / "additional_chat_templates").glob("*.jinja")
    files = {"default": folder / "chat_template.jinja", **{each.stem: each for each in further}}
    found = {name: read_regular(file) for name, file in files.items() if file.is_file()}
    return [{"name": name, "template": data.decode("utf-8")} for name, data in found.items()]


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _read(path: Path) -> dict[str, Any]:
    return read_config(path.parent, path.name) if path.is_file() else {}
