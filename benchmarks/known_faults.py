"""Faults of the known-issues benchmark, as changes of a trainer, of recorded numbers, or of a run.

Every fault changes one thing and declares nothing. Three places:

- ``trainer``: planted in the model that FSDP2 has loaded, and scored through FSDP2;
- ``weights``: the same, in the trainer and in its float32 twin: the engine holds older values;
- ``recorded``: in the numbers of a run, where the fault is one of pairing or bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mismatch.analysis.diagnosis.case import Case
from mismatch.keys import REFERENCE

FUNCTION = ("function-differs",)
MOVED = ("weights-differ", "stale-weights")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        issues: with this root cause, owner/repo#number.
        expected: causes of which one must come first: those that data cannot separate.
        side: whose numbers are off; "": no side is at fault, or the data cannot say.
        strengths: weak, middle, strong.
        models: that it can be planted in; (): all.
    """

    name: str
    place: str
    issues: tuple[str, ...]
    expected: tuple[str, ...]
    side: str
    strengths: tuple[float, ...]
    plant: Callable[..., Any]
    models: tuple[str, ...] = ()


# ---------------------------------------------------------------- recorded numbers


def _rows(case: Case, values: Any) -> list[Any]:
    return [values[row].copy() for row in case.rows]


def shift(case: Case, by: float, rng: np.random.Generator) -> Case:
    """Roll the trainer's values of each row."""
    moved = [np.roll(row, -int(by)) for row in _rows(case, case.right)]
    return case.repaired(case.left, np.concatenate(moved))


def swap_rows(case: Case, share: float, rng: np.random.Generator) -> Case:
    """Give this share of the rows another row's values, cut or filled to the length."""
    rows = _rows(case, case.right)
    count = max(4, int(share * len(rows)))
    chosen = rng.permutation(len(rows))[:count]
    old = [rows[n] for n in chosen]
    for place, values in zip(chosen, old[1:] + old[:1], strict=True):
        rows[place] = np.resize(values, len(rows[place]))
    return case.repaired(case.left, np.concatenate(rows))


def fake_end(case: Case, share: float, rng: np.random.Generator) -> Case:
    """Append an end token with 0.0 to this share of the rows that the policy had not ended."""
    rows, other = _rows(case, case.left), _rows(case, case.right)
    unfinished = [n for n, row in enumerate(other) if row[-1] < np.log(0.9)]
    for n in unfinished[: max(1, int(share * len(unfinished)))]:
        rows[n][-1] = 0.0
    return case.repaired(np.concatenate(rows), case.right)


def unsampled_end(case: Case, nats: float, rng: np.random.Generator) -> Case:
    """Last tokens that a framework appended to a rollout: the trainer finds them unlikely."""
    lower = np.zeros(len(case.right))
    for row in case.rows:
        lower[row.stop - 1] = nats * rng.random() * 2
    others = dict(case.others)
    exact = others.get(REFERENCE)
    if exact is not None:  # the same model in float32 finds them as unlikely
        others[REFERENCE] = replace(exact, logprobs=exact.logprobs - lower)
    return replace(case, others=others).repaired(case.left, case.right - lower)


def row_lengths(case: Case, share: float, rng: np.random.Generator) -> Case:
    """Take the end tokens from the trainer's flat array: every row is cut one token later."""
    flat = np.concatenate([row[:-1] for row in _rows(case, case.right)])
    flat = np.concatenate([flat, np.resize(flat, len(case.right) - len(flat))])
    return case.repaired(case.left, flat)


