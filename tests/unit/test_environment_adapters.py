"""Environments of verifiers and OpenEnv as partners, held to their interfaces by stand-ins."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import types
from dataclasses import dataclass, field
from typing import Any

import pytest

from mismatch.errors import MismatchError
from mismatch.processes.workers.sampling import environment_class
from mismatch.prompts import adapters
from mismatch.prompts.adapters import adapted
from mismatch.prompts.prompt import Prompt
from mismatch.specs import PromptSpec, RolloutSpec

QUESTION = [{"role": "user", "content": "2 + 2?"}]


@dataclass
class Message:
    """As verifiers' messages: attributes, and model_dump."""

    content: str
    role: str = "assistant"
    tool_calls: Any = None

    def model_dump(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, "tool_calls": self.tool_calls}


@dataclass
class Call:
    id: str
    name: str
    arguments: str


class Rubric:
    async def score_rollout(self, state: dict[str, Any]) -> None:
        state["reward"] = 1.0 if state["answer"] in state["completion"] else 0.0


@dataclass
class MultiTurn:
    """The methods of verifiers' MultiTurnEnv that are used, in its order."""

    rubric: Rubric = field(default_factory=Rubric)
    rows: tuple[dict[str, Any], ...] = ({"prompt": QUESTION, "answer": "4", "info": {"n": 7}},)
    replies: int = 1

    def get_dataset(self) -> Any:
        return self.rows

    async def init_state(self, row: Any, client: Any, model: str) -> dict[str, Any]:
        return {**row, "trajectory": [], "trajectory_id": "x", "final_env_response": None}

    async def setup_state(self, state: Any) -> Any:
        return None  # state is changed in place

    async def add_trajectory_step(self, state: Any, step: Any) -> None:
        state["trajectory"].append(step)

    async def is_completed(self, state: Any) -> bool:
        return "done" in state["trajectory"][-1]["completion"][-1].content

    async def env_response(self, messages: Any, state: Any) -> Any:
        last = messages[-1]
        if last.tool_calls:
            return [Message(f"{last.tool_calls[0].name} of {len(messages)}", "tool")]
        return [Message("Again.", "user")] * self.replies

    async def cleanup(self, state: Any) -> None:
        state["cleaned"] = True

    async def render_completion(self, state: Any) -> None:
        state["completion"] = " ".join(
            each.content for step in state["trajectory"] for each in step["completion"]
        )


def installed(monkeypatch: pytest.MonkeyPatch, environment: Any) -> None:
    package, parts = types.ModuleType("verifiers"), types.ModuleType("verifiers.types")
    package.load_environment = lambda id: environment  # type: ignore[attr-defined]
    parts.AssistantMessage, parts.ToolCall = Message, Call  # type: ignore[attr-defined]
    clients = types.ModuleType("verifiers.clients")
    clients.Client = type("Client", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.clients", clients)
    monkeypatch.setitem(sys.modules, "verifiers.types", parts)


def test_a_verifiers_environment_replies_and_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, MultiTurn())
    spec = RolloutSpec(prompts=PromptSpec(environment="verifiers:sums"))
    kind: Any = environment_class(spec)
    assert hasattr(kind, "reward")  # what asks for rewards looks at the class
    partner = kind(Prompt("p", messages=QUESTION))
    assert partner.state["info"] == {"n": 7}  # of the row with this prompt
    assert partner.reply("3<|im_end|>") == {"role": "user", "content": "Again."}
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>'
    assert partner.reply(call) == {"role": "tool", "content": "f of 4"}
    assert partner.reply("4, done<|im_end|>") is None
    contents = [step["completion"][-1].content for step in partner.state["trajectory"]]
    assert contents[0] == "3"
    assert partner.reward() == 1.0
    partner.close()
    assert partner.state["cleaned"]
    other = kind(Prompt("q", messages=[{"role": "user", "content": "3 + 3?"}], answer=6))
    assert other.state["answer"] == "6"


def test_a_reply_of_several_messages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, MultiTurn(replies=2))
    kind: Any = adapted("verifiers:sums")
    with pytest.raises(ValueError, match="2 messages"):
        kind(Prompt("p", text="hello")).reply("3")


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", types.ModuleType("verifiers"))
    with pytest.raises(MismatchError) as caught:
        adapted("verifiers:sums")
    assert "verifiers<0.4" in caught.value.fix
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(MismatchError) as caught:
        adapted("verifiers:sums")
    assert caught.value.fix == "pip install 'verifiers<0.4'"
    with pytest.raises(MismatchError):
        adapted("openenv:http://localhost:8000")
    assert adapted("my.tasks:Game") is None


@dataclass
class Result:
    observation: dict[str, Any]
    reward: float | None
    done: bool


class Client:
    """As openenv's GenericEnvClient: asynchronous, actions and observations are dicts."""

    def __init__(self, base_url: str) -> None:
        self.seen: list[Any] = [base_url]

    async def connect(self) -> None:
        self.seen.append("connect")

    async def reset(self) -> Result:
        self.seen.append("reset")
        return Result({}, None, False)

    async def step(self, action: dict[str, Any]) -> Result:
        self.seen.append(action)
        turns = sum(isinstance(each, dict) for each in self.seen)
        text = {"echoed_message": f"turn {turns}", "metadata": {"a": "b"}}
        return Result(text if turns == 1 else {"a": "y", "b": "x"}, 0.5, turns == 3)

    async def close(self) -> None:
        self.seen.append("close")


def test_an_openenv_server_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("openenv", "openenv.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = types.ModuleType("openenv.core.generic_client")
    module.GenericEnvClient = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kind: Any = adapted("openenv:http://localhost:8000#code")
    partner = kind(Prompt("p", text="hello"))
    assert partner.reply("one<|return|>") == {"role": "user", "content": "turn 1"}
    second = partner.reply("two")
    assert second["role"] == "user"
    assert json.loads(second["content"]) == {"a": "y", "b": "x"}
    assert partner.reply("three") is None
    assert partner.session.seen == [
        "http://localhost:8000", "connect", "reset",
        {"code": "one"}, {"code": "two"}, {"code": "three"},
    ]  # fmt: skip
    assert partner.reward() == 1.5
    partner.close()
    assert partner.session.seen[-1] == "close"


def test_one_that_hangs_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it waits, and is cancelled, or blocks the loop that all share."""
    monkeypatch.setattr(adapters, "WAIT_S", 0.2)
    monkeypatch.setattr(adapters, "ALIVE_S", 0.2)
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(5)
        finally:
            ended.append("cancelled")

    async def blocks() -> None:
        time.sleep(3)

    async def answers() -> str:
        return "fine"

    loop = adapters._loop()
    with pytest.raises(TimeoutError):
        adapters._wait(waits())
    assert ended == ["cancelled"]
    assert adapters._wait(answers()) == "fine"
    assert adapters._loop() is loop
    with pytest.raises(TimeoutError):
        adapters._wait(blocks())
    assert adapters._wait(answers()) == "fine"
    assert adapters._loop() is not loop
