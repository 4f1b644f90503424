"""The float32 reference at work on what other sides recorded.

Its forward pass runs with every module given the side's own recorded input: each module's output
against the recorded one is what is new there, and the recorded one goes on. So one pass holds every
module of a side against the reference on the same input. What is new can then be put into the
reference's own forward pass, all of it or in parts, to see how much of the end comes of it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mismatch.experiments.locate.judge import (
    MATTERS,
    PAIRS,
    explained,
    groups_of,
    moved,
    removed,
    sites_in,
    with_first,
)
from mismatch.experiments.locate.plan import Sums, site_errors
from mismatch.experiments.locate.types import (
    LAYER_SITES,
    SOME_FAMILIES,
    TITLES,
    Group,
    PairEffect,
    SideLocation,
    Site,
)
from mismatch.specs import Pass
from mismatch.training.load import load
from mismatch.training.module_capture import (
    Boundaries,
    Recorder,
    expert_count,
    mlp_of,
    require_known,
)
from mismatch.training.packing import MicroBatch
from mismatch.training.sequence_parallel import SequenceParallel
from mismatch.training.validate import prepare_pass, to_device
from mismatch.types import Floats, NotTested, Rollout


class Forward:
    """One loaded trainer, and its forward passes over one sequence each.

    Raises:
        MismatchError: a model that cannot be loaded, or whose modules cannot be told apart.
    """

    def __init__(self, world: Any, pass_: Pass, rollout: Rollout) -> None:
        self.world, self.spec, self.rollout = world, pass_.spec, rollout
        self.loaded = load(pass_.spec, world.mesh, world.device)
        require_known(self.loaded.scorer.decoder)
        self.options = prepare_pass(world, self.loaded, rollout, pass_.spec, None)[0]

    @property
    def count(self) -> int:
        """Of sequences."""
        return self.rollout.n_sequences

    def logprobs(self, number: int, visit: Any) -> np.ndarray:
        """Log-probabilities [A] of one sequence; ``visit``: see :class:`Boundaries`."""
        scorer, rollout = self.loaded.scorer, self.rollout
        length = int(rollout.offsets[number + 1] - rollout.offsets[number])
        parallel = SequenceParallel.of(self.world, 1)
        inputs = to_device(
            rollout, MicroBatch((number,), length), self.spec, self.options, self.world.device,
            None, parallel,
        )  # fmt: skip
        with torch.no_grad(), Boundaries(scorer.decoder, visit).shown():
            values, _ = scorer(
                scorer.score, inputs.batch, inputs.predicting, inputs.target_ids, inputs.options,
                None,
            )  # fmt: skip
        result: np.ndarray = values[0].double().cpu().numpy()
        return result

    def record(self, folder: Path) -> None:
        """Leave every boundary of every sequence."""
        for number in range(self.count):
            recorder = Recorder()
            np.save(folder / f"{number}.npy", self.logprobs(number, recorder))
            save_file(recorder.values, folder / f"{number}.safetensors")


LEAST = 2  # sequences that are replayed whatever the time
TESTED = 6  # groups whose effect is measured one by one
TIE = 1e-6  # of two logits, relative: a choice between equals
HEAD = Site(None, "head")
BySite = dict[Site, list[Sums]]


class Reference:
    """A loaded reference, its own forward passes, and what was replayed in it.

    Attributes:
        not_tested: modules that a side did not show.
    """

    def __init__(self, forward: Forward, directory: Path, end: float) -> None:
        self.forward, self.directory, self.end = forward, directory, end
        decoder: Any = forward.loaded.scorer.decoder
        self.layers = len(decoder.layers)
        config = forward.loaded.scorer.decoder_config
        self.top_k = int(getattr(config, "num_experts_per_tok", 0) or 0)
        self.routers = {n for n, layer in enumerate(decoder.layers) if expert_count(mlp_of(layer))}
        self.not_tested: list[NotTested] = []
        self.count = forward.count  # of sequences that are replayed, fewer where time runs out
        self.own: list[Floats] = []
        folder = self._folder("reference")
        for number in range(self.count):
            if number >= LEAST and time.monotonic() > end:
                self.count = number
                reason = f"the time was used up after {number} of {forward.count}"
                self.not_tested.append(
                    NotTested("further sequences", reason, "raise --budget-minutes")
                )
                break
            recorder = Recorder()
            self.own.append(forward.logprobs(number, recorder))
            save_file(recorder.values, folder / f"{number}.safetensors")
        self.not_tested += unseen(recorder.values, self.layers, self.routers)

    def _folder(self, name: str) -> Path:
        folder = self.directory / name.replace(":", "-")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # ------------------------------------------------------------ replay

    def replayed(self, side: str) -> BySite:
        """Every site of a side, one entry a sequence; what is new goes to files."""
        sums: BySite = {}
        news = self._folder(f"{side}-new")
        hidden: set[str] = set()
        for number in range(self.count):
            replay = self._replay(side, number)
            for site, part in replay.sums.items():
                sums.setdefault(site, []).append(part)
            save_file(replay.news, news / f"{number}.safetensors")
            hidden |= replay.hidden
        names = sorted({Site.of(key).title for key in hidden})
        if names:
            reason = f"{side} does not show them; what is new there counts for the next module"
            self.not_tested.append(NotTested(", ".join(names), reason))
        return {site: parts for site, parts in sums.items() if len(parts) == self.count}

    def _replay(self, side: str, number: int) -> Replay:
        folder = self._folder(side)
        natural = load_file(self._folder("reference") / f"{number}.safetensors")
        replay = Replay(load_file(folder / f"{number}.safetensors"), natural, self.top_k)
        given = self.forward.logprobs(number, replay)
        own = np.load(folder / f"{number}.npy")
        replay.sums[HEAD] = Sums.of(own[:, None], self.own[number][:, None], given[:, None])
        replay.news[HEAD.key] = torch.from_numpy(own - given)
        return replay

    # ------------------------------------------------------------ effects

    def located(self, entry: dict[str, Any], plain: BySite | None) -> SideLocation:
        """One side with its sources and what they do to the end.

        Args:
            entry: name, role and dtype of the side.
            plain: of the plain forward in its dtype.
        """
        name, dtype = entry["name"], entry["dtype"]
        sites = site_errors(self.replayed(name), plain, dtype, self.layers)
        end = self._distance(name)
        yardstick = f"plain:{dtype}"
        side = SideLocation(
            name=name,
            role=entry["role"],
            dtype=dtype,
            distance=_mean(end),
            plain_distance=None if plain is None else _mean(self._distance(yardstick)),
            distances=() if plain is None else self._distances(name),
            plain_distances=() if plain is None else self._distances(yardstick),
            held=None,
            sites=tuple(sites),
        )
        groups = groups_of(sites)
        return with_first(self._with_effects(side, end, groups)) if groups else side

    def drop(self) -> None:
        """Give back the model: nothing is replayed any more."""
        del self.forward

    def reverted(self, side: SideLocation, forward: Forward) -> float:
        """Share of a side's mean distance that goes without what its first source adds.

        Args:
            forward: the side's own, at work again.
        """
        group = side.source
        assert group is not None
        keys = {site.key for site in sites_in(side, group)}
        end = self._distance(side.name)
        without = np.concatenate(
            [
                self._put_into(forward, side.name, number, keys, -1.0) - self.own[number]
                for number in range(self.count)
            ]
        )
        return removed(end, without)

    def _put_into(
        self, forward: Forward, side: str, number: int, keys: Collection[str], sign: float
    ) -> Floats:
        """Log-probabilities of a model whose outputs a side's new errors are added to."""
        path = self._folder(f"{side}-new") / f"{number}.safetensors"
        with safe_open(path, "pt") as file:
            names = set(file.keys()) & set(keys)
            news = {key: sign * file.get_tensor(key) for key in names}
        head = news.pop(HEAD.key, None)
        end = forward.logprobs(number, Adding(news))
        return end if head is None else end + head.numpy()

    def _distance(self, side: str) -> Floats:
        """[A] the side's log-probabilities less the reference's own."""
        return np.concatenate(self._by_sequence(side))

    def _distances(self, side: str) -> tuple[float, ...]:
        """Mean |distance| of each sequence."""
        return tuple(map(_mean, self._by_sequence(side)))

    def _by_sequence(self, side: str) -> list[Floats]:
        folder = self._folder(side)
        return [np.load(folder / f"{n}.npy") - self.own[n] for n in range(self.count)]

    def _with_effects(
        self, side: SideLocation, end: Floats, candidates: list[tuple[Group, tuple[Site, ...]]]
    ) -> SideLocation:
        keys = [frozenset(site.key for site in sites) for _, sites in candidates]
        everything = frozenset(site.location.key for site in side.sites)
        sources: frozenset[str] = frozenset().union(*keys)
        groups = []
        for index, (group, _) in enumerate(candidates):
            if index < TESTED:
                alone = self._with_new(side.name, keys[index])
                without = self._with_new(side.name, everything - keys[index])
                group = replace(
                    group,
                    explains=explained(end, alone),
                    removed=removed(end, without),
                    moves=moved(end, alone),
                )
            else:
                group = replace(group, explains=0.0, removed=0.0)
            groups.append(group)
        together = self._with_new(side.name, sources)
        rest = self._with_new(side.name, everything - sources)
        pairs = self._pairs(side.name, end, keys, groups, everything)
        return replace(
            side,
            groups=tuple(groups),
            pairs=tuple(pairs),
            explained=explained(end, together),
            removed=removed(end, rest),
        )

    def _pairs(
        self,
        name: str,
        end: Floats,
        keys: list[frozenset[str]],
        groups: list[Group],
        everything: frozenset[str],
    ) -> Iterable[PairEffect]:
        """Of the groups that do most, where time is left."""
        order = sorted(range(len(groups)), key=lambda n: -groups[n].removed)[:PAIRS]
        for a in sorted(order):
            for b in sorted(order):
                strong = max(groups[a].removed, groups[b].removed) >= MATTERS
                if a >= b or not strong or time.monotonic() > self.end:
                    continue
                both = removed(end, self._with_new(name, everything - keys[a] - keys[b]))
                yield PairEffect(a, b, both, both - groups[a].removed - groups[b].removed)

    def _with_new(self, side: str, keys: Collection[str]) -> Floats:
        """[A] distance of the reference with a side's new errors at these sites."""
        return np.concatenate(
            [
                self._put_into(self.forward, side, number, keys, 1.0) - self.own[number]
                for number in range(self.count)
            ]
        )


