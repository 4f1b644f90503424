"""A run directory is data: nothing in a copied spec executes, is imported, or is sent a key."""

import stat
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from mismatch.cli.main import app
from mismatch.errors import MismatchError
from mismatch.processes.launch import worker_path
from mismatch.run import store
from mismatch.run.directory import at_work, load_spec
from mismatch.run.trust import NEEDS_TRUST
from mismatch.specs import (
    CheckSpec,
    EngineSpec,
    PromptSpec,
    RolloutSpec,
    Sampling,
    TrainSpec,
    to_dict,
)

from ..unit.test_launch import python, run_worker

MODEL = "tiny-gpt-oss"


def copied(folder, engine=None, train=None, prompts=None):
    """A run as it may come from anywhere."""
    spec = CheckSpec(
        rollout=RolloutSpec(
            engine=EngineSpec(engine="transformers", model=MODEL, **engine or {}),
            prompts=PromptSpec(**prompts or {}),
        ),
        train=TrainSpec(model=MODEL, **train or {}),
    )
    store.write_json(folder / "run" / "spec.json", to_dict(spec))
    return folder / "run"


# All other fields: numbers, choices, switches, names of columns, and models and revisions, whose
# files are read as data.
DATA: dict[type, frozenset[str]] = {
    spec: frozenset(names.split())
    for spec, names in {
        CheckSpec: "rollout train nproc_per_node noise_floor context_length seed preset "
        "not_reproduced quick two_passes weights_effect inject fixes budget_minutes verdict "
        "explain overlap extras",
        RolloutSpec: "engine prompts sampling exact_kl exact_kl_top_k",
        Sampling: "temperature top_p top_k min_p repetition_penalty max_tokens samples_per_prompt "
        "seed",
        EngineSpec: "engine model revision dtype tensor_parallel_size max_model_len "
        "gpu_memory_utilization routing prefill layers adapter adapter_as weights served_model "
        "server_concurrency server_timeout_s",
        PromptSpec: "task num_prompts seed dataset_config dataset_split prompt_column "
        "answer_column max_turns max_observation_tokens",
        TrainSpec: "model revision dtype master_dtype offload autocast head_dtype router_dtype "
        "micro_batch_tokens layout sequence_parallel grad routing temperature_in logprobs_dtype "
        "layers adapter adapter_as weights replay_routing replay_source inject inject_seed",
    }.items()
}


HOSTILE = {
    "interpreter": ({"python": "run/x"}, {}, "--python"),
    "environment": ({"env": (("LD_PRELOAD", "run/x.so"),)}, {}, "LD_PRELOAD"),
    "engine argument": ({"args": (("worker_cls", "run.x"),)}, {}, "worker_cls"),
    "remote code of the engine": ({"trust_remote_code": True}, {}, "--trust-remote-code"),
    "remote code of the trainer": ({}, {"trust_remote_code": True}, "--trust-remote-code"),
    "attention": ({}, {"attention": "run.x:attend"}, "--attention"),
    "attention of a hub": ({}, {"attention": "org/kernels"}, "--attention"),
    "experts": ({}, {"experts": "run.x:experts"}, "--experts-implementation"),
    "servers": ({"servers": ("http://203.0.113.9:80",)}, {}, "--server"),
}


@pytest.fixture
def started(monkeypatch):
    """Commands that would go on to run what a spec says."""
    seen = []

    def go(spec, **rest):
        seen.append(spec)
        raise MismatchError("far enough")

    monkeypatch.setattr("mismatch.pipeline.preflight.preflight", go)
    monkeypatch.setattr("mismatch.pipeline.preflight.preflight_rollout", go)
    return seen


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("verb", ["check", "rollout"])
def test_a_copied_spec_runs_no_code_unless_the_caller_says_so(tmp_path, started, case, verb):
    engine, train, named = HOSTILE[case]
    run = copied(tmp_path, engine, train)
    done = CliRunner().invoke(app, [verb, "--resume", str(run)])
    assert isinstance(done.exception, MismatchError)
    assert named in done.exception.message
    assert "--trust-run" in done.exception.fix
    assert not started
    CliRunner().invoke(app, [verb, "--resume", str(run), "--trust-run"])
    assert len(started) == 1


def test_a_class_that_a_copied_spec_names_is_not_imported(tmp_path, started):
    run = copied(tmp_path, prompts={"environment": "run.x:Game"})
    done = CliRunner().invoke(app, ["check", "--resume", str(run)])
    assert isinstance(done.exception, MismatchError)
    assert "--environment" in done.exception.message
    assert not started
    run = copied(tmp_path, prompts={"environment": "retry"})
    CliRunner().invoke(app, ["check", "--resume", str(run)])
    assert len(started) == 1


