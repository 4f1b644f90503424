"""Every number is a public function; every alias is data that says how it differs and why."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

import mismatch.metrics
from mismatch.cli.flags import Framework
from mismatch.frameworks import CORRECTING, FRAMEWORKS
from mismatch.metrics import METRICS, framework_names
from mismatch.metrics.correction_settings import recipes
from mismatch.metrics.importance_weights import Settings

EVERY_ALIAS = [
    (metric, alias) for metric, aliases in framework_names.aliases().items() for alias in aliases
]


@pytest.mark.parametrize("name", METRICS)
def test_every_number_is_a_public_function_with_its_formula(name):
    attribute, metric = name.replace(".", "_"), METRICS[name]
    function = getattr(mismatch.metrics, attribute)
    assert attribute in mismatch.metrics.__all__
    assert inspect.isfunction(function)
    assert function.__name__ == attribute
    assert tuple(inspect.signature(function).parameters)[: len(metric.needs)] == metric.needs
    assert len(function.__doc__) > 10


@pytest.mark.parametrize(("metric", "alias"), EVERY_ALIAS, ids=lambda x: getattr(x, "label", x))
def test_an_alias_is_complete(metric, alias):
    assert metric in METRICS
    assert alias.framework in FRAMEWORKS
    exact = any(c.isdigit() for c in alias.source)  # a version or a commit
    assert exact or "second-hand" in alias.source
    assert alias.sign in ("same", "opposite")
    assert alias.reduction != METRICS[metric].reduction, "leave it out where it is ours"
    if alias.sign == "opposite" or alias.reduction:
        assert alias.differs
    if alias.differs:
        assert alias.remark


def test_a_name_is_given_to_a_metric_only_once():
    labels = [(metric, alias.label) for metric, alias in EVERY_ALIAS]
    assert len(set(labels)) == len(labels)


def test_the_flag_offers_every_framework_whose_source_was_read():
    second_hand = {alias.framework for _, alias in EVERY_ALIAS if "second-hand" in alias.source}
    assert set(get_args(Framework)) == set(FRAMEWORKS) - second_hand
    assert [recipe.framework for recipe in recipes("tis-token", Settings())] == list(CORRECTING)


def test_names_of_one_framework():
    assert [alias.name for alias in framework_names.of("k3_kl", "verl")] == ["rollout_corr/k3_kl"]
    assert len(framework_names.of("k3_kl")) > 3
    assert framework_names.of("k2_kl") == framework_names.of("tomorrow_kl") == ()


def test_how_it_differs_in_words():
    (areal,) = framework_names.of("kl", "areal")
    sign, condition, *_ = areal.remark.split("; ")
    assert sign == "opposite sign"
    assert "rejection_sampling" in condition
    (same,) = framework_names.of("k3_kl", "verl")
    assert (same.remark, same.differs) == ("", False)
    (trl,) = framework_names.of("ratio_mean", "trl")
    assert "product" in trl.remark
    assert "above 3" in trl.remark
