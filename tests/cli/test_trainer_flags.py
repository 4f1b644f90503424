"""`--trainer`, `--verl-config` and the data-set flags mean what they say; what is given wins."""

import json

import pytest

from mismatch.cli.configuration import configured
from mismatch.cli.flags import Flags
from mismatch.cli.options import CHECK
from mismatch.cli.to_spec import check_spec
from mismatch.errors import MismatchError
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
    spec, notes = spec_of(trainer="verl")
    assert spec.train.autocast == "bf16"
    assert spec.preset.startswith("verl")
    assert any("autocast" in note for note in notes)
    assert check_spec(flags()).train.autocast is None


def test_one_interpreter_holds_both_sides_where_no_other_is_named():
    spec, _ = spec_of(python="/env/python")
    assert spec.rollout.engine.python == spec.train.python == "/env/python"
    spec, _ = spec_of(python="/env/python", vllm_python="/vllm/python")
    assert (spec.rollout.engine.python, spec.train.python) == ("/vllm/python", "/env/python")
    spec, _ = spec_of(python="/env/python", train_python="/own/python", engine="transformers")
    assert (spec.rollout.engine.python, spec.train.python) == ("/env/python", "/own/python")


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
    options = flags(verl_config=path, verl_override=[override], scorer="verl", model=None)
    spec = configured(check_spec(options), options)[0]
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
    options = flags(verl_config=path, model=None)
    spec = configured(check_spec(options), options)[0]
    assert spec.rollout.sampling.temperature == 0.7
    assert spec.rollout.sampling.samples_per_prompt == 8
    assert spec.rollout.engine.dtype == "fp16"
    assert spec.train.model.endswith("tiny-gpt-oss")
    override = ["actor_rollout_ref.rollout.temperature=0.9"]
    spec, _ = spec_of(verl_config=path, verl_override=override, dtype="bf16")
    assert spec.rollout.sampling.temperature == 0.9
    assert spec.rollout.engine.dtype == "bf16"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trainer": "verl", "verl_config": "x.yaml"}, "--trainer and --verl-config"),
        ({"trl_config": "x.json", "verl_config": "x.yaml"}, "--verl-config and --trl-config"),
        ({"sample_as": "trl", "verl_config": "x.yaml"}, "--verl-config and --sample-as"),
        ({"verl_override": ["a=1"]}, "without --verl-config"),
        ({"prompts": "a.jsonl", "dataset": "b"}, "--prompts and --dataset"),
        ({"task": "calculator", "dataset": "b"}, "--task and --dataset"),
        ({"task": "chess"}, "unknown task 'chess'"),
    ],
)
def test_contradictions_are_refused(given, message, tmp_path):
    if "verl_config" in given:
        path = tmp_path / "x.yaml"
        path.write_text("actor_rollout_ref: {model: {path: tiny-gpt-oss}}\n")
        given = {**given, "verl_config": path}
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
    command = ("check", "--model", "tiny-gpt-oss", "--trainer", "trl", "--dry-run")
    done = mismatch(*command, cwd=tmp_path)
    assert "trainer: TRL" in done.stdout
    assert done.returncode == 0
