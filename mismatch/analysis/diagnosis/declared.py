"""Checks of what both sides declare: sampling parameters, special tokens, files, loaded weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from mismatch.types import Check, CheckStatus, Fingerprint, Rollout, Scoring

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
UNORDERED = 3  # sums of a digest that do not see order
MOST_UNCOMPARED = 0.5  # share of the parameters beyond which equality of the rest says nothing


def failed(id: str, detail: str, fix: str) -> Check:
    """A failed check; the fix is never missing."""
    return Check(id, "failed", detail, fix)


def attention_sinks(right: Fingerprint) -> Check:
    """The trainer's attention kernel honours the model's learned sinks, if it has any."""
    if "honours_sinks" not in right:
        return Check("attention-sinks", "not_tested", "the trainer does not name its kernel")
    kernel = right.get("attention")
    if right["honours_sinks"] is None:
        return Check("attention-sinks", "passed", f"the model has none ({kernel})")
    if right["honours_sinks"]:
        return Check("attention-sinks", "passed", f"{kernel} honours the learned sinks")
    detail = f"the trainer's attention ignores the model's learned sinks: {kernel}"
    fix = "train with a kernel that honours sinks; here: --attention auto"
    return failed("attention-sinks", detail, fix)


def sampling_parameters(rollout: Rollout, left: Scoring) -> Check:
    """The engine sampled with the parameters that were asked, and with no others."""
    effective = left.fingerprint.get("sampling")
    if not effective:
        detail = "the engine does not report its effective sampling parameters"
        return Check("sampling-parameters", "not_tested", detail)
    neutral = {
        "temperature": rollout.sampling.temperature,
        "top_p": rollout.sampling.top_p,
        "top_k": rollout.sampling.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
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


def _same_setting(name: str, value: float, wanted: float) -> bool:
    if name == "top_k":  # engines write "off" as 0 or -1
        return max(value, 0) == max(wanted, 0)
    return abs(value - wanted) < 1e-9


def special_tokens(rollout: Rollout, left: Scoring, right: Scoring) -> Check:
    """A stopped sequence ends in a stop token that the policy sampled; the prompt starts once."""
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


def source_files(left: Fingerprint, right: Fingerprint) -> Check:
    """Both sides read the same files, by sha256."""
    a, b = left.get("source_files"), right.get("source_files")
    if not a or not b:
        return Check("source-files", "not_tested", "a side did not hash the files it loaded")
    common = a.keys() & b.keys()
    differ = sorted(name for name in common if a[name] != b[name])
    only = sorted(name for name in a.keys() ^ b.keys() if name.endswith(WEIGHT_FILES))
    both = all(any(name.endswith(WEIGHT_FILES) for name in side) for side in (a, b))
    if differ or (only and (common or both)):
        detail = f"{', '.join((differ + only)[:5])} differ between the two sides"
        return failed("source-files", detail, "point engine and trainer at the same checkpoint")
    if not common:
        detail = "nothing to check: the two sides hashed no file of the same name"
        return Check("source-files", "not_tested", detail)
    return Check("source-files", "passed", f"{len(common)} files equal by sha256")


def sharding_checks(asked: int, train: Fingerprint) -> list[Check]:
    """The trainer ran on as many ranks as were asked for; none where it does not say."""
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


def _moved(pairs: dict[str, tuple[list[int], list[int]]]) -> tuple[list[str], list[str]]:
    """Of parameters with equal values: those whose order differs, and kinds laid out otherwise.

    Only what both digests say of the order counts (see mismatch.models.digests). A kind of
    parameter that has another order in every layer is an engine's layout; in some layers, a fault.
    """
    moved: dict[str, list[str]] = {}
    members: dict[str, int] = {}
    for name, (left, right) in pairs.items():
        kind = _kind(name)
        members[kind] = members.get(kind, 0) + 1
        shared = min(len(left), len(right))
        if list(left[UNORDERED:shared]) != list(right[UNORDERED:shared]):
            moved.setdefault(kind, []).append(name)
    layouts = [kind for kind, names in moved.items() if 1 < members[kind] == len(names)]
    faults = [name for kind, names in moved.items() if kind not in layouts for name in names]
    return faults, layouts


def _kind(name: str) -> str:
    """A parameter without the numbers of its layer and expert."""
    return re.sub(r"\.\d+(?=\.|$)", ".N", name)


def differing(
    left: Mapping[str, list[int]], right: Mapping[str, list[int]]
) -> tuple[list[str], list[str], list[str]]:
    """Of the parameters of both sides, by their digests: those of other values, those of the same
    values in another order, and kinds of parameters that one side lays out otherwise throughout.
    """
    common = sorted(left.keys() & right.keys())
    other = [n for n in common if list(left[n][:UNORDERED]) != list(right[n][:UNORDERED])]
    moved, layouts = _moved({n: (left[n], right[n]) for n in common if n not in other})
    return other, moved, layouts


def same_weights(left: Fingerprint, right: Fingerprint) -> bool:
    """Whether every parameter of both sides was compared, in its order, and is equal."""
    a, b = left.get("weights"), right.get("weights")
    sound = all(side.get("weights_comparable") is not False for side in (left, right))
    if not a or not b or not sound or left.get("unmapped_weights") or a.keys() != b.keys():
        return False
    return not any(differing(a, b))


def asked_apart(left: Fingerprint, right: Fingerprint, differ: Sequence[str]) -> list[str]:
    """Both sides' forms of the experts, where they alone differ and were asked to; else []."""
    forms = [side.get("weights_form", "as-stored") for side in (left, right)]
    asked = bool(differ) and forms[0] != forms[1] and all(".experts" in name for name in differ)
    return forms if asked else []


