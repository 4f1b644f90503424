"""Private names of vLLM and SGLang stand in one module per engine, each with a fallback."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import mismatch
from mismatch.engines.distribution_capture import CaptureRequest, pack, unpack
from mismatch.engines.held_weights import NO_DIGESTS, HeldWeights, Ranks
from mismatch.engines.sglang import child
from mismatch.engines.sglang import private as sglang
from mismatch.engines.sglang.engine import SglangEngine
from mismatch.engines.sglang.sync_driver import SglangDriver
from mismatch.engines.vllm import private as vllm
from mismatch.engines.vllm.engine import VllmEngine
from mismatch.errors import MismatchError
from mismatch.features.sync.judge import unread
from mismatch.models.weight_states import Checkpoint
from mismatch.specs import EngineSpec
from mismatch.types import (
    EXACT_KL,
    NO_MLA,
    PREFILL,
    ROUTES,
    WITHOUT_MLA,
    NotTested,
    Sampling,
)

ROOT = Path(mismatch.__file__).parent
HOMES = {ROOT / "engines" / name / "private.py" for name in ("vllm", "sglang")}
PUBLIC = {"vllm", "vllm.lora.request", "sglang"}  # modules that the engines document
IMPORTERS = {"import_module", "__import__", "found"}
# Folders that hold an engine's objects, and underscores there that are not an engine's.
HOLDERS = ("engines", "features/sync", "features/locate", "features/loop", "processes/workers")
OTHERS = {
    *("os._exit", "engine._call", "self.engine._call"),  # of mismatch's own engines, and these:
    *("self.engine._run", "self.engine._server"),
    *("_inheriting", "config._experts_implementation"),  # of multiprocessing, and transformers
}
# Names of engine internals without an underscore. Not listed: parts of a model's layers that both
# engines share (``tp_size``, ``w13_weight`` …); held_weights.py reads each with a fallback.
INTERNALS = {
    *("llm_engine", "engine_core", "vllm_config", "add_lora", "remove_lora"),  # vLLM's engine,
    *("model_runner", "get_model", "sample_tokens", "execute_model"),  # worker,
    *("execute_model_state", "input_batch", "scheduler_output", "req_ids", "req_id_to_index"),
    *("num_scheduled_tokens", "total_num_scheduled_tokens", "compute_logits"),
    *("num_computed_tokens_cpu", "num_computed_tokens_np", "process_weights_after_loading"),
    *("lora_manager", "lora_index_to_id", "lora_a_stacked", "lora_b_stacked", "cpu_linear"),
    *("global_num_experts", "set_capture_fn", "input_size_per_partition"),
    *("tp_worker", "tp_cpu_group", "server_args", "is_fully_idle", "get_init_info"),  # SGLang's
    *("tokenizer_manager", "signal_handler_class", "engine.loop"),
    *("run_scheduler_process_func", "run_detokenizer_process_func"),
}
READERS = ("getattr", "hasattr", "setattr", "delattr", "attribute", "found", "around")


def modules_of(node: ast.AST) -> list[str]:
    """Modules that a statement or call imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [] if node.level else [str(node.module)]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return [str(node.args[0].value)] if name in IMPORTERS else []
    return []


def internal_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for module in modules_of(node):
            if module.partition(".")[0] in ("vllm", "sglang") and module not in PUBLIC:
                yield module


def underscores(tree: ast.AST) -> Iterator[str]:
    """Underscore attributes of what is neither ``self`` nor a module's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            name, shown = node.attr, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = shown = str(getattr(node.args[1], "value", ""))
        else:
            continue
        if name.startswith("_") and not name.startswith("__") and shown not in OTHERS:
            yield shown


def internals(tree: ast.AST) -> Iterator[str]:
    """Names of :data:`INTERNALS` that are read, written, or looked up by their text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            shown = [node.attr, f"{ast.unparse(node.value).rpartition('.')[2]}.{node.attr}"]
        elif isinstance(node, ast.Call) and node.args:
            of_holder = ast.unparse(node.func).rpartition(".")[2] in READERS
            texts = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
            shown = [name for text in texts for name in text.split(".")] if of_holder else []
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("vars("):
            shown = [str(getattr(node.slice, "value", ""))]
        else:
            continue
        yield from (name for name in shown if name in INTERNALS)


