"""Checks of what both sides declare: sampling parameters, special tokens, files, ranks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mismatch.facts import Json
from mismatch.types import Check, CheckStatus, Rollout, Scoring, SideFacts

TF32 = 2.0**-8  # products in TF32 are off by up to a third of it; wrong code by more
EAGER = "--attention eager"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def failed(id: str, detail: str, fix: str) -> Check:
    """Return a failed check; the fix is never missing."""
    return Check(id, "failed", detail, fix)


def whole_model(left: SideFacts) -> list[Check]:
    """Warn that later layers were left out; no check of a run without ``--layers``."""
    if not (layers := left.get("layers")):
        return []
    detail = "only the first {} of {} layers were run".format(*layers)
    return [Check("whole-model", "warning", detail, "judge the whole model, without --layers")]


def attention_sinks(right: SideFacts) -> Check:
    """Check that the trainer's kernel honours the model's learned sinks, if it has any."""
    honours, kernel = right.get("honours_sinks", "not said"), right.get("attention")
    if honours == "not said":
        named = f"the trainer runs {kernel} and does not say whether it uses the model's sinks"
        unnamed = "the trainer does not name its kernel"
        return Check("attention-sinks", "not_tested", named if kernel else unnamed)
    if honours is None:
        return Check("attention-sinks", "passed", f"the model has none ({kernel})")
    if honours:
        return Check("attention-sinks", "passed", f"{kernel} uses the model's sinks")
    detail = f"the trainer's attention ignores the model's sinks: {kernel}"
    fix = "train with a kernel that honours sinks; here: --attention auto"
    return failed("attention-sinks", detail, fix)


def attention_softcap(right: SideFacts) -> list[Check]:
    """Check that the trainer's kernel caps its scores, where the model declares a cap and the
    kernel is known."""
    honours, kernel = right.get("honours_softcap"), right.get("attention")
    if honours is None:
        return []
    if honours:
        detail = f"{kernel} caps the scores as attn_logit_softcapping says"
        return [Check("attention-softcap", "passed", detail)]
    detail = f"the trainer's attention kernel ignores attn_logit_softcapping: {kernel}"
    fix = "train with a kernel that caps the scores (eager, flash attention); here: " + EAGER
    return [failed("attention-softcap", detail, fix)]


def attention_trial(scorings: Mapping[str, Scoring]) -> list[Check]:
    """Return a check that fails for a kernel that failed its trial in float32; none if none did."""
    prints = [
        each.fingerprint for each in scorings.values() if "attention_error" in each.fingerprint
    ]
    if not prints:
        return []
    facts = max(prints, key=lambda each: each["attention_error"])
    said = "; ".join(facts.get("attention_candidates") or [])
    detail = f"the trainer's attention in float32, {said}, against float64 on random tokens"
    fix = f"repair it: mismatch kernels --kernel {facts.get('attention')} looks at it closely"
    status: CheckStatus = "failed" if facts["attention_error"] > TF32 else "warning"
    return [Check("attention-trial", status, detail, fix)]


def sampling_parameters(rollout: Rollout, left: Scoring) -> Check:
    """Check that the engine sampled with the parameters that were asked, and with no others."""
    effective = left.fingerprint.get("sampling")
    if not effective:
        detail = "the engine does not report its effective sampling parameters"
        return Check("sampling-parameters", "not_tested", detail)
    neutral = {
        "temperature": rollout.sampling.temperature,
        "top_p": rollout.sampling.top_p,
        "top_k": rollout.sampling.top_k,
        "min_p": rollout.sampling.min_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "min_new_tokens": 0,  # SGLang's name
    }
    odd = {
        name: effective[name]
        for name, wanted in neutral.items()
        if name in effective and not _same_setting(name, effective[name], wanted)
    }
    if odd:
        shown = ", ".join(f"{name} = {value}" for name, value in odd.items())
        fix = "send every sampling parameter explicitly; vLLM: generation_config=vllm"
        return failed("sampling-parameters", f"the engine sampled with {shown}", fix)
    return Check("sampling-parameters", "passed", "as asked; no penalties, no minimum length")


def _same_setting(name: str, value: Json, wanted: float) -> bool:
    if not isinstance(value, int | float):
        return False
    if name == "top_k":  # engines write "off" as 0 or -1
        return max(value, 0) == max(wanted, 0)
    return abs(value - wanted) < 1e-9


def rope_length(left: SideFacts, given: bool) -> list[Check]:
    """Check that the engine had the length that decides which of LongRoPE's factors it takes.

    Args:
        given: whether the command said how long the engine's contexts are.
    """
    switch, length = left.get("rope_switch"), left.get("max_model_len")
    if not switch or not length:
        return []
    taken = "long" if length > switch else "short"
    detail = f"max_model_len is {length}: vLLM takes LongRoPE's {taken} factors ({switch} decides)"
    if given:
        return [Check("rope-length", "passed", detail)]
    fix = "give the length of your own engine: --max-model-len"
    return [Check("rope-length", "warning", f"{detail}, and yours was not given", fix)]


def special_tokens(rollout: Rollout, left: Scoring, right: Scoring) -> Check:
    """Check that stopped sequences end in a stop token that was sampled; the prompt starts once."""
    stop_ids = left.fingerprint.get("stop_token_ids")
    if stop_ids is None:
        detail = "the engine does not report its stop tokens"
        return Check("special-tokens", "not_tested", detail)
    last = rollout.offsets[1:] - 1
    stopped = np.array([reason == "stop" for reason in rollout.finish_reason])
    ends_in_stop = np.isin(rollout.token_ids[last], stop_ids)
    if (stopped & ~ends_in_stop).any():
        sequence = int(np.flatnonzero(stopped & ~ends_in_stop)[0])
        detail = f"sequence {sequence} stopped, but its last token is no stop token"
        return failed("special-tokens", detail, "keep the sampled EOS: it is an action")
    if (stopped & ~rollout.action_mask[last]).any():
        detail = "the sampled stop token is not among the action tokens"
        return failed("special-tokens", detail, "a sampled EOS is an action: unmask it")
    is_stop = np.isin(rollout.token_ids, stop_ids) & rollout.action_mask
    inner = is_stop.copy()
    inner[last] = False
    if inner.any() and rollout.turn.max() <= 1:
        sequence = int(rollout.sequence_of_token[np.flatnonzero(inner)[0]])
        detail = f"sequence {sequence} goes on after a sampled stop token"
        return failed("special-tokens", detail, "stop at EOS, or mask what follows it")
    bos = left.fingerprint.get("bos_token_id")
    starts = rollout.offsets[:-1]
    if bos is not None and bos not in stop_ids:
        twice = (rollout.token_ids[starts] == bos) & (rollout.token_ids[starts + 1] == bos)
        if twice.any():
            detail = f"{int(twice.sum())} prompts start with two BOS tokens"
            fix = "the chat template has the BOS already: tokenise with add_special_tokens=False"
            return failed("special-tokens", detail, fix)
    return _stop_token_gap(is_stop[rollout.actions], left, right, int(stopped.sum()))


def _stop_token_gap(stop: np.ndarray, left: Scoring, right: Scoring, stopped: int) -> Check:
    """Whether stop tokens disagree far more than the others do."""
    gap = np.abs(right.logprobs - left.logprobs)
    if stop.sum() >= 8 and (~stop).sum() >= 8:
        on_stop, elsewhere = float(gap[stop].mean()), float(gap[~stop].mean())
        if on_stop > max(10 * elsewhere, 0.5):
            detail = f"mean |delta| is {on_stop:.3g} on stop tokens, {elsewhere:.3g} elsewhere"
            fix = "was the EOS sampled, or appended by a framework? mask an appended one"
            return failed("special-tokens", detail, fix)
    if not stopped:
        detail = "nothing to check: every sequence ended at the length limit"
        return Check("special-tokens", "not_tested", detail)
    detail = f"{stopped} sequences stopped, each in a sampled stop token"
    return Check("special-tokens", "passed", detail)


SAME_CHECKPOINT = "point engine and trainer at the same checkpoint"


def source_files(left: SideFacts, right: SideFacts) -> Check:
    """Check that both sides read the same files, by sha256."""
    a, b = left.get("source_files"), right.get("source_files")
    if not a or not b:
        return Check("source-files", "not_tested", "a side did not hash the files it loaded")
    common = a.keys() & b.keys()
    differ = sorted(name for name in common if a[name] != b[name])
    only = sorted(name for name in a.keys() ^ b.keys() if name.endswith(WEIGHT_FILES))
    both = all(any(name.endswith(WEIGHT_FILES) for name in side) for side in (a, b))
    if differ or (only and (common or both)):
        detail = f"{', '.join((differ + only)[:5])} differ between the two sides"
        adapters = all(name.startswith("adapter/") for name in (*differ, *only))
        fix = "give both sides one adapter: --adapter" if adapters else SAME_CHECKPOINT
        return failed("source-files", detail, fix)
    if not common:
        detail = "nothing to check: the two sides hashed no file of the same name"
        return Check("source-files", "not_tested", detail)
    return Check("source-files", "passed", f"{len(common)} files equal by sha256")


def sharding_checks(asked: int, train: SideFacts) -> list[Check]:
    """Check that the trainer ran on as many ranks as were asked for; none if it does not say."""
    ranks = train.get("world_size")
    if ranks is None:
        return []
    if ranks < asked:
        detail = f"{asked} ranks were asked for, the trainer ran on {ranks}"
        return [Check("sharding", "warning", detail, "score again: --nproc-per-node")]
    if ranks == 1:
        detail = "one rank: nothing was sharded, so FSDP2's gathers and reductions did not run"
        return [Check("sharding", "not_tested", detail)]
    return [Check("sharding", "passed", f"{ranks} ranks")]
