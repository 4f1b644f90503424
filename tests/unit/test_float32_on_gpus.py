"""The engine in float32 where there are GPUs: its weights, its memory, its environment."""

from __future__ import annotations

import fcntl
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import transformers.modeling_utils  # noqa: F401  sizes are then counted in this process
from rich.console import Console

from mismatch.cli import session
from mismatch.doctor.fit import WIDER, engine_fit, first_layers_fit
from mismatch.doctor.machine import Gpu, Machine, inspect_machine, machine_with, parse_kind
from mismatch.doctor.memory import Workload, predict_engine
from mismatch.doctor.minutes import LONG_PASS_S
from mismatch.doctor.plan import memory_of, plan
from mismatch.engines.registry import check_machine, checkpoint_names
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.spec_edits import on_engine
from mismatch.experiments.scoring_passes import OFFLOAD, first_passes, float32_engine
from mismatch.features.kernels import isolation
from mismatch.features.locate import recording
from mismatch.features.sync import processes
from mismatch.features.sync.report import SyncSpec
from mismatch.models import derived, resolve_model
from mismatch.models.config import find_config, serves_mxfp4, unpacks_mxfp4
from mismatch.models.derived import in_form, in_form_while
from mismatch.models.sizes import sized
from mismatch.processes.launch import EXACT, EXACT_TRITON
from mismatch.processes.stages import Room, engine_command, score_in_float32
from mismatch.processes.tasks import FLOAT32_ENGINE
from mismatch.reports.plan import print_plan
from mismatch.run import store
from mismatch.run.long_rollout import leave
from mismatch.run.machine import Placement
from mismatch.run.messages import read_error
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec
from mismatch.types import NO_MLA, WITHOUT_MLA, NotTested
from tests.checkpoints import configuration, make_mxfp4
from tests.made_run import make_run
from tests.texts import numbers
from tests.unit.test_square import SPEC, Starter

GIB = 1 << 30
HUB = resolve_model("gpt-oss-20b")  # an id: no directory


KERNELS = {"attention_backend", "moe_backend", "moe_runner_backend"}


def check(model: str = HUB, ranks: int = 1, **engine: Any) -> CheckSpec:
    return CheckSpec(
        RolloutSpec(EngineSpec(model=model, **engine)), TrainSpec(model), nproc_per_node=ranks
    )


def gpus(text: str) -> Machine:
    return machine_with(inspect_machine(), *parse_kind(text))


# ---------------------------------------------------------------- its weights


def test_a_hub_id_and_a_directory_are_unpacked_alike(tmp_path: Path) -> None:
    directory = make_mxfp4(tmp_path / "released", tmp_path / "plain")
    for model in (HUB, str(directory)):
        exact = float32_engine(check(model).rollout)
        assert exact is not None
        assert (exact.engine.weights, exact.engine.dtype) == ("bf16", "fp32")
    for model in (str(tmp_path / "plain"), "someone/unknown"):
        exact = float32_engine(check(model).rollout)
        assert exact is not None
        assert exact.engine.weights == "as-stored"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_mxfp4_in_float32_is_refused_before_it_runs(engine: str) -> None:
    spec = EngineSpec(engine, HUB, dtype="fp32")
    assert serves_mxfp4(spec)
    with pytest.raises(MismatchError) as refused:
        check_machine(spec)
    assert "--weights engine=bf16" in refused.value.fix
    check_machine(replace(spec, weights="bf16"))


