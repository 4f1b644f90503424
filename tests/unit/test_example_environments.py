"""The environments of examples/environments: what their README says they do."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mismatch.processes.workers.sampling import environment_class
from mismatch.prompts.environments import Replies, prepared
from mismatch.prompts.prompt import Prompt
from mismatch.specs import PromptSpec, RolloutSpec
from tests.checkpoints import tokenizer

FOLDER = Path(__file__).parent.parent.parent / "examples" / "environments"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.tool_calls[0].function.arguments if m.tool_calls else m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = Prompt("p", messages=[{"role": "user", "content": "2 + 2?"}], answer=4)


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(FOLDER)
    yield
    for name in ("adapters", "code_tool", "sandbox"):
        sys.modules.pop(name, None)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the code's directories, of which no file and no process may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert not list(tmp_path.iterdir())
    assert not [p for p in psutil.process_iter(["cwd"]) if str(tmp_path) in str(p.info["cwd"])]


def environment(name: str) -> Any:
    return environment_class(RolloutSpec(prompts=PromptSpec(environment=name)))


def replies(kind: Any) -> Replies:
    chat = tokenizer()
    chat.chat_template = CHATML
    chat.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    end = chat.convert_tokens_to_ids("<|im_end|>")
    return Replies(kind, [TALK], chat, [end], len(chat), max_tokens=100)


def replied(partner: Replies, response: str) -> str:
    ids = partner(0, partner.tokenizer(response)["input_ids"])
    assert ids is not None, partner.ended
    return str(partner.tokenizer.decode(ids))


def test_the_python_tool_runs_a_call_and_is_offered(home: Path) -> None:
    kind = environment("code_tool:Python")
    (prompt,) = prepared(kind, [TALK])
    assert prompt.tools == [kind.tool]
    partner = replies(kind)
    call = '<tool_call>{"name": "python", "arguments": {"code": "%s"}}</tool_call>'
    assert "42" in replied(partner, call % "print(6 * 7)")
    assert "ZeroDivisionError" in replied(partner, call % "1 / 0")
    assert partner(0, partner.tokenizer("Answer: 42")["input_ids"]) is None
    assert not partner.ended


def test_retool_continues_the_message_after_the_output(home: Path) -> None:
    kind = environment("code_tool:Retool")
    (prompt,) = prepared(kind, [TALK])
    assert not prompt.tools
    assert prompt.messages
    assert prompt.messages[0]["content"] == f"{kind.instructions}\n\n2 + 2?"
    assert prepared(kind, [prompt]) == [prompt]
    partner = replies(kind)
    response = "So <code>\nprint(6 * 7)\n</code>"
    assert replied(partner, response) == "\n\n<interpreter>\n42\n</interpreter>\n\n"
    long = replied(partner, "<code>print('word ' * 1000)</code>")
    assert long.endswith("\n</interpreter>\n\n")  # the texts around the output are not cut
    assert partner.cut == 1
    ended = replied(partner, f"{response}<|im_end|>")
    assert ended.split()[:3] == ["<|im_start|>user", "<interpreter>", "42"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os\nos.fork()", "PermissionError"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "PermissionError"),
        ("while True: print('x' * 1000)", "2,000 bytes"),
        ("while True: pass", "error: "),
        ("open('f', 'wb').write(b'0' * (4 << 20))", "File too large"),
    ],
)
def test_code_is_limited(code: str, says: str, home: Path) -> None:
    from sandbox import Limits, run_code  # type: ignore[import-not-found]

    assert says in run_code(code, Limits(2.0, output_bytes=2000, file_bytes=1 << 20))


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)


class MultiTurn:
    """A stand-in with the methods of verifiers' MultiTurnEnv that the adapter uses."""

    class rubric:
        @staticmethod
        async def score_rollout(state: dict[str, Any]) -> None:
            state["reward"] = float(state["answer"] in state["trajectory"][-1]["seen"][-1].content)

    def get_dataset(self) -> Any:
        return [{"prompt": TALK.messages, "answer": "4", "info": {"n": 7}}]

    async def init_state(self, row: Any, client: Any, model: str) -> dict[str, Any]:
        return {**row, "trajectory": [], "trajectory_id": "x"}

    async def setup_state(self, state: Any) -> None: ...

    async def add_trajectory_step(self, state: Any, step: Any) -> None:
        state["trajectory"].append(step)

    async def is_completed(self, state: Any) -> bool:
        return "done" in state["trajectory"][-1]["completion"][-1].content

    async def env_response(self, messages: Any, state: Any) -> Any:
        return [{"role": "user", "content": f"again, {len(messages)}"}]

    async def render_completion(self, state: Any) -> None: ...

    async def cleanup(self, state: Any) -> None:
        state["cleaned"] = True

    async def _teardown(self) -> None: ...


def test_a_verifiers_environment_replies_and_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "verifiers", load_environment=lambda id: MultiTurn())
    installed(monkeypatch, "verifiers.clients", Client=type("Client", (), {}))
    message = types.SimpleNamespace
    installed(monkeypatch, "verifiers.types", AssistantMessage=message, ToolCall=message)
    from adapters import verifiers_environment  # type: ignore[import-not-found]

    kind = verifiers_environment("sums")
    partner = kind(TALK)
    assert partner.state["info"] == {"n": 7}  # of the row with this prompt
    assert partner.reply("3<|im_end|>") == {"role": "user", "content": "again, 2"}
    assert partner.reply("4, done<|im_end|>") is None
    assert partner.reward() == 1.0
    partner.close()
    assert partner.state["cleaned"]


class Server:
    """A stand-in for openenv's GenericEnvClient."""

    def __init__(self, base_url: str) -> None:
        self.actions: list[Any] = []

    async def connect(self) -> None: ...

    async def reset(self) -> None: ...

    async def step(self, action: dict[str, Any]) -> Any:
        self.actions.append(action)
        done = len(self.actions) == 2
        return types.SimpleNamespace(observation={"text": "echo"}, reward=0.5, done=done)

    async def close(self) -> None:
        await asyncio.sleep(0)


def test_an_openenv_server_replies_and_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("openenv", "openenv.core"):
        installed(monkeypatch, name)
    installed(monkeypatch, "openenv.core.generic_client", GenericEnvClient=Server)
    from adapters import openenv_server

    partner = openenv_server("http://localhost:8000", "code")(TALK)
    assert partner.reply("one<|return|>") == {"role": "user", "content": "echo"}
    assert partner.reply("two") is None
    assert partner.session.actions == [{"code": "one"}, {"code": "two"}]
    assert partner.reward() == 1.0
    partner.close()
