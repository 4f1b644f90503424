"""Words that readers have stumbled over stay out of everything that a user reads."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tools import site_pages

ROOT = Path(__file__).parents[2]
PACKAGE, DOCS = ROOT / "mismatch", ROOT / "docs"
BANNED = {
    "anew": r"anew",
    "bear": r"bears? (?:a|an|it|out)",
    "beside": r"besides?",
    "comes of": r"comes? of (?:it|that|this)",
    "goes with": r"(?:go|goes|gone|went) with",
    "held against": r"held against",
    "its own": r"(?:its|their) own",
    "law": r"laws?",  # for a distribution; ids such as sampling-law are not words
    "looked into": r"looked into",
    "mend": r"mend(?:s|ed|ing)?",
    "of theirs": r"of (?:theirs|ours|yours)",
    "parts from": r"parts? from",
    "ones": r"ones|(?:this|another|such) one",
    "stands": r"stands?(?! (?:for|in|out)\b)",
    "such": r"(?<!no )such(?! as\b)",
    "told apart": r"(?:tell|tells|told) (?:\w+ )?(?:apart|from)",
    "vouch": r"vouch(?:es|ed)?",
}
HITS = {name: re.compile(rf"(?<![\w-])(?:{one})(?![\w-])", re.I) for name, one in BANNED.items()}
NAMES = re.compile(r"^ +\w+(?:, \w+)*:|\b\w+=", re.M)  # of fields and arguments, in docstrings
CODE = re.compile(r"`[^`\n]*`|\]\([^)\s]*\)|<[^>\n]*>")  # inline code, link targets, tags

Text = tuple[str, str]  # where, what


@cache
def sources(folder: Path = PACKAGE) -> dict[Path, tuple[str, ast.Module]]:
    """Return the files of a folder, by default of the package, with their trees."""
    texts = {path: path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}
    return {path: (text, ast.parse(text)) for path, text in texts.items()}


def bare_strings(tree: ast.Module) -> set[ast.Constant]:
    """Return the strings that are statements: docstrings of all kinds."""
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def messages() -> Iterator[Text]:
    """Yield the strings of the package that are no docstring and no single word: help, errors."""
    for path, (_, tree) in sources().items():
        docstrings = bare_strings(tree)
        for node in ast.walk(tree):
            if node in docstrings or not isinstance(node, ast.Constant):
                continue
            if isinstance(node.value, str) and " " in node.value.strip():
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def explanations(folder: Path) -> Iterator[Text]:
    """Yield the docstrings and comments of a folder."""
    for path, (text, tree) in sources(folder).items():
        where = path.relative_to(ROOT)
        for node in bare_strings(tree):
            yield f"{where}:{node.lineno}", NAMES.sub(" ", str(node.value))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield f"{where}:{token.start[0]}", token.string


def templates() -> Iterator[Text]:
    """Yield the values of the package's TOML files, and the lines of its page templates."""
    for path in sorted(PACKAGE.rglob("*")):
        where = str(path.relative_to(ROOT))
        if path.suffix == ".toml":
            document = tomllib.loads(path.read_text("utf-8"))
            yield from ((f"{where}: {key}", text) for key, text in values(document))
        elif path.suffix in (".html", ".js") and not path.is_symlink():  # an example
            for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
                yield f"{where}:{number}", line


def values(item: Any, key: str = "") -> Iterator[Text]:
    """Yield every string of a TOML document with its key."""
    if isinstance(item, str):
        yield key, item
    elif isinstance(item, dict):
        for name, part in item.items():
            yield from values(part, f"{key}.{name}".lstrip("."))
    elif isinstance(item, list):
        for part in item:
            yield from values(part, key)


def pages() -> Iterator[Text]:
    """Yield the README and every page of the site as it is built, with the help of all commands."""
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        yield name, (ROOT / name).read_text("utf-8")
    for path in sorted(DOCS.rglob("*.md")):
        if "decisions" not in path.parts:
            yield str(path.relative_to(ROOT)), site_pages.filled(path.read_text("utf-8"))
    yield from site_pages.pages().items()


def found(texts: Iterator[Text], words: Iterator[str] | tuple[str, ...]) -> list[str]:
    """Return where the words are, with what is around them."""
    wanted = [HITS[word] for word in words]
    hits = []
    for where, text in texts:
        plain = CODE.sub(" ", text)
        for pattern in wanted:
            for hit in pattern.finditer(plain):
                around = plain[max(0, hit.start() - 40) : hit.end() + 40]
                hits.append(f"{where}: …{' '.join(around.split())}…")
    return hits


@pytest.mark.parametrize("texts", [messages, templates, pages], ids=lambda texts: texts.__name__)
def test_what_a_user_reads_has_none_of_these_words(texts: Any) -> None:
    assert found(texts(), tuple(BANNED)) == []


@pytest.mark.parametrize("folder", ["mismatch", "tools", "benchmarks"])
def test_docstrings_and_comments_have_none_of_these_words(folder: str) -> None:
    texts = list(explanations(ROOT / folder))
    assert len(texts) > 50  # they were looked at
    assert found(iter(texts), tuple(BANNED)) == []


def test_the_words_are_found() -> None:
    bad = "Held against the law, it goes with ones that stand beside their own; such is told apart."
    assert {word for word in BANNED if found(iter([("here", bad)]), (word,))} >= {
        *("beside", "goes with", "held against", "its own", "law", "ones", "stands"),
        *("such", "told apart"),
    }
    good = "`such` stands for [it](law.md), sampling-law, recommend; no such file, such as ten"
    assert found(iter([("here", good)]), tuple(BANNED)) == []
