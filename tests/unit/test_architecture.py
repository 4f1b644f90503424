"""The rooms of the house: no two files import each other in a circle, whatever the import is for.

``make lint`` holds the layers (import-linter, see pyproject.toml).
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

import mismatch
from tests.conftest import SKIPS, last_line, turned

ROOT = Path(mismatch.__file__).parent
# Lines with 3 % room (docs/decisions/0034-core-and-features.md); whoever deletes lowers them.
MOST_LINES, MOST_LINES_OF_A_FEATURE = 74_600, 3_850
MOST_PHRASES, MOST_MATCHES = 7, 0  # of the tests, of four words or more: lowered likewise
SPINE = {"__init__", "__main__", "api", "attempts", "captures", "codec", "errors", "facts"}
SPINE |= {"frameworks", "keys", "plugins", "specs", "types", "version"}
# Modules of the core that one feature alone imports, and that are to move into its folder.
TO_MOVE = {"metrics.row_sums": "recorded", "processes.spread": "recorded"}
TO_MOVE |= dict.fromkeys(("models.boundaries", "models.layer_parts"), "locate")
TO_MOVE["models.site_parameters"] = "locate"


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Module -> modules that it imports anywhere, also for types alone."""
    graph = grimp.build_graph("mismatch", cache_dir=None)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that can all reach each other (Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[set[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in imports[module]:
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            start = stack.index(module)
            components.append(set(stack[start:]))
            del stack[start:]

    for module in imports:
        if module not in number:
            visit(module)
    return [component for component in components if len(component) > 1]


def test_no_files_import_each_other_in_a_circle(imports: dict[str, set[str]]) -> None:
    assert circles(imports) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_the_root_of_the_package_holds_the_spine_alone() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} <= SPINE


def imported_by(path: Path) -> set[str]:
    """Modules of ours that a file imports anywhere; of ``from a import b`` also ``a.b``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module))
    return {name for name in names if name.partition(".")[0] == "mismatch"}


def lines_below(folder: Path) -> int:
    """Count the lines of a folder's Python files."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))


def test_the_package_does_not_grow_unnoticed() -> None:
    assert lines_below(ROOT) <= MOST_LINES
    features = [folder for folder in (ROOT / "features").iterdir() if folder.is_dir()]
    sizes = {folder.name: lines_below(folder) for folder in features}
    assert {name: n for name, n in sizes.items() if n > MOST_LINES_OF_A_FEATURE} == {}


def feature_of(module: str) -> str:
    """Return the feature whose folder holds a module; "": it is of the core."""
    return (*module.split("."), "", "")[2] if module.startswith("mismatch.features.") else ""


def test_the_core_neither_names_a_feature_nor_holds_its_parts(imports: dict[str, set[str]]) -> None:
    files = [path for path in ROOT.rglob("*.py") if "features" not in path.relative_to(ROOT).parts]
    sources = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in files}
    assert [name for name, text in sources.items() if "mismatch.features." in text] == []
    owners: dict[str, set[str]] = {name: {own} for name in imports if (own := feature_of(name))}
    # Engines and trainers are named by strings: in the registry, in an engine's folder, by users.
    core = [
        n for n in imports if n not in owners and ".engines." not in n and ".trainers." not in n
    ]
    importers = {name: {each for each in imports if name in imports[each]} for name in core}
    while found := {
        name: set().union(*(owners[each] for each in importers[name]))
        for name in core
        if name not in owners and importers[name] and importers[name] <= owners.keys()
    }:
        owners |= found
    of_one = {name: own for name in core if len(own := owners.get(name, set())) == 1}
    assert of_one == {f"mismatch.{name}": {owner} for name, owner in TO_MOVE.items()}


def test_no_module_name_is_used_in_three_rooms() -> None:
    """Outside features: these name their files alike, by role."""
    rooms: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        if path.stem != "__init__" and path.relative_to(ROOT).parts[0] != "features":
            rooms.setdefault(path.stem, set()).add(path.relative_to(ROOT).parts[0])
    assert {name: holders for name, holders in rooms.items() if len(holders) > 2} == {}


def test_the_package_takes_every_data_file_along() -> None:
    """What pyproject.toml does not name is missing from the wheel, and present in a checkout."""
    told = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    globs = told["tool"]["setuptools"]["package-data"]
    missing = []
    for path in ROOT.rglob("*"):
        if path.is_dir() or path.suffix in (".py", ".pyc"):
            continue
        parents = [path.parent, *path.parent.parents]
        package = next(each for each in parents if (each / "__init__.py").exists())
        name = ".".join(package.relative_to(ROOT.parent).parts)
        here = path.relative_to(package)
        if not any(here.match(each) for each in (*globs["*"], *globs.get(name, ()))):
            missing.append(str(path.relative_to(ROOT)))
    assert missing == []


def test_every_import_of_ours_exists() -> None:
    """Lazy ones too, which neither mypy (it ignores missing modules) nor a start-up would see."""
    repository = ROOT.parent
    folders = [ROOT, *(repository / name for name in ("tests", "tools", "benchmarks"))]
    missing = {
        f"{path.relative_to(repository)}: {name}"
        for folder in folders
        for path in folder.rglob("*.py")
        for name in imported_by(path)
        if not (module := repository / name.replace(".", "/")).with_suffix(".py").is_file()
        and not (module / "__init__.py").is_file()
    }
    assert missing == set()


@pytest.mark.parametrize("room", ["metrics", "analysis", "experiments"])
def test_the_core_neither_prints_nor_reads_the_environment(room: str) -> None:
    calls = {"print", "input"}
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in calls, f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("os", "environ"), f"{path}:{node.lineno}"


# ---------------------------------------------------------------- no logic on English

SPLITTERS = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition",
             "split", "rsplit", "find", "index", "count"}  # fmt: skip
