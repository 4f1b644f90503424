"""Run a framework's loss function on the cases: ``python -m mismatch.features.losses.worker JOB``.

Runs in the interpreter of the user's environment, which need not hold mismatch. JOB is a JSON file
``{"framework": "trl", "model": "…/tiny-gpt-oss", "out": "…/losses.json"}``; OUT gets a list with
``{"loss": …, "gradient": [[…]]}`` or ``{"error": "…"}`` for every case, in order.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mismatch.features.losses.cases import CASES, CLIP, KINDS, PER_SEQUENCE, Batch, Case, made

GIVEN = ("old", "advantages", "present", "mask")
Loss = Callable[[Case, dict[str, Any]], Any]
"""Case, and ``new``, ``old``, ``advantages``, ``present``, ``mask`` and ``weights`` (or None) of
a micro-batch, with ``tokens`` and ``sequences`` of the whole batch -> scalar loss."""


def verl_loss(model: str) -> Loss:
    """Return verl's ``ppo_loss``, with the configuration that makes it each case."""
    from tensordict import TensorDict

    from mismatch.trainers.verl import composed, jagged, use_cpu

    if not torch.cuda.is_available():
        use_cpu()
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    configs = {}
    for kind in KINDS:
        settings = {
            "use_dynamic_bsz": "true",
            "loss_agg_mode": "seq-mean-token-mean" if kind in PER_SEQUENCE else "token-mean",
            "policy_loss.loss_mode": "vanilla" if kind.startswith("ppo") else kind,
            "clip_ratio_low": 1.0 if kind == "cispo" else CLIP,  # its clip has no lower end
            "clip_ratio_high": CLIP,
        }
        lines = tuple(f"actor_rollout_ref.actor.{key}={value}" for key, value in settings.items())
        configs[kind] = omega_conf_to_dataclass(composed(None, lines).actor)

    def loss(case: Case, part: dict[str, Any]) -> Any:
        lengths = part["present"].sum(1).tolist()

        def rows(values: Any) -> Any:
            return jagged([row[:length] for row, length in zip(values, lengths, strict=True)])

        fields = {
            "prompts": jagged([torch.zeros(1, dtype=torch.long)] * len(lengths)),
            "responses": rows(part["mask"].long()),
            "response_mask": rows(part["mask"].long()),
            "old_log_probs": rows(part["old"]),
            "advantages": rows(part["advantages"][:, None].expand_as(part["old"])),
        }
        if part["weights"] is not None:
            fields["rollout_is_weights"] = rows(part["weights"])
        data = TensorDict(fields, batch_size=len(lengths))
        sizes = {"batch_num_tokens": part["tokens"], "global_batch_size": part["sequences"]}
        tu.assign_non_tensor(data, dp_size=1, **sizes)
        # The output at a position is of the next token: one prompt token before, the last unused.
        pairs = zip(part["new"], lengths, strict=True)
        packed = torch.cat([torch.cat([row[:length], row.new_zeros(1)]) for row, length in pairs])
        return ppo_loss(configs[case.kind], {"log_probs": packed}, data)[0]

    return loss


def trl_loss(model: str) -> Loss:
    """Return ``GRPOTrainer._compute_loss`` of TRL, given these log-probabilities as its model's."""
    from mismatch.trainers.protocol import TrainerJob
    from mismatch.trainers.trl import METHOD, Trl

    trainer = Trl(TrainerJob(model=model, precision="fp32")).trainer
    trainer.vllm_importance_sampling_correction = True
    trainer.aux_loss_enabled = False
    device = trainer.accelerator.device

    def loss(case: Case, part: dict[str, Any]) -> Any:
        new, per_sequence, cispo = part["new"], case.kind in PER_SEQUENCE, case.kind == "cispo"
        given = new, torch.zeros_like(new), None  # TRL before 1.16 takes the first two
        setattr(trainer, METHOD, lambda *_, **asked: given[: 2 + ("compute_aux_loss" in asked)])
        trainer.loss_type = "cispo" if cispo else "grpo" if per_sequence else "dapo"
        trainer.importance_sampling_level = "sequence" if case.kind == "gspo" else "token"
        trainer.epsilon_low = CLIP
        trainer.epsilon_high = 1.0 + CLIP if cispo else CLIP  # of CISPO it is the cap itself
        trainer.use_vllm = part["weights"] is not None
        # One generation serves several optimiser steps: see huggingface/trl#5619.
        windows = case.micro_batches
        trainer.current_gradient_accumulation_steps = case.micro_batches
        trainer.args.steps_per_generation = case.micro_batches * windows
        ids, prompt = torch.zeros(new.shape, dtype=torch.long), torch.ones(len(new), 1).long()
        inputs = {
            "prompt_ids": prompt,
            "prompt_mask": prompt,
            "completion_ids": ids,
            "completion_mask": part["present"].long(),
            "tool_mask": part["mask"].long(),
            "advantages": part["advantages"],
            "old_per_token_logps": part["old"],
            "num_items_in_batch": torch.tensor(part["tokens"] * windows),
        }
        if part["weights"] is not None:
            inputs["importance_sampling_ratio"] = part["weights"]
        return trainer._compute_loss(trainer.model, {k: v.to(device) for k, v in inputs.items()})

    return loss


def own_loss(name: str) -> Loss:
    """Return a user's function, ``package.module:function``."""
    sys.path.append(str(Path.cwd()))
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


def run_case(loss: Loss, batch: Batch, case: Case) -> dict[str, Any]:
    """Return the loss and the gradient [4, 6] of a case, summed over its micro-batches."""
    total, weights = 0.0, batch.weights(case)
    gradient: list[Any] = []
    for rows in np.array_split(np.arange(len(batch.mask)), case.micro_batches):
        part: dict[str, Any] = {name: torch.tensor(getattr(batch, name)[rows]) for name in GIVEN}
        part["new"] = leaf = torch.tensor(batch.new[rows], requires_grad=True)
        part["weights"] = None if weights is None else torch.tensor(weights[rows])
        part |= {"tokens": int(batch.mask.sum()), "sequences": len(batch.mask)}
        value = loss(case, part)
        value.backward()
        total += float(value.detach())
        gradient.append(leaf.grad)
    return {"loss": total, "gradient": torch.cat(gradient).tolist()}


def main(path: str) -> None:
    """Run every case and write what it gave."""
    job = json.loads(Path(path).read_text("utf-8"))
    built_in = {"verl": verl_loss, "trl": trl_loss}.get(job["framework"])
    loss = built_in(job["model"]) if built_in else own_loss(job["framework"])
    found: list[dict[str, Any]] = []
    for case in CASES:
        try:
            found.append(run_case(loss, made(), case))
        except Exception as error:
            found.append({"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"})
    Path(job["out"]).write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
