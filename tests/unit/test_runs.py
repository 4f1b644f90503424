"""Which directory a command works in, and what it notes there."""

import json
import re
from dataclasses import replace

import pytest

from mismatch.errors import MismatchError
from mismatch.run import directory as runs
from mismatch.run import provenance, store
from mismatch.specs import CheckSpec, PromptSpec, RolloutSpec, TrainSpec

SPEC = CheckSpec(train=TrainSpec(model="m"))
OTHER = replace(SPEC, train=TrainSpec(model="m", dtype="fp32", attention="eager"))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def killed_run(name, spec=SPEC, verb="check"):
    """A run whose command never came to its end."""
    run_dir, _ = runs.open_run(verb, spec, "m", runs.DEFAULT_PARENT / name, None)
    with pytest.raises(KeyboardInterrupt), runs.at_work(run_dir, verb, spec, "mismatch check"):
        raise KeyboardInterrupt
    return run_dir


def finished_run(name, spec=SPEC):
    run_dir, _ = runs.open_run("check", spec, "m", runs.DEFAULT_PARENT / name, None)
    with runs.at_work(run_dir, "check", spec, "mismatch check"):
        pass
    return run_dir


def test_resume_finds_the_newest_unfinished_run_of_this_verb_and_spec():
    killed_run("older")
    wanted = killed_run("newer")
    finished_run("finished")
    killed_run("another-spec", OTHER)
    killed_run("another-verb", verb="rollout")
    assert runs.open_run("check", SPEC, "m", None, runs.NEWEST) == (wanted, True)


def test_a_run_at_work_is_never_resumed():
    wanted = killed_run("older")
    busy = killed_run("newer")
    with runs.at_work(busy, "check", SPEC, ""):
        assert runs.newest_unfinished(runs.DEFAULT_PARENT, "check", SPEC) == wanted
        with (
            pytest.raises(MismatchError, match="another mismatch process"),
            runs.at_work(busy, "check", SPEC, ""),
        ):
            pass


def test_resume_without_such_a_run_starts_one():
    finished_run("finished")
    run_dir, resumed = runs.open_run("check", SPEC, "m", None, runs.NEWEST)
    assert not resumed
    assert run_dir.parent == runs.DEFAULT_PARENT


def test_resume_with_a_directory_makes_or_continues_it(here):
    assert runs.open_run("check", SPEC, "m", here / "x", runs.NEWEST) == (here / "x", False)
    with pytest.raises(ZeroDivisionError), runs.at_work(here / "x", "check", SPEC, ""):
        raise ZeroDivisionError
    assert runs.open_run("check", SPEC, "m", here / "x", runs.NEWEST) == (here / "x", True)


def test_resuming_with_other_settings_names_them():
    run_dir = killed_run("a")
    with pytest.raises(MismatchError) as caught:
        runs.open_run("check", OTHER, "m", None, str(run_dir))
    named = re.findall(r"([\w.]+): '(\w+)' there, '(\w+)'", caught.value.message)
    assert set(named) == {("train.attention", "auto", "eager"), ("train.dtype", "bf16", "fp32")}
    assert "model" not in caught.value.message


def test_a_prompts_file_that_changed_is_not_resumed(here):
    (here / "p.jsonl").write_text('{"prompt": "a"}\n')
    spec = CheckSpec(rollout=RolloutSpec(prompts=PromptSpec(path="p.jsonl")))
    run_dir = killed_run("a", spec)
    assert runs.open_run("check", spec, "m", None, str(run_dir)) == (run_dir, True)
    (here / "p.jsonl").write_text('{"prompt": "b"}\n')
    with pytest.raises(MismatchError, match=r"p\.jsonl has changed"):
        runs.open_run("check", spec, "m", None, str(run_dir))


def test_commands_are_noted_in_their_order_with_what_repeats_them(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    run_dir = killed_run("a")
    command = "mismatch check --resume a"
    with runs.at_work(run_dir, "check", SPEC, command) as journal:
        journal.seconds["rollout"] = 2.0
    with runs.at_work(run_dir, "compare", SPEC, "mismatch compare a") as journal:
        assert journal.seconds == {"rollout": 2.0}
    document = json.loads((run_dir / "run.json").read_text())
    first, second, third = document["invocations"]
    assert first["finished"] is None
    assert second["finished"] >= second["created"]
    assert [command["verb"] for command in (first, second, third)] == ["check", "check", "compare"]
    assert second["command"] == command
    assert second["environment"]["VLLM_BATCH_INVARIANT"] == "1"
    assert "hidden" not in (run_dir / "run.json").read_text()
    assert {"python", "numpy", "train-infer-mismatch"} <= second["versions"].keys()


def test_a_commit_is_noted_with_a_mark_where_files_differ(here):
    import subprocess

    def git(*arguments):
        name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *name, *arguments], cwd=here, check=True, capture_output=True)

    assert provenance.commit(here) is None
    git("init")
    (here / "f").write_text("1")
    git("add", "f")
    git("commit", "-m", "x")
    clean = provenance.commit(here)
    assert len(clean) == 40
    (here / "f").write_text("2")
    assert provenance.commit(here) == clean + "+"


def test_a_spec_of_another_version_is_refused(here):
    store.write_json(here / "spec.json", {"rollout": {}, "quantum": True})
    with pytest.raises(MismatchError, match="quantum"):
        runs.load_spec(here)


def test_a_run_that_was_killed_at_once_is_to_be_begun_again(tmp_path):
    (tmp_path / runs.LOCK).touch()
    with pytest.raises(MismatchError, match="nothing was done") as caught:
        runs.load_spec(tmp_path)
    assert "same command" in caught.value.fix
