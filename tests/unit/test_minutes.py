"""Minutes of a plan: they follow the work, and the runs that their constants come from."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO

import pytest
import transformers.modeling_utils  # noqa: F401  sizes are then counted in this process
from rich.console import Console
from typer.testing import CliRunner

import mismatch.doctor.plan as planner
from mismatch.cli.main import app
from mismatch.doctor.machine import KINDS, Gpu, Machine, kind_of, parse_kind
from mismatch.doctor.minutes import TIMED, forward_s
from mismatch.doctor.plan import Plan, plan
from mismatch.errors import MismatchError
from mismatch.models import resolve_model
from mismatch.models.config import find_config
from mismatch.models.sizes import SizedModel, sized
from mismatch.reports.plan import print_plan
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, Sampling, TrainSpec

GIB = 1 << 30
HERE = Machine(8, 512 * GIB, 512 * GIB, ())


def check(model: str, max_tokens: int = 128, **engine: object) -> CheckSpec:
    name = resolve_model(model)
    made = EngineSpec(model=name, **engine)  # type: ignore[arg-type]
    rollout = RolloutSpec(made, sampling=Sampling(samples_per_prompt=4, max_tokens=max_tokens))
    return CheckSpec(rollout, train=TrainSpec(model=name), nproc_per_node=1)


def timed(gpus: str, model: str = "gpt-oss-20b", max_tokens: int = 128) -> Plan:
    return plan(check(model, max_tokens), HERE, gpus)


def model(name: str) -> SizedModel:
    return sized(find_config(resolve_model(name)))


def within_2(estimated: float, measured: float) -> bool:
    return measured / 2 < estimated < 2 * measured


def test_the_timed_check_is_estimated_within_a_factor_of_2() -> None:
    """docs/evidence/gpu-results.md; 43 of the 101 s of float32 were CUDA graphs, now left out."""
    stages = timed("H200", "tiny-gpt-oss").time.stages
    float32 = sum(spent for name, spent in stages.items() if name.startswith("vllm in float32"))
    engine = sum(spent for name, spent in stages.items() if name.startswith("engine"))
    trainer = sum(stages.values()) - float32 - engine - stages["the rest"]
    assert within_2(engine, 84)
    assert within_2(float32, 101 - 43)
    assert within_2(trainer, 13)


def test_the_timed_engines_of_20b_are_estimated_within_a_quarter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same page, with all samples in float32, on an H100: 124 s until responses were kept, 122
    s until the engine in float32 stood with 17 GiB in the host's memory, 60 s at most to score."""
    monkeypatch.setattr(planner, "LONG_PASS_S", math.inf)
    stages = timed("H100").time.stages
    kept = sum(stages[f"engine: {part}"] for part in ("start", "weights", "samples"))
    assert 0.75 * 124 < kept < 1.25 * 124
    assert stages["engine: rescores"] < 15
    exact = sum(stages[f"vllm in float32: {part}"] for part in ("start", "weights"))
    assert 0.75 * 122 < exact < 1.25 * 122
    rescores = stages["vllm in float32: rescores"]
    assert 30 < rescores < 1.4 * 60


@pytest.mark.parametrize(("rows", "longest", "measured"), [(16, 2048, 3.20), (1, 16_384, 5.53)])
def test_the_timed_forward_is_estimated_within_a_factor_of_2(
    rows: int, longest: int, measured: float
) -> None:
    shape = model("gpt-oss-20b")
    assert within_2(forward_s(shape, rows * longest, longest, KINDS[TIMED], "bf16"), measured)


def test_a_forward_takes_as_much_longer_as_there_are_tokens() -> None:
    shape, kind = model("gpt-oss-20b"), KINDS["A100-80GB"]
    once, thrice = (forward_s(shape, n, 512, kind, "bf16") for n in (10_000, 30_000))
    assert thrice == pytest.approx(3 * once)
    assert forward_s(shape, 10_000, 512, kind, "fp32") > 2 * once
    assert once > forward_s(shape, 10_000, 512, KINDS["H100-80GB"], "bf16")


def test_only_experts_that_are_chosen_take_time() -> None:
    shape = model("gpt-oss-20b")
    dense = replace(shape, experts=0, top_k=0)
    shares = [forward_s(each, 4096, 1, KINDS[TIMED], "bf16") for each in (shape, dense)]
    assert 4 < shares[1] / shares[0] < 8  # 20.9 billion parameters, 3.6 billion in use


def test_the_total_is_the_sum_of_the_stages_and_stands_first() -> None:
    planned = timed("1xH200")
    assert planned.time.seconds == pytest.approx(sum(planned.time.stages.values()))
    assert planned.to_dict()["seconds"] == planned.time.seconds
    assert json.loads(json.dumps(planned.to_dict()))["time"]["stages"] == planned.time.stages
    out = StringIO()
    print_plan(planned, Console(file=out, width=120))
    minutes = f"{-(-planned.time.seconds // 60):.0f}"
    assert minutes in out.getvalue().splitlines()[0].split()


