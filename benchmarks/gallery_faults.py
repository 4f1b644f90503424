"""Faults that benchmarks/known_issues.py does not plant, for the gallery of causes.

They are planted in FSDP2, which scores the tokens of the clean run of known_issues.py, and taken
out again, or in the run's numbers. What is scored lies in DIR/gallery and is not scored again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import known_faults
from benchmarks.known_issue_runs import here
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.plugins import RunArtefacts
from mismatch.keys import REFERENCE, REGROUPED, TRAIN
from mismatch.types import SideFacts

PREFILL, IN_FLOAT32 = "vllm:prefill", "vllm:fp32"
EVAL = f"{TRAIN}:grad"  # the pass of the other mode, without a dropout
SECOND = {REGROUPED: {"micro_batch_tokens": 512}, f"{TRAIN}:repeated": {}, EVAL: {}}


@dataclass(frozen=True)
class Planted:
    """One fault and how it is planted.

    Attributes:
        where: what a reader is told of it.
        trainer: plants it in the model that FSDP2 has loaded; returns what takes it out.
        spec: fields of the trainer's spec that are the fault.
        recorded: plants it in the case of the clean run.
        second: the other pass of the trainer that the fault is seen by.
        twin: the float32 pass has the fault too: the engine's weights are older.
        dtype: of both sides; in "fp32" the engine's numbers are those of its start in float32.
    """

    where: str
    trainer: Callable[[Any], Callable[[], None]] | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    recorded: Callable[[Case], Case] | None = None
    second: str = ""
    dtype: str = "bf16"
    twin: bool = False


# ---------------------------------------------------------------- in FSDP2


def _on(kind: Callable[[Any], bool], hook: Callable[..., Any]) -> Callable[[Any], Any]:
    """Plants a forward hook on all modules of a kind."""

    def plant(scorer: Any) -> Callable[[], None]:
        handles = [m.register_forward_hook(hook) for m in scorer.modules() if kind(m)]
        assert handles, "nothing to plant it in"
        return lambda: _remove(handles)

    return plant


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _attention(module: Any) -> bool:
    return hasattr(module, "q_proj")


def _noise(module: Any, args: Any, out: Any) -> Any:
    """Scatter outputs by 30 % at every pass, as sums in another order would."""
    import torch

    return (out[0] * (1 + 0.3 * torch.randn_like(out[0])), *out[1:])


def _by_rows(module: Any, args: Any, out: Any) -> Any:
    """Keep fewer bits in a kernel where the micro-batch has more rows."""
    import torch

    hidden = out[0]
    if hidden.shape[0] < 16:
        return out
    mantissa, exponent = torch.frexp(hidden.float())
    return (torch.ldexp((mantissa * 4).round() / 4, exponent).to(hidden.dtype), *out[1:])


def _dropout(scorer: Any) -> Callable[[], None]:
    """Add a dropout of 0.1 behind the attention."""
    import torch

    attention = [module for module in scorer.modules() if _attention(module)]
    handles = [
        module.register_forward_hook(
            lambda m, a, out: (torch.nn.functional.dropout(out[0], 0.1), *out[1:])
        )
        for module in attention
    ]
    return lambda: _remove(handles)


def _one_expert(scorer: Any) -> Callable[[], None]:
    """Routers choose one expert and not two."""
    routers = [m for m in scorer.modules() if hasattr(m, "top_k") and hasattr(m, "weight")]
    old = [router.top_k for router in routers]
    assert routers, "no router"
    for router in routers:
        router.top_k = 1

    def back() -> None:
        for router, top_k in zip(routers, old, strict=True):
            router.top_k = top_k

    return back


def _float32_tables(cast: bool) -> Callable[[Any], Callable[[], None]]:
    """Rotary tables are handed to the layers in float32, as in torchtitan; FSDP2 casts them or not.

    transformers rounds the tables that it makes to the model's dtype before any layer has them.
    """

    def plant(scorer: Any) -> Callable[[], None]:
        from torch.distributed.fsdp import FSDPModule

        code: Any = sys.modules[type(scorer.model).__module__]
        apply = code.apply_rotary_pos_emb

        def in_float32(q: Any, k: Any, cos: Any, sin: Any, *rest: Any, **more: Any) -> Any:
            sides = apply(q.float(), k.float(), cos.float(), sin.float(), *rest, **more)
            return tuple(side.to(q.dtype) for side in sides)

        code.apply_rotary_pos_emb = in_float32
        rotary = [module for module in scorer.modules() if hasattr(module, "inv_freq")]
        for module in rotary:
            right = module.forward
            module.forward = lambda x, *rest, _right=right, **more: _right(x.float(), *rest, **more)
        states = [m._get_fsdp_state() for m in scorer.modules() if isinstance(m, FSDPModule)]
        old = [state._mp_policy for state in states]
        for state, policy in zip(states, old, strict=True):
            state._mp_policy = replace(policy, cast_forward_inputs=cast)

        def back() -> None:
            code.apply_rotary_pos_emb = apply
            for module in rotary:
                del module.forward
            for state, policy in zip(states, old, strict=True):
                state._mp_policy = policy

        return back

    return plant


def _known(plant: Callable[[Any, float], None], strength: float) -> Callable[[Any], Any]:
    """Return a fault of benchmarks/known_faults.py that its inverse strength takes out again."""

    def planted(scorer: Any) -> Callable[[], None]:
        plant(scorer, strength)
        return lambda: plant(scorer, 1 / strength)

    return planted


def _weights(change: Callable[[str, Any], Any]) -> Callable[[Any], Any]:
    """Other values of the parameters that ``change`` gives some for; None: the same."""

    def planted(scorer: Any) -> Callable[[], None]:
        right = {}
        for number, (name, tensor) in enumerate(known_faults._parameters(scorer)):
            made = change(f"{number} {name}", tensor)
            if made is not None:
                right[name] = tensor, tensor.clone()
                tensor.copy_(made)

        def back() -> None:
            for tensor, values in right.values():
                tensor.copy_(values)

        return back

    return planted


def _moved(strength: float) -> Callable[[str, Any], Any]:
    def change(name: str, tensor: Any) -> Any:
        import torch

        if tensor.ndim < 2:
            return None
        generator = torch.Generator().manual_seed(int(name.partition(" ")[0]))
        return tensor + strength * tensor.float().std() * torch.randn(
            tensor.shape, generator=generator
        )

    return change


def _fp8(head: bool) -> Callable[[str, Any], Any]:
    """On the grid of fp8 (e4m3, a scale a row): the head, or the matrices of the layers."""

    def change(name: str, tensor: Any) -> Any:
        import torch

        chosen = "lm_head" in name if head else ".layers." in name and "router" not in name
        if tensor.ndim < 2 or not chosen:
            return None
        scale = tensor.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-9) / 448
        return (tensor.float() / scale).to(torch.float8_e4m3fn).float() * scale

    return change


# ---------------------------------------------------------------- in recorded numbers


def _far_tokens(case: Case) -> Case:
    """Every 150th log-probability of the engine is 1 to 3 nats too low."""
    far = np.zeros(len(case.left))
    far[::150] = -np.random.default_rng(0).uniform(1, 3, len(far[::150]))
    return _engines(case, case.left + far)


def _rounding(case: Case, times: Any) -> Case:
    """Multiply the engine's distance from float32."""
    assert case.reference is not None
    return _engines(case, case.reference + (case.left - case.reference) * times)