def trees(*folders: str) -> Iterator[tuple[str, ast.AST]]:
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        if path not in HOMES:
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8"))


def test_no_other_module_imports_what_an_engine_does_not_document() -> None:
    assert [(path, name) for path, tree in trees("") for name in internal_imports(tree)] == []


def test_no_other_module_touches_an_underscore_of_an_engine() -> None:
    assert [(path, name) for path, tree in trees(*HOLDERS) for name in underscores(tree)] == []


def test_no_other_module_reads_an_internal_name_of_an_engine() -> None:
    assert [(path, name) for path, tree in trees(*HOLDERS) for name in internals(tree)] == []


@pytest.mark.parametrize(
    "code",
    [
        "from vllm.logprobs import FlatLogprobs",
        "def f():\n    import sglang.srt.utils",
        "import_module('vllm.v1.worker')",
        "private.found('sglang.srt.managers', 'x')",
        "llm.engine._private",
        "getattr(runner, '_model')",
        "self.engine._loop",
        "self.model_runner",
        "llm.llm_engine.vllm",
        "loop = self.engine.loop",
        "getattr(scheduler, 'tp_cpu_group', None)",
        "attribute(llm, 'llm_engine.stop')",
        "vars(model)['compute_logits'] = tempered",
        "runner.execute_model = recording",
    ],
)
def test_private_names_elsewhere_are_found(code: str) -> None:
    tree = ast.parse(code)
    assert len([*internal_imports(tree), *underscores(tree), *internals(tree)]) == 1


@pytest.mark.parametrize(
    "code",
    [
        *("from vllm import LLM", "import sglang", "self._own", "os._exit(1)", "x.__dict__"),
        *("self._facts['model_runner']", "llm.generate", "loop.prompts"),
    ],
)
def test_public_names_are_not(code: str) -> None:
    tree = ast.parse(code)
    assert [*internal_imports(tree), *underscores(tree), *internals(tree)] == []