PATTERNS = {"compile", "match", "fullmatch", "search", "findall", "finditer", "sub", "split"}
WORDS = re.compile(r"[A-Za-z]{2,}[,;:]? +[A-Za-z]{2,}")  # two words of a sentence
ENGLISH_OF_OTHERS = {  # file -> whose words it has to read
    "engines/model_info.py": "errors of transformers",
    "prompts/datasets.py": "errors of datasets",
    "run/provenance.py": "the head of a private key's file",
}
SEPARATORS = {": ", "; ", ". "}  # between the parts of a sentence
MESSAGES = {"message", "reason", "detail", "summary"}  # attributes that hold our own sentences


def strings(node: ast.AST) -> list[str]:
    """Literals of an expression: a string, or a tuple of them."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return [
        part.value
        for part in parts
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]


def reads_a_message(node: ast.AST) -> bool:
    """``error.message``, or a method of it."""
    return any(isinstance(part, ast.Attribute) and part.attr in MESSAGES for part in ast.walk(node))


def logic_on_english(source: str) -> list[int]:
    """Lines whose outcome depends on the words of a sentence."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            literal = strings(node.left)
            message = isinstance(node.left, ast.Constant) and reads_a_message(node.comparators[0])
            held = not isinstance(node.comparators[0], ast.Tuple | ast.List | ast.Set | ast.Dict)
            if (held and any(map(WORDS.search, literal))) or (literal and message):
                lines.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            owner, name = node.func.value, node.func.attr
            pattern = isinstance(owner, ast.Name) and owner.id == "re" and name in PATTERNS
            if pattern or name in SPLITTERS:
                literal = strings(node.args[0])
                given = bool(literal) or isinstance(node.args[0], ast.Name | ast.Attribute)
                message = name in SPLITTERS and given and reads_a_message(owner)
                separator = name in SPLITTERS and not SEPARATORS.isdisjoint(literal)
                if any(map(WORDS.search, literal)) or message or separator:
                    lines.append(node.lineno)
    return sorted(lines)


def test_nothing_parses_our_own_sentences() -> None:
    offences = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if lines := logic_on_english(path.read_text("utf-8")):
            offences[name] = lines
    assert {name: lines for name, lines in offences.items() if name not in ENGLISH_OF_OTHERS} == {}
    assert set(ENGLISH_OF_OTHERS) <= set(offences), "an exception that is not needed any more"


@pytest.mark.parametrize(
    "offence",
    [
        'any("exact KL" in entry for entry in missing)',
        '"memory" not in error.message',
        'text.startswith("not supported")',
        'text.removesuffix("; its last lines:")',
        'rung.detail.rpartition("; ")',
        "audit.reason.startswith(ENDED)",
        'entry.split(": ")',
        're.findall(r"without the (--\\S+)", flags)',
    ],
)
def test_logic_on_english_is_found(offence: str) -> None:
    assert logic_on_english(offence) == [1]


@pytest.mark.parametrize(
    "code",
    ['name in ("two words", "others")', 'name.split(":")', 'name.startswith("fix:")',
     're.compile(r"(\\d+)\\.weight")', 'logprobs[0] in error.fields'],
)  # fmt: skip
def test_other_code_passes(code: str) -> None:
    assert logic_on_english(code) == []


# ---------------------------------------------------------------- skips say their kind


