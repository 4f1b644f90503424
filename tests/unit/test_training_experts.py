"""`bounded` experts are transformers' own, to the last bit, and keep nothing for the backward pass.

Each family's own loop ("eager") is the truth; derivatives are also checked against differences in
float64, and `EXPERT_ROWS` is lowered so that experts get their tokens in several parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch.errors import MismatchError
from mismatch.training import experts
from mismatch.training.experts import implementations_for
from tests import checkpoints, families

TOKENS, TOP_K = 40, 4  # a sum of two has but one order
# Biases and transposed weights; plain; a float32 router; no gate, and sums in the router's dtype.
KINDS = ("gpt_oss", "qwen3_moe", "deepseek_v3", "nemotron_h", "aria_text")


@pytest.fixture(autouse=True)
def registered() -> None:
    experts.register()
    experts.register()  # a second time changes nothing


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {family: families.tiny(family) for family in KINDS}


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "EXPERT_ROWS", 3)


def experts_of(model: Any) -> Any:
    return next(module for module in model.modules() if hasattr(module, "is_concatenated"))


def width_of(module: Any) -> int:
    """H: what an expert takes and gives."""
    return int(module.down_proj.shape[-1 if module.is_transposed else -2])


def count_of(module: Any) -> int:
    return int(module.down_proj.shape[0])


def given(module: Any, dtype: torch.dtype, weights_dtype: torch.dtype | None = None) -> Any:
    """Hidden states, ids (the last expert unused) and weights."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, width_of(module), generator=generator).to(dtype)
    scores = torch.rand(TOKENS, count_of(module) - 1, generator=generator)
    weights, ids = scores.topk(TOP_K)
    return (
        hidden.requires_grad_(),
        ids,
        weights.to(weights_dtype or dtype).detach().requires_grad_(),
    )