# ---------------------------------------------------------------- names that a version lacks


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Versions of both engines that hold no name at all."""
    names = ("vllm", "vllm.distributed", "sglang", "sglang.srt")
    names += tuple(f"sglang.srt.{name}" for name in ("utils", "server_args", "distributed"))
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def test_a_group_that_a_version_lacks_costs_the_weights(bare: dict[str, ModuleType]) -> None:
    for gathered in (vllm.gathered, sglang.gathered):
        with pytest.raises(MismatchError) as caught:
            gathered(torch.zeros(2), 0)
        assert "get_tp_group" in caught.value.message


class ColumnParallelLinear(torch.nn.Linear):
    tp_size = 2


def test_slices_that_cannot_be_gathered_are_not_compared_and_the_rest_is(
    bare: dict[str, ModuleType],
) -> None:
    model = torch.nn.ModuleDict(
        {"sliced": ColumnParallelLinear(2, 4, bias=False), "whole": torch.nn.LayerNorm(2)}
    )
    for gathered in (vllm.gathered, sglang.gathered):
        worker = HeldWeights()
        vars(worker)["_mismatch_model"] = lambda: model
        vars(worker)["mismatch_ranks"] = partial(Ranks, 2, gathered)
        prints, missing = worker.mismatch_held(["sliced.weight", "whole.weight"], [])
        assert set(prints) == {"whole.weight", "whole.bias"}
        assert "get_tp_group" in missing["sliced.weight"]
        assert [entry.reason for entry in unread(missing)] == [missing["sliced.weight"]]


def test_groups_gather_along_the_axis(bare: dict[str, ModuleType]) -> None:
    class Group:
        def all_gather(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
            return torch.cat([tensor, tensor], axis)

    for name, gathered in (("vllm", vllm.gathered), ("sglang.srt", sglang.gathered)):
        vars(bare[f"{name}.distributed"])["get_tp_group"] = Group
        assert gathered(torch.zeros(2, 3), 1).shape == (2, 6)


def test_what_sglang_cannot_run_without_is_named(bare: dict[str, ModuleType]) -> None:
    def engine() -> Any:
        return sglang.engine_class(print, print)

    for needed in (sglang.scheduler, sglang.detokenizer, engine):
        with pytest.raises(MismatchError) as caught:
            needed()
        assert "sglang.srt." in caught.value.message
        assert caught.value.fix


def test_facts_that_cannot_be_read_say_why() -> None:
    facts = sglang.first_facts(SimpleNamespace(), "mismatch")
    assert facts["lacking"] == dict.fromkeys(("weights", "routes"), sglang.SILENT)
    assert facts["moe_layers"] == []
    assert sglang.no_facts("hidden")["lacking"]["routes"] == "hidden"
    infos = [{"mismatch": {"device": "cuda:0"}}]
    engine = SimpleNamespace(_scheduler_init_result=SimpleNamespace(scheduler_infos=infos))
    assert sglang.first_facts(engine, "mismatch") == {"device": "cuda:0"}


def test_arguments_are_read_from_either_kind_of_class(bare: dict[str, ModuleType]) -> None:
    arguments: Any = type("ServerArgs", (), {"__struct_fields__": ("tp_size", "dtype")})
    vars(bare["sglang.srt.server_args"])["ServerArgs"] = arguments
    assert sglang.server_arguments() == {"tp_size", "dtype"}
    arguments = type("ServerArgs", (), {"__dataclass_fields__": {"port": None}})
    vars(bare["sglang.srt.server_args"])["ServerArgs"] = arguments
    assert sglang.server_arguments() == {"port"}


def test_children_end_though_sglang_has_no_function_for_it(
    bare: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []

    class Child:
        def kill(self) -> None:
            ended.append(self)

    class Process:
        def children(self, recursive: bool) -> list[Child]:
            return [Child(), Child()]

    monkeypatch.setattr(psutil, "Process", Process)
    monkeypatch.setattr("os._exit", ended.append)
    sglang.end_with_children()
    assert len(ended) == 3
    assert ended[-1] == 1


# ---------------------------------------------------------------- vLLM's worker, name by name


class Router(torch.nn.Module):
    global_num_experts = 4

    seen: Any = None

    def set_capture_fn(self, seen: Any) -> None:
        self.seen = seen


class Layer(torch.nn.Module):
    """A MoE layer that gives every token experts 0 and 3."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.layer_name = "model.layers.0.mlp"

    def forward(self, rows: int) -> None:
        if self.router.seen is not None:
            self.router.seen(torch.tensor([[0, 3]] * rows))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Layer()

    def compute_logits(self, rows: int) -> torch.Tensor:
        return torch.arange(3.0).repeat(rows, 1)