def test_a_copy_is_deleted_behind_the_engine_unless_it_was_there_or_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))
    model = make_mxfp4(tmp_path / "released", tmp_path / "plain")
    spec = EngineSpec("sglang", str(model), dtype="fp32", weights="bf16")

    def again() -> None:  # as in a new process
        for file in derived.READ.values():
            file.close()
        derived.READ.clear()

    with in_form_while(spec) as served:
        copy = Path(served.model)
        assert (copy / "config.json").exists()
    assert not copy.exists()
    again()
    with in_form_while(spec), open(copy.with_suffix(".read"), "w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        other_stays = other.fileno()
        derived.READ[tmp_path] = open(copy.with_suffix(".read"))  # noqa: SIM115
        fcntl.flock(derived.READ[tmp_path], fcntl.LOCK_SH)
    assert other_stays
    assert copy.exists()
    again()
    with in_form_while(spec):
        pass
    assert copy.exists()  # it was there before
    assert in_form(spec).model == str(copy)
    again()


def test_vllm_reads_mxfp4_where_it_lies_and_other_engines_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))
    model = make_mxfp4(tmp_path / "released", tmp_path / "plain")
    spec = EngineSpec("vllm", str(model), dtype="fp32", weights="bf16")
    assert unpacks_mxfp4(spec)
    assert in_form(spec) == spec
    cut = in_form(replace(spec, layers=1))
    assert derived.is_mxfp4(Path(cut.model))
    assert unpacks_mxfp4(cut)
    copies = [
        in_form(replace(spec, engine="sglang")),
        in_form(replace(spec, weights="mxfp4-rounded")),
        in_form(spec, copied=True),
    ]
    for copy in copies:
        assert not derived.is_mxfp4(Path(copy.model))
        assert not unpacks_mxfp4(copy)
    names = checkpoint_names(spec)
    assert sorted(names) == sorted(checkpoint_names(copies[0]))
    assert not unpacks_mxfp4(replace(spec, model=str(tmp_path / "plain")))


# ---------------------------------------------------------------- its environment


def test_float32_is_no_tf32_in_the_engines_process(tmp_path: Path) -> None:
    def env(dtype: Any) -> dict[str, str]:
        job = tmp_path / "jobs" / "job.json"
        return engine_command(EngineSpec(dtype=dtype), Placement(), "m", job)[1]

    assert env("fp32").items() >= (EXACT | EXACT_TRITON).items()
    assert EXACT_TRITON == {"TRITON_F32_DEFAULT": "ieee"}
    assert not env("bf16").keys() & (EXACT | EXACT_TRITON).keys()