def weights_as_loaded(left: Fingerprint, right: Fingerprint) -> Check:
    """Parameters hold the same values after loading, by digest, where names can be mapped."""
    a, b = left.get("weights"), right.get("weights")
    lossy = [side["dtype"] for side in (left, right) if side.get("weights_comparable") is False]
    if lossy or not a or not b:
        detail = (
            f"held in {lossy[0]}, which the checkpoint's values do not fit"
            if lossy
            else (left.get("weights_not_comparable") or "a side gave no digest of its parameters")
        )
        return Check("weights-as-loaded", "not_tested", detail)
    common = sorted(a.keys() & b.keys())
    if not common:
        return Check("weights-as-loaded", "not_tested", "no parameter name could be mapped")
    differ, moved, layouts = differing(a, b)
    unmapped = sorted((a.keys() ^ b.keys()) | set(left.get("unmapped_weights", ())))
    rest = f"; not compared: {', '.join(unmapped[:6])}" if unmapped else ""
    rest += f" and {len(unmapped) - 6} more" if len(unmapped) > 6 else ""
    if forms := asked_apart(left, right, differ):
        detail = (
            f"asked for: experts {forms[0]} in the engine, {forms[1]} in the trainer; "
            f"{len(differ)} of {len(common)} parameters differ, all of them experts{rest}"
        )
        return Check("weights-as-loaded", "warning", detail, "train and sample in one form")
    if differ:
        detail = f"{len(differ)} of {len(common)} parameters differ: {', '.join(differ[:4])}{rest}"
        fix = "the weight sync lost them, or they were loaded from another checkpoint: reload"
        return failed("weights-as-loaded", detail, fix)
    if moved:
        detail = f"{len(moved)} of {len(common)} parameters hold the same values in another order"
        fix = "experts, rows or columns were permuted as they were loaded: look at the loader"
        return failed("weights-as-loaded", f"{detail}: {', '.join(moved[:4])}", fix)
    if layouts:
        rest += f"; order not compared: {', '.join(layouts[:4])}, laid out otherwise in the engine"
    total, unordered = len(common) + len(unmapped), sum(_kind(name) in layouts for name in common)
    detail = f"{len(common)} of {total} parameters equal{rest}"
    little = len(unmapped) + unordered > MOST_UNCOMPARED * total
    status: CheckStatus = "not_tested" if little else "passed"
    return Check("weights-as-loaded", status, detail)
