"""`--framework`, its file and the data-set flags mean what they say; what is given wins."""

import json
from typing import get_args

import pytest

from mismatch.cli.configuration import configured
from mismatch.cli.flags import Flags
from mismatch.cli.options import CHECK
from mismatch.cli.to_spec import check_spec
from mismatch.errors import MismatchError
from mismatch.features.presets.flags import OWN_CODE, Framework
from mismatch.features.presets.rules import NAMES
from mismatch.prompts.sources import read_prompts
from tests.command import mismatch


def flags(**given) -> Flags:
    values = {option.name: option.default for option in CHECK}
    flags = Flags({**values, "model": "tiny-gpt-oss", "nproc_per_node": 2, **given})
    flags.explicit = frozenset(given)
    return flags


def spec_of(**given):
    options = flags(**given)
    return configured(check_spec(options), options)


def test_a_preset_sets_what_the_user_left_open():
    spec, notes = spec_of(framework="verl", own_loop=True)
    assert spec.train.autocast == "bf16"
    assert spec.preset.startswith("verl")
    assert any("autocast" in note for note in notes)
    assert check_spec(flags()).train.autocast is None


def test_one_interpreter_holds_both_sides_where_no_other_is_named():
    for given, engine, trainer in (
        (["/env/python"], "/env/python", "/env/python"),
        (["/env/python", "vllm=/vllm/python"], "/vllm/python", "/env/python"),
        (["/env/python", "train=/own/python"], "/env/python", "/own/python"),
        (["engine=/e/python", "train=/t/python"], "/e/python", "/t/python"),
        (["engine=/e/python", "vllm=/vllm/python"], "/vllm/python", None),
        (["/odd=name/python"], "/odd=name/python", "/odd=name/python"),
        ([], None, None),
    ):
        spec, _ = spec_of(python=given)
        assert (spec.rollout.engine.python, spec.train.python) == (engine, trainer), given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"python": ["sglang=/env/python"]}, "sglang=… given with --engine vllm"),
        ({"python": ["vlm=/env/python"]}, "vlm is none of"),
        ({"python": ["/a/python", "/b/python"]}, "given twice"),
        ({"weights": ["mxfp4"]}, "of which side"),
        ({"weights": ["rollout=mxfp4"]}, "rollout is none of"),
        ({"weights": ["engine=mxfp5"]}, "engine=mxfp5"),
        ({"weights": ["engine=mxfp4", "engine=bf16"]}, "given twice"),
    ],
)
def test_what_is_of_no_side_is_refused(given, message):
    with pytest.raises(MismatchError, match=message):
        spec_of(**given)


def test_weights_have_a_form_for_each_side():
    given = ["engine=mxfp4-rounded", "train=fp8-rounded", "effect=bf16"]
    spec, _ = spec_of(weights=given)
    forms = (spec.rollout.engine.weights, spec.train.weights, spec.weights_effect)
    assert forms == ("mxfp4-rounded", "fp8-rounded", "bf16")


def test_the_depth_of_a_check():
    for depth, quick, two_passes in (
        ("quick", True, None),
        ("normal", False, None),
        ("full", False, True),
    ):
        spec, _ = spec_of(depth=depth)
        assert (spec.quick, spec.two_passes) == (quick, two_passes)


@pytest.mark.parametrize("name", get_args(Framework))
def test_a_framework_s_name_is_enough(name):
    """Its own code scores where there is an adapter; its own loop, settings and sampling else."""
    spec, _ = spec_of(framework=name)
    assert spec.train.scorer == (name if name in OWN_CODE else "fsdp")
    own, _ = spec_of(framework=name, own_loop=True)
    assert own.train.scorer == "fsdp"
    known = name in NAMES
    assert bool(own.preset) == known
    assert any("--framework-config" in line for line in own.not_reproduced) != known
    assert spec_of(framework=name, scorer="mine:score")[0].train.scorer == "mine:score"


def test_verl_s_own_code_reads_the_config_that_both_sides_follow(tmp_path):
    path = tmp_path / "verl.yaml"
    path.write_text(
        "actor_rollout_ref:\n"
        "  model: {path: tiny-gpt-oss}\n"
        "  actor: {strategy: fsdp2}\n"
        "  rollout: {name: vllm, temperature: 1.0, n: 8, dtype: float16, "
        "tensor_model_parallel_size: 1}\n"
    )
    override = "actor_rollout_ref.model.use_remove_padding=false"
    options = flags(framework_config=path, framework_override=[override], model=None)
    spec = configured(check_spec(options), options)[0]
    assert spec.train.scorer == "verl"
    assert spec.train.scorer_config == str(path)
    assert spec.train.scorer_overrides == (override,)


def test_a_verl_config_sets_both_sides(tmp_path):
    path = tmp_path / "verl.yaml"
    path.write_text(
        "actor_rollout_ref:\n"
        "  model: {path: tiny-gpt-oss}\n"
        "  actor: {strategy: fsdp2}\n"
        "  rollout: {name: vllm, temperature: 0.7, n: 8, dtype: float16, "
        "tensor_model_parallel_size: 1}\n"
    )
    options = flags(framework_config=path, own_loop=True, model=None)
    spec = configured(check_spec(options), options)[0]
    assert spec.rollout.sampling.temperature == 0.7
    assert spec.rollout.sampling.samples_per_prompt == 8
    assert spec.rollout.engine.dtype == "fp16"
    assert spec.train.model.endswith("tiny-gpt-oss")
    override = ["actor_rollout_ref.rollout.temperature=0.9"]
    spec, _ = spec_of(framework_config=path, framework_override=override, dtype="bf16")
    assert spec.rollout.sampling.temperature == 0.9
    assert spec.rollout.engine.dtype == "bf16"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"framework": "trl", "framework_config": "x.yaml"}, "configuration of verl"),
        ({"framework_override": ["a=1"]}, "without --framework-config"),
        ({"own_loop": True}, "--own-loop"),
        ({"prompts": "a.jsonl", "dataset": "b"}, "--prompts and --dataset"),
        ({"task": "calculator", "dataset": "b"}, "--task and --dataset"),
        ({"task": "chess"}, "unknown task 'chess'"),
    ],
)
def test_contradictions_are_refused(given, message, tmp_path):
    if "framework_config" in given:
        path = tmp_path / "x.yaml"
        path.write_text("actor_rollout_ref: {model: {path: tiny-gpt-oss}}\ndata: {a: 1}\n")
        given = {**given, "framework_config": path}
    with pytest.raises(MismatchError, match=message):
        spec_of(**given)


def test_a_data_set_becomes_prompts_with_gradable_answers(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": f"so\n#### {n + 1}"} for n in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    spec = check_spec(flags(dataset=str(path), answer_column="answer", num_prompts=3))
    prompts = read_prompts(spec.rollout.prompts)
    assert len(prompts) == 3
    assert {prompt.grader for prompt in prompts} == {"number"}
    assert all(f"{prompt.answer - 1} + 1?" in str(prompt.messages) for prompt in prompts)


@pytest.mark.slow
def test_the_preset_reaches_the_command_line(tmp_path):
    command = ("check", "--model", "tiny-gpt-oss", "--framework", "trl", "--own-loop", "--dry-run")
    done = mismatch(*command, cwd=tmp_path)
    assert "trainer: TRL" in done.stdout
    assert done.returncode == 0