class Runner:
    """A step of two requests: a whole prompt of 3 tokens, and one token behind 4."""

    def __init__(self, lost: str = "", computed: int = 4) -> None:
        self.computed = computed  # tokens of the second request
        self.lost = lost  # the name of a method or value that this version lacks
        self.model = Model()
        self.execute_model_state: Any = None
        self.input_batch: Any = None

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "__dict__").get("lost"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def get_model(self) -> Model:
        return self.model

    def execute_model(self, scheduled: Any) -> None:
        self.model.mlp(4)

    def sample_tokens(self) -> str:
        return "sampled"

    def step(self) -> str:
        """Do what vLLM does, whatever it calls it."""
        values = {"num_scheduled_tokens": {"5-a": 3, "6-b": 1}, "req_ids": ["5-a", "6-b"]}
        values |= {"num_computed_tokens_cpu": np.array([0, self.computed, 0])}
        values.pop(self.lost, None)
        scheduled = self.input_batch = SimpleNamespace(**values)
        getattr(self, "execute_model", print)(scheduled)
        logits = Model.compute_logits(self.model, 2)
        state = {"scheduler_output": scheduled, "logits": logits}
        state.pop(self.lost, None)
        vars(self)["execute_model_state"] = SimpleNamespace(**state)
        getattr(self, "sample_tokens", print)()
        return "sampled"


class NewerRunner(Runner):
    """Keeps its batch in the state, and computes the logits when it samples."""

    def step(self) -> str:
        values = {"num_computed_tokens_np": np.array([0, 4]), "req_ids": ["5-a", "6-b"]}
        values |= {"num_scheduled_tokens": np.array([3, 1])}
        values.pop(self.lost, None)
        state = {"input_batch": SimpleNamespace(**values)}
        state.pop(self.lost, None)
        vars(self)["execute_model_state"] = SimpleNamespace(**state)
        getattr(self, "sample_tokens", print)()
        return "sampled"

    def sample_tokens(self) -> str:
        self.model.compute_logits(2)
        return "sampled"


def worker_of(runner: Any) -> Any:
    from mismatch.engines.vllm import worker

    made = worker.WorkerExtension()
    vars(made)["model_runner"] = runner
    return made


def sampled(runner: Any) -> tuple[dict[str, Any], str]:
    """What is taken of a step whose requests 5 and 6 are the rollout's two sequences."""
    worker = worker_of(runner)
    wanted = CaptureRequest(9, 3, 0, Sampling())
    worker.mismatch_start_distributions(asdict(wanted), 5, [3, 3])
    assert runner.step() == "sampled"
    packed, failed = worker.mismatch_stop_distributions()
    assert not {"sample_tokens"} & vars(runner).keys()
    assert not {"compute_logits"} & vars(runner.model).keys()
    return {name: unpack(array) for name, array in packed.items()}, failed


def routed(runner: Any) -> tuple[dict[str, Any], str]:
    worker = worker_of(runner)
    worker.mismatch_start_capture()
    assert runner.step() == "sampled"
    packed, failed = worker.mismatch_stop_capture()
    assert "execute_model" not in vars(runner)
    assert runner.model.mlp.router.seen is None
    return {name: unpack(array) for name, array in packed.items()}, failed


@pytest.mark.parametrize("kind", [Runner, NewerRunner])
def test_both_kinds_of_runner_give_the_logits_that_they_sample_from(
    kind: type[Runner], bare: dict[str, ModuleType]
) -> None:
    arrays, failed = sampled(kind())
    assert failed == ""
    assert sorted(arrays["keys"].tolist()) == [[0, 0], [1, 2]]


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        *((Runner, name) for name in ("get_model", "sample_tokens", "execute_model_state")),
        *((Runner, name) for name in ("input_batch", "scheduler_output", "logits", "req_ids")),
        *((Runner, name) for name in ("num_computed_tokens_cpu", "num_scheduled_tokens")),
        *((NewerRunner, name) for name in ("input_batch", "req_ids", "num_computed_tokens_np")),
        *((NewerRunner, name) for name in ("num_scheduled_tokens", "execute_model_state")),
    ],
)
def test_a_name_that_sampling_lacks_costs_the_distributions(
    kind: type[Runner], lost: str, bare: dict[str, ModuleType]
) -> None:
    arrays, failed = sampled(kind(lost))
    assert arrays == {}
    # A state without ``input_batch`` is taken for the older runner's, which has logits.
    assert lost in failed or (lost == "input_batch" and "logits" in failed)


def test_routes_are_cut_into_requests(bare: dict[str, ModuleType]) -> None:
    arrays, failed = routed(Runner(computed=0))
    assert failed == ""
    assert {name: rows.tolist() for name, rows in arrays.items()} == {
        "5-a": [[[0, 3]]] * 3,
        "6-b": [[[0, 3]]],
    }


