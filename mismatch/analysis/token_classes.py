"""What kind of thing a token is, judged by its text: special, whitespace, digit, word, other."""

from __future__ import annotations

import re

from mismatch.types import Fingerprint

TOKEN_CLASSES = ("special", "whitespace", "digit", "word", "other", "unknown")
_SPECIAL = re.compile(r"<[|｜].*[|｜]>|</?s>|<(pad|unk|bos|eos|mask)>|\[(CLS|SEP|PAD|UNK|MASK)\]")


def special_ids(facts: Fingerprint) -> set[int]:
    """Ids that the engine says are special: its stop tokens and the BOS."""
    known = [*(facts.get("stop_token_ids") or ()), facts.get("bos_token_id")]
    return {int(token) for token in known if token is not None}


def token_class(text: str | None, special: bool = False) -> str:
    """Special, whitespace, digit (no letter), word (a letter), other (punctuation), unknown.

    >>> [token_class(text) for text in (" the", "12", "\\n", "<|end|>", ").", None)]
    ['word', 'digit', 'whitespace', 'special', 'other', 'unknown']
    """
    if special or (text is not None and _SPECIAL.fullmatch(text.strip())):
        return "special"
    if not text:
        return "unknown"
    if text.isspace():
        return "whitespace"
    if any(character.isalpha() for character in text):
        return "word"
    return "digit" if any(character.isdigit() for character in text) else "other"
