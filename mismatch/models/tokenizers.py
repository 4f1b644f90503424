"""What a check reads of a model's tokenizer: itself, its end tokens, texts of its tokens."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from mismatch.errors import MismatchError, first_line
from mismatch.models.sampling_defaults import generation_config
from mismatch.run.hub import small_files


def load_tokenizer(model: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a directory or hub id.

    Raises:
        MismatchError: it is missing or cannot be read.
    """
    try:
        if find_spec("transformers") is None:
            from mismatch.models.file_tokenizer import FileTokenizer

            return FileTokenizer(small_files(model, revision))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            model, revision=revision, trust_remote_code=trust_remote_code
        )
    except MismatchError:
        raise
    except Exception as error:  # transformers and tokenizers raise many kinds here
        fault = f"tokenizer of {model} cannot be loaded: {first_line(error)}"
        fix = "save it in the model's folder: tokenizer.save_pretrained(DIR)"
        raise MismatchError(fault, fix) from error


def stop_ids(model: str, revision: str | None, *others: Any) -> tuple[int, ...]:
    """Return the end tokens of generation_config.json and the others, sorted.

    Args:
        others: an id, ids, or None each, as a tokenizer or a configuration gives its end token.
    """
    stated = None
    with contextlib.suppress(OSError, ValueError):  # no hub: what is here has been read
        stated = generation_config(small_files(model, revision)).get("eos_token_id")
    ids: set[int] = set()
    for given in (stated, *others):
        ids.update(given if isinstance(given, list | tuple) else () if given is None else (given,))
    return tuple(sorted(ids))


def token_texts(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """Return the text of every id; part of a character as the vocabulary spells it."""
    texts = {}
    for token in ids:
        text = str(tokenizer.decode([token]))
        if not text or "\ufffd" in text:
            spelled = tokenizer.convert_ids_to_tokens(token)
            text = str(spelled) if spelled else f"<{token}>"
        texts[int(token)] = text
    return texts


def special_texts(tokenizer: Any) -> list[str]:
    """Return texts that the tokenizer reads as control tokens, the longest first.

    Those that it calls special, and those written like them (Qwen's ``<tool_call>`` is not).
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    marks = {
        str(t.content) for t in added if t.special or re.fullmatch(r"[<\[]\S+[>\]]", t.content)
    }
    return sorted(marks | set(tokenizer.all_special_tokens), key=len, reverse=True)
