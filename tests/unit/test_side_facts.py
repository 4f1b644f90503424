"""What sides say is declared: the facts of stored runs, tables of names, and what mypy refuses."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from mypy import api

from mismatch.codec import Misfit, from_json
from mismatch.facts import SideFacts, known
from mismatch.pipeline.saved_runs import NOT_SETTINGS
from mismatch.reports.sections.ran import APART
from mismatch.trainers.protocol import Facts

ROOT = Path(__file__).parents[2]
TYPES = get_type_hints(SideFacts)
IN_A_REPORT = TYPES | {"weights": str}  # one digest of all
REPORTS = sorted((ROOT / "examples").glob("*/report.json"))


def odd(facts: dict[str, Any], types: dict[str, Any]) -> list[str]:
    """Facts that are not declared, or are of another type."""
    found = [key for key in facts if key not in types]
    for key in facts.keys() - set(found):
        try:
            from_json(types[key], facts[key], key)
        except Misfit as misfit:
            found.append(str(misfit))
    return found


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.parent.name)
def test_a_stored_run_holds_declared_facts_alone(path: Path) -> None:
    prints = json.loads(path.read_text("utf-8"))["fingerprints"]
    assert {side.partition(":")[0] for side in prints} >= {"vllm", "fsdp", "reference"}
    assert {
        side: wrong for side, facts in prints.items() if (wrong := odd(facts, IN_A_REPORT))
    } == {}


def test_an_odd_fact_is_found() -> None:
    facts = {"dtpe": "bf16", "world_size": "2", "sampling": {"top_p": 1.0}, "mode": "decode"}
    assert [each.partition(":")[0] for each in odd(facts, TYPES)] == ["dtpe", "world_size"]


def test_names_in_tables_are_those_of_facts() -> None:
    assert NOT_SETTINGS | set(APART) <= TYPES.keys()
    assert {field.name for field in fields(Facts)} - {"more"} <= TYPES.keys()


def test_facts_that_are_none_are_left_out() -> None:
    assert known({"dtype": None, "moe": False}) == {"moe": False}


def test_mypy_refuses_a_misspelt_name(tmp_path: Path) -> None:
    """Of a small type, because the package takes mypy a minute."""
    source = """from typing import TypedDict

class Small(TypedDict, total=False):
    dtype: str

def read(facts: Small) -> None:
    facts.get("dtype")
"""
    wrong = ['facts.get("dtpe")', 'facts["dtpe"]', 'facts["dtpe"] = ""', 'facts |= {"dtpe": ""}']
    (tmp_path / "reader.py").write_text(source + "".join(f"    {line}\n" for line in wrong))
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    plugins = ", ".join(str(ROOT / path) for path in config["plugins"])
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nplugins = {plugins}\n")
    options = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "cache")]
    said = api.run([*options, str(tmp_path / "reader.py")])[0].splitlines()
    assert {int(line.split(":")[1]) for line in said if ": error: " in line} == {8, 9, 10, 11}