def run(
    module: Any, name: str, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Output, and every gradient of a random projection of it."""
    module.config._experts_implementation = name
    hidden, weights = (t.detach().clone().requires_grad_() for t in (hidden, weights))
    module.zero_grad()
    out = module(hidden, ids, weights)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    out.backward(seed.to(out.dtype))
    results = {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad}
    return results | {key: p.grad.clone() for key, p in module.named_parameters()}


def same(results: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert results.keys() == wanted.keys()
    for key, value in wanted.items():
        assert value is not None, key
        assert torch.equal(results[key], value), key
        assert results[key].dtype == value.dtype


# ---------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("router", [None, torch.float32])
def test_numbers_and_gradients_are_eagers(
    models: dict[str, Any], family: str, dtype: torch.dtype, router: torch.dtype | None
) -> None:
    module = experts_of(models[family]).to(dtype)
    inputs = given(module, dtype, router)
    wanted = run(module, "eager", *inputs)
    same(run(module, "bounded", *inputs), wanted)
    assert wanted["out"].abs().max() > 0.1
    assert not wanted["down_proj"][-1].any()  # nobody's expert
    assert wanted["down_proj"][0].any()


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_numbers_and_gradients_are_eagers_under_autocast(
    models: dict[str, Any], family: str
) -> None:
    module = experts_of(models[family]).float()
    hidden, ids, weights = given(module, torch.float32)

    def outside(name: str) -> dict[str, torch.Tensor]:
        """As trainers do: the forward pass under autocast, the backward pass outside of it."""
        module.config._experts_implementation = name
        inputs = [t.detach().clone().requires_grad_() for t in (hidden, weights)]
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = module(inputs[0], ids, inputs[1])
        out.backward(torch.ones_like(out))
        results = {"out": out.detach(), "hidden": inputs[0].grad, "weights": inputs[1].grad}
        return results | {key: p.grad.clone() for key, p in module.named_parameters()}

    wanted = outside("eager")
    same(outside("bounded"), wanted)
    full = run(module, "eager", hidden, ids, weights)
    assert not torch.equal(wanted["out"], full["out"])  # autocast did something


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("family", KINDS)
def test_an_expert_may_get_its_tokens_in_parts(models: dict[str, Any], family: str) -> None:
    module = experts_of(models[family]).double()
    inputs = given(module, torch.float64)
    parts = list(experts.spans(inputs[1], count_of(module)))
    assert len(parts) > count_of(module)
    assert max(len(span.tokens) for span in parts) == 3
    results, wanted = (run(module, name, *inputs) for name in ("bounded", "eager"))
    for key, value in wanted.items():
        torch.testing.assert_close(results[key], value, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "nemotron_h"])
def test_derivatives_are_those_of_differences(models: dict[str, Any], family: str) -> None:
    module = experts_of(models[family]).double()
    module.config._experts_implementation = "bounded"
    hidden, ids, weights = (t[:5].detach() for t in given(module, torch.float64))
    parameters = dict(module.named_parameters())

    def layer(x: torch.Tensor, w: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(
            module, dict(zip(parameters, values, strict=True)), (x, ids, w)
        )

    taken = [t.requires_grad_() for t in (hidden, weights)]
    inputs = (*taken, *parameters.values())
    # Raising would compute the whole Jacobian for its message, for minutes.
    assert torch.autograd.gradcheck(layer, inputs, fast_mode=True, raise_exception=False)


def test_an_id_beyond_the_experts_is_padding(models: dict[str, Any]) -> None:
    module = experts_of(models["qwen3_moe"]).float()
    hidden, ids, weights = given(module, torch.float32)
    padded = ids.clone()
    padded[::2, 0] = count_of(module)
    padded[1, :] = count_of(module)
    results = run(module, "bounded", hidden, padded, weights)
    same(results, run(module, "eager", hidden, padded, weights))
    assert not results["out"][1].any()
    padded[1, 0] = count_of(module) + 7  # expert parallelism has larger ones; eager has no place
    same(run(module, "bounded", hidden, padded, weights), results)


def test_no_tokens_at_all(models: dict[str, Any]) -> None:
    module = experts_of(models["gpt_oss"]).float()
    none = [t[:0] for t in given(module, torch.float32)]
    results = run(module, "bounded", *none)
    assert results["out"].shape == (0, width_of(module))
    assert not any(p.any() for key, p in results.items() if key != "out")


# ---------------------------------------------------------------- what is kept, what is made


class Kept:
    """The tensors that autograd saves inside the block."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def __enter__(self) -> Kept:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors.append(tensor)
        return tensor

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


def test_nothing_but_the_inputs_is_kept(models: dict[str, Any]) -> None:
    module = experts_of(models["gpt_oss"]).float()
    hidden, ids, weights = given(module, torch.float32)
    own = {id(t): t for t in (hidden, ids, weights, *module.parameters())}
    module.config._experts_implementation = "bounded"
    with Kept() as kept:
        module(hidden, ids, weights)
    own_pointers = {t.data_ptr() for t in own.values()}
    assert {t.data_ptr() for t in kept.tensors} == own_pointers
    module.config._experts_implementation = "eager"
    with Kept() as kept:
        module(hidden, ids, weights)
    assert len({t.data_ptr() for t in kept.tensors} - own_pointers) > count_of(module)


def test_gradients_nobody_wants_are_not_made(models: dict[str, Any]) -> None:
    module = experts_of(models["gpt_oss"]).float()
    hidden, ids, weights = (t.detach() for t in given(module, torch.float32))
    module.zero_grad()
    module.config._experts_implementation = "bounded"
    module.gate_up_proj.requires_grad_(False)
    try:
        module(hidden, ids, weights).sum().backward()
    finally:
        module.gate_up_proj.requires_grad_()
    assert module.gate_up_proj.grad is None
    assert module.down_proj.grad.any()
    assert hidden.grad is None
    assert weights.grad is None


def test_the_gradient_of_a_gradient_is_refused(models: dict[str, Any]) -> None:
    module = experts_of(models["qwen3_moe"]).float()
    hidden, ids, weights = given(module, torch.float32)
    module.config._experts_implementation = "bounded"
    out = module(hidden, ids, weights)
    (first,) = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_a_whole_model_with_checkpointed_layers(models: dict[str, Any], family: str) -> None:
    model, ids = models[family].bfloat16(), families.token_ids()

    def both(name: str, checkpointed: bool) -> list[torch.Tensor]:
        model.set_experts_implementation(name)
        model.zero_grad()
        model.gradient_checkpointing_disable()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        logits = model(input_ids=ids, use_cache=False).logits
        logits.float().logsumexp(-1).sum().backward()
        return [
            logits.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]

    wanted = both("eager", checkpointed=False)
    assert len(wanted) > 20
    for results in (both("bounded", checkpointed=False), both("bounded", checkpointed=True)):
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


# ---------------------------------------------------------------- who can have it


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("gpt_oss", ["eager", "grouped_mm", "batched_mm", "bounded"]),
        ("nemotron_h", ["eager", "grouped_mm", "batched_mm", "bounded"]),
        ("llama4_text", ["eager"]),  # a loop of its own
    ],
)
def test_what_can_run_a_family(family: str, wanted: list[str]) -> None:
    assert implementations_for(families.configuration(family)) == wanted


def test_a_dense_model_has_no_experts_to_run() -> None:
    assert implementations_for(checkpoints.configuration("llama")) == []


@pytest.fixture(scope="module")
def loopy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write("llama4_text", tmp_path_factory.mktemp("llama4"))


@pytest.mark.parametrize("name", ["batched_mm", "bounded"])
def test_a_family_that_would_ignore_the_name_is_refused(loopy: Path, name: str) -> None:
    from mismatch.specs import TrainSpec
    from mismatch.training.load import require_runnable

    require_runnable(TrainSpec(str(loopy), experts="eager"))
    with pytest.raises(MismatchError, match=f"--experts-implementation {name}: .*loop"):
        require_runnable(TrainSpec(str(loopy), experts=name))