def unseen(shown: Collection[str], layers: int, routers: Collection[int]) -> list[NotTested]:
    """Sites that this family's layers do not show on any side.

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
    reason = "this family's layers do not show them; what is new there counts for the next module"
    return [NotTested(names, reason)]


def _mean(distance: Floats) -> float:
    """Mean size of the finite ones; NaN of none."""
    finite = np.abs(distance[np.isfinite(distance)])
    return float(finite.mean()) if finite.size else float("nan")


class Replay:
    """A visitor that gives every module a side's recorded input.

    Args:
        side: key -> [tokens, features] as the side recorded it.
        natural: the same of the reference's own forward pass.
        top_k: experts of a token; 0: dense.

    Attributes:
        news: what the side adds to the reference's output on the same input.
        hidden: keys that the side did not show, or in another shape.
    """

    def __init__(
        self, side: dict[str, torch.Tensor], natural: dict[str, torch.Tensor], top_k: int
    ) -> None:
        self.side, self.natural, self.top_k = side, natural, top_k
        self.sums: dict[Site, Sums] = {}
        self.news: dict[str, torch.Tensor] = {}
        self.hidden: set[str] = set()

    def __call__(self, key: str, value: torch.Tensor) -> torch.Tensor | None:
        own = self.side.get(key)
        if own is None or own.shape != value.shape:
            self.hidden.add(key)
            return None
        own = own.to(value.device, torch.float32)
        site = Site.of(key)
        natural = self.natural[key].numpy()
        sums = Sums.of(own.cpu().numpy(), natural, value.cpu().numpy(), self._counted(site))
        if site.name == "router":
            sums = self._with_flips(sums, own.cpu(), self.natural[key])
        self.sums[site] = sums
        self.news[key] = (own - value).cpu().contiguous()
        return own

    def _counted(self, site: Site) -> Any:
        """Of a block of experts: tokens whose choice was none between equals."""
        logits = self.side.get(Site(site.layer, "router").key)
        if site.name != "mlp" or logits is None or not 0 < self.top_k < logits.shape[-1]:
            return None
        best = torch.topk(logits.float(), self.top_k + 1, dim=-1).values
        gap = best[:, -2] - best[:, -1]
        counted: Any = (gap > TIE * best[:, -2].abs()).numpy()
        return counted

    def _with_flips(self, sums: Sums, own: torch.Tensor, natural: torch.Tensor) -> Sums:
        if not 0 < self.top_k < own.shape[-1]:
            return sums
        ours, theirs = (
            torch.topk(logits, self.top_k, dim=-1).indices.sort(-1).values
            for logits in (own, natural)
        )
        flips = float((ours != theirs).any(-1).sum())
        return replace(sums, flips=flips, tokens=float(len(own)))


class Adding:
    """A visitor that adds to some modules' outputs."""

    def __init__(self, news: dict[str, torch.Tensor]) -> None:
        self.news = news

    def __call__(self, key: str, value: torch.Tensor) -> torch.Tensor | None:
        new = self.news.get(key)
        return None if new is None else value + new.to(value.device, value.dtype)