def _tile(case: Case) -> Case:
    """From position 60 on the engine rounds 15 times as much; its prefill does not."""
    return _rounding(case, np.where(case.position >= 60, 15.0, 1.0))


def _without_prefill(case: Case) -> Case:
    """Leave out the prefill, which would have the fault as well."""
    return replace(case, others={n: one for n, one in case.others.items() if n != PREFILL})


def _chunks(case: Case) -> Case:
    """Do the same from the second chunk on, of a length that the engine states."""
    made = _without_prefill(_tile(case))
    facts = made.engine.fingerprint | {"max_num_batched_tokens": 60}
    return replace(made, engine=replace(made.engine, fingerprint=facts))


def _two_turns(case: Case) -> Case:
    """From the middle of each response on, its second turn: another context moves the trainer."""
    later = np.concatenate([np.arange(row.stop - row.start) >= (row.stop - row.start) // 2
                            for row in case.rows])  # fmt: skip
    turn = case.rollout.turn.copy()
    turn[case.rollout.actions[later]] = 2
    noise = np.random.default_rng(0).normal(0, 0.3, len(later)) * (1 - np.exp(case.right))
    moved = np.minimum(np.where(later, case.right + noise, case.right), -1e-6)
    trainer = replace(case.trainer, logprobs=moved)
    return Case.of(replace(case.rollout, turn=turn), case.engine, trainer, case.others)


