"""Rounding to MXFP4: the format's own arithmetic, and checkpoints rewritten with it."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from mismatch.errors import MismatchError
from mismatch.experiments.scoring_passes import training_passes
from mismatch.keys import REFERENCE, WEIGHTS
from mismatch.models import derived, mxfp4
from mismatch.models.digests import source_hashes
from mismatch.models.moe import require_forms
from mismatch.pipeline.commands import run_score
from mismatch.run import hub
from mismatch.run.store import save_rollout
from mismatch.specs import CheckSpec, TrainSpec, WeightsForm
from tests.checkpoints import make, make_mxfp4, rollout, tensors_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))


def _block(*values: float) -> torch.Tensor:
    return torch.tensor([*values, *[0.0] * (32 - len(values))])[None, :, None]


def _rounded(*values: float) -> list[float]:
    return mxfp4.rounded(_block(*values))[0, : len(values), 0].tolist()


def test_values_that_the_format_has_stay_what_they_are() -> None:
    held = [sign * v * 2.0**e for e in (-9, 0, 3) for v in mxfp4.VALUES for sign in (1, -1)]
    for chunk in (held[i : i + 16] for i in range(0, len(held), 16)):
        assert _rounded(*chunk) == chunk


@pytest.mark.parametrize(
    ("value", "nearest"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
)
def test_ties_go_to_the_even_code_and_signs_mirror(value: float, nearest: float) -> None:
    assert _rounded(6.0, value, -value) == [6.0, nearest, -nearest]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_every_byte_at_every_exponent_is_its_value_cast(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).repeat(255, 1).view(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8)[None, :, None].expand(1, 255, 16)
    signed = torch.tensor([*mxfp4.VALUES, *(-value for value in mxfp4.VALUES)]).double()
    nibbles = torch.stack([blocks & 15, blocks >> 4], -1).view(255, 512).long()
    values = torch.ldexp(signed[nibbles], scales[0, :, :1].int() - mxfp4.BIAS)
    assert_close(mxfp4.dequantise(blocks, scales, dtype)[0].t(), values.to(dtype), rtol=0, atol=0)


def test_above_six_saturates_and_the_exponent_is_the_largest_values() -> None:
    assert _rounded(7.0, 3.0) == [6.0, 3.0]  # 7 = 1.75 * 2^2: exponent 0, not 1
    blocks, scales = mxfp4.quantise(_block(8.0)[0].t())
    assert int(scales[0, 0]) == mxfp4.BIAS + 1
    assert int(blocks[0, 0, 0]) == 6  # 8 = 4 * 2^1


def test_zeros_and_values_under_the_smallest_exponent_give_zero() -> None:
    assert _rounded(0.0, 2.0**-140) == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_twice_changes_nothing_and_errors_stay_within_half_a_step(
    dtype: torch.dtype,
) -> None:
    weights = torch.randn(3, 96, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    once = mxfp4.rounded(weights)
    assert torch.equal(mxfp4.rounded(once), once)
    largest = weights.float().unflatten(1, (-1, 32)).abs().amax(2, keepdim=True)
    gap = (once.float() - weights.float()).unflatten(1, (-1, 32)).abs()
    assert bool((gap <= largest / 4).all())  # 7.99 saturates to 6: a quarter of the largest
    assert float(gap.mean()) > 0


def test_what_we_pack_is_unpacked_alike_by_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weights = torch.randn(2, 64, 48, generator=torch.Generator().manual_seed(1))
    packed = [mxfp4.quantise(expert.t()) for expert in weights]
    blocks, scales = (torch.stack(part) for part in zip(*packed, strict=True))
    theirs = convert_moe_packed_tensors(blocks, scales)
    assert_close(theirs, mxfp4.rounded(weights).to(theirs.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_number_is_refused(bad: float) -> None:
    with pytest.raises(MismatchError, match="NaN or infinite"):
        mxfp4.rounded(_block(1.0, bad))


def test_inputs_that_blocks_do_not_divide_are_refused() -> None:
    with pytest.raises(MismatchError, match="33 inputs"):
        mxfp4.quantise(torch.ones(2, 33))


# ---------------------------------------------------------------- halves of a pair

UP, DOWN = "m.layers.0.mlp.experts.gate_up_proj", "m.layers.0.mlp.experts.down_proj"


def _halves(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (2, 6, 3), generator=generator, dtype=torch.uint8)
    return blocks, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_halves_find_each_other_however_far_apart_they_come(dtype: torch.dtype) -> None:
    up, down, bias = _halves(1), _halves(2), torch.ones(2, 6)
    stored = [
        (f"{UP}_scales", up[1]),
        (f"{DOWN}_blocks", down[0]),
        (f"{UP}_bias", bias),
        (f"{UP}_blocks", up[0]),
        ("m.layers.0.norm_scales", bias),  # of no experts
        (f"{DOWN}_scales", down[1]),
    ]
    given = list(derived.unpacked(iter(stored), dtype, "cpu"))
    names = [f"{UP}_bias", UP, "m.layers.0.norm_scales", DOWN]
    assert [name for name, _ in given] == names
    assert sorted(derived.unpacked_names(name for name, _ in stored)) == sorted(names)
    found = dict(given)
    for name, pair in ((UP, up), (DOWN, down)):
        assert found[name].dtype == dtype
        assert torch.equal(found[name], mxfp4.dequantise(*pair, dtype))
    assert found[f"{UP}_bias"] is bias


def test_one_pair_is_held_at_a_time() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def layers() -> Iterator[tuple[str, torch.Tensor]]:
        for layer in range(5):
            blocks, scales = _halves(layer)
            held.append(weakref.ref(blocks))
            yield f"{layer}.experts.up_blocks", blocks
            del blocks
            yield f"{layer}.experts.up_scales", scales
            del scales

    for _ in derived.unpacked(layers(), torch.bfloat16):
        assert sum(each() is not None for each in held) <= 1


@pytest.mark.parametrize(("left", "lost"), [("blocks", "scales"), ("scales", "blocks")])
def test_a_half_alone_is_refused_once_all_has_come(left: str, lost: str) -> None:
    stored = [(f"{UP}_{left}", _halves(1)[0]), ("m.norm", torch.ones(1))]
    given = derived.unpacked(stored, torch.bfloat16)
    assert next(given)[0] == "m.norm"
    with pytest.raises(MismatchError, match=f"holds no {UP}_{lost}, .* in {UP}_{left}"):
        next(given)


def test_a_hub_gives_one_set_of_weights_and_all_that_goes_with_it() -> None:
    small = ["config.json", "chat_template.jinja", "merges.txt", "tokenizer.model", "code.py"]
    wanted = [*small, "model-00000-of-00002.safetensors"]
    others = ["original/model.safetensors", "original/config.json", "metal/model.bin", "a.bin"]
    others += ["consolidated.safetensors", "fp16/model.safetensors", "model.fp16.safetensors"]
    kept = filter_repo_objects(
        [*wanted, *others],
        allow_patterns=list(hub.FETCHED),
        ignore_patterns=list(hub.NOT_FETCHED),
    )
    assert list(kept) == wanted


# ---------------------------------------------------------------- whole checkpoints


def test_a_published_checkpoint_becomes_plain_numbers(tmp_path: Path) -> None:
    released = make_mxfp4(tmp_path / "released", tmp_path / "plain")
    checkpoint = derived.derive(released, "bf16")
    ours, plain = tensors_of(checkpoint), tensors_of(tmp_path / "plain")
    assert ours.keys() == plain.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor.float(), plain[name]), name
    assert "quantization_config" not in json.loads((checkpoint / "config.json").read_text())
    assert derived.derive(released, "mxfp4") == released  # has that form already
    assert derived.derive(tmp_path / "plain", "bf16") == tmp_path / "plain"


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_rounding_a_checkpoint_changes_its_experts_and_nothing_else(
    tmp_path: Path, family: str
) -> None:
    source = make(family, tmp_path / "model")
    before, after = tensors_of(source), tensors_of(derived.derive(source, "mxfp4-rounded"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    wanted = ("gate_up_proj", "down_proj", "gate_proj.weight", "up_proj.weight", "down_proj.weight")
    assert changed == {n for n in before if ".experts." in n and n.endswith(wanted)}
    name = sorted(changed)[0]
    inputs = before[name] if family == "gpt_oss" else before[name].t()[None]
    held = mxfp4.rounded(inputs)
    assert torch.equal(after[name], held if family == "gpt_oss" else held[0].t())


def test_packed_and_rounded_forms_hold_the_same_numbers(tmp_path: Path) -> None:
    source = make("gpt_oss", tmp_path / "model")
    packed, rounded = (derived.derive(source, form) for form in ("mxfp4", "mxfp4-rounded"))
    assert derived.is_mxfp4(packed)
    assert not derived.is_mxfp4(rounded)
    unpacked = derived.derive(packed, "bf16")
    stamp = (unpacked / "config.json").stat().st_mtime_ns
    derived.derive(packed, "bf16")  # of a derived checkpoint, whose record is not its record
    assert (unpacked / "config.json").stat().st_mtime_ns == stamp
    ours, theirs = tensors_of(unpacked), tensors_of(rounded)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_it_is_made_once_knows_its_origin_and_follows_a_change(tmp_path: Path) -> None:
    source = make("gpt_oss", tmp_path / "model")
    first = derived.derive(source, "mxfp4-rounded")
    stamp = (first / "config.json").stat().st_mtime_ns
    assert derived.derive(source, "mxfp4-rounded") == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    assert source_hashes(first) == source_hashes(source)
    assert not list(first.parent.glob("*.partial"))
    make("gpt_oss", source, seed=1)
    assert derived.derive(source, "mxfp4-rounded") != first


def test_large_checkpoints_are_written_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(derived, "SHARD_BYTES", 50_000)
    source = make("gpt_oss", tmp_path / "model")
    checkpoint = derived.derive(source, "mxfp4-rounded")
    files = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((checkpoint / derived.INDEX).read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert tensors_of(checkpoint).keys() == index["weight_map"].keys()


def test_what_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MismatchError, match="not of qwen3_moe"):
        derived.derive(make("qwen3_moe", tmp_path / "moe"), "mxfp4")
    with pytest.raises(MismatchError, match="no experts"):
        derived.derive(make("llama", tmp_path / "dense"), "mxfp4-rounded")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(MismatchError, match="GB are free"):
        derived.derive(make("gpt_oss", tmp_path / "full"), "mxfp4-rounded")


# ---------------------------------------------------------------- what goes wrong on the way


def _left(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache").rglob("*.partial")]


def test_a_damaged_checkpoint_is_refused_with_its_file(tmp_path: Path) -> None:
    source = make("gpt_oss", tmp_path / "model")
    path = next(source.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(MismatchError, match=path.name):
        derived.derive(source, "mxfp4-rounded")


def test_experts_without_their_exponents_are_refused(tmp_path: Path) -> None:
    released = make_mxfp4(tmp_path / "released", tmp_path / "plain")
    for path in released.glob("*.safetensors"):
        kept = {k: v for k, v in load_file(path).items() if not k.endswith("down_proj_scales")}
        save_file(kept, path, {"format": "pt"})
    with pytest.raises(MismatchError, match=r"holds no model.layers.0.*down_proj_scales"):
        derived.derive(released, "bf16")
    assert not _left(tmp_path)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("os error 28")])
def test_a_disk_that_fills_up_is_named_and_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*args: object) -> None:
        raise error

    source = make("gpt_oss", tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(MismatchError, match=rf"cache.*: {re.escape(str(error))}") as raised:
            derived.derive(source, "mxfp4-rounded")
    assert "MISMATCH_CACHE" in raised.value.fix
    assert not _left(tmp_path)
    assert derived.derive(source, "mxfp4-rounded").is_dir()


def test_ctrl_c_leaves_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        derived.derive(make("gpt_oss", tmp_path / "model"), "mxfp4-rounded")
    assert not _left(tmp_path)


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(MismatchError, match=re.escape(str(tmp_path / "file"))):
        derived.derive(make("gpt_oss", tmp_path / "model"), "mxfp4-rounded")


def test_a_derived_checkpoint_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    source = make("gpt_oss", tmp_path / "model")
    checkpoint = derived.derive(source, "mxfp4-rounded")
    path = next(checkpoint.glob("*.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    assert derived.derive(source, "mxfp4-rounded") == checkpoint
    assert path.read_bytes() == whole


# ---------------------------------------------------------------- the effect of a form


def _asked(model: Path, effect: WeightsForm | None = None, **train: Any) -> CheckSpec:
    train_spec = TrainSpec(str(model), **train)
    return CheckSpec(train=train_spec, weights_effect=effect, context_length=0)


def test_the_effect_is_one_more_load_after_the_trainers_own_passes() -> None:
    spec = _asked(Path("nowhere"), "mxfp4-rounded")
    passes = [pass_ for pass_ in training_passes(spec) if not pass_.name.startswith("plain:")]
    forms = [pass_.spec.weights for pass_ in passes]
    assert forms == [*["as-stored"] * (len(forms) - 2), "mxfp4-rounded", "as-stored"]
    assert [passes[-2].name, passes[-1].name] == [WEIGHTS, REFERENCE]
    assert passes[-2].spec == replace(spec.train, weights="mxfp4-rounded")
    alone = training_passes(replace(spec, noise_floor=False))
    assert [pass_.name for pass_ in alone] == ["fsdp", WEIGHTS]


def test_forms_that_the_trainer_cannot_get_are_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    moe, dense = make("gpt_oss", tmp_path / "moe"), make("llama", tmp_path / "dense")
    require_forms(_asked(moe, "mxfp4-rounded"))
    require_forms(_asked(dense))
    require_forms(_asked(Path("somebody/else"), "mxfp4-rounded"))  # not here: found out later
    for spec in (_asked(dense, "mxfp4-rounded"), _asked(dense, weights="mxfp4-rounded")):
        with pytest.raises(MismatchError, match="holds no experts"):
            require_forms(spec)
    with pytest.raises(MismatchError, match="--weights effect=mxfp4-rounded:"):
        require_forms(_asked(moe, "mxfp4-rounded", weights="mxfp4-rounded"))


def test_the_effect_belongs_to_the_trainer_under_test(tmp_path: Path) -> None:
    save_rollout(tmp_path, rollout(((3, 2),)))
    spec = _asked(make("gpt_oss", tmp_path / "moe"), "mxfp4-rounded")
    with pytest.raises(MismatchError, match=r"--weights effect.*'fsdp'"):
        run_score(spec, tmp_path, MagicMock(), name="other")


def test_a_checkpoint_that_is_never_whole_ends_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(derived, "_whole", lambda target: False)
    source = make("gpt_oss", tmp_path / "model")
    with pytest.raises(MismatchError) as refused:
        derived.derive(source, "mxfp4-rounded")
    assert "MISMATCH_CACHE" in refused.value.fix
