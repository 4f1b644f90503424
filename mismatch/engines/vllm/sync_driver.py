"""vLLM's own ways to new weights, for a probe of the weight sync."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mismatch.engines.base import Engine, argument_name
from mismatch.engines.model_calls import attribute
from mismatch.engines.model_info import read_model_info
from mismatch.engines.sync_drivers import Answer, Driver, Held, held_from_plain
from mismatch.engines.vllm import private
from mismatch.engines.vllm.arguments import is_cpu_build
from mismatch.errors import MismatchError
from mismatch.models.weight_states import RANK, Adapters, Checkpoint, state_of
from mismatch.specs import EngineSpec
from mismatch.types import NotTested

ADAPTER = 1  # vLLM's number of the probe's adapter
SLEEPS = {"sleep-1": 1, "sleep-2": 2}  # path -> level
ASLEEP = "sleep, level {level}"
IGNORED = "vLLM's CPU build ignores it with a warning only"
# One request at a time: vLLM's CPU kernels take prompt logprobs of no more with an adapter.
ROOM = (("enable_lora", True), ("max_lora_rank", RANK), ("max_loras", 1), ("max_num_seqs", 1))


class VllmDriver(Driver):
    """See :class:`mismatch.engines.sync_drivers.Driver`."""

    reloads = True  # an adapter under a number that vLLM has already

    def __init__(self, engine: Engine, checkpoint: Checkpoint, scratch: Path) -> None:
        super().__init__(engine, checkpoint, scratch)
        self.slept: set[int] = set()  # levels

    @staticmethod
    def prepared(engine: EngineSpec, path: str) -> EngineSpec:
        """Return it with room for an adapter, or the ability to sleep; see the protocol."""
        if path == "rpc" and engine.tensor_parallel_size > 1:
            fault = "--path rpc writes whole tensors, and each rank holds slices"
            raise MismatchError(fault, "drop --tensor-parallel-size, or another --path")
        if path in SLEEPS:
            if is_cpu_build():
                fault = f"{ASLEEP.format(level=SLEEPS[path])} is not tested: {IGNORED}"
                raise MismatchError(fault, "the same command on a GPU, or another --path")
            return with_arguments(engine, (("enable_sleep_mode", True),))
        if path != "lora":
            return engine
        if is_cpu_build() and read_model_info(engine).moe:
            fault = "vLLM's CPU build has no LoRA kernels for layers with experts"
            raise MismatchError(fault, "a model without experts, a GPU, or another --path")
        return with_arguments(engine, ROOM)

    def push(self, path: str, push: int) -> None:
        if path == "lora":
            self._push_adapter(push)
        elif path == "reload":
            self._reload(push)
        elif path in SLEEPS:  # between rollouts, as frameworks do it
            self.engine.llm.sleep(level=SLEEPS[path])
            self.wake("weights")
            try:
                self._reload(push)
            finally:
                self.wake("kv_cache")
            self.slept.add(SLEEPS[path])
        else:
            directory, seed = str(self.checkpoint.directory), self.checkpoint.seed
            self.engine._call("mismatch_push", path, directory, seed, push)

    def sleep(self) -> None:
        """Give the GPU away: weights go to the host's memory, the cache is dropped."""
        self.engine.llm.sleep(level=1)

    def wake(self, part: str) -> None:
        """Take back ``weights`` or ``kv_cache``."""
        self.engine.llm.wake_up(tags=[part])

    def _reload(self, push: int) -> None:
        with self.files(push) as source:
            self.engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": source})

    def _push_adapter(self, push: int) -> None:
        from vllm.lora.request import LoRARequest

        if not state_of(push):
            attribute(self.engine.llm, private.REMOVE_ADAPTER)(ADAPTER)
            self.engine.adapter = None
            return
        # The same folder each time, as frameworks do: vLLM's cache is keyed by name and path.
        folder = self.checkpoint.write(push, self.scratch / "adapter")
        try:
            adapter = LoRARequest("mismatch", ADAPTER, str(folder), load_inplace=self.reloads)
            attribute(self.engine.llm, private.ADD_ADAPTER)(adapter)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.engine.adapter = LoRARequest("mismatch", ADAPTER, str(folder))

    def push_own(self, function: Callable[..., Any], weights: dict[str, Any]) -> None:
        function(weights, self.engine.llm)

    def held(self, names: list[str], transposed: list[str]) -> Held:
        if isinstance(self.checkpoint, Adapters):
            return held_from_plain(self.engine._call("mismatch_held_adapter", names, ADAPTER)[0])
        return super().held(names, transposed)

    def answers(self, prompts: Sequence[list[int]]) -> list[Answer] | None:
        from vllm import SamplingParams

        if not self.engine.config.cache_config.enable_prefix_caching:
            return None
        greedy = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0)
        given: Any = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = self.engine.llm.generate(
            given, greedy, use_tqdm=False, lora_request=self.engine.adapter
        )
        answers = []
        for output in outputs:
            completion = output.outputs[0]
            logprob = completion.logprobs[0][completion.token_ids[0]].logprob
            answers.append(Answer(float(logprob), int(output.num_cached_tokens or 0)))
        return answers

    def drop_caches(self) -> None:
        self.engine.llm.reset_prefix_cache()

    def not_tested(self) -> list[NotTested]:
        why = IGNORED if is_cpu_build() else "the probe went by another path"
        return [
            NotTested(ASLEEP.format(level=level), why, f"on a GPU: --path {path}")
            for path, level in SLEEPS.items()
            if level not in self.slept
        ]


def with_arguments(engine: EngineSpec, wanted: tuple[tuple[str, Any], ...]) -> EngineSpec:
    """Return the engine with these arguments, unless the user gave them."""
    given = {argument_name(raw) for raw, _ in engine.args}
    kept = tuple(pair for pair in wanted if pair[0] not in given)
    return replace(engine, args=(*engine.args, *kept))
