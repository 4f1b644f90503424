"""The float32 reference at work on what other sides recorded.

Its forward pass runs with every module given the side's own recorded input: each module's output
against the recorded one is what is new there, and the recorded one goes on. So one pass compares
every module of a side with the reference on the same input. What is new can then be put into the
reference's own forward pass, all of it or in parts, to see how much of the end it explains.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mismatch.features.locate.bits import Logits, logits_of
from mismatch.features.locate.errors import BEYOND, BySite, Forms, Sums, form_of, site_errors
from mismatch.features.locate.judge import explained, groups_of, moved, removed, with_first
from mismatch.features.locate.plan import side_folder
from mismatch.features.locate.results import (
    LAYER_SITES,
    SOME_FAMILIES,
    TITLES,
    Group,
    SideLocation,
    Site,
)
from mismatch.models.boundaries import Boundaries, Recorder, expert_count
from mismatch.models.layer_parts import LAYERS, child, parts_of
from mismatch.specs import Dtype, Pass
from mismatch.training.load import load
from mismatch.training.packing import MicroBatch
from mismatch.training.sequence_parallel import SequenceParallel
from mismatch.training.validate import prepare_pass, to_device
from mismatch.types import Floats, NotTested, Rollout

TESTED = 6  # groups whose effect is measured one by one
TIE = 1e-6  # of two logits, relative: a choice between equals
TINY = 1e-30  # a sum of squares, added to nothing else
HEAD = Site(None, "head")


class Forward:
    """One loaded trainer, and its forward passes over one sequence each.

    Raises:
        MismatchError: a model that cannot be loaded, or whose modules cannot be identified.
    """

    def __init__(self, world: Any, pass_: Pass, rollout: Rollout) -> None:
        self.world, self.spec, self.rollout = world, pass_.spec, rollout
        self.loaded = load(pass_.spec, world.mesh, world.device)
        self.options = prepare_pass(world, self.loaded, rollout, pass_.spec, None)[0]

    def logprobs(self, number: int, visit: Any) -> np.ndarray:
        """Return log-probabilities [A] of one sequence; ``visit``: see :class:`Boundaries`."""
        scorer, rollout = self.loaded.scorer, self.rollout
        length = int(rollout.offsets[number + 1] - rollout.offsets[number])
        parallel, group = SequenceParallel.of(self.world, 1), MicroBatch((number,), length)
        inputs = to_device(
            rollout, group, self.spec, self.options, self.world.device, None, parallel
        )
        boundaries = Boundaries(scorer.decoder, visit, getattr(visit, "otherwise", None))
        with torch.no_grad(), boundaries.shown():
            values, _ = scorer(
                scorer.score, inputs.batch, inputs.predicting, inputs.target_ids, inputs.options
            )
        result: np.ndarray = values[0].double().cpu().numpy()
        return result

    def record(self, folder: Path, number: int, head: bool = False) -> np.ndarray:
        """Leave every boundary of a sequence; return its log-probabilities [A].

        Args:
            head: leave the logits too.
        """
        recorder = Recorder()
        with logits_of(self.loaded.scorer) if head else nullcontext(Logits()) as logits:
            values = self.logprobs(number, recorder)
        np.save(folder / f"{number}.npy", values)
        shown = recorder.values | logits.joined()
        save_file(shown, folder / f"{number}.safetensors")
        return values

    def answer(self, directory: Path, side: str) -> None:
        """Leave what every module gives on what a side recorded before it."""
        folder, answers = side_folder(directory, side), side_folder(directory, f"{side}-plain")
        for number in range(self.rollout.n_sequences):
            visit = Answers(load_file(folder / f"{number}.safetensors"))
            visit.values[HEAD.key] = torch.from_numpy(self.logprobs(number, visit))
            save_file(visit.values, answers / f"{number}.safetensors")


class Answers(Recorder):
    """A visitor that keeps what modules give on a side's recorded input, which goes on."""

    def __init__(self, side: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.side = side

    def __call__(self, key: str, value: torch.Tensor) -> torch.Tensor | None:
        super().__call__(key, value)
        own = self.side.get(key)
        return own.to(value.device) if own is not None and own.shape == value.shape else None


class Reference:
    """A loaded reference, its forward passes, and what was replayed in it.

    Attributes:
        own: log-probabilities of each sequence.
        not_tested: modules that a side did not show.
        forms: of the side that was replayed last, against other forms of the reference's modules.
    """

    forms: Forms

    def __init__(self, forward: Forward, directory: Path) -> None:
        self.forward, self.directory = forward, directory
        self.count = forward.rollout.n_sequences
        config = forward.loaded.scorer.decoder_config
        self.top_k = int(getattr(config, "num_experts_per_tok", 0) or 0)
        decoder: Any = forward.loaded.scorer.decoder
        mlps = [parts_of(layer).mlp for layer in child(decoder, LAYERS)]
        routers = {n for n, mlp in enumerate(mlps) if mlp is not None and expert_count(mlp)}
        folder = side_folder(directory, "reference")
        self.own = [forward.record(folder, number) for number in range(self.count)]
        with safe_open(folder / "0.safetensors", "pt") as shown:
            self.not_tested = unseen(set(shown.keys()), len(mlps), routers)

    def replayed(self, side: str) -> BySite:
        """Return every site of a side, one entry a sequence; what is new goes to files."""
        sums: dict[Site, list[Sums]] = {}
        self.forms = {}
        folder = side_folder(self.directory, side)
        news = side_folder(self.directory, f"{side}-new")
        hidden: set[str] = set()
        for number in range(self.count):
            natural = load_file(side_folder(self.directory, "reference") / f"{number}.safetensors")
            answers = side_folder(self.directory, f"{side}-plain") / f"{number}.safetensors"
            plain = load_file(answers) if answers.exists() else {}
            replay = Replay(load_file(folder / f"{number}.safetensors"), natural, self.top_k, plain)
            given = self.forward.logprobs(number, replay)
            own = np.load(folder / f"{number}.npy")
            y, r, s = (torch.from_numpy(end)[:, None] for end in (own, self.own[number], given))
            answer = plain.get(HEAD.key)
            p = None if answer is None else answer[:, None]
            replay.sums[HEAD] = Sums.of(y, r, s, plain=p)
            replay.news[HEAD.key] = torch.from_numpy(own - given)
            for site, part in replay.sums.items():
                sums.setdefault(site, []).append(part)
            for form, part in replay.forms.items():
                self.forms.setdefault(form, []).append(part)
            save_file(replay.news, news / f"{number}.safetensors")
            hidden |= replay.hidden
        if hidden:
            names = ", ".join(sorted({TITLES[Site.of(key).name] for key in hidden}))
            reason = f"{side} does not show them; what is new there counts for the next module"
            self.not_tested.append(NotTested(names, reason))
        return {site: parts for site, parts in sums.items() if len(parts) == self.count}

    def located(
        self,
        name: str,
        role: Literal["engine", "trainer"],
        dtype: Dtype,
        plain: BySite | None,
        alike: bool = False,
    ) -> SideLocation:
        """Return one side with its sources and what they do to the end.

        Args:
            plain: of the plain forward in its dtype; None: there is none.
            alike: a module that rounds otherwise than the plain forward's is a source too.
        """
        sites = site_errors(self.replayed(name), plain, dtype, role if alike else "")
        by_sequence = self._distances(name)
        end = np.concatenate(by_sequence)
        yardstick = [] if plain is None else self._distances(f"plain:{dtype}")
        side = SideLocation(
            name=name,
            role=role,
            dtype=dtype,
            distance=_mean(end),
            plain_distance=_mean(np.concatenate(yardstick)) if yardstick else None,
            distances=tuple(map(_mean, by_sequence)) if yardstick else (),
            plain_distances=tuple(map(_mean, yardstick)),
            held=None,
            sites=tuple(sites),
        )
        everything = {site.location.key for site in sites}
        sources: set[str] = set()
        groups: list[Group] = []
        for group, places in groups_of(sites):
            keys = {site.key for site in places}
            sources |= keys
            if group.excess > BEYOND:  # else the reference's own form fits as well
                group = replace(group, form=form_of(places, self.forms, plain, dtype))
            if len(groups) < TESTED:
                alone, without = self._with_new(name, keys), self._with_new(name, everything - keys)
                effects = explained(end, alone), removed(end, without), moved(end, alone)
                group = replace(group, explains=effects[0], removed=effects[1], moves=effects[2])
            groups.append(group)
        if not groups:
            return side
        together = explained(end, self._with_new(name, sources))
        gone = removed(end, self._with_new(name, everything - sources))
        return with_first(replace(side, groups=tuple(groups), explained=together, removed=gone))

    def _with_new(self, side: str, keys: Collection[str]) -> Floats:
        """Return the distance [A] of the reference with a side's new errors at these sites."""
        distances, folder = [], side_folder(self.directory, f"{side}-new")
        for number in range(self.count):
            with safe_open(folder / f"{number}.safetensors", "pt") as file:
                news = {key: file.get_tensor(key) for key in set(file.keys()) & set(keys)}
            head = news.pop(HEAD.key, None)
            end = self.forward.logprobs(number, partial(added, news))
            end = end if head is None else end + head.numpy()
            distances.append(end - self.own[number])
        return np.concatenate(distances)

    def _distances(self, side: str) -> list[Floats]:
        """Return a side's log-probabilities less the reference's own, by sequence."""
        folder = side_folder(self.directory, side)
        return [np.load(folder / f"{n}.npy") - self.own[n] for n in range(self.count)]


def unseen(shown: Collection[str], layers: int, routers: Collection[int]) -> list[NotTested]:
    """Return the sites that some layer of this family does not show on any side.

    Args:
        shown: keys that the reference recorded.
        routers: layers with experts.
    """
    missing = {
        name
        for number in range(layers)
        for name in set(LAYER_SITES) - set(SOME_FAMILIES)
        if f"{number}.{name}" not in shown and (name != "router" or number in routers)
    }
    if not missing:
        return []
    names = ", ".join(TITLES[name] for name in LAYER_SITES if name in missing)
    reason = "not every layer has and shows them; what is new there counts for the next module"
    return [NotTested(names, reason)]


def _mean(distance: Floats) -> float:
    """Return the mean size of the finite values; NaN of none."""
    finite = np.abs(distance[np.isfinite(distance)])
    return float(finite.mean()) if finite.size else float("nan")


class Replay:
    """A visitor that gives every module a side's recorded input.

    Args:
        side: key -> [tokens, features] as the side recorded it.
        natural: the same of the reference's own forward pass.
        top_k: experts of a token; 0: dense.
        plain: what the plain forward in the side's dtype gives on the side's inputs.

    Attributes:
        news: what the side adds to the reference's output on the same input.
        hidden: keys that the side did not show, or in another shape.
    """

    def __init__(
        self,
        side: dict[str, torch.Tensor],
        natural: dict[str, torch.Tensor],
        top_k: int,
        plain: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.side, self.natural, self.top_k, self.plain = side, natural, top_k, plain or {}
        self.sums: dict[Site, Sums] = {}
        self.forms: dict[tuple[Site, str], Sums] = {}
        self.news: dict[str, torch.Tensor] = {}
        self.hidden: set[str] = set()

    def __call__(self, key: str, value: torch.Tensor) -> torch.Tensor | None:
        own = self.side.get(key)
        if own is None or own.shape != value.shape:
            self.hidden.add(key)
            return None
        own = own.to(value.device, torch.float32)
        site, natural = Site.of(key), self.natural[key].to(value.device)
        plain, counted = self.plain.get(key), self._counted(site, value.device)
        plain = None if plain is None else plain.to(value.device)
        self.sums[site] = Sums.of(own, natural, value, counted, plain)
        self.news[key] = (own - value).cpu().contiguous()
        return own

    def otherwise(
        self, key: str, name: str, value: torch.Tensor, times: torch.Tensor | None
    ) -> None:
        """Compare what the side gives with another form of the reference's module.

        Args:
            times: multiplied, for each token, by the factor that fits the side best, and added.
        """
        own = self.side.get(key)
        if own is None or own.shape != value.shape:
            return
        own, site = own.to(value.device, torch.float32), Site.of(key)
        if times is not None:
            square = times.square().sum(-1, keepdim=True)
            fitted = ((own - value) * times).sum(-1, keepdim=True) / square.clamp_min(TINY)
            value = value + fitted * times
        natural, counted = self.natural[key].to(value.device), self._counted(site, value.device)
        self.forms[site, name] = Sums.of(own, natural, value, counted)

    def _counted(self, site: Site, device: torch.device) -> torch.Tensor | None:
        """Return, of a block of experts, the tokens whose choice was none between equals."""
        logits = self.side.get(Site(site.layer, "router").key)
        if site.name != "mlp" or logits is None or not 0 < self.top_k < logits.shape[-1]:
            return None
        best = torch.topk(logits.float(), self.top_k + 1, dim=-1).values
        gap = best[:, -2] - best[:, -1]
        return (gap > TIE * best[:, -2].abs()).to(device)


def added(news: dict[str, torch.Tensor], key: str, value: torch.Tensor) -> torch.Tensor | None:
    """Visit a module: what is new there is added to its output."""
    new = news.get(key)
    return None if new is None else value + new.to(value.device, value.dtype)
