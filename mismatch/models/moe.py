"""What is asked of routers and experts before anything starts, and disturbances planted on purpose.

Disturbances stand in for noise that a machine cannot show by itself (a CPU is nearly bitwise
stable), and are named as injected wherever their effect is reported.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

from mismatch.errors import MismatchError
from mismatch.facts import ROUTER_NOISE, injections_in_words
from mismatch.models.config import is_moe
from mismatch.specs import AS_STORED, CheckSpec, Injections, TrainSpec

# Of a trainer's "routing"; else why its experts cannot be captured.
CAPTURED, NOT_ASKED, DENSE = "captured", "not asked for", "dense"
KNOWN = {ROUTER_NOISE: "normal noise of this standard deviation on every router logit"}


def parse_injections(texts: Sequence[str] | None) -> Injections:
    """Return what ``--inject NAME=SIZE`` (repeatable) asks for.

    >>> parse_injections(["router-noise=0.05"])
    (('router-noise', 0.05),)

    Raises:
        MismatchError: an unknown name, a name given twice, or a size that is no positive number.
    """
    sizes: dict[str, float] = {}
    for text in texts or ():
        name, equals, size = text.partition("=")
        name = name.strip()
        if name not in KNOWN:
            raise MismatchError(f"--inject {text!r}: no such disturbance", f"use {_usage()}")
        if name in sizes:
            raise MismatchError(f"--inject {name} is given twice", "give it once")
        sizes[name] = _size(text, size if equals else "")
    return tuple(sizes.items())


def _size(text: str, size: str) -> float:
    try:
        value = float(size)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise MismatchError(f"--inject {text!r}: the size is no positive number", f"use {_usage()}")
    return value


def _usage() -> str:
    return " or ".join(f"--inject {name}=SIGMA ({what})" for name, what in KNOWN.items())


def require_routes(spec: CheckSpec, weight_givers: Collection[str] = ("transformers",)) -> None:
    """Refuse what cannot be replayed or disturbed before any process starts.

    Args:
        weight_givers: engines that give the weights of the experts that they used.

    Raises:
        MismatchError: a dense model, routes that nobody captures, weights that no engine gives, or
            a stored disturbance that is unknown here, or one without the pass that it is for.
    """
    train, engine = spec.train, spec.rollout.engine
    parse_injections([f"{name}={size}" for name, size in (*spec.inject, *train.inject)])
    if spec.inject and spec.two_passes is False:
        raise MismatchError(
            f"--inject {injections_in_words(spec.inject)} is for the trainer's second forward "
            "pass, which --no-two-passes leaves out",
            "drop one of the two",
        )
    flag = "--replay-routing" if train.replay_routing else "--inject" if spec.inject else ""
    if flag and is_moe(train.model, train.revision) is False:
        raise MismatchError(f"{flag}: {train.model} is dense, it has no routers", f"drop {flag}")
    if train.replay_routing is not None and train.replay_source is None:
        _require_engine_routes(train, engine.engine, engine.routing, weight_givers)


def require_forms(spec: CheckSpec) -> None:
    """Refuse, before any process starts, forms of the experts that the trainer cannot get.

    Raises:
        MismatchError: a form that cannot be made of the checkpoint, or an effect of no change.
    """
    from mismatch.models.derived import quantisation, require_form

    train, effect = spec.train, spec.weights_effect
    if effect == train.weights:
        fault = f"--weights effect={effect}: the trainer's weights have that form already"
        raise MismatchError(fault, "name another form, or drop --weights effect=")
    engine = spec.rollout.engine.model
    asked = [(train.model, train.weights), (engine if effect == "bf16" else train.model, effect)]
    for model, form in asked:
        directory = Path(model)
        if form in (None, AS_STORED) or not (directory / "config.json").is_file():
            continue  # a hub id: it is found out with the weights
        if form == effect == "bf16" and not quantisation(directory):
            fault = f"--weights effect=bf16: the engine's checkpoint {engine} is not quantised"
            raise MismatchError(fault, "drop it, or give the engine a quantised one: --model")
        require_form(directory, form)


def _require_engine_routes(
    train: TrainSpec, engine: str, routing: bool, weight_givers: Collection[str]
) -> None:
    if not routing:
        fault = f"--replay-routing {train.replay_routing}: the engine's experts are not captured"
        raise MismatchError(fault, "run without --no-routing")
    if train.replay_routing == "ids+weights" and engine not in weight_givers:
        given = ", ".join(weight_givers)
        raise MismatchError(
            f"--replay-routing ids+weights: {engine} gives the ids of the experts it used, not "
            "their weights",
            "use --replay-routing ids" + (f", or --engine {given}" if given else ""),
        )
