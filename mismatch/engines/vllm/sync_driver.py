"""vLLM's own ways to new weights, for a probe of the weight sync."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

from mismatch.engines.sync_drivers import Answer, CalledDriver, Held
from mismatch.engines.vllm.arguments import is_cpu_build
from mismatch.models.adapter_states import Adapters
from mismatch.models.weight_states import state_of
from mismatch.types import NotTested

ADAPTER = 1  # vLLM's number of the probe's adapter


class VllmDriver(CalledDriver):
    """See :class:`mismatch.engines.sync_drivers.Driver`."""

    reloads = True  # an adapter under a number that vLLM has already

    def push(self, path: str, push: int) -> None:
        if path == "lora":
            self._push_adapter(push)
            return
        if path != "reload":
            directory, seed = str(self.checkpoint.directory), self.checkpoint.seed
            self.engine._call("mismatch_push", path, directory, seed, push)
            return
        with self.files(push) as source:
            self.engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": source})

    def _push_adapter(self, push: int) -> None:
        from vllm.lora.request import LoRARequest

        loader: Any = self.engine.llm.llm_engine
        if not state_of(push):
            loader.remove_lora(ADAPTER)
            self.engine.adapter = None
            return
        # The same folder each time, as frameworks do: vLLM's cache is keyed by name and path.
        folder = self.checkpoint.write(push, self.scratch / "adapter")
        try:
            loader.add_lora(
                LoRARequest("mismatch", ADAPTER, str(folder), load_inplace=self.reloads)
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.engine.adapter = LoRARequest("mismatch", ADAPTER, str(folder))

    def push_own(self, function: Callable[..., Any], weights: dict[str, Any]) -> None:
        function(weights, self.engine.llm)

    def held(self, names: list[str], transposed: list[str]) -> Held:
        if isinstance(self.checkpoint, Adapters):
            return self.called("mismatch_held_adapter", names, ADAPTER)
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
        return [_answer(output) for output in outputs]

    def drop_caches(self) -> None:
        self.engine.llm.reset_prefix_cache()

    def not_tested(self) -> list[NotTested]:
        why = "a probe keeps the engine awake"
        if is_cpu_build():
            why = "vLLM's CPU build ignores it with a warning only"
        how = "on a GPU: a --push that sleeps and wakes the engine first"
        return [NotTested("sleep, levels 1 and 2", why, how)]


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    token = completion.token_ids[0]
    return Answer(float(completion.logprobs[0][token].logprob), int(output.num_cached_tokens or 0))
