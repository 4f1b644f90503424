"""Adapt environments of ``verifiers`` and OpenEnv to mismatch's protocol.

Name the class in a module of yours, and give that to ``--environment my_module:Sums``::

    from adapters import openenv_server, verifiers_environment

    Sums = verifiers_environment("sums")                          # derives from MultiTurnEnv
    Echo = openenv_server("http://localhost:8000", "message")     # a running server

Written against verifiers 0.3.0 and openenv-core 0.2.3 and 0.3.0.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import re
import threading
from collections.abc import Coroutine, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from mismatch.errors import MismatchError
from mismatch.prompts.prompt import Prompt
from mismatch.prompts.tools import tool_call

ENDS = re.compile(r"(?:\s*(?:<\|[^|<>]*\|>|</s>))+\s*$")  # special tokens that end a response
WAIT_S = 50.0  # of a reply, a reward or an end; less than environments.REPLY_S
ALIVE_S = 1.0


def verifiers_environment(id: str) -> type[Verifiers]:
    """Return the class for an installed environment of verifiers.

    Raises:
        MismatchError: the package is missing, or it has no such environment.
    """
    shared = _load_verifiers(id)
    atexit.register(lambda: _wait(shared._teardown()))

    class OfVerifiers(Verifiers):
        def __init__(self, prompt: Prompt) -> None:
            super().__init__(shared, prompt)

    return OfVerifiers


def openenv_server(url: str, field: str = "message") -> type[OpenEnv]:
    """Return the class for a running OpenEnv server, whose actions hold the response as ``field``.

    Raises:
        MismatchError: the package is missing.
    """
    client = _openenv_client()

    class OfServer(OpenEnv):
        def __init__(self, prompt: Prompt) -> None:
            super().__init__(client, url, field)

    return OfServer


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for all sequences, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _wait(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the coroutine's result; it is cancelled where it takes too long.

    One that blocks the loop of all cannot be: the others go on in a new loop.

    Raises:
        TimeoutError: it took too long.
    """
    waiting = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return waiting.result(WAIT_S)
    except TimeoutError:
        waiting.cancel()
        if not _turns(_loop()):
            _loop.cache_clear()
        raise


