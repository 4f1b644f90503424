"""Quantised matrices are read as the packages that write them read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch.analysis.diagnosis.loaded_weights import asked_apart
from mismatch.errors import MismatchError
from mismatch.models.derived import derive, form_name
from mismatch.models.moe import require_forms
from mismatch.models.quantised import (
    ROUNDED,
    dequantise,
    fp8_rounded,
    int4_rounded,
    nvfp4_rounded,
)
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec, WeightsForm
from tests.checkpoints import make

OUT, IN = 96, 256


def matrix(rows: int = OUT, columns: int = IN) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def of_vllm() -> Any:
    """The module of vLLM that packs 4-bit values, and a matrix [in, out] in its parts."""
    pytest.importorskip("vllm", reason="client: vllm")
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.scalar_type import scalar_types

    made = quant_utils.quantize_weights(matrix().t(), scalar_types.uint4, 128, True)
    return quant_utils, *made


def test_a_gptq_matrix_is_that_of_vllm() -> None:
    utils, wanted, codes, scales, zeros = of_vllm()
    parts = {
        "qweight": utils.gptq_pack(codes, 4, IN, OUT),
        "qzeros": utils.pack_cols(zeros - 1, 4, IN // 128, OUT),
        "scales": scales,
        "g_idx": torch.arange(IN) // 128,
    }
    torch.testing.assert_close(dequantise(parts, {"quant_method": "gptq"}), wanted.t().bfloat16())
    parts["qzeros"] = utils.pack_cols(zeros, 4, IN // 128, OUT)
    later = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
    torch.testing.assert_close(dequantise(parts, later), wanted.t().bfloat16())


def test_an_awq_matrix_is_that_of_vllm() -> None:
    utils, wanted, codes, scales, zeros = of_vllm()
    parts = {
        "qweight": utils.awq_pack(codes, 4, IN, OUT),
        "qzeros": utils.awq_pack(zeros, 4, IN // 128, OUT),
        "scales": scales,
    }
    torch.testing.assert_close(dequantise(parts, {"quant_method": "awq"}), wanted.t().bfloat16())


@pytest.mark.parametrize("blocks", [(128, 128), (1, IN), (OUT, IN)])
def test_an_fp8_matrix_is_scaled_by_block_by_row_or_whole(blocks: tuple[int, int]) -> None:
    weight = matrix().to(torch.float8_e4m3fn)
    shape = [-(-n // b) for n, b in zip((OUT, IN), blocks, strict=True)]
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    wanted = torch.empty(OUT, IN)
    for row in range(OUT):
        for column in range(IN):
            factor = scale[row // blocks[0], column // blocks[1]]
            wanted[row, column] = weight[row, column].float() * factor
    name = "weight_scale_inv" if blocks[0] == 128 else "weight_scale"
    found = dequantise({"weight": weight, name: scale}, {"quant_method": "fp8"})
    torch.testing.assert_close(found, wanted.bfloat16())


def compressed(kind: str, **arguments: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Parts of a matrix as compressed-tensors packs it, and what it reads back."""
    pytest.importorskip("compressed_tensors", reason="client: compressed-tensors")
    from compressed_tensors import compressors
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    made: Any = getattr(compressors, kind)
    weight = matrix()
    if kind.startswith("NVFP4"):
        largest = weight.unflatten(-1, (-1, 16)).abs().amax(-1)
        whole = (448 * 6 / weight.abs().max()).float()
        scale = (largest * whole / 6).to(torch.float8_e4m3fn)
        state = {
            "weight": weight,
            "weight_scale": scale.float(),
            "weight_global_scale": whole[None],
        }
    else:
        groups = weight.unflatten(-1, (-1, 128)).abs().amax(-1)
        state = {"weight": weight, "weight_scale": groups / 7}
    parts = made.compress(dict(state), scheme)
    wanted = made.decompress(dict(parts), scheme)["weight"]
    return parts, wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("PackedQuantizationCompressor", {"num_bits": 4, "strategy": "group", "group_size": 128}),
        (
            "NVFP4PackedCompressor",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
    ],
)
def test_a_matrix_of_compressed_tensors_is_read_as_it_reads_it(
    kind: str, arguments: dict[str, Any]
) -> None:
    parts, wanted = compressed(kind, **arguments)
    found = dequantise(parts, {"quant_method": "compressed-tensors"})
    torch.testing.assert_close(found, wanted.bfloat16())
    if kind.startswith("NVFP4"):
        torch.testing.assert_close(nvfp4_rounded(matrix()).bfloat16(), found)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(MismatchError, match="weight_bits"):
        dequantise({"weight_bits": torch.zeros(1)}, {"quant_method": "fp8"})


