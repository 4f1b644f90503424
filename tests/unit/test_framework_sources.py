"""What verl and TRL pass to vLLM in their own source is followed here, or named as not followed.

The sources come out of the wheels of the package index; nothing of them is imported.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mismatch.features.presets.rules import Name, rules_of, table
from mismatch.features.presets.verl import follow_verl, read_verl_config
from mismatch.specs import CheckSpec
from tests.preset_machine import be_on

VERL, TRL = "verl==0.9.1", "trl==1.16.0"
SERVER = "verl/workers/rollout/vllm_rollout/vllm_async_server.py"
DEFAULTS = "verl/trainer/config/_generated_ppo_trainer.yaml"
# Attributes of a verl model config that are made of the checkpoint, not of a key.
MADE = ("model.hf_config", "model.local_path", "model.processor", "model.tokenizer")
# Arguments of TRL's VLLMGeneration that are objects, or the trainer's own.
OBJECTS = {"model", "accelerator", "processing_class", "logprobs", "max_num_seqs"}
# Followed by code: its options are other keys again (features/presets/trl.py).
OPTIONS = "generation_kwargs"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both packages' files."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*command, VERL, TRL], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"hub: no package index gives {VERL} and {TRL}: {done.stderr[-200:]}")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


def chain(node: ast.AST) -> str:
    """Return ``self.config.x`` of such an expression; "" of any other."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def read_by_verl(tree: ast.AST) -> set[str]:
    """Return the keys of the rollout and of the model that verl's server reads."""
    found = set()
    for node in ast.walk(tree):
        key = chain(node)
        if isinstance(node, ast.Call) and chain(node.func).endswith(".get"):
            (name, *_) = node.args
            if isinstance(name, ast.Constant):
                key = f"{chain(node.func).removesuffix('.get')}.{name.value}"
        for prefix, section in (("self.config.", "rollout."), ("self.model_config.", "model.")):
            if key.startswith(prefix) and not key.endswith(".get"):
                found.add(section + key.removeprefix(prefix))
    return found


def known(framework: Name) -> set[str]:
    """Return every key that has a meaning here."""
    keys = table(f"{framework}_keys")
    names = {row["key"] for row in (*keys["follow"], *keys["gap"])} | set(keys.get("defaults", ()))
    for section, inside in keys["no_effect"].items():
        names.update(f"{section}.{name}".lstrip(".") for name in inside)
    return names


def accounted(key: str, names: set[str]) -> bool:
    """Whether a key, a section that it is in, or a key of its section is known."""
    return any(key == n or key.startswith(f"{n}.") or n.startswith(f"{key}.") for n in names)


def test_every_key_that_verls_server_reads_is_accounted_for(wheels: Path) -> None:
    (server,) = [
        node
        for node in ast.parse((wheels / SERVER).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "vLLMHttpServer"
    ]
    read = {key for key in read_by_verl(server) if not key.startswith(MADE)}
    assert len(read) > 40
    names = {key.removeprefix("actor_rollout_ref.") for key in known("verl")}
    names |= {"rollout.prompt_length", "rollout.response_length"}
    assert [key for key in sorted(read) if not accounted(key, names)] == []


def test_verls_arguments_have_their_names_here(wheels: Path) -> None:
    """``"max_num_seqs": self.config.max_num_seqs`` of its source, against our table."""
    sent = {}
    for node in ast.walk(ast.parse((wheels / SERVER).read_text())):
        if isinstance(node, ast.Dict):
            for name, value in zip(node.keys, node.values, strict=True):
                if isinstance(name, ast.Constant) and chain(value).startswith("self.config."):
                    sent[chain(value).removeprefix("self.config.")] = name.value
    compared = []
    for rule in rules_of("verl"):
        key = rule.key.removeprefix("actor_rollout_ref.rollout.")
        places = [place.partition(".")[2] for place in rule.to]
        if key in sent and (rule.argument or rule.to[0].startswith("engine.")):
            compared.append(key)
            assert sent[key] in (rule.argument, *places), key
    assert len(compared) > 8


def test_verls_own_defaults_are_followed_to_the_last_key(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The composed configuration of its wheel: all that its engine could get is known."""
    be_on(monkeypatch)
    overrides = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.path=org/name")
    followed = follow_verl(read_verl_config(wheels / DEFAULTS, overrides), CheckSpec())
    engine = followed.spec.rollout.engine
    assert dict(engine.args)["max_num_batched_tokens"] == 8192
    assert engine.tensor_parallel_size == 2
    assert followed.spec.rollout.sampling.seed == 42
    unread = [key for key in followed.ignored if key.startswith("actor_rollout_ref.rollout.")]
    assert unread == []


def test_what_trl_passes_to_vllm_is_accounted_for(wheels: Path) -> None:
    trainer = ast.parse((wheels / "trl/trainer/grpo_trainer.py").read_text())
    (call,) = [
        node
        for node in ast.walk(trainer)
        if isinstance(node, ast.Call) and chain(node.func) == "VLLMGeneration"
    ]
    names = known("trl")
    passed = {
        str(word.arg): chain(word.value).rpartition(".")[2]
        for word in call.keywords
        if word.arg not in OBJECTS
    }
    assert len(passed) > 15
    assert [field for field in passed.values() if field not in (*names, OPTIONS)] == []


def test_trls_constants_and_defaults_are_its_own(wheels: Path) -> None:
    generation = ast.parse((wheels / "trl/generation/vllm_generation.py").read_text())
    (call,) = [
        node
        for node in ast.walk(generation)
        if isinstance(node, ast.Call) and chain(node.func) == "LLM"
    ]
    constants = {
        word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)
    }
    assert constants["max_num_batched_tokens"] == 4096
    assert constants["logprobs_mode"] == "processed_logprobs"
    fields = {}
    for node in ast.walk(ast.parse((wheels / "trl/trainer/grpo_config.py").read_text())):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            given = {word.arg: word.value for word in node.value.keywords}
            if "default" in given:
                fields[chain(node.target)] = ast.literal_eval(given["default"])
    own = table("trl_keys")["defaults"]
    assert {name: fields[name] for name in own if name in fields} == {
        name: value for name, value in own.items() if name in fields
    }
