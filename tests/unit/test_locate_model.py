"""`mismatch locate --model`: the short run that it makes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mismatch.cli.flags import Flags
from mismatch.cli.locate import MAX_TOKENS, PROMPTS, small_run
from mismatch.cli.session import narrator
from mismatch.errors import MismatchError
from mismatch.experiments.scoring_passes import training_passes
from mismatch.models import EMBEDDED
from mismatch.pipeline import commands, preflight


def flags(**values: Any) -> Flags:
    base = {"revision": None, "trust_remote_code": False, "seed": 3, "out": None, "model": None}
    return Flags({**base, **values})


def test_a_model_gets_a_short_run_with_the_trainers_own_pass_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(preflight, "preflight", lambda spec: None)
    monkeypatch.setattr(commands, "run_check", lambda *given, **named: ran.append(given))
    folder = tmp_path / "run"
    assert small_run(flags(model="tiny-gpt-oss", out=folder), narrator(silent=True)) == folder
    ((spec, run_dir, *_),) = ran
    assert run_dir == folder
    assert spec.rollout.engine.model == spec.train.model == str(EMBEDDED["tiny-gpt-oss"])
    assert spec.rollout.prompts.num_prompts == PROMPTS
    assert (spec.rollout.sampling.max_tokens, spec.rollout.sampling.seed) == (MAX_TOKENS, 3)
    assert len(training_passes(spec)) == 1


def test_without_a_run_and_a_model_there_is_nothing_to_locate() -> None:
    with pytest.raises(MismatchError):
        small_run(flags(), narrator(silent=True))
