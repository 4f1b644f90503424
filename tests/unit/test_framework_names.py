"""Every number is a documented function; every alias is data that says how it differs and why."""

from __future__ import annotations

import inspect
import math
import re
from typing import get_args

import numpy as np
import pytest

import mismatch.metrics
from mismatch.analysis.corrections import recipes
from mismatch.cli.options import Framework
from mismatch.metrics import METRICS, describe, framework_formulas, framework_names
from mismatch.metrics.framework_formulas import value_of
from mismatch.metrics.frameworks import CORRECTING, FRAMEWORKS

KNOWN_ARRAYS = {"delta", "rollout", "train", "sequence"}
EVERY_ALIAS = [
    (metric, alias) for metric, aliases in framework_names.ALIASES.items() for alias in aliases
]


@pytest.mark.parametrize("name", METRICS)
def test_every_number_is_a_public_function_with_a_full_docstring(name):
    attribute, metric = name.replace(".", "_"), METRICS[name]
    function = getattr(mismatch.metrics, attribute)
    assert attribute in mismatch.metrics.__all__
    assert inspect.isfunction(function)
    assert function.__name__ == attribute
    assert tuple(inspect.signature(function).parameters)[: len(metric.needs)] == metric.needs
    text = inspect.getdoc(function) or ""
    assert text == describe.docstring(metric)
    for part in ("Args:", "Returns:", "Raises:", "EmptyComparison", "Interval:", "Source:"):
        assert part in text, part
    assert f"unit: {metric.unit}" in text
    for need in metric.needs:
        assert re.search(rf"^    {need}: (\[[A-Z]|see docs)", text, re.MULTILINE), need
    assert len(describe.formula(metric)) > 10
    labels = [alias.label for alias in framework_names.of(name)]
    assert all(label in text for label in labels)
    assert labels or "no alias known" in text


def test_the_formula_leaves_out_how_it_is_computed():
    assert "Terms hold" not in describe.formula(METRICS["ratio_mean"])
    assert "delta²/2," in describe.formula(METRICS["k2_kl"])


@pytest.mark.parametrize(("metric", "alias"), EVERY_ALIAS, ids=lambda x: getattr(x, "label", x))
def test_an_alias_is_complete(metric, alias):
    assert metric in METRICS
    assert alias.framework in FRAMEWORKS
    exact = any(c.isdigit() for c in alias.source)  # a version or a commit
    assert exact or "second-hand" in alias.source
    another = alias.sign == "opposite" or alias.reduction != METRICS[metric].reduction
    if another:
        assert alias.value is not None, "it is another number, so it must be computable"
    if alias.value is not None:
        assert alias.remark(METRICS[metric].reduction)
        assert set(inspect.signature(alias.value).parameters) <= KNOWN_ARRAYS


def test_a_name_is_given_to_a_metric_only_once():
    labels = [(metric, alias.label) for metric, alias in EVERY_ALIAS]
    assert len(set(labels)) == len(labels)


def test_the_flag_offers_every_framework_whose_source_was_read():
    second_hand = {alias.framework for _, alias in EVERY_ALIAS if "second-hand" in alias.source}
    assert set(get_args(Framework)) == set(FRAMEWORKS) - second_hand
    assert set(recipes.FRAMEWORKS) - {"AReaL"} == set(CORRECTING)


def test_every_convention_belongs_to_an_alias():
    used = {alias.value for _, alias in EVERY_ALIAS}
    helpers = {
        "value_of", "mean_over_sequences", "verl_weights", "trl_sequence_ratios",
    }  # fmt: skip
    own = {
        function
        for name, function in inspect.getmembers(framework_formulas, inspect.isfunction)
        if function.__module__ == framework_formulas.__name__ and not name.startswith("_")
    }
    assert {f.__name__ for f in own - used} == helpers


def test_names_of_one_framework():
    assert [alias.name for alias in framework_names.of("k3_kl", "verl")] == ["rollout_corr/k3_kl"]
    assert len(framework_names.of("k3_kl")) > 3
    assert framework_names.of("k2_kl") == framework_names.of("tomorrow_kl") == ()


def test_how_it_differs_in_words():
    (areal,) = framework_names.of("kl", "areal")
    sign, condition, *_ = areal.remark("token").split("; ")
    assert sign == "opposite sign"
    assert "rejection_sampling" in condition
    (same,) = framework_names.of("chi2_token", "verl")
    assert same.remark("token") == ""
    (trl,) = framework_names.of("ratio_mean", "trl")
    assert "product" in trl.remark("token")
    assert "above 3" in trl.remark("token")


def test_a_value_that_cannot_be_computed_is_none():
    delta, sequence = np.array([0.1, 0.2]), np.array([0, 0])
    arrays = {"delta": delta, "sequence": sequence}
    assert value_of(framework_formulas.probs_diff_std, arrays) is None  # no logprobs
    huge = {"delta": np.array([800.0]), "sequence": np.array([0])}
    assert value_of(framework_formulas.sample_ratio, huge) is None
    assert value_of(framework_formulas.sample_abs, arrays) == pytest.approx(0.15)
    arrays = {"rollout": np.zeros(1), "train": np.zeros(1)}
    assert value_of(framework_formulas.probs_diff_std, arrays) is None  # A - 1 = 0


def test_bounds_in_words():
    ranges = {describe.values(metric) for metric in METRICS.values()}
    assert {"any", "0 and above", "0 to 1", "-1 to 1"} <= ranges
    infinite = [m for m in METRICS.values() if math.isinf(m.bounds[0])]
    assert all(describe.values(metric) == "any" for metric in infinite)