def skips_without_a_kind(source: str) -> list[int]:
    """Lines that skip a test for a reason that does not begin with a kind of ``SKIPS``."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        named = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
        if node.func.attr in ("skipif", "importorskip"):
            reasons: list[ast.expr] = named or [ast.Constant("")]
        elif node.func.attr == "skip":
            reasons = named or node.args[:1] or [ast.Constant("")]
        else:
            continue
        for reason in reasons:
            start = reason.values[0] if isinstance(reason, ast.JoinedStr) else reason
            if isinstance(start, ast.Constant) and isinstance(start.value, str):
                if start.value.partition(":")[0] not in SKIPS:
                    lines.append(node.lineno)
            elif not isinstance(start, ast.Name):  # a name: the reason is made just above
                lines.append(node.lineno)
    return lines


def test_every_skip_says_its_kind() -> None:
    tests = Path(__file__).parents[1]
    offences = {
        path.relative_to(tests).as_posix(): lines
        for path in sorted(tests.rglob("*.py"))
        if (lines := skips_without_a_kind(path.read_text("utf-8")))
    }
    assert offences == {}


def test_a_skip_without_a_kind_is_found() -> None:
    assert skips_without_a_kind("pytest.skip('no GPU')") == [1]
    assert skips_without_a_kind("pytest.importorskip('torch')") == [1]
    assert skips_without_a_kind("pytest.mark.skipif(x, reason=f'{y} missing')") == [1]
    assert skips_without_a_kind("pytest.skip(f'GPU: {why}')") == []


def test_the_last_line_counts_skips_by_kind() -> None:
    class Skipped:
        def __init__(self, reason: str) -> None:
            self.longrepr = ("file.py", 3, f"Skipped: {reason}")

    skipped = [Skipped("GPU: none"), Skipped("GPU: no driver"), Skipped("browser: none")]
    line = last_line({"passed": [1, 2], "error": [1], "skipped": skipped})
    counts = {part.split()[1]: int(part.split()[0]) for part in line.partition(":")[0].split(", ")}
    assert counts == {"passed": 2, "failed": 1, "skipped": 3}
    assert " 2 GPU" in line
    assert SKIPS["browser"] in line
    assert last_line({"passed": [1]}).split(", ")[1:] == ["0 failed", "0 skipped"]


def test_a_limit_of_time_starts_no_test_and_says_so() -> None:
    asked = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/unit/test_keys.py",
    ]
    env = os.environ | {"MISMATCH_TESTS_UNTIL": "1", "MISMATCH_TESTS_FIRST": "7"}
    tests = Path(__file__).parents[2]
    shown = subprocess.run(asked, cwd=tests, env=env, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    last = shown.stdout.splitlines()[-1]
    assert last.startswith("0 passed")
    assert SKIPS["time"] in last


def test_every_file_of_tests_comes_first_once() -> None:
    assert turned("aabbac", 0) == ["a", "b", "c"]
    assert turned("aabbac", 4) == ["b", "c", "a"]
    assert {turned("abc", number)[0] for number in range(7, 10)} == {"a", "b", "c"}
    assert turned("", 4) == []


# ---------------------------------------------------------------- no tests of English


def long_texts(node: ast.AST) -> bool:
    """Whether a text of four words or more stands in it."""
    texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return any(isinstance(text, str) and len(text.split()) >= 4 for text in texts)


def phrases_asserted(source: str) -> list[int]:
    """Lines of asserts that hold a phrase: they break where words change and nothing else does.

    A test asserts on fields, numbers and names, and takes a text from where it is made.
    """
    nodes = ast.walk(ast.parse(source))
    return [node.lineno for node in nodes if isinstance(node, ast.Assert) and long_texts(node.test)]


def phrases_matched(source: str) -> list[int]:
    """Lines of ``pytest.raises(…, match=…)`` likewise."""
    keywords = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.keyword))
    return [each.value.lineno for each in keywords if each.arg == "match" and long_texts(each)]


def test_tests_hold_no_more_phrases() -> None:
    sources = [path.read_text("utf-8") for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert sum(len(phrases_asserted(source)) for source in sources) <= MOST_PHRASES
    assert sum(len(phrases_matched(source)) for source in sources) <= MOST_MATCHES


def test_phrases_in_tests_are_found() -> None:
    phrase = "of these are less"
    offences = ('assert "{}" in said', 'assert said == f"{{n}} {}"', 'assert f(x, y="{}")')
    others = ("assert WORDS in said, '{}'", "said = '{}'", "assert 'of these are' in said")
    for code in offences:
        assert phrases_asserted(code.format(phrase)) == [1]
    for code in others:
        assert phrases_asserted(code.format(phrase)) == []
    matched, beside = "raises(E, match='{}')", "raises(E, match='three words only', other='{}')"
    assert phrases_matched(matched.format(phrase)) == [1]
    assert phrases_matched(beside.format(phrase)) == []
