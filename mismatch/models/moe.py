"""What can be said about a model's routers from its configuration alone, before anything starts."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from mismatch.errors import MismatchError
from mismatch.models.config import is_moe
from mismatch.models.injections import describe
from mismatch.specs import AS_STORED, CheckSpec, TrainSpec


def require_routes(spec: CheckSpec, weight_givers: Collection[str] = ("transformers",)) -> None:
    """Refuse what cannot be replayed or disturbed before any process starts.

    Args:
        weight_givers: engines that give the weights of the experts that they used.

    Raises:
        MismatchError: a dense model, routes that nobody captures, weights that no engine gives, or
            an injection without the pass that it is for.
    """
    train, engine = spec.train, spec.rollout.engine
    if spec.inject and spec.two_passes is False:
        raise MismatchError(
            f"--inject {describe(spec.inject)} is for the trainer's second forward pass, which "
            "--no-two-passes leaves out",
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
    from mismatch.models.derived import require_form

    train, effect = spec.train, spec.weights_effect
    if effect == train.weights:
        raise MismatchError(
            f"--weights-effect {effect}: the trainer's experts have that form already",
            "name another form, or drop --weights-effect",
        )
    directory = Path(train.model)
    if (directory / "config.json").is_file():  # else it is found out with the weights
        for form in (train.weights, effect):
            if form is not None and form != AS_STORED:
                require_form(directory, form)


def _require_engine_routes(
    train: TrainSpec, engine: str, routing: bool, weight_givers: Collection[str]
) -> None:
    if not routing:
        raise MismatchError(
            f"--replay-routing {train.replay_routing}: the engine's experts are not captured",
            "drop --no-routing",
        )
    if train.replay_routing == "ids+weights" and engine not in weight_givers:
        given = ", ".join(weight_givers)
        raise MismatchError(
            f"--replay-routing ids+weights: {engine} gives the ids of the experts it used, not "
            "their weights",
            "use --replay-routing ids" + (f", or --engine {given}" if given else ""),
        )
