"""The configuration of a loaded model is read off its modules, alike for engines and trainers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mismatch.analysis.diagnosis.detectors.stated import configurations
from mismatch.models.resolved import resolved
from tests import drawn_pair as drawn
from tests import families


def named(engine, trainer):
    """The causes that a difference between two configurations names."""
    case = drawn.other_function(0, 1.0)
    case = replace(
        case,
        engine=replace(case.engine, fingerprint={"config": engine}),
        trainer=replace(case.trainer, fingerprint={"config": trainer}),
    )
    return {finding.cause for finding in configurations(case).findings if finding.certain}


class Rotary(nn.Module):
    """An engine's: cosine and sine of every position, in a dtype, with a factor on both."""

    def __init__(self, frequencies, dtype, factor=1.0):
        super().__init__()
        angles = torch.outer(torch.arange(64.0), torch.tensor(frequencies))
        table = torch.cat([angles.cos(), angles.sin()], dim=1) * factor
        self.register_buffer("cos_sin_cache", table.to(dtype))


class Attention(nn.Module):
    """An engine's: what the kernel is given stands on ``impl``."""

    def __init__(self, **settings):
        super().__init__()
        self.sliding_window = settings.pop("window", None)
        self.impl = SimpleNamespace(scale=0.125, logits_soft_cap=0, **settings)


class Engine(nn.Module):
    def __init__(self, rotary, attention):
        super().__init__()
        self.rotary, self.attention = rotary, attention


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss", "gemma2"])
def test_a_family_resolves_to_what_its_configuration_says(family):
    model = families.tiny(family)
    fields, config = resolved(model), model.config
    assert fields["rms_norm_eps"] == [pytest.approx(config.rms_norm_eps)]
    assert fields["final_logit_softcapping"] == (
        getattr(config, "final_logit_softcapping", None) or 0
    )
    assert len(fields["sliding_window"]) == config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    wanted = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert fields["sliding_window"] == wanted
    if family in ("qwen3_moe", "gpt_oss"):
        assert fields["num_experts_per_tok"] == [config.num_experts_per_tok]


def test_values_are_those_that_compute_and_not_those_of_the_configuration():
    model = families.tiny("gpt_oss")
    before = resolved(model)
    model.model.rotary_emb.attention_scaling = 1.0
    model.model.norm.variance_epsilon = 1e-3
    after = resolved(model)
    assert named(before, after) == {"yarn-attention-factor", "norm-eps"}
    assert named(before, before) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_s_table_is_the_trainer_s_frequencies(dtype):
    names = ("rope_frequencies", "attention_factor")
    trainer = {name: resolved(families.tiny("gpt_oss"))[name] for name in names}
    (frequencies,), (factor,) = trainer.values()

    def engine(frequencies, factor):
        fields = resolved(Engine(Rotary(frequencies, dtype, factor), Attention()))
        return {name: fields[name] for name in names}

    assert named(engine(frequencies, factor), trainer) == set()
    other = engine([f / 2 for f in frequencies], 1.0)
    assert named(other, trainer) == {"rope-config", "yarn-attention-factor"}


def test_sinks_windows_and_caps_of_an_engine():
    attention = Attention(window=8, sinks=None)
    attention.sinks = nn.Parameter(torch.zeros(2))
    fields = resolved(Engine(Rotary([1.0, 0.1], torch.float32), attention))
    assert fields["attention_sinks"] is False
    assert fields["sliding_window"] == [8]
    changed = {"attention_sinks": True, "sliding_window": [None], "final_logit_softcapping": 30.0}
    assert named(fields, fields | changed) == {"attention-sinks", "sliding-window", "logit-softcap"}


def test_a_window_that_no_sequence_reaches_past_is_none():
    assert named({"sliding_window": [10_000, None]}, {"sliding_window": [None, None]}) == set()
    assert named({"sliding_window": [10]}, {"sliding_window": [None]}) == {"sliding-window"}
