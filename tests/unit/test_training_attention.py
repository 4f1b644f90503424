"""A kernel that drops attention sinks is refused, unless that fault is planted by name."""

from __future__ import annotations

import pytest

from mismatch.errors import MismatchError
from mismatch.training.attention.resolve import PLANTED, has_sinks, resolve_attention
from mismatch.training.source import skeleton
from tests.checkpoints import configuration


def test_sinks_are_found() -> None:
    assert has_sinks(skeleton(configuration("gpt_oss")))
    assert not has_sinks(skeleton(configuration("llama")))


@pytest.mark.parametrize(
    ("family", "name", "runs", "honours"),
    [
        ("gpt_oss", "auto", "sink-sdpa", True),
        ("gpt_oss", "eager", "eager", True),
        ("gpt_oss", "sink-sdpa", "sink-sdpa", True),
        ("gpt_oss", "no-sinks", PLANTED, False),
        ("llama", "auto", "sdpa", None),
        ("llama", "sdpa", "sdpa", None),
        ("llama", "eager", "eager", None),
    ],
)
def test_resolution(family: str, name: str, runs: str, honours: bool | None) -> None:
    attention = resolve_attention(name, configuration(family))
    assert (attention.label, attention.honours_sinks) == (runs, honours)
    assert attention.requested == name


@pytest.mark.parametrize(
    ("family", "name", "word"),
    [
        ("gpt_oss", "sdpa", "sinks"),
        ("gpt_oss", "no-such-kernel", "no-such-kernel"),
        ("llama", "no-sinks", r"--attention no-sinks.*llama"),
        ("llama", "no-such-kernel", "no-such-kernel"),
    ],
)
def test_refusals(family: str, name: str, word: str) -> None:
    with pytest.raises(MismatchError, match=word) as caught:
        resolve_attention(name, configuration(family))
    assert "auto" in caught.value.fix


def test_a_kernel_that_may_drop_sinks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import mismatch.training.attention.resolve as attention

    monkeypatch.setattr(attention, "_transformers_choice", lambda name, model: "hub/fast-attn")
    assert resolve_attention("flash_attention_2", configuration("llama")).label == "hub/fast-attn"
    with pytest.raises(MismatchError, match=r"hub/fast-attn.*sinks of gpt_oss"):
        resolve_attention("flash_attention_2", configuration("gpt_oss"))


@pytest.mark.parametrize(("name", "runs"), [("auto", "eager"), ("sink-sdpa", None)])
def test_families_that_compute_with_their_masks_stay_eager(
    monkeypatch: pytest.MonkeyPatch, name: str, runs: str | None
) -> None:
    # DeepSeek-V4 and Hunyuan-V4 declare no flash kernel for that reason.
    import transformers

    monkeypatch.setattr(transformers.GptOssForCausalLM, "_supports_flash_attn", False)
    if runs is None:
        with pytest.raises(MismatchError, match=f"--attention {name} .*masks"):
            resolve_attention(name, configuration("gpt_oss"))
    else:
        assert resolve_attention(name, configuration("gpt_oss")).label == runs
