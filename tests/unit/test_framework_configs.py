"""Every key of a file of SkyRL, NeMo-RL, prime-rl, slime or OpenRLHF is followed or named."""

from __future__ import annotations

import dataclasses
import re
import shlex
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yaml import YAMLError

from mismatch.cli.configuration import configured
from mismatch.cli.flags import Flags
from mismatch.cli.options import CHECK
from mismatch.cli.to_spec import check_spec
from mismatch.errors import MismatchError
from mismatch.features.presets.apply import FollowedFile
from mismatch.features.presets.other import OTHERS, follow_other, model_of, read_framework_config
from mismatch.features.presets.rules import CONVERSIONS, READERS, rules_of, table
from mismatch.features.presets.syntaxes import arguments
from mismatch.run.yaml_file import parsed
from mismatch.specs import CheckSpec, EngineSpec, Sampling, TrainSpec
from tests.preset_machine import be_on

FILES = Path(__file__).parent.parent / "data" / "frameworks"
EXAMPLES = {path.stem: path for path in sorted(FILES.iterdir())}
GROUPS = {"engine": EngineSpec, "train": TrainSpec, "sampling": Sampling}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    be_on(monkeypatch)


def follow(path: Path | str, framework: str = "", **options: set[str]) -> FollowedFile:
    name, source = read_framework_config(Path(path), framework)
    return follow_other(name, source, CheckSpec(), **options)


def changed(folder: Path, name: str, old: str, new: str) -> Path:
    """Write an example with one text exchanged, and return its path."""
    text = EXAMPLES[name].read_text("utf-8")
    assert old in text
    path = folder / EXAMPLES[name].name
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


def test_each_framework_has_an_example() -> None:
    assert set(EXAMPLES) == set(OTHERS)


@pytest.mark.parametrize("name", OTHERS)
def test_both_sides_are_as_the_file_says(name: str) -> None:
    followed = follow(EXAMPLES[name])
    engine, sampling = followed.spec.rollout.engine, followed.spec.rollout.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.samples_per_prompt) == (0.7, 64, 4)
    assert engine.engine == ("sglang" if name == "slime" else "vllm")
    assert engine.tensor_parallel_size == 2
    if name != "openrlhf":  # it has no key for either
        assert dict(engine.args)["kv_cache_dtype"] == "fp8"
        assert engine.max_model_len == 512
    if name not in ("slime", "prime-rl", "nemo-rl"):
        assert dict(engine.args)["enforce_eager"] is True
    layout = "padding" if name == "slime" else "packing"
    assert (followed.spec.train.dtype, followed.spec.train.layout) == ("bf16", layout)
    _, source = read_framework_config(EXAMPLES[name])
    assert model_of(name, source) == "tiny-gpt-oss"
    assert followed.spec.preset.startswith(table(f"{name}_keys")["title"])
    assert followed.spec.not_reproduced == tuple(dict.fromkeys(followed.not_reproduced))
    assert not any("unknown" in line for line in followed.not_reproduced)