def test_features_start_their_processes_likewise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a gap in float32 would be located in kernels that run in TF32 only there, and an
    audit in a container with TF32 would find all kernels wrong."""
    seen: list[dict[str, str]] = []

    def start(label: str, command: list[str], run_dir: Path, progress: Any, env: Any) -> None:
        seen.append(env)
        raise MismatchError("seen enough")

    for place in (recording, processes, isolation):
        monkeypatch.setattr(place, "started", start)
    spec = check(str(tmp_path), dtype="fp32")
    (tmp_path / "jobs").mkdir()
    narrator = session.narrator(silent=True)
    recorder = recording._Recording(tmp_path, spec, narrator, ())
    assert isinstance(recorder.engine(), NotTested)
    with pytest.raises(MismatchError):
        processes.run_probe(tmp_path, SyncSpec(spec.rollout.engine), print)
    with pytest.raises(MismatchError):
        isolation.run_audit(isolation.AuditSpec("m"), tmp_path, print)
    *engines, audit = seen
    assert len(engines) == 2
    assert all(env.items() >= (EXACT | EXACT_TRITON).items() for env in engines)
    assert audit.items() >= EXACT.items()


def test_triton_takes_that_name_for_its_products() -> None:
    """Of the wheel, where it is here: what a product of float32 is unless told."""
    triton = pytest.importorskip("triton", reason="engine: triton comes with CUDA wheels")
    knobs = Path(triton.__file__).parent
    assert any("TRITON_F32_DEFAULT" in path.read_text("utf-8") for path in knobs.rglob("*.py"))


# ---------------------------------------------------------------- its memory


def sides(spec: CheckSpec, machine: Machine) -> dict[str, Any]:
    return {fit.side: fit for fit in memory_of(spec, machine).sides}


def test_the_plan_has_a_row_for_it_and_the_disk_of_its_copy() -> None:
    planned = plan(check(), gpus="1xH100-80GB")
    fits = {fit.side: fit for fit in planned.sides}
    exact = fits["vllm in float32"]
    held = exact.prediction.highest["weights"] + planned.float32_offload * GIB
    assert 77 * GIB < held < 79 * GIB  # 20.9 B parameters
    assert exact.level == "fits"
    assert "rollout in float32" in planned.stages
    assert any(f"{planned.float32_offload} GiB" in note for note in planned.notes)
    left_out = plan(check(resolve_model("gpt-oss-120b")), gpus="1xH100-80GB")
    assert "vllm in float32" in left_out.left_out()
    assert "rollout in float32" not in left_out.stages
    larger = plan(check(), gpus="1xH200-141GB")
    assert "rollout in float32" in larger.stages
    assert not any("disk:" in note for note in larger.notes)  # dequantised while it loads
    copied = memory_of(check(engine="sglang"), gpus("1xH200-141GB"))
    assert any("disk: 39.0 GiB" in note for note in copied.notes)
    assert not any("39.0 GiB" in note for note in plan(check(resolve_model("tiny-gpt-oss"))).notes)


@pytest.mark.parametrize(
    ("machine", "ranks", "split"),
    [("8xH100-80GB", 8, 2), ("2xH100-80GB", 2, 2), ("8xH100-80GB", 7, 1), ("8xH200-141GB", 4, 1)],
)
def test_it_is_split_until_it_fits(machine: str, ranks: int, split: int) -> None:
    memory = memory_of(check(ranks=ranks), gpus(machine))
    assert memory.float32_split == split
    assert memory.sides[-1].level == "fits"
    # Seven GPUs are the trainer's, which holds them meanwhile: the eighth alone is too small.
    assert (memory.float32_offload > 0) is (ranks == 7)
    stage = plan(check(ranks=ranks), gpus=machine).stages["rollout in float32"]
    assert (f"parallel {split}" in stage) is (split > 1)


@pytest.mark.parametrize(
    ("model", "machine"),
    [
        ("gpt-oss-20b", "1xH100-80GB"),
        ("qwen3-30b-a3b", "1xH100-80GB"),
        ("qwen3-32b", "1xH100-80GB"),
        ("qwen3-8b", "1xRTX4090-24GB"),
        ("qwen3-14b", "1xL40S-48GB"),
    ],
)
def test_weights_that_lack_room_are_kept_in_the_hosts_memory(model: str, machine: str) -> None:
    here = replace(gpus(machine), ram_free_bytes=256 * GIB)
    memory = memory_of(check(resolve_model(model)), here)
    exact, size = memory.sides[-1], memory.float32_offload
    assert (exact.side, exact.level) == ("vllm in float32", "fits")
    assert size > 0
    assert "vllm in float32" not in memory.left_out()
    spec = float32_engine(check(resolve_model(model)).rollout, 0, size)
    assert spec is not None
    assert (OFFLOAD, size) in spec.engine.args
    poor = replace(here, ram_free_bytes=(size + 1) * GIB)
    left = memory_of(check(resolve_model(model)), poor)
    assert (left.float32_offload, left.float32_layers) == (0, 2)
    assert left.left_out() == {}


def test_an_offload_that_would_not_help_is_not_made() -> None:
    """Somebody else holds the GPU; a GPU that has the host's memory; a size that is no number."""
    here = gpus("1xH100-80GB")
    (gpu,) = here.gpus
    for changed in (
        replace(here, gpus=(replace(gpu, free_bytes=60 * GIB),)),
        replace(here, gpus=(replace(gpu, shared=True),)),
    ):
        assert memory_of(check(), changed).float32_offload == 0
    with pytest.raises(MismatchError, match=OFFLOAD):
        memory_of(on_engine(check(), args=((OFFLOAD, "8GiB"),)), here)


