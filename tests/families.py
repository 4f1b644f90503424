"""Every MoE family of transformers, tiny: a configuration each, and what is tried on it.

A family is tried by knocking out one expert after another: a token whose layer output changes when
the weights of expert e are zero was sent to e. That needs no knowledge of any router.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.family_configs import COMMON, COMPOSITES, EXPERTS, EXTRA, VOCABULARY


def moe_families() -> list[str]:
    """model_type of every causal language model in transformers whose code has routed experts."""
    import importlib

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    families = []
    for model_type in CAUSAL:
        module = CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_")
        source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
        routed = re.search(r"^class \w*(Experts|MoE|Moe)\w*\(|topk\(", source, re.M)
        if routed and "experts" in source:
            families.append(model_type)
    return families


def other_modules() -> list[str]:
    """Directories of transformers with experts and a router that no causal language model uses."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    families = {name.removesuffix("_text") for name in moe_families()}
    others = []
    for path in sorted(root.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if re.search(r"^class \w*Experts\w*\(", source, re.M) and path.parent.name not in families:
            others.append(path.parent.name)
    return others


def configuration(family: str, **overrides: Any) -> Any:
    """A tiny configuration of a MoE family: 4 layers, 8 experts, 2 of them per token."""
    import inspect

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[family]
    fields = getattr(cls, "__dataclass_fields__", None) or inspect.signature(cls).parameters
    usual = COMMON | dict.fromkeys(EXPERTS, 8)
    own = {name: value for name, value in usual.items() if name in fields}
    for name in getattr(cls, "attribute_map", {}):
        own.pop(name, None)
    return cls(**{**own, **EXTRA.get(family, {}), **overrides})


def draw(model: Any, seed: int = 0) -> Any:
    """Weights that give the routers something to decide, and every expert an output to miss."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("tid2eid"):  # DeepSeek-V4's table of experts by token id
                draws = torch.rand(len(tensor), experts_of(model), generator=generator)
                tensor.copy_(draws.argsort(-1)[:, : tensor.shape[-1]])
            if not tensor.is_floating_point() or "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            if "correction_bias" in name:
                tensor.copy_(0.05 * noise)
            elif tensor.ndim > 1:
                tensor.copy_(noise / max(1.0, min(tensor.shape[-1], 64) ** 0.5) * 1.5)
    return model


def experts_of(model: Any) -> int:
    """E of the routers of a tiny model."""
    from mismatch.training.routing.capture import moe_layers

    return moe_layers(model.get_decoder())[0].num_experts


def tiny(family: str, **overrides: Any) -> Any:
    """A random model of a family, float32."""
    import torch
    import transformers

    config = configuration(family, **overrides)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return draw(model.float()).eval()


def token_ids(rows: int = 2, length: int = 12) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def captured(model: Any, ids: Any) -> tuple[list[Any], list[Any]]:
    """The MoE layers of a model, and what a forward pass over ``ids`` shows of each."""
    import torch

    from mismatch.training.routing.capture import moe_layers, recording

    layers = moe_layers(model.get_decoder())
    with torch.no_grad(), recording(layers) as recorder:
        model(input_ids=ids, use_cache=False)
    return layers, recorder.finished()


def replayed(model: Any, layers: list[Any], ids: Any, wanted: Any) -> list[Any]:
    """What a forward pass shows when it is told to use the experts ``wanted`` [R, L, K]."""
    import torch

    from mismatch.training.routing.capture import recording

    with replaying(model, layers, wanted), torch.no_grad(), recording(layers) as recorder:
        model(input_ids=ids, use_cache=False)
    return recorder.finished()


def replaying(model: Any, layers: list[Any], wanted: Any) -> Any:
    """Context in which a model uses the experts ``wanted``."""
    import torch

    from mismatch.training.routing.interventions import intervening
    from mismatch.training.routing.replay import Replay

    columns = {layer.index: column for column, layer in enumerate(layers)}
    rows = torch.ones(len(wanted), dtype=torch.bool)
    return intervening(model.get_decoder(), layers, (Replay("the trial", columns, rows, wanted),))


def chosen(ids: Any, experts: int) -> Any:
    """[R, E] bool: the sets of ids [R, K]."""
    import torch

    return torch.zeros(len(ids), experts, dtype=torch.bool).scatter_(1, ids, True)


def experts_that_ran(model: Any, layer: Any, ids: Any) -> Any:
    """[R, E] bool: which experts' weights each token's output of this MoE block rests on."""
    import torch

    block, weights, count = _parts(model, layer)
    whole = _output(model, block, ids)
    used = []
    for expert in range(count):
        with _without(weights, expert, count):
            used.append((_output(model, block, ids) != whole).any(-1))
    return torch.stack(used, -1)


def _parts(model: Any, layer: Any) -> tuple[Any, list[Any], int]:
    """The block of a layer, the output weights of its experts, and how many have any."""
    path = next(name for name, module in model.named_modules() if module is layer.experts)
    block = model.get_submodule(path.rpartition(".")[0])
    experts = getattr(block, "experts", block)  # JetMoE keeps them in the block itself
    ends = ("down_proj", "w2", "output_linear.weight")
    weights = [p for name, p in experts.named_parameters() if name.endswith(ends)]
    assert weights, "no weights of experts found"
    count = layer.num_experts - layer.family.extra_choices
    return block, weights, getattr(experts, "num_routed_experts", count)


@contextmanager
def _without(weights: list[Any], expert: int, count: int) -> Iterator[None]:
    import torch

    saved = [parameter.detach().clone() for parameter in weights]
    try:
        with torch.no_grad():
            for parameter in weights:
                parameter.view(count, -1)[expert] = 0
        yield
    finally:
        with torch.no_grad():
            for parameter, old in zip(weights, saved, strict=True):
                parameter.copy_(old)


class _Enough(Exception):
    """The block has run; the rest of the model does not matter."""


def _output(model: Any, block: Any, ids: Any) -> Any:
    """[R, D] what a block hands on."""
    import torch

    kept: list[Any] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)
        raise _Enough

    handle = block.register_forward_hook(keep)
    try:
        with torch.no_grad(), suppress(_Enough):
            model(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    return kept[0].reshape(ids.numel(), -1).clone()


UNREADABLE = ("doge",)


def tried() -> list[str]:
    """The families whose routing can be read, each tried on a model of its own."""
    return [name for name in moe_families() if name not in (*COMPOSITES, *UNREADABLE)]


def write(family: str, directory: Path | str, **overrides: Any) -> Path:
    """A tiny checkpoint of a family, float32, with a byte-level tokenizer."""
    from tests.checkpoints import tokenizer

    directory = Path(directory)
    tiny(family, **overrides).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def write_prompts(path: Path, count: int) -> Path:
    """Random token ids of different lengths, one prompt a line."""
    import json

    rows = [token_ids(1, 5 + 2 * index)[0].tolist() for index in range(count)]
    path.write_text("".join(json.dumps({"prompt_token_ids": row}) + "\n" for row in rows))
    return path


@dataclass(frozen=True)
class Trial:
    """What trying one family showed.

    Attributes:
        layers: layers with routed experts; ``total`` counts all.
        wrong: (token, expert) pairs of the last such layer where capture and knocking out disagree.
        margin: the gap between the last chosen and the first rejected expert is captured.
        replay: "yes", or why other experts could not be given.
    """

    layers: tuple[int, ...]
    total: int
    num_experts: int
    top_k: int
    wrong: int
    margin: bool
    replay: str


@cache
def trial(family: str) -> Trial:
    """Capture and replay on a tiny random model of the family."""
    model, ids = tiny(family), token_ids()
    layers, routes = captured(model, ids)
    ran = experts_that_ran(model, layers[-1], ids)
    sets = chosen(routes[-1].ids, layers[-1].num_experts)
    return Trial(
        layers=tuple(layer.index for layer in layers),
        total=_total(model.config.get_text_config()),
        num_experts=layers[0].num_experts,
        top_k=routes[0].ids.shape[1],
        wrong=int((ran != sets[:, : ran.shape[1]]).sum()),
        margin=all(route.margin is not None for route in routes),
        replay=_replay(model, layers, routes, ids),
    )


def _replay(model: Any, layers: list[Any], routes: list[Any], ids: Any) -> str:
    """Give every token other experts and see which ones run."""
    import torch

    from mismatch.errors import MismatchError

    generator = torch.Generator().manual_seed(5)
    draws = torch.rand(ids.numel(), len(layers), layers[0].num_experts, generator=generator)
    wanted = draws.argsort(-1)[..., : routes[0].ids.shape[1]]
    try:
        shown = replayed(model, layers, ids, wanted)
        with replaying(model, layers, wanted):
            ran = experts_that_ran(model, layers[-1], ids)
    except MismatchError as error:
        return error.message
    given = chosen(wanted[:, -1], layers[-1].num_experts)[:, : ran.shape[1]]
    same = all(torch.equal(routes.ids, wanted[:, i]) for i, routes in enumerate(shown))
    return "yes" if same and torch.equal(ran, given) else "other experts ran than were given"


def _total(config: Any) -> int:
    """Decoder layers; LongCat counts its attentions as hidden layers, two in each."""
    return getattr(config, "num_layers", None) or config.num_hidden_layers
