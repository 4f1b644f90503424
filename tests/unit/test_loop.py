"""The loop's parts against known truths: coefficients, arms, history, verification of a push."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from mismatch.cli.flags import Flags
from mismatch.cli.main import app
from mismatch.doctor.machine import inspect_machine, machine_with, parse_kind
from mismatch.doctor.memory import Workload, predict_trainer, sharded
from mismatch.errors import MismatchError
from mismatch.features.loop import arms, history
from mismatch.features.loop.arms import (
    memory_of_loop,
    require_same_settings,
    resume_from,
    run_arm,
)
from mismatch.features.loop.command import asked, checked_of, loop, loop_spec
from mismatch.features.loop.engine_side import EngineSide, own_rewards
from mismatch.features.loop.policy import deal, per_token, policy_loss, unclipped
from mismatch.features.loop.spec import AS_IS, Asked, LoopSpec, arm_of, place_of, read_seeds
from mismatch.metrics.importance_weights import group_advantages
from mismatch.models import resolve_model
from mismatch.models.config import find_config
from mismatch.models.digests import digest_tensor
from mismatch.models.sizes import sized
from mismatch.models.weight_states import Prints
from mismatch.prompts.prompt import Prompt
from mismatch.run import store
from mismatch.run.directory import load_spec
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, Sampling, TrainSpec, to_dict
from mismatch.types import Floats, Rollout, Scoring
from tests.checkpoints import make_mxfp4, rollout
from tests.made_run import make_run
from tests.texts import numbers

BASE = LoopSpec(arm=AS_IS)
ROLLOUT = replace(
    rollout(((3, 4), (3, 6), (4, 5), (4, 2)), sampling=Sampling()),
    prompt_index=np.array([0, 0, 1, 1]),
    rewards=np.array([1.0, 0.0, 0.0, 1.0]),
)


def sides(seed: int = 0, spread: float = 0.3) -> tuple[Floats, Floats, Floats]:
    """(engine, old, new) log-probabilities that differ."""
    drawn = np.random.default_rng(seed)
    engine = -drawn.uniform(0.5, 2.0, ROLLOUT.n_actions)
    old = engine + drawn.normal(0, spread, len(engine))
    return engine, old, old + drawn.normal(0, spread, len(engine))


@pytest.mark.parametrize("loss", ["token", "sequence"])
@pytest.mark.parametrize("arm", [AS_IS, "tis", "seq-tis", "on-policy-ratio"])
def test_coefficients_are_the_derivative_of_the_clipped_objective(loss: Any, arm: str) -> None:
    asked_loop = arm_of(replace(BASE, loss=loss), arm)
    engine, old, new = sides()
    everyone = np.array([0, 1])
    policy = policy_loss(ROLLOUT, old, engine, everyone, asked_loop)
    got = policy(np.arange(len(new)), new)

    sequence = torch.from_numpy(ROLLOUT.sequence_of_token[ROLLOUT.actions])
    assert ROLLOUT.rewards is not None
    advantage = torch.from_numpy(group_advantages(ROLLOUT.rewards, ROLLOUT.prompt_index))[sequence]
    delta = torch.from_numpy(old - engine)
    weight = torch.ones_like(delta)
    if arm == "tis":
        weight = delta.exp().clamp(max=2.0)
    if arm == "seq-tis":
        total = torch.zeros(4, dtype=torch.float64).index_add(0, sequence, delta)
        weight = total.exp().clamp(max=2.0)[sequence]
    logprobs = torch.tensor(new, requires_grad=True)
    before = logprobs.detach() if arm == "on-policy-ratio" else torch.from_numpy(old)
    ratio = (logprobs - before).exp()
    terms = weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    if loss == "token":
        objective = terms.sum() / len(terms)
    else:
        lengths = torch.bincount(sequence)[sequence]
        objective = (terms / lengths).sum() / 4
    objective.backward()
    assert logprobs.grad is not None
    assert np.allclose(got, logprobs.grad.numpy())
    assert (got == 0).any() == (arm != "on-policy-ratio")  # the clip removed some
    assert (policy.largest > 1.2) == (arm != "on-policy-ratio")


def test_a_mini_batch_counts_only_its_own_prompts() -> None:
    engine, old, _ = sides()
    first, second = deal(ROLLOUT, 2, (0, 3))
    parts = [policy_loss(ROLLOUT, old, engine, p, BASE).plain for p in (first, second)]
    assert not (parts[0] * parts[1]).any()
    assert all(part.any() for part in parts)
    assert [list(p) for p in deal(ROLLOUT, 5, (0, 3))] == [list(p) for p in (first, second)]


def test_arms_are_the_changes_of_the_fixes() -> None:
    without = arm_of(BASE, "no-sinks+seq-tis")
    assert without.check.train.attention == "no-sinks"
    assert without.corrections == ("tis-sequence",)
    assert arm_of(without, "attention-sinks").check.train.attention == "auto"
    assert arm_of(BASE, "router-replay").check.train.replay_routing == "ids"
    assert arm_of(BASE, AS_IS) == BASE
    for name in ("attention-sinks", "nothing", "router-noise=1", "tis+attention-sinks"):
        with pytest.raises(MismatchError):
            arm_of(BASE, name)


@pytest.mark.parametrize("text", ["", "a", "-1", "0,x"])
def test_seeds_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(MismatchError):
        read_seeds(text)


def scorings() -> tuple[Scoring, Scoring]:
    engine, old, _ = sides(1)
    ids = ROLLOUT.token_ids[ROLLOUT.actions]
    entropy = np.full(len(ids), 0.5)
    return Scoring("vllm:decode", ids, engine, {}), Scoring("fsdp", ids, old, {}, entropy)


def test_a_history_holds_what_was_measured_and_forgets_what_is_made_again(tmp_path: Path) -> None:
    row = history.measure(ROLLOUT, *scorings())
    engine, old, _ = sides(1)
    assert row["reward"] == 0.5
    assert row["entropy"] == 0.5
    delta = old - engine
    assert row["k3_kl"] == pytest.approx((np.exp(delta) - 1 - delta).mean())
    for step in range(4):
        history.save_row(tmp_path, row | {"step": float(step)})
    history.forget_from(tmp_path, 2)
    rows = history.rows_of(tmp_path)
    timed = [row | {"seconds": 30.0} for row in rows]
    assert numbers(history.in_words(timed[-1], steps=12))[-2:] == [
        30,
        5,
    ]  # s a step, min to its end
    assert [row["step"] for row in rows] == [0.0, 1.0]


# ---------------------------------------------------------------- the engine's side


NAMES = ("a", "b")


class Engine:
    """A driver of an engine whose paths bring some of the pushed weights."""

    brings: ClassVar = {"reload": ("a",), "rpc": NAMES}

    def __init__(self, engine: Any, checkpoint: Any, scratch: Path) -> None:
        self.checkpoint, self.own = checkpoint, {name: torch.zeros(8, 8) for name in NAMES}

    def push(self, path: str, push: int) -> None:
        pushed = dict(self.checkpoint.tensors(push))
        self.own |= {name: pushed[name] for name in self.brings[path]}

    def held(self, names: list[str], transposed: list[str]) -> Any:
        return {name: Prints.of(name, tensor) for name, tensor in self.own.items()}, {}

    def drop_caches(self) -> None:
        pass


def engine_side(tmp_path: Path, loop: LoopSpec = BASE) -> EngineSide:
    return EngineSide(tmp_path, loop, None, None, ["reload", "rpc"], list(range(6)))  # type: ignore[arg-type]


def test_weights_go_by_the_path_that_brings_all_and_a_lost_parameter_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(8, 8, generator=generator) for name in NAMES}
    (tmp_path / "weights").mkdir()
    save_file(weights, tmp_path / "weights" / "model.safetensors", {"format": "pt"})
    config = Path(resolve_model("tiny-gpt-oss")) / "config.json"
    (tmp_path / "weights" / "config.json").write_text(config.read_text())
    digests = {name: list(digest_tensor(tensor)) for name, tensor in weights.items()}
    monkeypatch.setattr("mismatch.features.loop.engine_side.driver_class", lambda _: Engine)
    side = engine_side(tmp_path)
    assert side.take(3, digests)["parameters_verified"] == 2
    assert side.paths == ["rpc"]  # reload lost a parameter
    with pytest.raises(MismatchError) as lost:
        side.take(3, digests | {"a": [0] * 6})
    assert lost.value.message.endswith("export lost a")
    monkeypatch.setattr(Engine, "brings", {"rpc": ("a",)})
    with pytest.raises(MismatchError) as lost:
        side.take(3, digests)
    assert lost.value.message.startswith("step 3:")
    assert lost.value.message.endswith("rpc lost b")
    monkeypatch.setattr(Engine, "held", lambda *_: ({}, {}))
    with pytest.raises(MismatchError, match="no parameter"):
        side.take(3, digests)


def test_arms_of_one_seed_see_the_same_prompts(tmp_path: Path) -> None:
    side = engine_side(tmp_path, replace(BASE, prompts=4))
    other = engine_side(tmp_path, arm_of(replace(BASE, prompts=4), "tis"))
    assert side.chosen(5) == other.chosen(5) != side.chosen(6)
    assert len(set(side.chosen(5))) == 4
    many = engine_side(tmp_path, replace(BASE, prompts=9))
    assert len(many.chosen(0)) == 9


class Tokenizer:
    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))


def failing_reward(text: str, answer: int) -> float:
    raise KeyError(answer)


def length_reward(text: str, answer: int) -> float:
    return float(len(text.split()))


def test_a_reward_function_that_raises_stops_with_its_words() -> None:
    prompts = [Prompt("here", text="", answer=n) for n in range(2)]
    given: Rollout = ROLLOUT
    got = own_rewards(f"{__name__}:length_reward", prompts, given, Tokenizer(), "step 1")
    assert got.tolist() == [4.0, 6.0, 5.0, 2.0]
    with pytest.raises(MismatchError, match=r"\b0 .*\b1: KeyError"):
        own_rewards(f"{__name__}:failing_reward", prompts, given, Tokenizer(), "step 1")


# ---------------------------------------------------------------- a run goes on


def resuming(folder: Path, **given: str) -> Flags:
    """``--resume PLACE`` and these flags."""
    flags = Flags({"resume": str(folder), "steps": 60, "arms": "as-is", "seeds": "0", **given})
    flags.explicit = frozenset({"resume", *given})
    return flags


def test_a_run_goes_on_in_another_installation_with_the_arms_it_was_asked(tmp_path: Path) -> None:
    tiny = resolve_model("tiny-gpt-oss")
    engine = RolloutSpec(engine=EngineSpec(model=tiny))
    base = replace(BASE, steps=9, check=CheckSpec(engine, TrainSpec(tiny, dtype="fp32")))
    require_same_settings(Asked(base, ("as-is",), (0,)), tmp_path)
    text = (tmp_path / "settings.json").read_text("utf-8")
    assert tiny not in text
    (tmp_path / "settings.json").write_text(
        text.replace('"tiny-gpt-oss"', '"/elsewhere/mismatch/models/tiny-gpt-oss"'), "utf-8"
    )
    longer = replace(base, steps=12)
    every = require_same_settings(Asked(longer, ("tis",), (0, 1)), tmp_path)
    assert every == (longer, ("as-is", "tis"), (0, 1))
    again, arms, seeds = asked(resuming(tmp_path, seeds="5"))
    assert (again.steps, arms, seeds) == (12, ("as-is", "tis"), (5,))
    assert again.check.train.model == tiny
    other = replace(base, check=replace(base.check, train=TrainSpec(tiny, dtype="fp16")))
    with pytest.raises(MismatchError, match=r"train\.dtype: 'fp32' .*'fp16'"):
        require_same_settings(Asked(other, ("as-is",), (0,)), tmp_path)
    with pytest.raises(MismatchError, match="holds no loop"):
        asked(resuming(tmp_path / "nothing"))
    own = replace(base, reward="my.task:reward")
    require_same_settings(Asked(own, ("as-is",), (0,)), tmp_path / "own")
    with pytest.raises(MismatchError, match=r"my\.task:reward"):
        asked(resuming(tmp_path / "own"))


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize("fails", ["engine", "world"])
def test_whichever_worker_fails_ends_the_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    commands = dict.fromkeys(("engine", "world"), "import time; time.sleep(60)")
    commands[fails] = "raise SystemExit(3)"
    for side, code in commands.items():
        command = [sys.executable, "-c", code]
        monkeypatch.setattr(arms, f"{side}_command", lambda *_, command=command: (command, {}))
    began = time.monotonic()
    with pytest.raises(MismatchError, match="exit code 3"):
        run_arm(tmp_path, replace(BASE, steps=3), tmp_path / "pool.json", lambda line: None)
    assert time.monotonic() - began < 50


def test_a_run_goes_on_from_the_last_whole_checkpoint(tmp_path: Path) -> None:
    assert resume_from(tmp_path) == 0
    for name in ("000005", "000010", "000015.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert resume_from(tmp_path) == 10
    assert place_of("no-sinks+seq-tis", 1) == "no-sinks+seq-tis/seed-1"


def test_an_optimiser_takes_three_times_the_parameters_beside_them() -> None:
    model = resolve_model("tiny-gpt-oss")
    train = TrainSpec(model, master_dtype="fp32", grad=True)
    shape, work = sized(find_config(model, None)), Workload(4, 100)
    scores = predict_trainer(shape, train, 2, work, "cpu")
    trains = predict_trainer(shape, train, 2, work, "cpu", trains=True)
    assert trains.peak_bytes - scores.peak_bytes == 3 * sharded(shape, train, 2)
    check = CheckSpec(RolloutSpec(engine=EngineSpec(model=model)), train, nproc_per_node=1)
    engine, trainer = memory_of_loop(check)
    assert (engine.side, trainer.side) == ("engine", "fsdp")
    assert trainer.capacity < engine.capacity


def test_sides_on_one_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve_model("tiny-gpt-oss")
    check = CheckSpec(
        RolloutSpec(EngineSpec("vllm", model)),
        TrainSpec(model, master_dtype="fp32"),
        nproc_per_node=1,
    )
    capacities = []
    for count in (1, 2):
        machine = machine_with(inspect_machine(), count, parse_kind("H100")[1])
        monkeypatch.setattr(arms, "inspect_machine", lambda machine=machine: machine)
        capacities.append(memory_of_loop(check)[1].capacity)
    assert capacities[0] < capacities[1]


def test_the_command_reads_its_flags_and_starts_nothing_on_a_dry_run() -> None:
    flags = ["loop", "--dry-run", "--arms", "as-is,no-sinks+seq-tis"]
    shown = CliRunner().invoke(app, [*flags, "--steps", "7", "--seeds", "0,1"])
    assert shown.exit_code in (0, 2), shown.output
    assert "28" in shown.output  # 7 steps of two arms with two seeds
    assert "0.0003" in shown.output
    refused = CliRunner().invoke(app, ["loop", "--dry-run", "--arms", "attention-sinks"])
    assert isinstance(refused.exception, MismatchError)  # it changes nothing


def test_a_loop_takes_the_sides_of_a_check(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    spec = load_spec(run)
    flags = Flags({option.name: option.default for option in loop.options} | {"like": run})  # type: ignore[attr-defined]
    made = loop_spec(flags).check
    assert made.rollout.engine.model == spec.rollout.engine.model
    assert (made.train.dtype, made.noise_floor) == (spec.train.dtype, False)
    assert made.train.master_dtype == "fp32"  # bf16 would round small steps away
    assert loop_spec(flags).learning_rate == 1e-6  # for a model that is not the embedded one
    flags.explicit = frozenset({"num_prompts", "max_tokens"})  # sizes may be a loop's own
    flags |= {"num_prompts": 3, "max_tokens": 5}
    small = loop_spec(flags)
    assert small.check.rollout.prompts.num_prompts == 3
    assert small.check.rollout.sampling.max_tokens == 5
    flags.explicit = frozenset({"dtype"})
    with pytest.raises(MismatchError, match="--dtype") as caught:
        loop_spec(flags)
    assert caught.value.fix
    assert len(loop.options) <= 30  # type: ignore[attr-defined]


def test_a_loop_like_a_run_of_few_layers_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    spec = load_spec(run)
    few = replace(spec, train=replace(spec.train, layers=3))
    store.write_json(run / "spec.json", to_dict(few))
    flags = Flags({option.name: option.default for option in loop.options} | {"like": run})  # type: ignore[attr-defined]
    with pytest.raises(MismatchError, match="3 layers") as caught:
        loop_spec(flags)
    assert caught.value.fix


def test_a_loop_serves_packed_experts_in_bf16_alone(tmp_path: Path) -> None:
    """A push of bf16 weights would leave what an engine packed or rounded at its first values."""
    run = make_run(tmp_path / "run")
    packed = str(make_mxfp4(tmp_path / "packed", tmp_path / "plain"))
    spec = load_spec(run)
    flags = Flags({option.name: option.default for option in loop.options} | {"like": run})  # type: ignore[attr-defined]

    def serve(**engine: Any) -> LoopSpec:
        served = replace(spec.rollout.engine, **engine)
        asked = replace(spec, rollout=replace(spec.rollout, engine=served))
        store.write_json(run / "spec.json", to_dict(asked))
        return loop_spec(flags)

    for engine in ({"weights": "mxfp4-rounded"}, {"model": packed}):
        with pytest.raises(MismatchError) as caught:
            serve(**engine)
        assert "--weights engine=bf16" in caught.value.fix
    assert serve(model=packed, weights="bf16").check.train.weights == "bf16"
    assert serve().check.train.weights == spec.train.weights


def test_a_loop_says_what_its_check_found_of_each_arm(tmp_path: Path) -> None:
    """Of the check as it is and with each fix that it measured."""
    run = Path(__file__).parents[2] / "examples" / "tiny-gpt-oss-no-sinks"
    checked = checked_of(run)
    assert checked is not None
    assert (checked.prompts, checked.samples) == (64, 4)
    assert checked.verdicts["as-is"] == "broken"
    assert checked.verdicts["attention-sinks"] == "healthy"
    assert checked_of(make_run(tmp_path / "bare")) is None


def test_what_a_kill_left_half_written_goes_with_the_steps_that_are_made_again(
    tmp_path: Path,
) -> None:
    for name in ("rows/000000.json", "rows/000002.json", "go/000001.json", "go/.000001.json.77",
                 "steps/000000/rollout", "steps/000001/rollout"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    history.forget_from(tmp_path, 1)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")}
    assert left == {"rows/000000.json", "steps/000000"}


def test_no_order_of_a_run_that_ended_reaches_the_engine_of_its_continuation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is up before the trainer would sample a step that is then made again."""

    def ended(*_: object) -> None:
        assert not (tmp_path / "go" / "000001.json").exists()
        raise MismatchError("seen", "-")

    for name in ("checkpoints/000001/state", "go/000000.json", "go/000001.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(arms, "started", ended)
    with pytest.raises(MismatchError, match="seen"):
        run_arm(tmp_path, replace(BASE, steps=3), tmp_path / "pool.json", lambda line: None)
    assert (tmp_path / "go" / "000000.json").exists()


def test_token_loss_divides_by_all_tokens_and_sequence_loss_by_each_samples() -> None:
    lengths = np.array([2, 4, 3, 1])
    advantage, sequence = np.array([1.0, -1.0, 0.5, 2.0]), np.repeat(np.arange(4), lengths)
    member = sequence != 2
    token = per_token(advantage, member, sequence, "token")
    assert token == pytest.approx(np.where(member, advantage[sequence] / 7, 0.0))
    each = per_token(advantage, member, sequence, "sequence")
    assert each == pytest.approx(np.where(member, (advantage / (3 * lengths))[sequence], 0.0))


def test_ppo_gradient_is_the_objectives_derivative() -> None:
    ratio, advantage = np.array([0.5, 0.9, 1.1, 1.5] * 2), np.repeat([1.0, -1.0], 4)

    def objective(logprob: np.ndarray) -> np.ndarray:
        r = ratio * np.exp(logprob)
        return np.minimum(r * advantage, np.clip(r, 0.8, 1.2) * advantage)

    numeric = (objective(np.full(8, 1e-6)) - objective(np.full(8, -1e-6))) / 2e-6
    ours = np.where(unclipped(ratio, advantage, 0.2), ratio * advantage, 0.0)
    assert ours == pytest.approx(numeric, abs=1e-8)
