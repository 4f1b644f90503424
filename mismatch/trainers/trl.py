"""TRL's own GRPO trainer: its per-token log-probability method, which every GRPO step calls.

The configuration is the user's: fields of ``GRPOConfig`` in a YAML or JSON file. How the model is
distributed is accelerate's matter: ``--accelerate-config`` launches this process with the user's
own file, as a training run is launched.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mismatch.errors import MismatchError
from mismatch.trainers.protocol import Facts, Scored, Tokens, TrainerJob, Variant, short

METHOD = "_get_per_token_logps_and_entropies"
# Fields of GRPOConfig that would start an engine or a tracker, or bring other data.
LEFT_OUT = ("use_vllm", "vllm_mode", "report_to", "output_dir", "push_to_hub", "eval_strategy")


class Trl:
    """One ``GRPOTrainer`` with its model prepared by accelerate."""

    def __init__(self, job: TrainerJob) -> None:
        try:
            from datasets import Dataset
            from trl import GRPOConfig, GRPOTrainer
        except ImportError as error:
            raise MismatchError(
                f"TRL's GRPO trainer cannot be imported: {error}",
                "name the interpreter of your training environment: --train-python PATH",
            ) from error
        if not hasattr(GRPOTrainer, METHOD):
            raise MismatchError(
                f"trl {metadata.version('trl')} has no GRPOTrainer.{METHOD}",
                "use trl 1.0 or newer, or --scorer package.module:function",
            )
        self.job = job
        self.version = metadata.version("trl")
        options = settings(job)
        self.notes = tuple(f"{name} is not followed" for name in LEFT_OUT if name in options)
        options = {name: value for name, value in options.items() if name not in LEFT_OUT}
        if job.precision == "fp32":  # transformers 4 keeps the first trainer's precision here
            os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
        with tempfile.TemporaryDirectory() as scratch:
            config = GRPOConfig(
                **{"num_generations": 2, "per_device_train_batch_size": 2, "max_steps": 1}
                | options
                | {
                    "output_dir": scratch,
                    "report_to": [],
                    "use_cpu": not torch.cuda.is_available(),
                    "seed": job.seed,
                }
            )
            self.trainer: Any = GRPOTrainer(
                model=job.model,
                reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
                args=config,
                train_dataset=Dataset.from_list([{"prompt": "1+1="}] * 8),
            )
        self.rows = config.per_device_train_batch_size
        accelerator = self.trainer.accelerator
        if str(accelerator.distributed_type).endswith("FSDP"):  # as Trainer prepares it for a run
            optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=0.0)
            self.model, _ = accelerator.prepare(self.trainer.model, optimizer)
        else:
            self.model = accelerator.prepare_model(self.trainer.model)
        self.model.train()  # as in a GRPO step, which scores before it learns

    def score(self, tokens: Tokens, variant: Variant) -> Scored:
        accelerator = self.trainer.accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        sequences, masks = tokens.sequences(), tokens.masks()
        own = list(range(rank, len(sequences), world))
        rows = {"alone": 1, "regrouped": max(1, self.rows // 2)}.get(variant, self.rows)
        most = math.ceil(len(sequences) / world)
        steps = math.ceil(most / rows)  # the same on all ranks: FSDP gathers in step
        logprobs: dict[int, Any] = {}
        entropy: dict[int, Any] = {}
        dtype = "fp32"
        for step in range(steps):
            group = own[step * rows : (step + 1) * rows] or own[:1] or [0]
            first = {n: int(np.flatnonzero(masks[n])[0]) for n in group}
            before = [torch.from_numpy(sequences[n][: first[n]]).long() for n in group]
            after = [torch.from_numpy(sequences[n][first[n] :]).long() for n in group]
            ids, real = self._padded(before, after)
            with torch.no_grad():
                given, entropies, *_ = getattr(self.trainer, METHOD)(
                    self.model, ids, real, max(map(len, after)), compute_entropy=True
                )
            dtype = short(given.dtype)
            for row, n in enumerate(group):
                actions = masks[n][first[n] :]
                logprobs[n] = given[row, : len(actions)].float().cpu().numpy()[actions]
                entropy[n] = entropies[row, : len(actions)].float().cpu().numpy()[actions]
        return Scored(
            tuple(own),
            tuple(logprobs[n] for n in own),
            tuple(entropy[n] for n in own),
            dtype=dtype,
        )

    def _padded(
        self, before: list[torch.Tensor], after: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and attention mask [rows, T]: prompts padded left, completions right."""
        from trl.trainer.utils import pad

        filler = self.trainer.processing_class.pad_token_id
        parts, marks = [], []
        for tensors, side in ((before, "left"), (after, "right")):
            parts.append(pad(tensors, padding_value=filler, padding_side=side))
            ones = [torch.ones_like(tensor) for tensor in tensors]
            marks.append(pad(ones, padding_value=0, padding_side=side))
        device = self.trainer.accelerator.device
        return torch.cat(parts, 1).to(device), torch.cat(marks, 1).to(device)

    def facts(self) -> Facts:
        accelerator = self.trainer.accelerator
        mixed = str(accelerator.mixed_precision)
        master = short(next(iter(self.trainer.model.parameters())).dtype)
        computing = mixed if mixed != "no" else master
        return Facts(
            code=f"trl {self.version}, GRPOTrainer.{METHOD}",
            dtype=computing,
            attention=str(self.trainer.model.config._attn_implementation),
            master_dtype=master,
            autocast=None if mixed == "no" else mixed,
            micro_batch=f"{self.rows} rows",
            notes=self.notes,
            more={"distributed": str(accelerator.distributed_type).rpartition(".")[2]},
        )


def settings(job: TrainerJob) -> dict[str, Any]:
    """Return the fields of ``GRPOConfig``: the user's file, and what the check decides.

    Raises:
        MismatchError: a file that is no mapping.
    """
    options: dict[str, Any] = {}
    if job.config is not None:
        text = Path(job.config).read_text("utf-8")
        if job.config.endswith(".json"):
            options = json.loads(text)
        else:
            import yaml

            options = yaml.safe_load(text)
        if not isinstance(options, dict):
            raise MismatchError(f"{job.config} holds no fields of GRPOConfig", "write name: value")
    init = dict(options.get("model_init_kwargs") or {})
    if job.attention != "auto":
        init["attn_implementation"] = job.attention
    if job.trust_remote_code:
        init["trust_remote_code"] = True
    if job.revision is not None:
        init["revision"] = job.revision
    if job.precision == "fp32":
        init["dtype"] = "float32"
        options |= {"bf16": False, "fp16": False}
    return options | {"model_init_kwargs": init, "temperature": job.temperature}