def test_a_score_that_was_made_while_there_was_room_stays(tmp_path: Path) -> None:
    starter = Starter(make_run(tmp_path / "run"), SPEC)
    starter.room = Room(float32_left_out="80 GiB needed")
    rollout = store.load_rollout(starter.run_dir)
    left = store.load_scoring(starter.run_dir, "transformers:decode")
    named = replace(left, name="vllm:fp32")
    store.save_scoring(starter.run_dir, named, rollout, made_by=SPEC.train)
    score_in_float32(starter)
    assert starter.started == []
    assert read_error(starter.run_dir, FLOAT32_ENGINE) is None


def test_the_users_own_offload_stays() -> None:
    own = on_engine(check(), args=((OFFLOAD, 4),))
    memory = memory_of(own, gpus("1xH100-80GB"))
    assert (memory.float32_offload, memory.float32_layers) == (0, 2)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_gpu_gets_kernels_that_take_float32(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Engines choose FlashAttention 3, FlashInfer or MLA's kernels without a look at the dtype."""

    def exact(family: str, *args: tuple[str, Any]) -> EngineSpec:
        place = tmp_path / family
        if not place.exists():
            configuration(family).save_pretrained(place)
        spec = check(str(place))
        spec = on_engine(spec, engine=engine, args=args)
        found = float32_engine(spec.rollout)
        assert found is not None
        return found.engine

    assert {name for name, _ in exact("qwen3_moe").args} & KERNELS == set()  # on a CPU
    monkeypatch.setattr("mismatch.experiments.scoring_passes.local_gpus", lambda: 1)
    experts, plain = dict(exact("qwen3_moe").args), dict(exact("qwen3").args)
    expected = {
        "vllm": ({"moe_backend"}, set()),
        "sglang": ({"attention_backend", "moe_runner_backend"}, {"attention_backend"}),
    }
    assert tuple(given.keys() & KERNELS for given in (experts, plain)) == expected[engine]
    assert {value for name, value in experts.items() if name in KERNELS} == {"triton"}
    own = ("moe-backend" if engine == "vllm" else "moe-runner-backend", "mine")
    assert [pair for pair in exact("qwen3_moe", own).args if "moe" in pair[0]] == [own]
    assert (("VLLM_MLA_DISABLE", "1") in exact("deepseek_v3").env) is (engine == "vllm")
    assert exact("qwen3").env == ()


def test_the_plan_says_that_float32_runs_without_kernels_for_mla(tmp_path: Path) -> None:
    configuration("deepseek_v3").save_pretrained(tmp_path)
    here, spec = gpus("1xH100-80GB"), check(str(tmp_path))

    def said(spec: CheckSpec, machine: Machine = here) -> bool:
        return any(str(WITHOUT_MLA) in note for note in memory_of(spec, machine).notes)

    assert said(spec)
    assert not said(spec, replace(here, gpus=()))
    assert not said(on_engine(spec, engine="sglang"))
    assert not said(on_engine(spec, env=((NO_MLA[0], "0"),)))
    assert not said(check())


def test_unpacked_experts_take_what_they_take() -> None:
    packed, bf16 = (
        memory_of(check(weights=form), gpus("1xH100-80GB")).sides[0].prediction.highest["weights"]
        for form in ("as-stored", "bf16")
    )
    assert (packed // GIB, bf16 // GIB) == (12, 38)


def test_different_gpus_are_planned_by_the_smallest() -> None:
    big, small = (Gpu(str(gib), gib * GIB, (gib - 1) * GIB, "580") for gib in (80, 24))
    mixed = Machine(8, 64 * GIB, 64 * GIB, (big, small))
    same = replace(mixed, gpus=(small, small))
    assert [f.capacity for f in memory_of(check(ranks=2), mixed).sides] == [
        f.capacity for f in memory_of(check(ranks=2), same).sides
    ]


def test_what_does_not_fit_is_left_out_with_its_reason_and_starts_nothing(tmp_path: Path) -> None:
    starter = Starter(tmp_path, SPEC)
    starter.room = Room(float32_left_out="80 GiB needed")
    score_in_float32(starter)
    assert starter.started == []
    left = read_error(tmp_path, FLOAT32_ENGINE)
    assert left is not None
    assert left.message == "80 GiB needed"
    starter.room = Room(float32_split=4)
    score_in_float32(starter)
    assert [spec.engine.tensor_parallel_size for spec in starter.started] == [4]


# ---------------------------------------------------------------- what would help


def test_no_setting_that_is_in_use_is_a_remedy() -> None:
    def warnings(**train: Any) -> str:
        model = resolve_model("gpt-oss-120b")
        spec = CheckSpec(RolloutSpec(EngineSpec(model=model)), TrainSpec(model, **train))
        return plan(replace(spec, nproc_per_node=1), gpus="1xH100-80GB").warnings[1]

    assert "--offload" in warnings()
    assert "--master-dtype auto" in warnings(master_dtype="fp32")
    assert "--master-dtype auto" not in warnings()
    assert "--offload" not in " ".join(plan_of_offloaded())
    assert WIDER not in " ".join(plan(check(dtype="fp32", weights="bf16"), gpus="H100").warnings)
    spec = check(dtype="fp32", weights="bf16", ranks=2, tensor_parallel_size=2)
    two = plan(spec, gpus="2xA100-40GB").warnings
    assert WIDER not in " ".join(two)  # both GPUs are the engine's


def plan_of_offloaded() -> list[str]:
    model = resolve_model("gpt-oss-120b")
    spec = CheckSpec(RolloutSpec(EngineSpec(model=model)), TrainSpec(model, offload=True))
    small = replace(gpus("1xH100-80GB"), ram_bytes=64 * GIB, ram_free_bytes=64 * GIB)
    return plan(replace(spec, nproc_per_node=1), small).warnings


def test_prompt_logprobs_take_a_chunk_of_the_batch_however_short_a_prompt_is() -> None:
    shape = sized(find_config(HUB))
    work = Workload(64, 271)
    logits = predict_engine(shape, EngineSpec(model=HUB), work).moments["prefill rescoring"]
    (part,) = (size for name, size in logits.items() if name.startswith("logits"))
    assert part == 1024 * 201_088 * (2 + 8)


def test_whether_it_fits_stands_first(capsys: pytest.CaptureFixture[str]) -> None:
    for model, first in ((HUB, "it fits"), (resolve_model("gpt-oss-120b"), "it does not fit")):
        print_plan(plan(check(model), gpus="H100"), Console())
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(first)
        assert lines[-1].startswith(first)


@pytest.mark.parametrize(
    ("model", "machine", "best", "lacking"),
    [
        ("gpt-oss-20b", "1xH100-80GB", "HEALTHY", ""),
        ("qwen3-30b-a3b", "1xH200-141GB", "HEALTHY", ""),
        ("qwen3-235b-a22b", "8xH100-80GB", "INCONCLUSIVE", "reference:fp32"),
    ],
)
def test_the_plan_begins_with_the_best_verdict_that_the_machine_can_give(
    model: str, machine: str, best: str, lacking: str
) -> None:
    """Otherwise a user learns after minutes that memory had decided the verdict before."""
    planned = plan(check(resolve_model(model), ranks=int(machine[0])), gpus=machine)
    assert planned.best_verdict == best
    assert planned.to_dict()["best_verdict"] == best
    console = Console(record=True, width=400, file=StringIO())
    print_plan(planned, console)
    first = console.export_text().splitlines()[0]
    assert best in first
    assert lacking in first


@pytest.mark.parametrize(
    ("model", "machine", "of"),
    [
        ("gpt-oss-20b", "1xH100-80GB", 24),
        ("qwen3-32b", "1xH100-80GB", 64),
        ("qwen3-8b", "1xRTX4090-24GB", 36),
    ],
)
def test_without_room_in_the_hosts_memory_the_first_layers_are_checked(
    model: str, machine: str, of: int
) -> None:
    here = replace(gpus(machine), ram_bytes=8 * GIB, ram_free_bytes=8 * GIB)
    spec = check(resolve_model(model))
    planned = plan(spec, here)
    assert (planned.best_verdict, planned.left_out()) == ("HEALTHY", {})
    assert planned.float32_layers == 2
    assert any(numbers(note)[-4:-2] == [2, of] for note in planned.notes)
    alone = planned.sides[-1]
    assert (alone.side, alone.level) == ("vllm in float32", "fits")
    # The plan of those layers alone needs as much: the arithmetic is that of --layers.
    same = on_engine(spec, layers=2, dtype="fp32", weights=float32_form(spec))
    assert memory_of(same, here).sides[0].needed == alone.needed
    console = Console(record=True, width=400, file=StringIO())
    print_plan(planned, console)
    first = console.export_text().splitlines()[0]
    assert "HEALTHY" in first
    assert numbers(first)[-1] == 2


@pytest.mark.parametrize(
    ("model", "machine", "samples", "few"),
    [
        ("gpt-oss-20b", "1xH100-80GB", 4, True),  # its experts cross the bus
        ("gpt-oss-20b", "1xH100-80GB", 1, False),
        ("gpt-oss-20b", "1xH200-141GB", 4, False),
        ("qwen3-8b", "1xH100-80GB", 4, False),
    ],
)
def test_where_all_samples_would_take_long_in_float32_one_of_each_prompt_does(
    model: str, machine: str, samples: int, few: bool
) -> None:
    spec = check(resolve_model(model))
    sampling = replace(spec.rollout.sampling, samples_per_prompt=samples)
    spec = replace(spec, rollout=replace(spec.rollout, sampling=sampling))
    planned = plan(spec, gpus(machine))
    assert planned.float32_few is few
    seconds = planned.time.stages["vllm in float32: rescores"]
    assert (seconds < LONG_PASS_S) or samples == 1
    assert any("first sample" in note for note in planned.notes) is few


def float32_form(spec: CheckSpec) -> Any:
    exact = float32_engine(spec.rollout)
    assert exact is not None
    return exact.engine.weights


def test_the_first_layers_hold_every_kind_of_layer(tmp_path: Path) -> None:
    """Kinds that alternate, and experts behind dense layers."""
    sliding = ["sliding_attention"] * 5 + ["full_attention"]
    fields: dict[str, dict[str, Any]] = {
        "gemma3": {"num_hidden_layers": 18, "layer_types": 3 * sliding},
        "deepseek_v3": {"num_hidden_layers": 9, "first_k_dense_replace": 3},
    }
    small, found = replace(gpus("1xRTX4090-24GB"), ram_free_bytes=GIB), []
    for family, given in fields.items():
        configuration(family, **given).save_pretrained(tmp_path / family)
        spec = check(str(tmp_path / family))
        whole = sized(find_config(str(tmp_path / family)))
        engine = engine_fit(spec, whole, Workload(4, 100), small)
        found.append(first_layers_fit(spec, whole, Workload(4, 100), small, engine)[0])
    assert found == [6, 4]


def test_without_a_reference_no_layers_are_worth_checking() -> None:
    planned = memory_of(check(resolve_model("qwen3-235b-a22b"), ranks=8), gpus("8xH100-80GB"))
    assert "reference:fp32" in planned.left_out()
    assert planned.float32_layers == 0


def test_the_first_layers_are_scored_under_their_name_and_no_long_sequence(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run")
    leave(run, 10_000)
    starter = Starter(run, SPEC)
    starter.room = Room(float32_layers=2)
    score_in_float32(starter)
    assert [spec.engine.layers for spec in starter.started] == [2]
    assert [task.name for task in starter.tasks] == ["vllm:first-layers:fp32"]
    passes = first_passes(SPEC, 2)
    assert [item.name for item in passes] == [
        "reference:first-layers:fp32",
        "plain:first-layers:bf16",
    ]
    assert {item.spec.layers for item in passes} == {2}
    assert first_passes(SPEC, 0) == []