@pytest.mark.parametrize(
    "lost",
    ["get_model", "execute_model", "req_ids", "num_computed_tokens_cpu", "num_scheduled_tokens"],
)
def test_a_name_that_forwarding_lacks_costs_the_routes(
    lost: str, bare: dict[str, ModuleType]
) -> None:
    arrays, failed = routed(Runner(lost))
    assert arrays == {}
    assert lost in failed


def test_a_model_that_is_not_found_costs_what_is_read_off_it(bare: dict[str, ModuleType]) -> None:
    worker = worker_of(Runner("get_model"))
    facts = worker.mismatch_describe()
    assert facts["moe_layers"] == []
    for what in (ROUTES, PREFILL, vllm.WEIGHTS):
        assert "get_model" in facts["lacking"][what]
    assert worker.mismatch_digests([]) == NO_DIGESTS
    worker.mismatch_set_temperature(1.0)
    assert worker.mismatch_held(["a"], []) == ({}, {"a": facts["lacking"][vllm.WEIGHTS]})
    assert worker.mismatch_held_adapter(["a"], 1) == ({}, {"a": facts["lacking"][vllm.WEIGHTS]})


def test_slots_that_are_not_found_cost_the_adapter(bare: dict[str, ModuleType]) -> None:
    _, missing = worker_of(Runner()).mismatch_held_adapter(["a"], 1)
    assert "lora_manager" in missing["a"]


def test_what_a_loaded_model_does_not_allow_is_said(bare: dict[str, ModuleType]) -> None:
    lacking = vllm.lacking(torch.nn.Module())
    assert vllm.LOGITS in lacking[PREFILL]
    assert vllm.REPACK in lacking[vllm.WEIGHTS]
    whole = Model()
    vars(whole)["mismatch_loaded"] = NO_DIGESTS
    assert set(vllm.lacking(whole).values()) == {""}


def test_a_temperature_is_set_and_taken_back(bare: dict[str, ModuleType]) -> None:
    runner = Runner()
    worker = worker_of(runner)
    for temperature in (2.0, 0.5, 1.0):
        worker.mismatch_set_temperature(temperature)
        assert runner.model.compute_logits(1).tolist() == [[0, 1 / temperature, 2 / temperature]]
    assert "compute_logits" not in vars(runner.model)


# ---------------------------------------------------------------- vLLM's engine


def vllm_engine(lacking: dict[str, str], temperature: float = 0.7) -> Any:
    """An engine as it is once vLLM has started, without vLLM."""
    engine: Any = VllmEngine.__new__(VllmEngine)
    engine.spec, engine.sampling = EngineSpec(model="m"), Sampling(temperature=temperature)
    engine.info = SimpleNamespace(moe=True, num_experts=4, top_k=2, rope_switch=0)
    model = SimpleNamespace(
        **dict.fromkeys(("quantization", "logprobs_mode", "enforce_eager", "max_model_len")),
        **dict.fromkeys(("seed", "generation_config")),
        dtype="bfloat16",
        head_dtype="bfloat16",
        get_sliding_window=lambda: None,
    )
    cache = SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True, block_size=16)
    names = ("enable_chunked_prefill", "max_num_batched_tokens", "max_num_seqs")
    engine.config = SimpleNamespace(
        model_config=model,
        cache_config=cache,
        scheduler_config=SimpleNamespace(**dict.fromkeys(names)),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4]),
    )
    facts = dict.fromkeys(("attention", "moe_backend", "device", "model_runner", "model_class"), "")
    reasons = dict.fromkeys((ROUTES, PREFILL, vllm.WEIGHTS), "") | lacking
    engine._facts = facts | {"config": {}, "moe_layers": [0], "lacking": reasons}
    engine._refused, engine._untaken, engine._distributions = "", "", {}
    engine._prefill_temperature, engine._sent, engine._capture = 1.0, {}, True
    return engine