def _engines(case: Case, left: Any) -> Case:
    left = np.minimum(left, -1e-6)
    return Case.of(case.rollout, replace(case.engine, logprobs=left), case.trainer, case.others)


def _early_mask(case: Case) -> Case:
    """Begin the mask six tokens early: what nobody sampled counts, at -6 on both sides."""
    mask = case.rollout.action_mask
    early = mask.copy()
    for places in np.split(np.flatnonzero(mask), np.flatnonzero(np.diff(case.sequence)) + 1):
        early[places[0] - 6 : places[0]] = True
    rng, sides = np.random.default_rng(0), []
    for side in (case.engine, case.trainer):
        values = rng.normal(-6.0, 0.02, len(mask))
        values[case.rollout.actions] = side.logprobs
        entropy = np.full(len(mask), 1.0)
        if side.entropy is not None:
            entropy[case.rollout.actions] = side.entropy
        sides.append(replace(side, token_ids=case.rollout.token_ids[early], extra={},
                             logprobs=values[early], entropy=entropy[early]))  # fmt: skip
    turn = np.where(early, 1, case.rollout.turn)
    return Case.of(replace(case.rollout, action_mask=early, turn=turn), sides[0], sides[1], {})


PLANTED = {
    "decode-vs-prefill": Planted(
        "in recorded numbers: decoding rounds 8 times as much, the prefill as it should",
        recorded=lambda case: _rounding(case, np.full(len(case.left), 8.0))),
    "turn-context": Planted(
        "in recorded numbers, each response cut in two turns: in the second the trainer is off "
        "by 0.3 nats where it is uncertain", recorded=_two_turns),
    "nondeterminism": Planted(
        "in FSDP2: attention differs by noise of 30 % from pass to pass",
        trainer=_on(_attention, _noise), second=f"{TRAIN}:repeated"),
    "microbatch-dependence": Planted(
        "in FSDP2: attention keeps 2 bits in micro-batches of 16 rows and more",
        trainer=_on(_attention, _by_rows), second=REGROUPED),
    "train-eval-paths": Planted(
        "in FSDP2: a dropout of 0.1 after the attention in train(), compared with eval()",
        trainer=_dropout, second=EVAL),
    "function-differs": Planted("in FSDP2: the base of the rotations times 2",
                                trainer=_known(known_faults.rope_theta, 2.0)),
    "side-off": Planted("FSDP2 in float32 with every matrix moved by 1 % of its spread, vLLM in "
                        "float32", trainer=_weights(_moved(0.01)), dtype="fp32"),
    "weights-differ": Planted("in FSDP2 and its float32 twin: every matrix moved by 5 % of its "
                              "spread", trainer=_weights(_moved(0.05)), twin=True),
    "sleep-level-2": Planted(
        "what a lost update leaves, in FSDP2 and its float32 twin: every matrix moved by 20 % of "
        "its spread (the sleep needs a GPU)",
        trainer=_weights(_moved(0.2)), twin=True),
    "quantised-rollout": Planted(
        "on the trainer's side, where it leaves the same mark: matrices of the layers, without "
        "routers, in fp8", trainer=_weights(_fp8(False))),
    "quantised-module-list": Planted(
        "on the trainer's side: the head in fp8, which the list should have excluded",
        trainer=_weights(_fp8(True))),
    "router-config": Planted("in FSDP2: routers choose 1 of 8 experts and not 2",
                             trainer=_one_expert),
    "fsdp-cast-inputs": Planted(
        "in FSDP2: `cast_forward_inputs=True` over rotary tables in float32",
        trainer=_float32_tables(True)),
    "precision": Planted("FSDP2 in bf16, vLLM in float32", spec={"dtype": "bf16"},
                         dtype="fp32"),
    "trainer-autocast": Planted("FSDP2 in float32 under `torch.autocast` in bf16, vLLM in float32",
                                spec={"autocast": "bf16"}, dtype="fp32"),
    "bf16-lm-head": Planted("FSDP2 in float32 with its head in bf16, vLLM in float32",
                            spec={"head_dtype": "bf16"}, dtype="fp32"),
    "router-precision": Planted("FSDP2 in float32 with its routers in bf16, vLLM in float32",
                                spec={"router_dtype": "bf16"}, dtype="fp32"),
    "action-mask": Planted("in recorded numbers: six tokens of each prompt count as sampled",
                           recorded=_early_mask),
    "fp8-kv-tile": Planted("in recorded numbers: the engine rounds 15 times as much from position "
                           "60 on", recorded=_tile),
    "chunked-prefill": Planted("in recorded numbers: the engine, which states chunks of 60 tokens, "
                               "rounds 15 times as much from there on", recorded=_chunks),
}  # fmt: skip