def encoded_again(case: Case, tokens: float, rng: np.random.Generator) -> Case:
    """From a turn's end on, text was encoded again and some tokens were added."""
    rows = _rows(case, case.right)
    for row in rows:
        if len(row) > 24:
            at = int(rng.integers(6, len(row) // 2))
            added = -np.abs(rng.normal(-2, 1, int(tokens)))
            row[at:] = np.concatenate([added, row[at:]])[: len(row) - at]
    return case.repaired(case.left, np.concatenate(rows))


def fused_kernel(case: Case, nats: float, rng: np.random.Generator) -> Case:
    """Add a constant, as a fused cross-entropy, to this share of the tokens: values above 0."""
    bad = rng.random(len(case.right)) < 0.2
    return case.repaired(case.left, np.where(bad, case.right + nats, case.right))


def _noisy(case: Case, where: Any, times: float, rng: np.random.Generator) -> Case:
    """Multiply the engine's own rounding at some tokens."""
    reference = case.reference
    assert reference is not None
    left = np.where(where, reference + (case.left - reference) * times, case.left)
    return case.repaired(np.minimum(left, -1e-6), case.right)


def from_position(case: Case, times: float, rng: np.random.Generator) -> Case:
    """From one position on the decode kernel reads its fp8 cache in other tiles."""
    return _noisy(case, case.position >= 60, times, rng)


def chunk_starts(case: Case, times: float, rng: np.random.Generator) -> Case:
    """Lose a state where a chunk of the prefill begins."""
    return _noisy(case, (case.position - 1) % 16 == 0, times, rng)


def bf16_logprobs(case: Case, bits: float, rng: np.random.Generator) -> Case:
    """Keep the trainer's log-softmax in so many significant bits."""
    mantissa, exponent = np.frexp(case.right)
    return case.repaired(case.left, np.ldexp(np.round(mantissa * 2.0**bits) / 2.0**bits, exponent))


# ---------------------------------------------------------------- a model that FSDP2 has loaded


def _parameters(scorer: Any) -> Iterator[tuple[str, Any]]:
    """Name and local tensor of each parameter of a world of one rank."""
    for name, parameter in scorer.named_parameters():
        tensor = parameter.data
        yield name, tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _noise(scorer: Any, strength: float, chosen: Callable[[str, Any], bool]) -> None:
    """Chosen parameters plus strength x their spread x noise, the same in every dtype."""
    import torch

    for number, (name, tensor) in enumerate(_parameters(scorer)):
        if chosen(name, tensor):
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
            tensor.copy_(tensor.float() + strength * tensor.float().std() * noise)


def stale(scorer: Any, strength: float) -> None:
    """Every matrix has moved: the engine was not refitted."""
    _noise(scorer, strength, lambda name, tensor: tensor.ndim > 1)


def stale_head(scorer: Any, strength: float) -> None:
    """Move the head alone: the sync does not carry it."""
    _noise(scorer, strength, lambda name, tensor: "lm_head" in name)


def lost_parameter(scorer: Any, strength: float) -> None:
    """Leave a kind of parameter at its first value, as the engine's reload: norms of a layer."""
    for name, tensor in _parameters(scorer):
        if ".layers.1." in name and "norm" in name:
            tensor.mul_(1 + strength)


def swapped_experts(scorer: Any, layers: float) -> None:
    """Exchange the first two experts of some layers, and not in their router."""
    for name, tensor in _parameters(scorer):
        if ".experts." in name and any(f".layers.{n}." in name for n in range(int(layers))):
            tensor[:2] = tensor[:2].flip(0).clone()


def adapter_scale(scorer: Any, strength: float) -> None:
    """Scale the query projection of one layer: an adapter of another alpha / rank."""
    for name, tensor in _parameters(scorer):
        if ".layers.1." in name and "q_proj.weight" in name:
            tensor.mul_(strength)


def no_sinks(scorer: Any, nats: float) -> None:
    """Learned sinks lowered; 30 nats take them out."""
    for name, tensor in _parameters(scorer):
        if name.endswith("sinks"):
            tensor.sub_(nats)


def _rotary(scorer: Any) -> list[Any]:
    return [module for module in scorer.modules() if hasattr(module, "inv_freq")]


def yarn_factor(scorer: Any, part: float) -> None:
    """Lose a part of YaRN's factor on cosine and sine; 1: all of it."""
    for module in _rotary(scorer):
        module.attention_scaling = module.attention_scaling ** (1 - part)


def rope_theta(scorer: Any, times: float) -> None:
    """Another base of the rotations."""
    for module in _rotary(scorer):
        count = len(module.inv_freq)
        powers = np.arange(count) / count
        module.inv_freq.mul_(module.inv_freq.new_tensor(times**-powers))


def window(scorer: Any, part: float) -> None:
    """Another window in the sliding layers; 0: none."""
    config = scorer.model.config
    config.sliding_window = int(config.sliding_window * part) if part else 1 << 20


def norm_epsilon(scorer: Any, times: float) -> None:
    """Set the epsilon of every norm."""
    for module in scorer.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= times


def softcap(scorer: Any, cap: float) -> None:
    """Logits through cap x tanh(x / cap), on one side only."""
    import torch

    head = scorer.model.lm_head
    head.register_forward_hook(lambda module, args, out: cap * torch.tanh(out.float() / cap))


@contextmanager
def packed_without_bounds() -> Iterator[None]:
    """Packing that does not tell the model where its documents end."""
    from mismatch.training import validate

    place: Any = validate
    collate = place.collate
    place.collate = lambda *args: replace(collate(*args), position_ids=None)
    try:
        yield
    finally:
        place.collate = collate


def nothing(*args: Any) -> None:
    """Leave the model as it is: the fault is a setting of the pass, or of its tokens."""


SHIFTED = ("misalignment",)
FAULTS = (
    Fault("shift", "recorded", ("modelscope/ms-swift#8196", "PrimeIntellect-ai/prime-rl#1525"),
          SHIFTED, "", (1, -1, 2), shift),
    Fault("far shift", "recorded", ("opendilab/LightRFT#53",), SHIFTED, "", (5, 8, 13), shift),
    Fault("mask one token off", "recorded", ("huggingface/trl#5144", "volcengine/verl#6089"),
          SHIFTED, "", (-2, -3, 3), shift),
    Fault("other rows", "recorded", ("allenai/open-instruct#1473", "allenai/open-instruct#1483"),
          ("row-pairing",), "", (0.06, 0.3, 1.0), swap_rows),
    Fault("appended end at 0.0", "recorded", ("NovaSky-AI/SkyRL#2148", "NovaSky-AI/SkyRL#758",
          "allenai/open-instruct#1041"), ("appended-eos",), "engine", (0.1, 0.3, 1.0), fake_end),
    Fault("appended end, not sampled", "recorded", ("NovaSky-AI/SkyRL#2148",),
          ("appended-eos",), "engine", (0.5, 2, 6), unsampled_end),
    Fault("end counted on one side", "recorded", ("huggingface/trl#5145",),
          ("row-lengths",), "", (1, 1, 1), row_lengths),
    Fault("turn encoded again", "recorded", ("volcengine/verl#3960", "huggingface/trl#5224",
          "PrimeIntellect-ai/prime-rl#1334"), ("retokenisation",), "", (1, 2, 3), encoded_again),
    Fault("fused cross-entropy", "recorded", ("volcengine/verl#2656", "volcengine/verl#3723"),
          ("unnormalised-law",), "trainer", (1, 5, 100), fused_kernel),
    Fault("fp8 tile from a position on", "recorded", ("vllm-project/vllm#54035",
          "sgl-project/sglang#25790"), ("onset", "fp8-kv-tile"), "engine", (5, 10, 20),
          from_position),
    Fault("state lost at chunks", "recorded", ("NVIDIA-NeMo/RL#2100",),
          ("kv-block", "chunked-prefill"), "engine", (8, 15, 30), chunk_starts),
    Fault("16-bit log-softmax", "recorded", ("OpenRLHF/OpenRLHF#634", "InternLM/xtuner#1108"),
          ("bf16-logprobs",), "trainer", (8, 7, 6), bf16_logprobs),
    Fault("weights not refitted", "weights", ("huggingface/trl#5312", "huggingface/trl#5313"),
          (*MOVED, "side-off"), "engine", (0.02, 0.05, 0.1), stale),
    Fault("head not carried", "weights", ("pytorch/torchtitan#2402", "vllm-project/vllm#51665"),
          (*MOVED, "tied-head-stale", "side-off"), "engine", (0.05, 0.1, 0.2), stale_head),
    Fault("parameter lost in a reload", "weights", ("PrimeIntellect-ai/prime-rl#2714",),
          (*MOVED, *FUNCTION, "side-off"), "engine", (0.3, 1, 3), lost_parameter),
    Fault("experts swapped", "weights", ("NovaSky-AI/SkyRL#1680", "vllm-project/vllm#42821",
          "vllm-project/vime#274"), (*MOVED, *FUNCTION, "experts-differ"), "engine",
          (1, 2, 4), swapped_experts, ("gpt-oss", "mixtral")),
    Fault("adapter scale", "weights", ("radixark/miles#2075", "UniRL/UniRL#155"),
          (*MOVED, *FUNCTION, "lora-scale", "side-off"), "engine", (1.3, 1.6, 2), adapter_scale),
    Fault("sinks ignored", "trainer", ("volcengine/verl#3794", "radixark/miles#1500"),
          (*FUNCTION, "attention-sinks"), "trainer", (1, 4, 30), no_sinks,
          ("gpt-oss",)),
    Fault("YaRN factor dropped", "trainer", ("PrimeIntellect-ai/prime-rl#2802",),
          (*FUNCTION, "yarn-attention-factor"), "trainer", (0.3, 0.6, 1),
          yarn_factor, ("gpt-oss",)),
    Fault("other rope base", "trainer", ("marin-community/MarinFold#184",),
          (*FUNCTION, "rope-config"), "trainer", (1.5, 2, 4), rope_theta),
    Fault("other window", "trainer", (), (*FUNCTION, "sliding-window", "onset"),
          "trainer", (0.75, 0.5, 0), window, ("gpt-oss", "mixtral")),
    Fault("softcap on one side", "trainer", ("unslothai/unsloth-zoo#593",),
          (*FUNCTION, "logit-softcap", "temperature-semantics"), "trainer", (30, 20, 12), softcap),
    Fault("norm epsilon", "trainer", (), (*MOVED, *FUNCTION, "norm-eps", "side-off"), "trainer",
          (1e3, 1e4, 1e5), norm_epsilon),
    Fault("packed rows see each other", "packing", ("THUDM/slime#1686",
          "huggingface/transformers#46093"), (*FUNCTION, "packing-leak"), "trainer",
          (1, 1, 1), nothing),
    Fault("template token lost", "template", ("volcengine/verl#3720", "vllm-project/vllm#35907"),
          (*FUNCTION, "template-drift"), "trainer",
          (1, 2, 4), nothing, ("gpt-oss",)),
)  # fmt: skip