def entries(engine: Any) -> dict[str, str]:
    return {each.what: each.reason for each in NotTested.of(engine.fingerprint("decode"))}


def test_what_fails_while_vllm_samples_is_not_tested_and_the_samples_stay() -> None:
    engine = vllm_engine({})
    assert entries(engine) == {}
    engine._call = lambda method: [({}, "no req_ids")]
    assert engine._captured([("5-a", None)]) == [None]
    assert engine.experts() is None
    engine._untaken = "no sample_tokens"
    assert entries(engine) == {ROUTES: "vllm: no req_ids", EXACT_KL: "vllm: no sample_tokens"}


@pytest.mark.parametrize(("dtype", "said"), [("float32", True), ("bfloat16", False)])
def test_the_engine_in_float32_says_that_it_runs_without_kernels_for_mla(
    dtype: str, said: bool
) -> None:
    engine = vllm_engine({}, temperature=1.0)
    engine.config.model_config.dtype = dtype
    engine.spec = replace(engine.spec, env=(NO_MLA,))
    assert (WITHOUT_MLA.what in entries(engine)) is said
    engine.spec = replace(engine.spec, env=())
    assert entries(engine) == {}


@pytest.mark.parametrize(
    ("ranks", "untaken"),
    [
        ([({}, "no sample_tokens"), ({}, "")], "no sample_tokens"),
        ([({}, "no logits here"), ({"keys": pack(np.zeros(1))}, "")], ""),  # of another rank
    ],
)
def test_distributions_of_one_rank_are_enough(ranks: list[Any], untaken: str) -> None:
    engine = vllm_engine({})
    engine._capture, engine._next_id = False, 0
    engine._wanted = CaptureRequest(9, 3, 0, Sampling())
    engine._run = lambda prompts, *_: [("0", None)] * len(prompts)
    engine._params = engine._sample = lambda *_: None
    engine._call = lambda name, *_: ranks if name == "mismatch_stop_distributions" else []
    engine.generate([[1]], lambda *_: None)
    assert engine._untaken == untaken
    engine._wanted = None  # of a later turn
    engine.generate([[1]], lambda *_: None)
    assert engine._untaken == untaken


def test_a_prefill_that_cannot_be_tempered_is_not_tested() -> None:
    lacking = {PREFILL: "no compute_logits", vllm.WEIGHTS: "no step"}
    engine = vllm_engine(lacking)
    facts = engine.fingerprint("decode")
    assert facts["prefill"] is False
    assert facts["weights_not_comparable"] == "no step"
    assert entries(engine) == {PREFILL: "vllm: no compute_logits"}
    assert "prefill" not in vllm_engine(lacking, 1.0).fingerprint("decode")


def test_an_engine_says_which_cuda_graphs_it_has() -> None:
    engine = vllm_engine({})
    for held, said in (([1, 2, 4], [1, 2, 4]), ([], []), (None, [])):
        engine.config.compilation_config.cudagraph_capture_sizes = held
        assert engine.fingerprint("decode")["cudagraph_capture_sizes"] == said


def test_an_engine_without_a_way_to_end_its_children_ends(bare: dict[str, ModuleType]) -> None:
    engine = vllm_engine({})
    engine.llm = SimpleNamespace()
    engine.__exit__()
    with pytest.raises(MismatchError) as caught:
        engine._run([[1]], [None], print)
    assert vllm.ENGINE in caught.value.message


def test_the_configuration_follows_from_the_arguments_where_it_is_not_found(
    bare: dict[str, ModuleType],
) -> None:
    made = SimpleNamespace(create_engine_config=lambda: "made")
    vars(bare["vllm"])["EngineArgs"] = lambda **given: made
    assert vllm.config_of(SimpleNamespace(), {"seed": 1}) == "made"
    held = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config="held"))
    assert vllm.config_of(held, {}) == "held"