# Of the example: what has a counterpart here and what corrects the loss.
GAPS = {
    "skyrl": ("lora.rank = 32", "tis_ratio_type = token"),
    "nemo-rl": ("lora_cfg.enabled = True", "use_importance_sampling_correction = True"),
    "prime-rl": ("trainer.model.lora = ", "orchestrator.train.source"),
    "slime": ("attention-backend = flash", "use-tis = True"),
    "openrlhf": ("ds.lora.rank = 16", "is_correction_enable = True"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_reproduced_is_named(name: str) -> None:
    notes = follow(EXAMPLES[name]).notes()
    for gap in GAPS[name]:
        assert any("not reproduced: " in line and gap in line for line in notes)
    if "lora" in GAPS[name][0]:
        adapter = follow(EXAMPLES[name], explicit={"adapter"})
        assert not any("LoRA" in line for line in adapter.not_reproduced)


MISTYPED = {
    "skyrl": ("temperature: 0.7", "temprature: 0.7", "generator.sampling_params.temperature"),
    "nemo-rl": ("kv_cache_dtype: fp8", "kv_cache_dtyp: fp8", "vllm_cfg.kv_cache_dtype"),
    "prime-rl": ("group_size = 4", "grup_size = 4", "orchestrator.group_size"),
    "slime": ("--rollout-temperature", "--rollout-temprature", "rollout-temperature"),
    "openrlhf": ("--rollout.max_new_tokens", "--rollout.max_new_token", "rollout.max_new_tokens"),
}
UNKNOWN = {
    "skyrl": ("flash_attn: false", "flash_attn: false\n  warp_drive: 9"),
    "nemo-rl": ("top_p: 1.0", "top_p: 1.0\n    warp_drive: 9"),
    "prime-rl": ("seq_len = 2048", "seq_len = 2048\nwarp_drive = 9"),
    "slime": ("--use-tis", "--use-tis --warp_drive 9"),
    "openrlhf": ("--vllm.enforce_eager", "--vllm.warp_drive 9"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_mistyped_key_is_asked_about_and_an_unknown_one_named(name: str, tmp_path: Path) -> None:
    old, new, meant = MISTYPED[name]
    said = follow(changed(tmp_path, name, old, new)).not_reproduced
    (asked,) = [line for line in said if line.endswith("?")]
    assert asked.endswith(f"{meant}?")
    said = follow(changed(tmp_path, name, *UNKNOWN[name])).not_reproduced
    (unknown,) = [line for line in said if "unknown to" in line]
    assert "warp_drive" in unknown


def test_a_key_that_has_moved_is_found(tmp_path: Path) -> None:
    old = changed(tmp_path, "skyrl", "n_samples_per_prompt: 4", "temperature: 0.9")
    said = follow(old).not_reproduced
    assert any(line.endswith(f" {MISTYPED['skyrl'][2]}?") for line in said)


def test_flags_win_and_no_key_runs_code(tmp_path: Path) -> None:
    followed = follow(EXAMPLES["skyrl"], explicit={"temperature", "engine"})
    assert followed.spec.rollout.sampling.temperature == 1.0
    assert any(line.endswith("--temperature") for line in followed.kept)
    hostile = changed(tmp_path, "skyrl", "kv_cache_dtype: fp8", "worker_cls: evil.Worker")
    followed = follow(hostile)
    assert "worker_cls" not in dict(followed.spec.rollout.engine.args)
    assert any("--engine-arg worker_cls" in line for line in followed.kept)
    remote = "tensor_parallel_size = 2\ntrust_remote_code = true"
    followed = follow(changed(tmp_path, "prime-rl", "tensor_parallel_size = 2", remote))
    assert followed.spec.rollout.engine.trust_remote_code is False
    assert any("--trust-remote-code" in line for line in followed.kept)


def test_arguments_of_another_engine_are_not_passed() -> None:
    followed = follow(EXAMPLES["slime"], explicit={"engine"})  # the check's own: vllm
    assert followed.spec.rollout.engine.args == ()
    assert any("kv-cache-dtype" in line for line in followed.not_reproduced)


def test_weights_in_fp8_and_automatic_dtypes(tmp_path: Path) -> None:
    path = changed(tmp_path, "nemo-rl", "precision: ${policy.precision}", "precision: fp8")
    followed = follow(path)
    assert followed.spec.rollout.engine.dtype == EngineSpec().dtype
    assert any("vllm_cfg.precision = fp8" in line for line in followed.not_reproduced)
    path = changed(tmp_path, "prime-rl", "enforce_eager = true", 'dtype = "auto"')
    assert follow(path).spec.rollout.engine.dtype == EngineSpec().dtype


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no keys"),
        ("# nothing\n", "no keys"),
        ("trainer: {a: 1}\n  generator: [1,", "line 2"),
        ("exp_name: a\nactor_train: {a: 1}\nactor_infer: {a: 1}\n", "configuration of ROLL"),
        ("learning_rate: 1\n", "no framework is known"),
        ("A=aa\n" + "A=$A$A\n" * 40 + "run --hf-checkpoint $A\n", "grow without bound"),
        ('python -m train --hf-checkpoint "/a\n --rollout-batch-size 8', "No closing quotation"),
    ],
)
def test_files_that_are_of_no_use(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(MismatchError) as caught:
        follow(path)
    assert said in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_was_cut_off_anywhere_is_followed_or_refused(name: str, tmp_path: Path) -> None:
    text = EXAMPLES[name].read_text("utf-8")
    path = tmp_path / EXAMPLES[name].name
    followed = 0
    for end in range(0, len(text), 31):
        path.write_text(text[:end], encoding="utf-8")
        with suppress(MismatchError):
            follow(path, name)
            followed += 1
    assert followed


def test_whose_file_it_is(tmp_path: Path) -> None:
    for name, path in EXAMPLES.items():
        assert read_framework_config(path)[0] == name
        assert read_framework_config(path, name)[0] == name
        other = next(each for each in OTHERS if each != name)
        with pytest.raises(MismatchError, match="by its keys"):
            read_framework_config(path, other)
    verl = tmp_path / "verl.yaml"
    verl.write_text("actor_rollout_ref: {model: {path: a}}\ndata: {a: 1}\n")
    with pytest.raises(MismatchError, match="is not complete"):  # verl's own reader
        read_framework_config(verl)
    with pytest.raises(MismatchError, match="configuration of verl"):
        read_framework_config(verl, "trl")
    few = tmp_path / "few.yaml"
    few.write_text("policy: {precision: float16}\n")
    assert follow(few, "nemo-rl").spec.train.dtype == "fp16"


def test_the_flag_sets_a_check_also_of_trl(tmp_path: Path) -> None:
    def spec_of(**given: str | None) -> CheckSpec:
        values = {option.name: option.default for option in CHECK}
        flags = Flags({**values, "nproc_per_node": 2, **given})
        flags.explicit = frozenset(given)
        return configured(check_spec(flags), flags)[0]

    spec = spec_of(framework_config=EXAMPLES["nemo-rl"])
    assert spec.train.model.endswith("tiny-gpt-oss")
    assert (spec.rollout.sampling.temperature, spec.train.autocast) == (0.7, "bf16")
    assert any("LoRA" in line for line in spec.not_reproduced)
    grpo = tmp_path / "grpo.yaml"
    grpo.write_text("model_name_or_path: tiny-gpt-oss\ntemperature: 0.9\n")
    given = spec_of(framework="trl", framework_config=grpo)
    assert (given.rollout.sampling.temperature, given.train.scorer) == (0.9, "trl")
    with pytest.raises(MismatchError, match="configuration of SkyRL"):
        spec_of(framework="nemo-rl", framework_config=EXAMPLES["skyrl"])


def test_variables_of_a_script(tmp_path: Path) -> None:
    text = (
        'T=0.7\nN=${N:-3}\nargs=(--hf-checkpoint a --rollout-batch-size 8\n --rollout-top-p "$P")\n'
    )
    path = tmp_path / "run.sh"
    path.write_text(f"{text}run --rollout-temperature $T --n-samples-per-prompt $N ${{args[@]}}\n")
    followed = follow(path)
    sampling = followed.spec.rollout.sampling
    assert (sampling.temperature, sampling.samples_per_prompt, sampling.top_p) == (0.7, 3, 1.0)
    assert any(line.startswith("rollout-top-p = $P") for line in followed.not_reproduced)


NAMES = st.from_regex(r"[a-z]{2,8}(-[a-z]{1,5})?", fullmatch=True)
WORDS = st.from_regex(r"[A-Za-z/_.][A-Za-z/_. ']{0,12}", fullmatch=True) | st.integers(-9, 99)


@given(st.dictionaries(NAMES, WORDS | st.just(True), min_size=1), st.booleans(), st.booleans())
def test_a_script_holds_the_arguments_that_were_written(
    wanted: dict[str, str | int | bool], array: bool, equals: bool
) -> None:
    lines = []
    for name, value in wanted.items():
        shown = f"{'=' if equals else ' '}{shlex.quote(str(value))}"
        lines.append(f"  --{name}{'' if value is True else shown}")
    if array:
        text = "#!/bin/bash\nA=(\n" + "\n  # it's a comment\n".join(lines) + "\n)\nrun ${A[@]}\n"
    else:
        text = "run \\\n" + " \\\n".join(lines) + "\necho done\n"
    found = arguments(text, "run.sh", "run.sh")
    assert found.tree == {name: read(str(value)) for name, value in wanted.items()}
    assert found.left_open == {}


def read(text: str) -> object:
    """Return what YAML reads in a word: frameworks read numbers and switches so."""
    try:
        return parsed(text)
    except YAMLError:
        return text


@pytest.mark.parametrize("name", OTHERS)
def test_a_table_says_where_it_was_read_and_names_what_is_here(name: str) -> None:
    text = files("mismatch.features.presets").joinpath(f"{name}_keys.toml").read_text("utf-8")
    header = text.partition("title")[0]
    assert re.search(r"[\w-]+/[\w-]+ [0-9a-f]{7}", header)
    assert re.search(r"\.(py|yaml)", header)
    for rule in rules_of(name):
        assert rule.kind in READERS
        assert rule.convert in CONVERSIONS
        assert bool(rule.to) != bool(rule.argument)
        for place in rule.to:
            group, _, field = place.partition(".")
            assert field in {each.name for each in dataclasses.fields(GROUPS[group])}
    flags = {option.name for option in CHECK}
    assert {row.get("unless", "adapter") for row in table(f"{name}_keys")["gap"]} <= flags
