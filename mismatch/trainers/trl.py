"""TRL's own GRPO trainer: its per-token log-probability method, which every GRPO step calls.

The configuration is the user's: a script's YAML, or ``args.to_json_string()`` (trl_config.py). How
the model is distributed is accelerate's matter: ``--accelerate-config`` launches this process with
the user's own file, as a training run is launched.
"""

from __future__ import annotations

import math
import os
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mismatch.errors import MismatchError
from mismatch.run.yaml_file import read_mapping
from mismatch.trainers.protocol import (
    Facts,
    Replaced,
    Scored,
    Tokens,
    TrainerJob,
    Variant,
    attention_here,
    require_known_attention,
    short,
    sinks_of,
)
from mismatch.trainers.trl_config import DEFAULT_ROWS, QUANTISED, TrlFile, divided, fields_of

METHOD = "_get_per_token_logps_and_entropies"


class Trl:
    """One ``GRPOTrainer`` with its model prepared by accelerate."""

    def __init__(self, job: TrainerJob) -> None:
        try:
            from datasets import Dataset
            from trl import GRPOConfig, GRPOTrainer
        except ImportError as error:
            raise MismatchError(
                f"TRL's GRPO trainer cannot be imported: {error}",
                "name the interpreter of your training environment: --python train=PATH",
            ) from error
        if not hasattr(GRPOTrainer, METHOD):
            raise MismatchError(
                f"trl {metadata.version('trl')} has no GRPOTrainer.{METHOD}",
                "use trl 1.0 or newer, or --scorer package.module:function",
            )
        self.job = job
        self.version = metadata.version("trl")
        on_gpu = torch.cuda.is_available()
        file = file_of(job)
        options = settings(job, file)
        self.notes, self.replaced = list(file.notes()), list[Replaced]()
        asked = options["model_init_kwargs"].get("attn_implementation") or ""
        require_known_attention(asked, job)
        family = model_type(job) if "flash" in asked else ""
        found = attention_here(asked, family, on_gpu, job.precision)
        if found is not None:
            self.replaced.append(found)
            options["model_init_kwargs"]["attn_implementation"] = found.ran
        if job.precision == "fp32":  # transformers 4 keeps the first trainer's precision here
            os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
        with tempfile.TemporaryDirectory() as scratch:
            config = GRPOConfig(
                **options
                | {"output_dir": scratch, "report_to": [], "use_cpu": not on_gpu, "seed": job.seed}
            )
            self.trainer: Any = GRPOTrainer(
                model=job.model,
                reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
                args=config,
                train_dataset=Dataset.from_list([{"prompt": "1+1="}] * 8),
                peft_config=self._peft_config(file),
            )
        self.rows = config.per_device_train_batch_size
        accelerator = self.trainer.accelerator
        if str(accelerator.distributed_type).endswith("FSDP"):  # as Trainer prepares it for a run
            optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=0.0)
            self.model, _ = accelerator.prepare(self.trainer.model, optimizer)
        else:
            self.model = accelerator.prepare_model(self.trainer.model)
        self.model.train()  # as in a GRPO step, which scores before it learns

    def _peft_config(self, file: TrlFile) -> Any:
        """Return the adapter that a script would train; it starts as a change of nothing."""
        from trl import ModelConfig, get_peft_config

        if not file.model.get("use_peft"):
            return None
        if find_spec("peft") is None:
            note = (
                "use_peft is not followed: peft is not installed here; a new LoRA changes nothing"
            )
            self.notes.append(note)
            return None
        own = {name: value for name, value in file.model.items() if name not in QUANTISED}
        return get_peft_config(ModelConfig(**own))

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
            tuple(own), tuple(logprobs[n] for n in own), tuple(entropy[n] for n in own), dtype=dtype
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
        attention = str(self.trainer.model.config._attn_implementation)
        computing = mixed if mixed != "no" else master
        return Facts(
            code=f"trl {self.version}, GRPOTrainer.{METHOD}",
            dtype=computing,
            attention=attention,
            master_dtype=master,
            autocast=None if mixed == "no" else mixed,
            micro_batch=f"{self.rows} rows",
            notes=tuple(self.notes),
            replaced=tuple(self.replaced),
            more={"distributed": str(accelerator.distributed_type).rpartition(".")[2]}
            | sinks_of(self.trainer.model, attention),
        )


def file_of(job: TrainerJob) -> TrlFile:
    """Return the user's file, its keys by the class of this TRL that knows them.

    Raises:
        MismatchError: a file that is no mapping, or a key that is a typing error.
    """
    if job.config is None:
        return TrlFile({}, {})
    fields = fields_of(None)
    if fields is None:
        raise MismatchError(
            f"trl {metadata.version('trl')} has no GRPOConfig", "use trl 1.0 or newer"
        )
    return divided(job.config, read_mapping(Path(job.config), job.config), fields)


def settings(job: TrainerJob, file: TrlFile) -> dict[str, Any]:
    """Return the fields of ``GRPOConfig``: the user's file, and what the check decides."""
    options = file.options()
    if job.config is None:
        options["per_device_train_batch_size"] = DEFAULT_ROWS
    init = options["model_init_kwargs"]
    if job.attention != "auto":
        init["attn_implementation"] = job.attention
    init["trust_remote_code"] = job.trust_remote_code  # a file alone runs no code of a model
    if job.revision is not None:
        init["revision"] = job.revision
    if job.precision == "fp32":
        init["dtype"] = "float32"
        options |= {"bf16": False, "fp16": False}
    return options | {"temperature": job.temperature}


def model_type(job: TrainerJob) -> str:
    """Return the family of the checkpoint, as its config.json names it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        job.model, revision=job.revision, trust_remote_code=job.trust_remote_code
    )
    return str(config.model_type)