@pytest.mark.parametrize("spec", NEEDS_TRUST)
def test_every_field_of_every_spec_is_classified(spec):
    """A new field fails here until somebody has said whether a stranger may set it."""
    needs, data = set(NEEDS_TRUST[spec]), DATA[spec]
    assert needs | data == {field.name for field in fields(spec)}
    assert not needs & data


@pytest.mark.parametrize("source", ["path", "dataset"])
def test_a_copied_spec_reads_no_file_of_the_reader(tmp_path, started, source):
    private = tmp_path / "private.jsonl"
    private.write_text('{"prompt": "secret"}\n')
    run = copied(tmp_path, {"servers": ("http://203.0.113.9:80",)}, prompts={source: str(private)})
    done = CliRunner().invoke(app, ["check", "--resume", str(run)])
    assert isinstance(done.exception, MismatchError)
    assert str(private) in done.exception.message
    assert not started
    run = copied(tmp_path, prompts={source: str(private)})  # read into the run, and shared with it
    done = CliRunner().invoke(app, ["check", "--resume", str(run)])
    assert str(private) in done.exception.message
    done = CliRunner().invoke(app, ["loop", "--like", str(run)])
    assert str(private) in done.exception.message
    assert not started
    CliRunner().invoke(app, ["check", "--resume", str(run), "--trust-run"])
    assert len(started) == 1


def test_a_copied_spec_names_no_data_set_that_only_the_reader_can_read(
    tmp_path, started, monkeypatch
):
    """A path below the home folder, and a data set of a hub that the reader's token opens."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "private.jsonl").write_text('{"prompt": "secret"}\n')
    for name in ("~/private.jsonl", "org/private"):
        run = copied(tmp_path, prompts={"dataset": name})
        for command in (["check", "--resume", str(run)], ["loop", "--like", str(run)]):
            done = CliRunner().invoke(app, command)
            assert isinstance(done.exception, MismatchError)
            assert name in done.exception.message
        assert not started
    CliRunner().invoke(app, ["check", "--resume", str(run), "--trust-run"])
    assert len(started) == 1


def test_a_data_set_that_the_run_knows_by_its_content_is_read_again(tmp_path, started, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    data = tmp_path / "mine.jsonl"
    data.write_text('{"prompt": "2 + 2"}\n')
    run = copied(tmp_path, prompts={"dataset": "~/mine.jsonl"})
    with at_work(run, "check", load_spec(run), "mismatch check"):
        pass
    CliRunner().invoke(app, ["check", "--resume", str(run)])
    assert len(started) == 1
    data.write_text('{"prompt": "secret"}\n')
    done = CliRunner().invoke(app, ["check", "--resume", str(run)])
    assert "has changed" in done.exception.message
    assert len(started) == 1


def test_a_prompts_file_that_the_run_knows_by_its_content_is_read_again(tmp_path, started):
    """The run of this reader: its first command noted the checksum of the file."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "2 + 2"}\n')
    run = copied(tmp_path, prompts={"path": str(prompts)})
    with at_work(run, "check", load_spec(run), "mismatch check"):
        pass
    CliRunner().invoke(app, ["check", "--resume", str(run)])
    assert len(started) == 1
    prompts.write_text('{"prompt": "3 + 3"}\n')
    done = CliRunner().invoke(app, ["check", "--resume", str(run)])
    assert "has changed" in done.exception.message
    assert len(started) == 1