def test_the_engine_in_float32_takes_minutes_where_it_fits() -> None:
    names = {gpus: timed(gpus).time.stages for gpus in ("1xH200", "1xH100")}
    starts = [names["1xH200"][f"{each}: start"] for each in ("engine", "vllm in float32")]
    assert starts[1] < starts[0]  # no CUDA graphs
    # Both read the packed files; SGLang writes MXFP4 experts in bf16 and reads them again.
    weights = [names["1xH200"][f"{each}: weights"] for each in ("engine", "vllm in float32")]
    assert weights[1] == weights[0]
    copying = check("gpt-oss-20b", engine="sglang")
    stages = plan(copying, HERE, "1xH200").time.stages
    copied = stages["sglang in float32: weights"]
    written = copied - weights[0]
    assert written > 24 * 10 + 40  # 10.5 s of CPU time a layer (measured), and the bytes
    # On 80 GB a part of the weights is read through the bus, for every batch.
    rescores = [names[gpus]["vllm in float32: rescores"] for gpus in ("1xH200", "1xH100")]
    assert rescores[1] > rescores[0] + 1


def test_every_pass_and_longer_responses_take_time() -> None:
    short, long = timed("1xH200"), timed("1xH200", max_tokens=1024)
    passes = {fit.side for fit in short.sides} - {"engine", "vllm in float32"}
    assert passes < short.time.stages.keys()
    exact = "vllm in float32: rescores"
    grows = {exact, *passes, "engine: samples", "engine: rescores"}
    assert all(long.time.stages[name] > 1.5 * short.time.stages[name] for name in grows)


def test_more_gpus_take_less_and_unfit_passes_nothing() -> None:
    spec = check("gpt-oss-20b")
    one, four = (plan(replace(spec, nproc_per_node=n), HERE, "8xH100") for n in (1, 4))
    assert four.time.stages["fsdp:fp32"] < one.time.stages["fsdp:fp32"]
    small = plan(check("gpt-oss-20b"), HERE, "RTX4090")
    assert small.left_out()
    assert not small.left_out().keys() & small.time.stages.keys()


def test_what_was_never_timed_says_so_or_has_no_minutes() -> None:
    notes = [timed(gpus).time.notes for gpus in ("1xH200", "1xH100")]
    assert "H100-80GB" in notes[1][0]
    assert notes[0][0] in notes[1][0]
    other = plan(check("tiny-gpt-oss", engine="sglang"), HERE, "H200").time.notes
    assert any("sglang" in note for note in other)
    for gpus in ((), (Gpu("NVIDIA GB10", 120 * GIB, 90 * GIB, "580"),)):
        unknown = plan(check("tiny-gpt-oss"), replace(HERE, gpus=gpus))
        assert unknown.time.stages == {}
        assert unknown.to_dict()["seconds"] is None
        assert unknown.time.notes


@pytest.mark.parametrize(
    ("name", "mib", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", 40_960, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 81_920, "A100-80GB"),
        ("NVIDIA GeForce RTX 4090", 24_564, "RTX4090-24GB"),
        ("NVIDIA H200", 143_771, "H200-141GB"),
        ("NVIDIA GH200 480GB", 143_771, ""),
        ("NVIDIA GH200 480GB", 97_871, "GH200-96GB"),
        ("NVIDIA H100 NVL", 95_830, "H100-NVL-94GB"),
        ("NVIDIA H20", 97_871, "H20-96GB"),
        ("NVIDIA H20-3e", 143_771, ""),
        ("NVIDIA A10", 23_028, ""),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887, "RTX-PRO-6000-96GB"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9_856, ""),
        *((name, kind.mib, name) for name, kind in KINDS.items()),
    ],
)
def test_a_gpu_is_known_by_its_name_and_memory(name: str, mib: int, kind: str) -> None:
    assert kind_of(Gpu(name, mib << 20, 0, "")) == kind


@pytest.mark.parametrize(
    ("text", "count", "kind"),
    [
        ("1xH20", 1, "H20-96GB"),
        ("8xH200", 8, "H200-141GB"),
        ("L4", 1, "L4-24GB"),
        ("4xl40s", 4, "L40S-48GB"),
        ("H100-NVL", 1, "H100-NVL-94GB"),
        ("2 x H100", 2, "H100-80GB"),
        ("RTX-5090", 1, "RTX5090-32GB"),
        ("4090", 1, "RTX4090-24GB"),
        ("4xA100-80", 4, "A100-80GB"),
        *((kind, 1, kind) for kind in KINDS),
    ],
)
def test_gpus_that_are_asked_for_are_those_of_the_plan(text: str, count: int, kind: str) -> None:
    assert parse_kind(text) == (count, kind)


@pytest.mark.parametrize("text", ["H2", "H", "L", "A100", "0xH100", "8x", "MI300X", "H100-NV", ""])
def test_a_part_of_a_name_is_no_gpu(text: str) -> None:
    with pytest.raises(MismatchError):
        parse_kind(text)


def test_json_prints_the_plan_alone_and_a_kind_of_gpu_belongs_to_a_dry_run() -> None:
    asked = ["check", "--model", "tiny-gpt-oss", "--format", "json"]
    asked += ["--gpus", "H200"]
    shown = CliRunner().invoke(app, [*asked, "--dry-run"])
    assert shown.exit_code == 0
    document = json.loads(shown.stdout)
    assert document["seconds"] == pytest.approx(sum(document["time"]["stages"].values()))
    assert isinstance(CliRunner().invoke(app, asked).exception, MismatchError)
