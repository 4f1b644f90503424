"""Resuming never mixes: other versions or weights are named, and nothing is reused."""

import shutil
from dataclasses import replace

import pytest

from mismatch.errors import MismatchError
from mismatch.models import EMBEDDED
from mismatch.run import manifest, provenance, resume, store

from ..made_run import rollout, scoring, spec


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(EMBEDDED["tiny-gpt-oss"], tmp_path / "model")


@pytest.fixture
def finished(tmp_path, model):
    """A run whose decode, prefill and trainer's scoring are complete, and its spec."""
    asked = spec()
    engine = replace(asked.rollout.engine, model=str(model))
    asked = replace(
        asked,
        rollout=replace(asked.rollout, engine=engine),
        train=replace(asked.train, model=str(model)),
    )
    run, tokens = tmp_path / "run", rollout()
    run.mkdir()
    store.save_rollout(run, tokens, made_by=asked.rollout)
    store.save_vocabulary(run, {int(i): "t" for i in set(tokens.token_ids.tolist())})
    for name, by in (
        ("transformers:decode", asked.rollout),
        ("transformers:prefill", asked.rollout),
        ("fsdp", asked.train),
    ):
        store.save_scoring(run, scoring(name, tokens, 0.0), tokens, made_by=by)
    return run, asked


def questions(run, asked):
    return {
        "rollout": lambda: resume.rollout_done(run, asked.rollout),
        "rescored": lambda: resume.rescored(run, asked.rollout),
        "scoring": lambda: resume.scoring_done(run, "fsdp", asked.train),
    }


def test_the_same_versions_and_weights_are_reused(finished):
    assert all(ask() for ask in questions(*finished).values())


@pytest.mark.parametrize("package", ["torch", "transformers", "numpy", "kernels"])
@pytest.mark.parametrize("stage", ["rollout", "rescored", "scoring"])
def test_another_version_is_refused_with_both_named(finished, monkeypatch, stage, package):
    now = provenance.numeric_versions() | {package: "99.9"}
    monkeypatch.setattr(store, "numeric_versions", lambda: now)
    was = provenance.numeric_versions().get(package, "(not set)")
    with pytest.raises(MismatchError) as caught:
        questions(*finished)[stage]()
    assert f"{package}: " in caught.value.message
    assert "'99.9' here" in caught.value.message
    assert f"{was!r} there" in caught.value.message


@pytest.mark.parametrize("stage", ["rollout", "scoring"])
def test_other_weights_in_the_same_place_are_refused(finished, model, stage):
    (file,) = model.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # of the same size
    file.write_bytes(content)
    with pytest.raises(MismatchError, match="weights: "):
        questions(*finished)[stage]()


def test_a_large_file_is_known_by_its_size_and_time(model, monkeypatch):
    import os

    monkeypatch.setattr(provenance, "SMALL", 10)
    before = provenance.checkpoint_digest(str(model), None)
    (file,) = model.glob("*.safetensors")
    os.utime(file, ns=(1, 1))
    assert provenance.checkpoint_digest(str(model), None) != before


def test_a_model_that_is_not_here_has_no_digest():
    for name in ("no/such-model", "nowhere", "/no/such/folder", "a/b/c", "--/.."):
        assert provenance.checkpoint_digest(name, None) == ""


def test_an_engine_of_another_environment_is_asked_there(finished, monkeypatch):
    """This process lacks its packages; its worker asks the same question with them."""
    run, asked = finished
    monkeypatch.setattr(store, "numeric_versions", lambda: {"torch": "99.9"})
    engine = replace(asked.rollout.engine, python="/other/bin/python")
    other = replace(asked.rollout, engine=engine)
    entries = manifest.entries(run)
    for entry in entries.values():
        if entry["made_by"]:
            entry["made_by"] = store.spec_hash(other)
    manifest._save(run, entries)
    assert resume.rollout_done(run, other)


def test_a_run_from_before_versions_were_noted_can_be_resumed(finished, monkeypatch):
    run, asked = finished
    entries = manifest.entries(run)
    for entry in entries.values():
        entry.pop("made_with", None)
    manifest._save(run, entries)
    monkeypatch.setattr(store, "numeric_versions", lambda: {"torch": "99.9"})
    assert resume.rollout_done(run, asked.rollout)
