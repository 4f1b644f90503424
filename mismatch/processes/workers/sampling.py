"""Sampling in an engine's process: what is read before it starts, all turns, what they leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.captures import NotNumbers
from mismatch.codec import to_json
from mismatch.engines.artefacts import (
    build_rollout,
    decode_fingerprint,
    decode_keys,
    decode_routing,
    decode_scoring,
    response_rewards,
)
from mismatch.engines.base import UNTESTED, Capabilities, Engine, Sample
from mismatch.engines.distribution_capture import CaptureRequest, build_distributions, reported_law
from mismatch.engines.model_info import ModelInfo, load_tokenizer, read_model_info
from mismatch.engines.registry import engine_class
from mismatch.engines.turns import Trajectory, TurnDistributions, play, starting
from mismatch.errors import CorruptCapture, MismatchError
from mismatch.models.derived import first_not_finite
from mismatch.models.tokenizers import token_texts
from mismatch.prompts.environments import Environment, Replies, built_in, prepared
from mismatch.prompts.prompt import Prompt
from mismatch.prompts.sources import read_prompts, render_prompts
from mismatch.run import store
from mismatch.run.messages import Reporter, report_timing
from mismatch.specs import RolloutSpec
from mismatch.types import EXACT_KL, ROUTES, Floats, NotTested, Rollout, Scoring

NEVER_WRITTEN = "its MoE kernel does not write them (all are 0)"
WITHOUT_TEMPLATE = NotTested(
    "chat template", "the tokenizer has none: questions were given as plain text", "--prompts FILE"
)
LIKELY = 8  # outcomes of a position whose texts are kept


@dataclass(frozen=True)
class Ready:
    """What is known before the engine starts."""

    prompts: list[Prompt]
    ids: list[list[int]]
    tokenizer: Any
    info: ModelInfo
    capabilities: Capabilities
    longest: int
    environment: Callable[[Prompt], Environment] | None


def ready_for(spec: RolloutSpec) -> Ready:
    """Read model, tokenizer and prompts.

    Raises:
        MismatchError: one of them cannot be read, or a prompt exceeds the context.
    """
    kind = engine_class(spec.engine.engine)
    getattr(kind, "prepare", lambda: None)()
    capabilities = kind.capabilities(spec.engine, spec.sampling)
    if spec.sampling.penalises:
        why = {"distributions": "they are taken before the repetition penalty"}
        reasons = {**capabilities.reasons, **why}
        capabilities = replace(capabilities, distributions=False, reasons=reasons)
    environment = environment_class(spec)
    prompts = prepared(environment, read_prompts(spec.prompts))
    info, tokenizer = read_model_info(spec.engine), load_tokenizer(spec.engine)
    if tokenizer.vocab_size > info.vocab_size:  # padding above the tokenizer's own is usual
        raise MismatchError(
            f"tokenizer/model vocabulary mismatch: the tokenizer of {spec.engine.model} knows "
            f"{tokenizer.vocab_size} tokens, the model {info.vocab_size}",
            "save the model's tokenizer with the weights: tokenizer.save_pretrained(DIR)",
        )
    ids = render_prompts(prompts, tokenizer, info.vocab_size, has_questions(spec))
    longest = require_context(spec, prompts, ids, info)
    return Ready(prompts, ids, tokenizer, info, capabilities, longest, environment)


def has_questions(spec: RolloutSpec) -> bool:
    """Whether the prompts are those of a task or data set; a file says what each prompt is."""
    return spec.prompts.path is None


def sampled(
    spec: RolloutSpec, engine: Engine, ready: Ready, progress: Any, pushed: str = ""
) -> tuple[Rollout, list[Trajectory], Scoring]:
    """Return all turns of all sequences with their rewards, and the decode scoring without routes.

    Args:
        pushed: why the engine's weights are none of a checkpoint.
    """
    captured = None
    if ready.capabilities.distributions and spec.exact_kl >= 1:
        law = reported_law(engine.fingerprint("decode"), spec.sampling)
        wanted = CaptureRequest(spec.exact_kl, spec.exact_kl_top_k, spec.sampling.seed, law)
        captured = TurnDistributions(engine, wanted)
    with timed("generate"):
        try:
            samples = engine.generate(ready.ids, progress)
        except NotNumbers as error:
            raise not_numbers(engine.name, spec.engine.model) from error
        require_complete(samples, len(ready.ids), spec.sampling.samples_per_prompt, engine.name)
        trajectories = starting(ready.ids, samples)
        if captured is not None:
            captured.end(enumerate(trajectories))
        replies, rewards = further_turns(engine, spec, trajectories, ready, captured)
    fingerprint = decode_fingerprint(engine, spec, ready.tokenizer, ready.info, pushed)
    plain = has_questions(spec) and not ready.tokenizer.chat_template
    fingerprint["not_tested"] = [
        *fingerprint.get("not_tested", ()),
        *to_json(not_tested(spec, ready.capabilities)),
        *to_json([WITHOUT_TEMPLATE] if plain else []),
        *to_json([] if replies is None else list(untested_turns(spec, replies))),
    ]
    fingerprint.setdefault("prefill", wants_prefill(spec, ready.capabilities))
    rollout = build_rollout(trajectories, spec, fingerprint)
    if rewards is None:
        rewards = response_rewards(ready.prompts, rollout, ready.tokenizer)
    rollout = replace(rollout, rewards=rewards)
    decode = decode_scoring(engine, trajectories, rollout, fingerprint)
    if captured is not None:
        decode = with_distributions(captured, decode, rollout, ready.info.vocab_size)
        captured.engine.capture_distributions(None)
    return rollout, trajectories, decode


def not_numbers(engine: str, model: str) -> MismatchError:
    """Say which tensor of the checkpoint makes log-probabilities NaN, where one does."""
    tensor = first_not_finite(Path(model)) if Path(model).is_dir() else ""
    what, fix = f"{engine} gives log-probabilities that are NaN", "try --dtype fp32"
    if tensor:
        what, fix = f"{what}: {tensor} of {model} holds NaN or infinity", "use a sound checkpoint"
    return MismatchError(what, fix)


def save_texts(run_dir: Path, rollout: Rollout, decode: Scoring, ready: Ready) -> None:
    """Save the texts of all tokens that a report may show.

    They are those of the rollout, and what the engine thought likeliest in their places.
    """
    parts = [rollout.token_ids]
    if decode.likeliest is not None:
        parts.append(np.unique(decode.likeliest.ids).astype(np.int64))
    if (law := decode.distributions) is not None:
        columns = np.argsort(-law.logprobs, axis=1)[:, :LIKELY]
        parts.append(columns if law.ids is None else np.take_along_axis(law.ids, columns, axis=1))
    ids = np.unique(np.concatenate([part.reshape(-1) for part in parts]))
    known = ids[ids < ready.info.vocab_size].tolist()
    store.save_vocabulary(run_dir, token_texts(ready.tokenizer, known))


def environment_class(spec: RolloutSpec) -> Callable[[Prompt], Environment] | None:
    """Return what makes a sequence's environment; None: every sequence has one turn.

    Raises:
        MismatchError: no environment of that name, or a class that cannot be imported.
    """
    name = spec.prompts.environment
    if name is None:
        return None
    environment = built_in(name)
    if environment is not None:
        return environment
    from mismatch.training.user_kernels import load_function

    return load_function(name)[0]


def further_turns(
    engine: Engine,
    spec: RolloutSpec,
    trajectories: Sequence[Trajectory],
    ready: Ready,
    captured: TurnDistributions | None = None,
) -> tuple[Replies | None, Floats | None]:
    """Let the environment reply and the engine answer: what it did, and its rewards, if it has any.

    The trajectories grow in place. Environments are closed, whatever happens.
    """
    if ready.environment is None:
        return None, None
    replies = Replies(
        ready.environment,
        [ready.prompts[trajectory.prompt] for trajectory in trajectories],
        ready.tokenizer,
        ready.info.stop_ids,
        ready.info.vocab_size,
        spec.prompts.max_observation_tokens,
    )
    try:
        play(
            engine,
            trajectories,
            lambda number, responses: replies(number, responses[-1].token_ids),
            most_turns=spec.prompts.max_turns,
            longest=ready.longest,
            max_tokens=spec.sampling.max_tokens,
            progress=Reporter("rollout"),
            captured=captured,
        )
        return replies, replies.rewards()
    finally:
        replies.close()


def untested_turns(spec: RolloutSpec, replies: Replies) -> Iterator[NotTested]:
    """Yield what is missing where an environment replies."""
    name = spec.prompts.environment
    failed = f"{name}: the environment failed"
    for reason, count in replies.ended.items():
        yield NotTested(f"the rest of {count} sequences", f"{failed} ({reason})")
    if replies.no_rewards:
        yield NotTested("rewards", f"{failed} ({replies.no_rewards})")
    if replies.cut:
        most = spec.prompts.max_observation_tokens
        cut = f"{name}: {replies.cut} were cut to --max-observation-tokens {most}"
        yield NotTested("whole replies", cut)


def with_distributions(
    captured: TurnDistributions, decode: Scoring, rollout: Rollout, vocabulary: int
) -> Scoring:
    """Return the scoring with what the engine took, or with the reason why it cannot be used."""
    taken = captured.collected()
    try:
        distributions = build_distributions(taken, rollout, decode.logprobs, vocabulary)
    except CorruptCapture as error:
        if any(each.what == EXACT_KL for each in NotTested.of(decode.fingerprint)):
            return decode  # the engine has said why
        return without(decode, NotTested(EXACT_KL, f"{captured.engine.name}: {error.message}"))
    return replace(decode, distributions=distributions)


def with_routes(
    engine: Engine, trajectories: Sequence[Trajectory], decode: Scoring, rollout: Rollout
) -> Scoring:
    """Return the scoring with its routed experts, or with why there are none to be trusted.

    What sparse attention selected comes with them, where the engine gives it.
    """
    decode = replace(decode, keys=decode_keys(engine, trajectories, rollout))
    routed = [sample.routed for trajectory in trajectories for sample in trajectory.responses]
    several = any(rows is not None and rows.shape[-1] > 1 for rows in routed)
    reason = f"{engine.name}: {NEVER_WRITTEN}"
    # A buffer that the MoE kernel does not fill: every id of every sequence is 0.
    if not several or any(rows is None or rows.any() for rows in routed):
        try:
            return replace(decode, routing=decode_routing(engine, trajectories, rollout))
        except CorruptCapture as error:
            reason = error.message
    return without(decode, NotTested(ROUTES, reason))


def without(decode: Scoring, missing: NotTested) -> Scoring:
    """Return the scoring, which says that it lacks something."""
    entries = [*decode.fingerprint["not_tested"], to_json(missing)]
    return replace(decode, fingerprint=decode.fingerprint | {"not_tested": entries})


@contextmanager
def timed(name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    report_timing(name, time.monotonic() - start)


def wants_prefill(spec: RolloutSpec, capabilities: Capabilities) -> bool:
    tempered = spec.sampling.temperature not in (0.0, 1.0)
    able = capabilities.prefill and (capabilities.prefill_tempered or not tempered)
    return spec.engine.prefill and able


def not_tested(spec: RolloutSpec, capabilities: Capabilities) -> list[NotTested]:
    """Return what was asked for and this engine cannot do."""
    reasons = capabilities.reasons
    wanted = {
        "prefill": spec.engine.prefill,
        "prefill_tempered": spec.engine.prefill and spec.sampling.temperature not in (0.0, 1.0),
        "routed_experts": spec.engine.routing,
        "deterministic": True,
        "distributions": spec.exact_kl > 0,
    }
    return [
        NotTested(UNTESTED[name], f"{spec.engine.engine}: {reasons.get(name, f'no {name}')}")
        for name, asked in wanted.items()
        if asked and not getattr(capabilities, name)
    ]


def require_context(
    spec: RolloutSpec, prompts: Sequence[Prompt], ids: Sequence[list[int]], info: ModelInfo
) -> int:
    """Return the length of the longest sequence that may come, in tokens.

    Turns that would exceed the context are not played.

    Raises:
        MismatchError: a prompt (named), or it and its first response, exceed the context.
    """
    index = max(range(len(ids)), key=lambda i: len(ids[i]))
    prompt, origin = len(ids[index]), prompts[index].origin
    longest, all_turns = prompt + spec.sampling.max_tokens, prompt + spec.most_after_prompt
    limit = spec.engine.max_model_len or info.context
    if limit is None:
        return all_turns
    # Rescoring asks the engine to sample one token more than the sequence has.
    room = limit - (1 if spec.engine.prefill else 0)
    if prompt >= room:
        fault = f"{origin} has {prompt} tokens, the context is {limit}"
        fix = "shorten or drop the prompt, or raise --max-model-len if the model allows it"
        raise MismatchError(fault, fix)
    if longest > room:
        raise MismatchError(
            f"{origin} has {prompt} tokens; with --max-tokens {spec.sampling.max_tokens} "
            f"it exceeds the context of {limit}",
            f"use --max-tokens {room - prompt} or fewer, or raise --max-model-len",
        )
    return min(all_turns, room)


def require_complete(
    samples: Sequence[Sequence[Sample]], prompts: int, per_prompt: int, engine: str
) -> None:
    """Every prompt has all its samples, and every sample a logprob per token.

    Raises:
        MismatchError: the engine gave fewer, or tokens without logprobs.
    """
    got = sum(len(group) for group in samples)
    if len(samples) != prompts or any(len(group) != per_prompt for group in samples):
        fault = f"{engine} returned {got} samples, asked for {prompts} x {per_prompt}"
        raise MismatchError(fault, "look for dropped requests in logs/engine.log")
    for index, group in enumerate(samples):
        for sample in group:
            if not sample.token_ids or len(sample.token_ids) != len(sample.logprobs):
                raise MismatchError(
                    f"{engine}: {len(sample.token_ids)} tokens but {len(sample.logprobs)} logprobs "
                    f"in a sample of prompt {index}",
                    "look into logs/engine.log for aborted requests",
                )