# ---------------------------------------------------------------- SGLang's scheduler


def scheduler_facts(monkeypatch: pytest.MonkeyPatch, **held: Any) -> dict[str, Any]:
    """The first message of a scheduler that holds these names."""

    class Scheduler:
        def get_init_info(self) -> dict[str, Any]:
            return {"status": "ready"}

    monkeypatch.setattr(child, "require_engine", lambda: None)
    monkeypatch.setattr(sglang, "scheduler", lambda: (Scheduler, lambda: None))
    monkeypatch.setattr(sglang, "hook", lambda: SimpleNamespace(register=lambda: None, used=[]))
    for name in ("load_in_one_dtype", "digest_before_repacking", "capture_triton_routes"):
        monkeypatch.setattr(sglang, name, lambda: "")
    child.run_scheduler()
    made: Any = Scheduler()
    vars(made).update(held)
    facts: dict[str, Any] = made.get_init_info()[child.FACTS]
    return facts


def test_a_scheduler_whose_model_is_not_found_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SimpleNamespace(model=torch.nn.Module(), device="cpu")
    facts = scheduler_facts(monkeypatch, tp_worker=SimpleNamespace(model_runner=runner))
    assert (facts["model_class"], facts["device"], facts["dtype"]) == ("Module", "cpu", "unknown")
    assert facts["lacking"] == {"weights": "", "routes": ""}
    for held, name in (({}, "tp_worker"), ({"tp_worker": object()}, "model_runner")):
        facts = scheduler_facts(monkeypatch, **held)
        assert name in facts["lacking"]["weights"]
        assert facts["model_class"] == sglang.UNKNOWN
    runner = SimpleNamespace()
    facts = scheduler_facts(monkeypatch, tp_worker=SimpleNamespace(model_runner=runner))
    assert "model" in facts["lacking"]["routes"]


def test_a_dtype_that_is_not_found_is_the_one_asked_for_and_routes_are_refused() -> None:
    engine: Any = SglangEngine.__new__(SglangEngine)
    engine.spec, engine.sampling = EngineSpec("sglang", "m"), Sampling()
    engine.info, engine._server = SimpleNamespace(moe=True), {}
    engine._arguments, engine._seeded = {"dtype": "bfloat16", "context_length": 64}, False
    engine._facts, engine._sent, engine._refused = sglang.no_facts("no tp_worker"), {}, ""
    engine._refused = engine._routes_refused()
    facts = engine.fingerprint("decode")
    assert facts["dtype"] == "bf16"
    assert "no tp_worker" in facts["weights_not_comparable"]
    assert "no tp_worker" in NotTested.of(facts)[0].reason
    assert not engine.weights().digests


def test_calls_in_a_scheduler_go_on_without_its_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    scheduler = SimpleNamespace()
    answer = tmp_path / "answer"
    child.call(scheduler, "mismatch_idle", [], str(answer))
    assert json.loads(answer.read_text()) is False  # a push waits as long as it may
    child.call(scheduler, "mismatch_held", [["a"], []], str(answer))
    assert "tp_worker" in json.loads(answer.read_text())[1]["a"]
    scheduler.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=torch.nn.Module()))
    child.call(scheduler, "mismatch_held", [["a"], []], str(answer))
    assert "server_args" in json.loads(answer.read_text())[1]["a"]


def test_an_engine_without_its_manager_still_starts_and_drops_its_cache(tmp_path: Path) -> None:
    sglang.handle_signals(SimpleNamespace(), print, print)
    flushed = SimpleNamespace(success=True)
    inner = SimpleNamespace(flush_cache=lambda: flushed)
    engine: Any = SimpleNamespace(engine=inner)
    driver = SglangDriver(engine, Checkpoint("m", 0), tmp_path)
    driver.drop_caches()
    flushed.success = False
    with pytest.raises(MismatchError):
        driver.drop_caches()
