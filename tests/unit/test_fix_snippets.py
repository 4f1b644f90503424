"""What a report offers to copy is what its fix measured, or says that it is not.

Each setting of verl and of TRL goes through the reader of that framework's own configuration, and
has to give the check that the fix gives; one that selects a kernel has to name the kernel.
"""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mismatch.experiments.fixes.base import VALUE
from mismatch.experiments.fixes.catalogue import FIXES, fix_named
from mismatch.experiments.fixes.guides import settings_of
from mismatch.experiments.results import FixOutcome
from mismatch.features.presets.trl import follow_trl, read_trl_config
from mismatch.features.presets.verl import follow_verl, read_verl_config
from mismatch.frameworks import KERNEL_COSTS, Recipe
from mismatch.reports.sections import page
from mismatch.reports.sections.fixes import with_proof
from mismatch.specs import CheckSpec
from tests.checkpoints import configuration
from tests.fixes_fixture import make_table
from tests.preset_machine import be_on
from tests.reports_fixture import make_failing_report
from tests.unit.test_verl_config import PRINTED


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    be_on(monkeypatch)


NOT_FOLLOWED = {"ids", "4 sequences"}  # Megatron's keys; a check counts a batch in tokens
RECIPES = [
    pytest.param(fix.id, recipe, id=f"{fix.id}-{recipe.framework}-{recipe.selects}")
    for fix in FIXES
    if fix.side != "estimator"
    for recipe in settings_of(fix.id)
    if recipe.lines
    and recipe.selects not in NOT_FOLLOWED
    and (recipe.framework == "verl" or recipe.lines[0].startswith("GRPOConfig("))
]


def followed(recipe: Recipe, folder: Path) -> CheckSpec:
    """Return the check that a framework's configuration with these lines describes."""
    if recipe.framework == "verl":
        path = folder / "ppo.yaml"
        path.write_text(PRINTED, "utf-8")
        overrides = [line.removeprefix("+") for line in recipe.lines]
        return follow_verl(read_verl_config(path, overrides), CheckSpec()).spec
    call = ast.parse("\n".join(recipe.lines), mode="eval").body
    assert isinstance(call, ast.Call)
    fields = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    experts = fields.get("model_init_kwargs", {}).pop("experts_implementation", None)
    path = folder / "grpo.json"
    path.write_text(json.dumps({"bf16": True} | fields), "utf-8")
    spec = follow_trl(read_trl_config(path), CheckSpec()).spec
    # A field of transformers that TRL hands on, and that a check has by the same name.
    return replace(spec, train=replace(spec.train, experts=experts)) if experts else spec


def plain(spec: CheckSpec) -> dict[str, Any]:
    """Return the fields of a check by their path; defaults that are written out are left out."""
    found = leaves(asdict(spec))
    if found[".train.master_dtype"] == found[".train.dtype"]:
        found[".train.master_dtype"] = "auto"
    args = found[".rollout.engine.args"]
    found[".rollout.engine.args"] = [pair for pair in args if pair[1] != "auto"]
    return found


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {k: v for key in tree for k, v in leaves(tree[key], f"{path}.{key}").items()}


@pytest.mark.parametrize(("name", "recipe"), RECIPES)
def test_a_setting_of_a_framework_gives_the_check_of_its_fix_or_says_what_it_gives(
    name: str, recipe: Recipe, tmp_path: Path
) -> None:
    fix = fix_named(name)
    spec = followed(recipe, tmp_path)
    if recipe.selects in KERNEL_COSTS:
        assert spec.train.attention == recipe.selects
        return
    wanted = fix.taking(VALUE if fix.values else "").apply(spec)
    assert (plain(wanted) == plain(spec)) is not bool(recipe.selects)


def kernels_shown(kernel: str) -> dict[str, str]:
    """Return setting -> note of the first answer, where the best fix ran this kernel."""
    table, (report, _) = make_table(), make_failing_report()
    rows = tuple(replace(row, kernel=kernel) for row in table.outcomes)
    shown = page(report.with_analyses(fixes=replace(table, outcomes=rows))).answers[0]
    assert kernel in shown.text
    return {" ".join(block.lines): block.note for block in shown.settings}


def test_only_the_kernel_that_ran_is_called_measured() -> None:
    """As a CPU run has it: sink-sdpa ran, which no framework has."""
    for kernel in ("sink-sdpa", *KERNEL_COSTS):
        notes = kernels_shown(kernel)
        measured = [lines for lines, note in notes.items() if note.startswith("measured")]
        assert all(kernel in lines for lines in measured)
        assert len(measured) == (0 if kernel == "sink-sdpa" else 2)  # verl and TRL
        assert all(note for note in notes.values())


def test_the_kernel_that_keeps_no_scores_comes_first_and_the_costly_one_has_its_cost() -> None:
    notes = kernels_shown("sink-sdpa")
    for framework in ("override_config", "GRPOConfig"):
        names = [lines for lines in notes if framework in lines and "attn" in lines]
        assert ["eager" in lines for lines in names] == [False, True]
    for lines, note in notes.items():
        assert ("98 GB" in note) == ("=eager" in lines or '"eager"' in lines)


def test_a_value_is_that_of_the_fix_that_was_measured() -> None:
    row = FixOutcome("experts-implementation=batched_mm", "train", "")
    lines = [text for recipe, _ in with_proof(row, row.id) for text in recipe.lines]
    assert lines
    assert all("batched_mm" in text for text in lines)
    ids, weights = (
        FixOutcome(f"router-replay={value}", "train", "")
        for value in fix_named("router-replay").values
    )
    assert {proof[:10] for recipe, proof in with_proof(ids, ids.id) if recipe.lines} == {
        "the same s"
    }
    assert {proof[:7] for recipe, proof in with_proof(weights, weights.id) if recipe.lines} == {
        "not run"
    }


def test_the_kernels_of_the_settings_honour_sinks_in_transformers() -> None:
    """Their names are those that transformers runs for gpt-oss, not aliases of other kernels."""
    from mismatch.training.attention.resolve import resolve_attention

    config = configuration("gpt_oss")
    for kernel in KERNEL_COSTS:
        attention = resolve_attention(kernel, config)
        assert (attention.label, attention.honours_sinks) == (kernel, True)
    assert resolve_attention("auto", config).label not in KERNEL_COSTS
