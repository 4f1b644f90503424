"""What every public metric makes of the inputs that users have at hand: right, or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mismatch.metrics
from mismatch.errors import MismatchError
from mismatch.metrics import METRICS

ROLLOUT = -np.array([1.0, 2.0, 3.0, 4.0])
TRAIN = -np.array([1.5, 2.0, 3.0, 4.25])
ARRAYS = {
    "rollout": ROLLOUT,
    "train": TRAIN,
    "delta": TRAIN - ROLLOUT,
    "sequence": np.array([0, 0, 1, 1]),
    "train_entropy": np.array([1.0, 2.0, 1.0, 1.0]),
    "rollout_top1": np.array([1, 2, 3, 4]),
    "train_top1": np.array([1, 2, 3, 5]),
}
NAMES = [name for name, metric in METRICS.items() if set(metric.needs) <= set(ARRAYS)]
FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "a list": list,
    "a tensor with grad": lambda a: torch.tensor(a, requires_grad=a.dtype.kind == "f"),
    "a bf16 tensor": lambda a: torch.tensor(a).bfloat16() if a.dtype.kind == "f" else a,
    "fp16": lambda a: a.astype(np.float16) if a.dtype.kind == "f" else a.astype(np.int32),
}


def value(name: str, form: Callable[[np.ndarray], Any] = np.asarray, **given: Any) -> float | None:
    """None: refused with an error of ours."""
    metric = getattr(mismatch.metrics, name.replace(".", "_"))
    arrays = ARRAYS | given
    try:
        return metric(*(form(arrays[need]) for need in METRICS[name].needs))
    except MismatchError:
        return None


def test_most_metrics_take_these_arrays():
    assert len(NAMES) > 20


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_numbers_gives_the_same(form):
    """The numbers are exact in every dtype, so that nothing may differ."""
    for name in NAMES:
        assert value(name, FORMS[form]) == value(name), name


def test_integers_do_not_wrap():
    odd = {
        "delta": np.array([1, 2, 0, 255], np.uint8),
        "rollout": np.array([-1, -2, -3, -100], np.int8),
        "train": np.array([-2, -2, -3, 100], np.int8),
    }
    real = {name: array.astype(np.float64) for name, array in odd.items()}
    for name in NAMES:
        assert value(name, **odd) == value(name, **real), name
    assert value("kl", **odd) == -64.5


def test_one_element_has_a_value_or_an_error_and_none_at_all_is_an_error():
    for name in NAMES:
        single = value(name, lambda array: array[:1])
        assert single is None or isinstance(single, float), name
        assert value(name, lambda array: array[:0]) is None, name
    assert value("k3_kl", lambda array: array[:1]) == pytest.approx(np.expm1(-0.5) + 0.5)
