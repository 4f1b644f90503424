"""Every fix has a page, made of the catalogue and its guide; the guides hold no orphans."""

import re

import pytest

from mismatch.errors import MismatchError
from mismatch.experiments.fixes.catalogue import FIXES
from mismatch.experiments.fixes.guides import guide_of, guides, sentence, settings_of
from mismatch.metrics.correction_settings import recipes
from mismatch.metrics.importance_weights import Settings
from tools.fix_pages import HEADINGS, pages, tables

IDS = [fix.id for fix in FIXES]


def page_of(name):
    return pages()[f"reference/fixes/{name}.md"]


def test_every_fix_has_a_guide_and_no_guide_is_an_orphan():
    assert sorted(guides()) == sorted(IDS)
    assert len(IDS) == len(set(IDS))


@pytest.mark.parametrize("name", IDS)
def test_a_page_has_all_its_parts(name):
    text = page_of(name)
    assert text.startswith(f"# `{name}`\n")
    assert tuple(re.findall("^## (.+)$", text, re.M)) == HEADINGS
    for body in re.split("^## .+$", text, flags=re.M)[1:]:
        assert len(body.split()) >= 5
    assert f"--fix {name}" in text
    assert f"(fixes/{name}.md)" in tables()


@pytest.mark.parametrize("name", IDS)
def test_verl_and_trl_are_spoken_of_with_the_source_that_was_read(name):
    settings = {setting.framework: setting for setting in guide_of(name).settings}
    assert {"verl", "TRL"} <= settings.keys() or name == "veto"
    for setting in settings.values():
        assert setting.source
        assert setting.lines or setting.remark, "neither a setting nor a reason for none"
    if "verl" in settings:
        assert settings["verl"].source.startswith("verl 0.9.1, verl/")
        assert settings["TRL"].source.startswith("TRL 1.16.0, trl/")


@pytest.mark.parametrize("name", IDS)
def test_evidence_names_its_source_and_says_when_it_was_not_read_there(name):
    facts = guide_of(name).evidence
    assert facts
    text = page_of(name)
    flat = " ".join(text.split())
    for fact in facts:
        source = fact.source.replace("|", "\\|")
        assert (f"{source}; second-hand" in flat) is not fact.read


def test_settings_of_the_loss_are_those_of_the_corrections():
    for fix in FIXES:
        if fix.side == "estimator" and not fix.hides:
            entries = recipes(fix.corrects, Settings())
            assert settings_of(fix.id)[: len(entries)] == entries


def test_no_guide_is_an_error_that_lists_them():
    with pytest.raises(MismatchError, match="no guide") as raised:
        guide_of("magic")
    assert "router-replay" in raised.value.fix
    assert settings_of("magic") == ()


def test_a_name_of_a_setting_is_not_capitalised():
    assert sentence("the default") == "The default."
    assert sentence("use_x stays") == "use_x stays."