# ---------------------------------------------------------------- runs


def make(home: Path, run: RunArtefacts, train: Any) -> None:
    """Score the tokens of a run without a fault by trainers that have one: what is missing."""
    from mismatch.experiments.scoring_passes import reference_of
    from mismatch.specs import Pass
    from mismatch.training.distributed import World
    from mismatch.training.load import load
    from mismatch.training.score import score_pass
    from mismatch.training.validate import prepare_pass

    home.mkdir(parents=True, exist_ok=True)
    missing = [
        n for n, one in PLANTED.items() if not one.recorded and not (home / f"{n}.npz").is_file()
    ]
    if not missing:
        return
    world, loads = World.start(), {}
    train = replace(train, model=here(train.model, home), routing=False)

    def passed(name: str, spec: Any, plant: Any) -> Any:
        key = (spec.dtype, spec.attention)
        if key not in loads:
            loads[key] = load(spec, world.mesh, world.device)
        loaded = replace(loads[key], spec=spec)
        prepare_pass(world, loaded, run.rollout, spec, None)
        back = plant(loaded.scorer) if plant else None
        try:
            return score_pass(world, loaded, run.rollout, Pass(name, spec))
        finally:
            if back is not None:
                back()

    for name in missing:
        fault = PLANTED[name]
        spec = replace(train, **({"dtype": fault.dtype} | fault.spec))
        jobs: dict[str, Any] = {TRAIN: spec}
        if fault.second:
            jobs[fault.second] = replace(spec, **SECOND[fault.second])
        if fault.twin:
            jobs[REFERENCE] = reference_of(train)
        arrays: dict[str, Any] = {}
        for job, its in jobs.items():
            made = passed(job, replace(its, routing=False), None if job == EVAL else fault.trainer)
            arrays |= {f"{job} p": made.logprobs, f"{job} H": made.entropy}
        np.savez(home / f"{name}.npz", **arrays)
        print(f"scored: {name}", flush=True)


def clean_of(run: RunArtefacts, dtype: str) -> Case:
    """Return the case without a fault, with what detectors read of numbers alone."""
    kept = (REFERENCE, "plain:bf16", PREFILL) if dtype == "bf16" else (REFERENCE,)
    decode, train = run.decode, run.train
    if dtype == "fp32":
        decode = replace(run.usable[IN_FLOAT32], name=decode.name)
        train = replace(run.usable[REFERENCE], name=TRAIN)
    decode, train = (
        replace(one, fingerprint={"dtype": dtype}, extra={}) for one in (decode, train)
    )
    others = {name: one for name, one in run.usable.items() if name in kept}
    return Case.of(run.rollout, decode, train, others)


def cases(home: Path, run: RunArtefacts) -> Iterator[tuple[str, Case, Case, str]]:
    """Cause, its case, that of the clean run, and what was planted, of all that are measured."""
    for name, fault in PLANTED.items():
        right = clean_of(run, fault.dtype)
        if fault.recorded:
            yield name, fault.recorded(right), right, fault.where
        elif (home / f"{name}.npz").is_file():
            yield (
                name,
                _scored(np.load(home / f"{name}.npz"), fault, run, right),
                right,
                fault.where,
            )


def _scored(held: Any, fault: Planted, run: RunArtefacts, right: Case) -> Case:
    passes = {
        job: replace(right.trainer, name=job, logprobs=held[f"{job} p"], entropy=held[f"{job} H"])
        for job in {key.rpartition(" ")[0] for key in held.files}
    }
    facts: SideFacts = {"dtype": fault.spec.get("dtype", fault.dtype)}
    trainer = replace(passes.pop(TRAIN), fingerprint=facts)
    others = right.others | passes
    if {"dtype", "autocast"} & fault.spec.keys():  # as every check of two dtypes has it
        others["plain:bf16"] = run.usable["plain:bf16"]
    if fault.twin:  # of the older weights
        others.pop("plain:bf16")
    return Case.of(right.rollout, right.engine, trainer, others)