@pytest.mark.parametrize("name", ["logs", "errors", "logs/train.log", ".lock"])
def test_a_run_that_holds_a_link_is_not_written(tmp_path, name):
    """What is written, emptied or deleted through a link would be a file of the reader's."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "train-x.json").write_text("mine")
    run = copied(tmp_path)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(victim / "train-x.json" if "." in name else victim)
    with pytest.raises(MismatchError), at_work(run, "compare", CheckSpec(), "mismatch compare"):
        pass
    assert [path.read_text() for path in victim.iterdir()] == ["mine"]


def test_a_module_beside_the_workers_package_is_not_imported(tmp_path):
    room = tmp_path / "package"
    (room / "numpy").mkdir(parents=True)
    (room / "torch.py").write_text("")
    worker_path(tmp_path)
    assert [path.name for path in room.iterdir()] == ["mismatch"]
    assert (room / "mismatch").is_symlink()


def test_a_spec_without_code_needs_no_word(tmp_path, started):
    run = copied(tmp_path, {}, {"attention": "sdpa"})
    CliRunner().invoke(app, ["check", "--resume", str(run)])
    assert len(started) == 1


def test_a_server_that_is_named_again_is_asked(tmp_path, started):
    run = copied(tmp_path, {"servers": ("http://203.0.113.9:80",)})
    CliRunner().invoke(app, ["check", "--resume", str(run), "--server", "http://127.0.0.1:8000"])
    assert started[0].rollout.engine.servers == ("http://127.0.0.1:8000",)


def test_remote_code_of_a_runs_model_is_the_callers_word(tmp_path):
    run = copied(tmp_path, {}, {"trust_remote_code": True})
    done = CliRunner().invoke(app, ["score", str(run)])
    assert isinstance(done.exception, MismatchError)
    assert "--trust-remote-code" in done.exception.message


def test_nothing_of_a_copied_run_is_executed(tmp_path, monkeypatch):
    """A script in the run as the engine's interpreter; it would leave a file."""
    monkeypatch.chdir(tmp_path)
    run = copied(tmp_path, {"python": "run/x"})
    script = run / "x"
    script.write_text("#!/bin/sh\ntouch executed\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    CliRunner().invoke(app, ["check", "--resume", "run"])
    assert not (tmp_path / "executed").exists()


# ---------------------------------------------------------------- the working directory of workers

WORKER = "mismatch.processes.workers.session"


def test_files_of_the_working_directory_do_not_stand_in_for_modules(tmp_path, monkeypatch):
    (tmp_path / "gc.py").write_text("raise SystemExit(7)\n")
    for name in ("json", "tokenizers", "dataclasses"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    command = [*python("")[:1], "-m", WORKER]  # without a job: its usage, exit code 2
    with pytest.raises(MismatchError, match="exit code 2"):
        run_worker("train", command, tmp_path / "run")


def test_functions_of_the_working_directory_are_still_found(tmp_path, monkeypatch):
    (tmp_path / "yours.py").write_text("def attend():\n    pass\n")
    (tmp_path / "colorsys.py").write_text("def attend():\n    pass\n")
    monkeypatch.chdir(tmp_path)
    code = """
        from mismatch.training.user_kernels import load_function
        load_function("yours:attend")
        import colorsys
        assert hasattr(colorsys, "rgb_to_hls"), colorsys.__file__
    """
    run_worker("train", python(code), tmp_path / "run")


def test_a_checkout_that_is_not_installed_is_found_by_its_workers(tmp_path, monkeypatch):
    from mismatch.processes import launch

    root = str(launch.ROOT)
    monkeypatch.setattr("sys.path", [root])  # as python -m mismatch in the checkout has it
    assert root in launch.package_path()["PYTHONPATH"].split(":")


def test_the_spec_that_is_shown_hides_values(tmp_path):
    run = copied(tmp_path, {"args": (("hf_token", "hf_secret"),)})
    done = CliRunner().invoke(app, ["check", "--resume", str(run)])
    assert "hf_secret" not in str(done.exception)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user with a key of their own; another one's is elsewhere."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)

    def lives(name):
        monkeypatch.setenv("HOME", str(tmp_path / name))

    lives("mine")
    return lives


@pytest.fixture
def begun(tmp_path, home):
    """A run that a command of this user began with an interpreter and a data set of a hub."""
    run = copied(tmp_path, {"python": "/env/bin/python"}, prompts={"dataset": "org/private"})
    with at_work(run, "check", load_spec(run), "mismatch check"):
        pass
    return run


def resumed(run, verb="check"):
    flags = ["--like", str(run)] if verb == "loop" else ["--resume", str(run)]
    return CliRunner().invoke(app, [verb, *flags])


def test_a_run_of_this_user_is_resumed_without_a_word(begun, started, tmp_path):
    resumed(begun)
    assert len(started) == 1
    with at_work(begun, "compare", load_spec(begun), "mismatch compare"):
        pass
    resumed(begun)
    assert len(started) == 2
    key = tmp_path / "mine/.local/state/mismatch/key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert key.read_bytes().hex() not in (begun / "run.json").read_text()


def test_a_run_of_another_user_is_not(begun, started, home):
    home("theirs")
    assert "--trust-run" in resumed(begun).exception.fix
    with at_work(begun, "compare", load_spec(begun), "mismatch compare"):  # judging trusts nobody
        pass
    assert "--trust-run" in resumed(begun).exception.fix
    assert not started


def test_a_run_whose_spec_was_edited_is_not(begun, started):
    spec = begun / "spec.json"
    spec.write_text(spec.read_text().replace("/env/bin/python", "/run/x"))
    for verb in ("check", "rollout"):
        assert "--trust-run" in resumed(begun, verb).exception.fix
    assert not started


def test_a_user_without_a_home_that_can_be_written_is_asked(begun, started, home, tmp_path):
    (tmp_path / "file").touch()
    home("file")
    assert "--trust-run" in resumed(begun).exception.fix
    assert not started