def _turns(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a loop still runs anything."""
    try:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(ALIVE_S)
    except TimeoutError:
        return False
    return True


# ---------------------------------------------------------------- verifiers


def _load_verifiers(id: str) -> Any:
    try:
        verifiers = import_module("verifiers")
    except ImportError as error:
        raise MismatchError(
            "the package verifiers is not installed", "pip install 'verifiers<0.4'"
        ) from error
    if not hasattr(verifiers, "load_environment"):
        raise MismatchError(
            f"verifiers {getattr(verifiers, '__version__', '')} has no environments of messages",
            "pip install 'verifiers<0.4': its newer agents call a model server themselves",
        )
    try:
        environment = verifiers.load_environment(id)
    except Exception as error:  # an environment's own code
        raise MismatchError(
            f"verifiers:{id}: {error}", "install the environment's package"
        ) from error
    if not hasattr(environment, "env_response"):
        raise MismatchError(f"verifiers:{id} has no turns", "one that derives from MultiTurnEnv")
    return environment


class Verifiers:
    """One sequence of a verifiers environment.

    The row of its data set with the prompt's messages gives answer and info; without one, the
    prompt's own answer. A reply is one message: an environment that gives several is refused.
    """

    def __init__(self, environment: Any, prompt: Prompt) -> None:
        self.environment = environment
        self.state = _wait(self._start(prompt))

    async def _start(self, prompt: Prompt) -> Any:
        messages = prompt.messages or [{"role": "user", "content": prompt.text or ""}]
        row = _row(self.environment, messages) or {
            "prompt": messages, "answer": "" if prompt.answer is None else str(prompt.answer),
            "info": {}, "example_id": 0,
        }  # fmt: skip
        state = await self.environment.init_state(row, _no_client(), "mismatch")
        return await self.environment.setup_state(state) or state

    def reply(self, response: str) -> Mapping[str, Any] | None:
        """See :class:`mismatch.prompts.environments.Environment`."""
        messages = _wait(self._reply(response))
        if not messages:
            return None
        if len(messages) != 1:
            raise ValueError(f"a reply of {len(messages)} messages; one can be appended")
        message = messages[0]
        fields = message if isinstance(message, Mapping) else message.model_dump()
        return {name: fields[name] for name in ("role", "content", "name") if fields.get(name)}

    async def _reply(self, response: str) -> Any:
        state = self.state
        before = [] if not state["trajectory"] else state["trajectory"][-1]["seen"]
        prompt = before or list(state["prompt"])
        answer = _assistant(response)
        step = {"prompt": prompt, "completion": [answer], "response": None, "tokens": None,
                "reward": None, "advantage": None, "is_truncated": False,
                "trajectory_id": state["trajectory_id"], "extras": {},
                "seen": [*prompt, answer]}  # fmt: skip
        await self.environment.add_trajectory_step(state, step)
        if await self.environment.is_completed(state):
            return None
        replied = await self.environment.env_response(step["seen"], state)
        if state.get("final_env_response") is not None:
            return None
        replied = [{"role": "user", "content": replied}] if isinstance(replied, str) else replied
        step["seen"] = [*step["seen"], *replied]
        return replied

    def reward(self) -> float:
        """By the environment's rubric."""

        async def score() -> float:
            await self.environment.render_completion(self.state)
            await self.environment.rubric.score_rollout(self.state)
            return float(self.state["reward"] or 0.0)

        return float(_wait(score()))

    def close(self) -> None:
        """Clean up what the environment set up for this sequence."""
        _wait(self.environment.cleanup(self.state))


def _no_client() -> Any:
    """Stands where an environment keeps its client: responses come from elsewhere."""
    base = import_module("verifiers.clients").Client
    kind: Any = type("NoClient", (base,), {"__init__": lambda self: None})
    kind.__abstractmethods__ = frozenset()
    return kind()


def _assistant(response: str) -> Any:
    """Return a response as verifiers' message: its text without end tokens, and its call."""
    types = import_module("verifiers.types")
    call = tool_call(response)
    text = ENDS.sub("", response)
    if call is None:
        return types.AssistantMessage(content=text)
    arguments = json.dumps(call.arguments or {})
    calls = [types.ToolCall(id="call", name=call.name, arguments=arguments)]
    return types.AssistantMessage(content=text, tool_calls=calls)


def _row(environment: Any, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the row of the environment's data set with this prompt."""
    try:
        rows = environment.get_dataset()
    except Exception:  # it has none, or one for evaluation alone
        return None
    wanted = [(each.get("role"), each.get("content")) for each in messages]
    for row in rows:
        prompt = row.get("prompt")
        if isinstance(prompt, list) and [(m["role"], m["content"]) for m in prompt] == wanted:
            return dict(row)
    return None


# ---------------------------------------------------------------- OpenEnv


def _openenv_client() -> Any:
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ImportError as error:
        raise MismatchError(
            "the package openenv-core is not installed", "pip install openenv-core"
        ) from error
    return GenericEnvClient


class OpenEnv:
    """One sequence on an OpenEnv server: a session of its own, begun with its first response.

    An observation becomes the user's message: its text where it has one field of text, else JSON.
    """

    def __init__(self, client: Any, url: str, field: str) -> None:
        self.session = client(base_url=url)
        self.field = field
        self.rewards: list[float] = []
        self.begun = False

    def reply(self, response: str) -> Mapping[str, Any] | None:
        """See :class:`mismatch.prompts.environments.Environment`."""
        result = _wait(self._step(ENDS.sub("", response)))
        self.rewards.append(float(result.reward or 0.0))
        if result.done:
            return None
        return {"role": "user", "content": _text(result.observation)}

    async def _step(self, text: str) -> Any:
        if not self.begun:
            await self.session.connect()
            await self.session.reset()
            self.begun = True
        return await self.session.step({self.field: text})

    def reward(self) -> float:
        """Return the sum of its steps' rewards."""
        return sum(self.rewards)

    def close(self) -> None:
        """Its session, whether the server or this side ended the sequence."""
        _wait(self.session.close())


def _text(observation: Any) -> str:
    fields = {name: value for name, value in dict(observation).items()
              if name not in ("metadata", "reward", "done")}  # fmt: skip
    texts = [value for value in fields.values() if isinstance(value, str) and value]
    return texts[0] if len(texts) == 1 else json.dumps(fields, default=str)