@pytest.mark.parametrize("form", ROUNDED)
def test_rounding_again_changes_nothing_and_the_shape_stays(form: str) -> None:
    weight = matrix(2 * OUT, 208).unflatten(0, (2, OUT))  # neither side is a multiple of 128
    once = ROUNDED[form](weight)
    assert once.shape == weight.shape
    torch.testing.assert_close(ROUNDED[form](once), once, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ROUNDED[form](weight[1]), once[1])


def test_each_format_loses_what_its_steps_allow() -> None:
    weight = matrix()
    fp8 = (fp8_rounded(weight) - weight).abs() / weight.abs().clamp(min=0.1)
    assert 0.03 < fp8.max() <= 1 / 16 + 1e-6  # three bits behind the point
    int4 = (int4_rounded(weight) - weight).abs()
    spread = weight.unflatten(-1, (-1, 128))
    step = (spread.amax(-1) - spread.amin(-1)).max() / 15
    assert 0.4 * step < int4.max() <= step
    assert not torch.equal(nvfp4_rounded(weight), weight)
    with pytest.raises(MismatchError, match="16"):
        nvfp4_rounded(matrix(4, 20))


def layer_matrices(directory: Path) -> dict[str, torch.Tensor]:
    (file,) = directory.glob("*.safetensors")
    return load_file(file)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("form", ROUNDED)
def test_the_matrices_of_the_layers_are_rounded_and_nothing_else(
    family: str, form: WeightsForm, tmp_path: Path
) -> None:
    source = make(family, tmp_path / family)
    before, after = layer_matrices(source), layer_matrices(derive(source, form))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    exempt = ("norm", "embed", "lm_head", "router", "mlp.gate.", "bias", "sinks")
    assert changed == {name for name in before if not any(part in name for part in exempt)}
    for name in changed:
        wide, close = before[name].float(), after[name].float()
        assert (wide - close).abs().max() < 0.2 * wide.abs().max()
        if name.endswith("gate_up_proj"):  # groups lie along the inputs, which come first
            torch.testing.assert_close(after[name], ROUNDED[form](before[name].mT).mT)


@pytest.mark.usefixtures("cache")
def test_a_quantised_checkpoint_becomes_its_own_values_and_no_other_form(tmp_path: Path) -> None:
    source, fp8 = make("qwen3", tmp_path / "qwen3"), tmp_path / "fp8"
    shutil.copytree(source, fp8)
    (file,) = fp8.glob("*.safetensors")
    state = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)
    state[f"{name}_scale"] = torch.tensor(2.0)
    state[name.replace("weight", "input_scale")] = torch.tensor(3.0)
    wanted = (state[name].float() * 2).bfloat16()
    save_file(state, file, {"format": "pt"})
    config = json.loads((fp8 / "config.json").read_text())

    def called(method: str) -> Path:
        values = config | {"quantization_config": {"quant_method": method}}
        (fp8 / "config.json").write_text(json.dumps(values))
        return fp8

    plain = derive(called("fp8"), "bf16")
    assert layer_matrices(plain).keys() == layer_matrices(source).keys()
    assert torch.equal(layer_matrices(plain)[name], wanted)
    assert form_name("bf16", plain) == form_name("bf16", fp8) == "bf16 of fp8"
    assert form_name("bf16", source) == "bf16"
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    for method, form in (("fp8", "int4-rounded"), ("fp8", "mxfp4-rounded"), ("hqq", "bf16")):
        with pytest.raises(MismatchError, match=method):
            derive(called(method), form)


def test_an_effect_that_there_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    plain = str(make("qwen3", tmp_path / "qwen3"))
    engine, train = RolloutSpec(EngineSpec("vllm", plain)), TrainSpec(plain)
    require_forms(CheckSpec(engine, train, weights_effect="fp8-rounded"))
    with pytest.raises(MismatchError, match="not quantised"):
        require_forms(CheckSpec(engine, train, weights_effect="bf16"))


@pytest.mark.parametrize(
    ("forms", "names", "asked"),
    [
        (("fp8-rounded", "as-stored"), ["model.layers.0.self_attn.q_proj.weight"], True),
        (("fp8-rounded", "as-stored"), ["model.layers.0.mlp.experts.down_proj"], True),
        (("bf16 of fp8", "as-stored"), ["model.layers.0.mlp.down_proj.weight"], True),
        (("bf16", "as-stored"), ["model.layers.0.mlp.down_proj.weight"], False),
        (("fp8-rounded", "fp8-rounded"), ["model.layers.0.mlp.down_proj.weight"], False),
        (("fp8-rounded", "as-stored"), ["model.layers.0.input_layernorm.weight"], False),
        (("fp8-rounded", "as-stored"), ["model.layers.0.mlp.gate.weight"], False),
        (("fp8-rounded", "as-stored"), ["lm_head.weight"], False),
    ],
)
def test_only_weights_that_a_form_changes_may_differ(
    forms: tuple[str, str], names: list[str], asked: bool
) -> None:
    engine, trainer = ({"weights_form": form} for form in forms)
    assert bool(asked_apart(engine, trainer, names)) == asked
