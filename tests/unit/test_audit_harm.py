"""What a kernel does to the whole model, on tokens that it samples or that a run has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mismatch.models
from mismatch.errors import MismatchError
from mismatch.processes.kernels.cases import Candidate
from mismatch.processes.kernels.isolation import AuditSpec
from mismatch.processes.kernels.model_impact import ImpactSource, measure_impact

TINY = str(Path(mismatch.models.__file__).parent / "tiny-gpt-oss")
SOURCE = ImpactSource(AuditSpec(TINY), tokens=192)
CHOSEN = "mismatch_sinks"


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    from mismatch.training.attention.resolve import register_kernels

    register_kernels()


@pytest.mark.slow
def test_dropped_sinks_are_seen_in_logprobs_and_gradients() -> None:
    harm = measure_impact(SOURCE, Candidate("sdpa", "transformers", "sdpa"), CHOSEN)
    own = harm.baseline
    assert own is not None
    assert own.baseline is None
    assert harm.tokens == own.tokens > 100
    assert harm.sink_gradient_error == 1.0
    assert own.sink_gradient_error is not None
    assert own.sink_gradient_error < 0.2
    assert harm.mean_abs_delta > 5 * own.mean_abs_delta > 1e-3  # bfloat16's own error
    assert harm.k3_kl > 10 * own.k3_kl
    assert harm.gradient_cosine is not None
    assert own.gradient_cosine is not None
    assert harm.gradient_cosine < 0.7 < 0.98 < own.gradient_cosine
    assert harm.gradient_error is not None
    assert own.gradient_error is not None
    assert harm.gradient_error > 5 * own.gradient_error


@pytest.mark.slow
def test_a_missing_sink_gradient_shows_there_alone() -> None:
    from mismatch.training.user_kernels import register_attention
    from tests.planted_attention import no_sink_gradient

    name = register_attention(f"{no_sink_gradient.__module__}:no_sink_gradient")
    harm = measure_impact(SOURCE, Candidate("mine", "yours", name), CHOSEN)
    assert harm.baseline is not None
    assert harm.sink_gradient_error == 1.0
    assert harm.mean_abs_delta < 2 * harm.baseline.mean_abs_delta


def test_documents_that_see_each_other_do_harm_where_rows_are_packed() -> None:
    from mismatch.training.user_kernels import register_attention

    name = register_attention("tests.planted_attention:leaking_packing")
    leaking = Candidate("mine", "yours", name)
    alone = measure_impact(SOURCE, leaking, CHOSEN)
    packed = measure_impact(SOURCE, leaking, CHOSEN, packed=True)
    assert alone.baseline is not None
    assert packed.baseline is not None
    assert alone.mean_abs_delta < 2 * alone.baseline.mean_abs_delta
    assert packed.mean_abs_delta > 5 * packed.baseline.mean_abs_delta
    assert packed.baseline.mean_abs_delta < 2 * alone.baseline.mean_abs_delta


def test_the_trainer_s_own_kernel_has_no_baseline_but_itself() -> None:
    harm = measure_impact(SOURCE, Candidate("sink-sdpa", "ours", CHOSEN), CHOSEN)
    assert harm.baseline is None
    assert harm.mean_abs_delta > 0


def test_a_model_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mismatch.processes.kernels.costs.free_bytes", lambda device: 1000)
    with pytest.raises(MismatchError, match=f"{1000 / 2**30:.3g} GiB"):
        measure_impact(
            ImpactSource(AuditSpec(TINY, seed=5)), Candidate("sdpa", "transformers", "sdpa"), CHOSEN
        )


# ---------------------------------------------------------------- tokens


def test_tokens_of_a_run_are_its_sequences(tmp_path: Path) -> None:
    from mismatch.processes.kernels.model_impact import from_run
    from mismatch.run.store import save_rollout
    from tests.made_run import rollout

    source = rollout()
    save_rollout(tmp_path, source)
    rows = from_run(str(tmp_path))
    assert [len(row.ids) for row in rows] == [
        int(n) for n in source.offsets[1:] - source.offsets[:-1]
    ]
    assert torch.cat([row.ids for row in rows]).tolist() == source.token_ids.tolist()
    assert sum(int(row.acting.sum()) for row in rows) == source.n_actions


def test_an_answer_ends_with_its_first_stop_token() -> None:
    from mismatch.processes.kernels.model_impact import ends_of

    new = torch.tensor([[4, 6, 0, 0], [4, 5, 4, 5], [5, 4, 4, 7]])
    assert ends_of(new, [6, 7]) == [2, 4, 4]
    assert ends_of(new, 4) == [1, 1, 2]
    assert ends_of(new, None) == [4, 4, 4]


def test_the_first_token_of_a_row_is_predicted_by_nothing() -> None:
    from mismatch.processes.kernels.model_impact import Row

    acting = torch.ones(3, dtype=torch.bool)
    assert Row.of(torch.arange(3), acting).acting.tolist() == [False, True, True]
    assert acting.all()
