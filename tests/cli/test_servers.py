"""`--server` and its companions: what is refused before anything starts, what may be resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch.cli.flags import Flags
from mismatch.cli.options import CHECK
from mismatch.cli.to_spec import engine_spec, moved, server_addresses
from mismatch.errors import MismatchError
from mismatch.run import store
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec, to_dict
from tests.command import mismatch
from tests.scripted_server import ScriptedServer

SECRET = "sk-very-secret"
HERE = "http://127.0.0.1:9"  # where nobody answers


def refused(tmp_path: Path, *flags: str, **env: str) -> str:
    done = mismatch("check", "--model", "tiny-gpt-oss", *flags, cwd=tmp_path, **env)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir()), "nothing may be left"
    return done.stdout + done.stderr


def test_a_wrong_address_is_said_at_once(tmp_path: Path) -> None:
    error = refused(tmp_path, "--server", HERE)
    assert f"{HERE}:" in error


def test_secrets_in_addresses_are_refused_and_not_repeated(tmp_path: Path) -> None:
    error = refused(tmp_path, "--server", f"http://me:{SECRET}@127.0.0.1:9")
    assert SECRET not in error
    assert "MISMATCH_API_KEY" in error


def flags(**given: object) -> Flags:
    """Values of the flags of a check, some of them given by the user."""
    values = Flags({option.name: option.default for option in CHECK} | given)
    values.explicit = frozenset(given)
    return values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine_arg", ["kv_cache_dtype=fp8"]),
        ("engine", ["vllm"]),
        ("tensor_parallel_size", 2),
        ("max_model_len", 64),
        ("weights", ["engine=bf16"]),
        ("python", ["engine=x/python"]),
    ],
)
def test_flags_of_an_engine_of_ours_are_refused(name: str, value: object) -> None:
    with pytest.raises(MismatchError, match=f"--{name.replace('_', '-')}"):
        server_addresses(flags(server=[HERE], **{name: value}))


def test_flags_become_fields_of_the_engine() -> None:
    assert server_addresses(flags()) == ()
    given = flags(server=[HERE + "/v1"], server_timeout=5.0, served_model="m")
    assert engine_spec(given, "tiny-gpt-oss", "server", None) == EngineSpec(
        engine="server",
        model="tiny-gpt-oss",
        servers=(HERE,),
        served_model="m",
        server_timeout_s=5.0,
    )
    engine = EngineSpec("server", "tiny-gpt-oss", servers=("http://a:1",), served_model="m")
    later = moved(engine, flags(server=[HERE]))
    assert (later.servers, later.served_model) == ((HERE,), "m")
    with pytest.raises(MismatchError, match="not with servers"):
        moved(EngineSpec("transformers", "tiny-gpt-oss"), flags(server=[HERE]))


def test_companions_need_a_server(tmp_path: Path) -> None:
    assert "--served-model without --server" in refused(tmp_path, "--served-model", "x")
    assert "--server http://" in refused(tmp_path, "--engine", "server")


def test_the_wrong_model_is_refused_before_a_run_is_begun(tmp_path: Path) -> None:
    with ScriptedServer(name="large", key=SECRET) as server:
        error = refused(tmp_path, "--server", server.url, MISMATCH_API_KEY=SECRET)
        assert "--served-model large" in error
        error = refused(tmp_path, "--server", server.url, MISMATCH_API_KEY="not-it")
        assert "MISMATCH_API_KEY" in error
        assert "not-it" not in error


def begun(tmp_path: Path, engine: EngineSpec) -> Path:
    """A run that was begun and has nothing yet."""
    run = tmp_path / "run"
    run.mkdir()
    spec = CheckSpec(rollout=RolloutSpec(engine), train=TrainSpec(model=engine.model))
    store.write_json(run / "spec.json", to_dict(spec))
    return run


def test_a_run_goes_on_with_servers_elsewhere(tmp_path: Path) -> None:
    run = begun(tmp_path, EngineSpec("server", "tiny-gpt-oss", servers=("http://127.0.0.1:7",)))
    done = mismatch("rollout", "--resume", str(run), "--trust-run", cwd=tmp_path)
    assert "http://127.0.0.1:7:" in done.stderr
    done = mismatch("rollout", "--resume", str(run), "--server", HERE, cwd=tmp_path)
    assert f"{HERE}:" in done.stderr
    assert done.returncode == 2


def test_the_plan_names_the_servers_and_counts_no_memory_of_theirs() -> None:
    from mismatch.doctor.plan import plan
    from mismatch.models import resolve_model

    model = resolve_model("tiny-gpt-oss")
    train = TrainSpec(model=model)
    remote = CheckSpec(
        rollout=RolloutSpec(EngineSpec("server", model, servers=(HERE,))), train=train
    )
    local = CheckSpec(rollout=RolloutSpec(EngineSpec("transformers", model)), train=train)
    planned = plan(remote)
    assert planned.stages["rollout"].startswith(HERE)
    both = [{fit.side for fit in each.sides} for each in (planned, plan(local))]
    assert both[1] - both[0] == {"engine", "transformers in float32"}
