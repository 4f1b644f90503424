"""An optimiser's step on the weights of a loaded model, their checkpoints and their export."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.tensor import DTensor

from mismatch.errors import MismatchError, named_line
from mismatch.models.derived import IN_LAYER, Shards
from mismatch.models.weight_states import Checkpoint, link_others
from mismatch.training.backward import Backward, local_gradient
from mismatch.training.distributed import World
from mismatch.training.load import LoadedModel

BETAS = 0.9, 0.95


class PolicyOptimiser:
    """AdamW without weight decay, gradients cut to a norm."""

    def __init__(self, world: World, loaded: LoadedModel, rate: float, max_norm: float) -> None:
        self.world, self.loaded, self.max_norm = world, loaded, max_norm
        self.trained = [*loaded.scorer.requires_grad_(True).parameters()]
        self.optimiser = torch.optim.AdamW(self.trained, rate, BETAS, weight_decay=0.0)

    def step(self, backward: Backward, rows: Sequence[int]) -> tuple[float, float] | None:
        """Take one step on these samples; all ranks call it.

        Returns:
            Loss of all ranks, and the gradient's norm before it is cut; None: it is not finite,
            and nothing was changed.
        """
        with torch.enable_grad(), backward.installed():
            own = backward.until_finite(rows)
        loss = float(self.world.sum(torch.tensor(own if own is not None else torch.nan).double()))
        if own is None or loss != loss:
            backward.clear()
            return None
        for each in self.trained:  # such as unused sinks: every checkpoint has all moments
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        gradients = [g for each in self.trained if (g := local_gradient(each)) is not None]
        squared = sum(float(gradient.double().square().sum()) for gradient in gradients)
        norm = backward.factor * float(self.world.sum(torch.tensor(squared).double()).sqrt())
        for gradient in gradients:
            gradient.mul_(backward.factor * min(1.0, self.max_norm / norm) if norm else 0.0)
        self.optimiser.step()
        backward.clear()
        return loss, norm

    def save(self, folder: Path) -> None:
        """Write weights and moments by torch.distributed.checkpoint; whole or not at all."""
        partial = folder.with_name(f"{folder.name}.partial")
        try:
            if self.world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self.world.barrier()
            save_sharded(self._state(), checkpoint_id=partial, process_group=self.world.control)
            self.world.barrier()
            if self.world.rank == 0:
                partial.rename(folder)
        except (OSError, CheckpointException) as error:
            fault = f"the checkpoint {folder} cannot be written: {_cause(error)}"
            fix = "free disk space; --resume continues from the one before"
            raise MismatchError(fault, fix) from error

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote, in a world of any size."""
        state = self._state()
        try:
            load_sharded(state, checkpoint_id=folder, process_group=self.world.control)
        except (Exception, CheckpointException) as error:
            fault = f"the checkpoint {folder} cannot be read: {_cause(error)}"
            fix = "delete it: the loop continues from the one before, or from the beginning"
            raise MismatchError(fault, fix) from error
        set_state_dict(
            self.loaded.scorer,
            self.optimiser,
            model_state_dict=state["model"],
            optim_state_dict=state["optimiser"],
        )

    def _state(self) -> dict[str, Any]:
        model, optimiser = get_state_dict(self.loaded.scorer, self.optimiser)
        return {"model": model, "optimiser": optimiser}


def _cause(error: BaseException) -> str:
    """Of a rank's failure, which torch reports as a table of tracebacks."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return named_line(next((failure[0] for failure in failures), error))


def export(world: World, loaded: LoadedModel, base: Path, target: Path, dtype: torch.dtype) -> None:
    """Write the weights as a checkpoint under the base's names; all ranks call it.

    What transformers fused when it loaded the base (the experts of a layer) it takes apart again, a
    layer at a time.

    Raises:
        MismatchError: a name of the base that none of the model's parameters becomes.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = loaded.scorer.model
    missing, first = set(Checkpoint(base, 0).names()), world.rank == 0
    shards = Shards(target)
    if first:
        shutil.rmtree(target, ignore_errors=True)
        link_others(base, target)
    layer_of = lambda item: found[0] if (found := IN_LAYER.match(item[0])) else item[0]  # noqa: E731
    for _, layer in groupby(model.state_dict().items(), key=layer_of):
        whole = {}
        for name, tensor in layer:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # of all ranks
            if first:
                kept = dtype if full.is_floating_point() else full.dtype
                whole[name] = full.detach().to("cpu", kept, copy=True)
        for name, tensor in revert_weight_conversion(model, whole).items() if first else ():
            if name in missing:
                shards.add(name, tensor)
                missing.remove(name)
    if first and missing:
        fault = f"the trainer has another name for {min(missing)} and {len(missing) - 1} more"
        fix = "its loader converts this checkpoint: save it again with save_pretrained"
        raise MismatchError(fault, fix)
    if first:
        shards.finish()
