"""Resuming never mixes: other versions or weights are named, and nothing is reused."""

import shutil
from dataclasses import replace

import pytest

from mismatch.errors import MismatchError
from mismatch.experiments.scoring_passes import reference_of
from mismatch.models import EMBEDDED
from mismatch.processes import stages
from mismatch.processes.stages import pass_python
from mismatch.run import manifest, provenance, resume, store
from mismatch.run.interpreters import look_into
from mismatch.specs import FILE_SCORER, OWN_SCORER, TrainSpec

from ..environments import Environment
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


@pytest.fixture
def environment(tmp_path):
    """Another interpreter, whose environment says that it holds torch 99.1."""
    other = Environment(tmp_path / "other")
    other.install("torch", "99.1")
    look_into.cache_clear()
    return other


def test_what_another_environment_scored_is_compared_with_its_versions(finished, environment):
    run, asked = finished
    python = environment.python
    tokens = store.load_rollout(run)
    store.save_scoring(run, store.load_scoring(run, "fsdp"), tokens, asked.train, python=python)
    assert manifest.entries(run)["scores/fsdp.parquet"]["made_with"]["torch"] == "99.1"
    assert resume.scoring_done(run, "fsdp", asked.train, python)
    with pytest.raises(MismatchError, match=r"'99\.1' there"):
        resume.scoring_done(run, "fsdp", asked.train)
    environment.install("torch", "99.2")
    look_into.cache_clear()  # as in the next command
    with pytest.raises(MismatchError, match=r"'99\.2' here"):
        resume.scoring_done(run, "fsdp", asked.train, python)


def test_an_engine_of_another_environment_is_asked_there(finished, environment):
    run, asked = finished
    with pytest.raises(MismatchError, match=r"'99\.1' here"):
        resume.rollout_done(run, asked.rollout, environment.python)


def test_scores_of_a_file_have_no_versions(finished, monkeypatch):
    _, asked = finished
    read = replace(asked.train, scorer=FILE_SCORER)
    assert store.made_with(read).keys() == {"weights"}


@pytest.mark.parametrize("torch_here", [True, False])
@pytest.mark.parametrize("scorer", [OWN_SCORER, "trl"])
def test_each_pass_belongs_to_the_environment_that_computes_it(monkeypatch, scorer, torch_here):
    there = "/there/bin/python"
    monkeypatch.setattr(stages, "find_spec", lambda name: torch_here or None)
    train = TrainSpec(scorer=scorer, python=there)
    reference = reference_of(train)
    assert pass_python(train, train) == there
    beside_an_adapter = scorer != OWN_SCORER and torch_here
    assert pass_python(reference, train) == (None if beside_an_adapter else there)


def test_a_run_from_before_versions_were_noted_can_be_resumed(finished, monkeypatch):
    run, asked = finished
    entries = manifest.entries(run)
    for entry in entries.values():
        entry.pop("made_with", None)
    manifest._save(run, entries)
    monkeypatch.setattr(store, "numeric_versions", lambda: {"torch": "99.9"})
    assert resume.rollout_done(run, asked.rollout)
