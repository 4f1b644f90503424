"""verl's own FSDP engine: what ``compute_log_prob`` of a verl 0.9 run calls.

The configuration is verl's own: its defaults, and over them the user's file (the composed YAML that
verl prints when a run starts, or a part of it). Settings are handed on as
``verl/workers/engine_workers.py`` (``init_model``) does. verl has no CPU platform; one is given to
it through its public registry, with FSDP2 in place of FSDP1, which refuses a CPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mismatch.errors import MismatchError
from mismatch.run.files import read_yaml
from mismatch.run.provenance import hidden_variable
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

DEFAULT = "flash_attention_2"  # verl's, where override_config names no attention
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


class Verl:
    """One ``FSDPEngineWithLMHead`` with its weights loaded."""

    def __init__(self, job: TrainerJob) -> None:
        self.job = job
        self.version = metadata.version("verl")
        self.notes: list[str] = []
        self.replaced: list[Replaced] = []
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            use_cpu()
        if not dist.is_initialized():
            dist.init_process_group("nccl" if on_gpu else "gloo")
        try:
            from verl.trainer.config import CheckpointConfig
            from verl.utils.config import omega_conf_to_dataclass
            from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
        except ImportError as error:
            raise MismatchError(
                f"verl {self.version} has no engine that this adapter knows: {error}",
                "use verl 0.9, or score with your own function: --scorer package.module:function",
            ) from error
        config = composed(job.config, job.overrides)
        actor, rollout = config.actor, config.rollout
        model = config.model
        model.path = job.model
        model.trust_remote_code = job.trust_remote_code
        if actor.strategy not in ("fsdp", "fsdp2"):
            raise MismatchError(
                f"actor.strategy is {actor.strategy}; this adapter runs verl's FSDP engine",
                "use an actor with strategy fsdp or fsdp2",
            )
        self._settle_attention(model, on_gpu)
        if not on_gpu:
            self._fit_a_cpu(model, actor)
        if not on_gpu or self.replaced:
            self._without_ulysses(actor)
        sizes = (actor.ppo_micro_batch_size, actor.ppo_micro_batch_size_per_gpu)
        if not actor.use_dynamic_bsz and sizes == (None, None):  # verl's defaults leave it open
            self.notes.append("no micro-batch size is configured: batches are cut by tokens")
            actor.use_dynamic_bsz = True
        if job.precision == "fp32":
            actor.fsdp_config.mixed_precision = FP32
            actor.fsdp_config.model_dtype = "fp32"
        model_config = omega_conf_to_dataclass(model)
        actor_config = omega_conf_to_dataclass(actor)
        self.engine_config = actor_config.engine
        self.engine_config.use_remove_padding = model_config.get("use_remove_padding", False)
        self.engine_config.use_fused_kernels = model_config.get("use_fused_kernels", False)
        self.engine_config.use_dynamic_bsz = actor.use_dynamic_bsz
        self.most_tokens = rollout.log_prob_max_token_len_per_gpu or job.micro_batch_tokens
        self.rows = rollout.log_prob_micro_batch_size_per_gpu
        self.dynamic = bool(actor.use_dynamic_bsz) or not self.rows
        self.engine = FSDPEngineWithLMHead(
            model_config, self.engine_config, actor_config.optim, CheckpointConfig()
        )
        self.engine.initialize()
        self.packed = bool(self.engine_config.use_remove_padding)
        self.autocast = getattr(self.engine, "_autocast_dtype", torch.bfloat16)

    def _settle_attention(self, model: Any, on_gpu: bool) -> None:
        """Put the attention that can run here into the configuration."""
        from omegaconf import open_dict
        from transformers import AutoConfig

        given = model.override_config.get("attn_implementation") or DEFAULT
        asked = given if self.job.attention == "auto" else self.job.attention
        family = ""
        require_known_attention(asked, self.job)
        if "flash" in asked:
            trust = self.job.trust_remote_code
            family = AutoConfig.from_pretrained(self.job.model, trust_remote_code=trust).model_type
        packed = bool(model.use_remove_padding)
        found = attention_here(asked, family, on_gpu, self.job.precision, packed)
        with open_dict(model):
            model.override_config["attn_implementation"] = found.ran if found else asked
            if found and on_gpu and packed:
                # A flash kernel is told where packed sequences end; masks of others need not be.
                model.use_remove_padding = False
                self._replace("use_remove_padding", "true", "false", "float32 runs without flash")
        if found:
            path = "+actor_rollout_ref.model.override_config."
            instead = f"{path}{found.instead.replace(': ', '=')}" if found.instead else ""
            self.replaced.append(replace(found, instead=instead))

    def _fit_a_cpu(self, model: Any, actor: Any) -> None:
        """Set back what only a GPU can run."""
        actor.fsdp_config.use_torch_compile = False
        self.notes.append("log-softmax is float32 as under a GPU's autocast, not a CPU's bf16")
        why = "it needs a GPU"
        if actor.strategy == "fsdp":
            self._replace("strategy", "fsdp", "fsdp2", "FSDP1 needs a GPU", "fsdp-cast-inputs")
            actor.strategy = "fsdp2"
        if model.use_fused_kernels:
            causes = ("bf16-logprobs", "bf16-lm-head")
            self._replace("use_fused_kernels", "true", "false", why, *causes)
            model.use_fused_kernels = False

    def _without_ulysses(self, actor: Any) -> None:
        """Undo sequence parallelism: verl gathers the slices inside flash attention alone."""
        key = "ulysses_sequence_parallel_size"
        asked = max(actor.get(key) or 1, actor.fsdp_config.get(key) or 1)
        if asked > 1:
            self._replace(key, str(asked), "1", "verl gathers its slices in flash attention alone")
            actor[key] = actor.fsdp_config[key] = 1

    def _replace(self, what: str, asked: str, ran: str, why: str, *causes: str) -> None:
        self.replaced.append(Replaced(what, asked, ran, why, causes=causes))

    def score(self, tokens: Tokens, variant: Variant) -> Scored:
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu

        group, count = self.engine.get_data_parallel_rank(), self.engine.get_data_parallel_size()
        own = list(range(group, len(tokens.lengths), count))
        sequences, masks = tokens.sequences(), tokens.masks()
        dynamic, most, rows = self._batching(tokens, variant)
        each = math.ceil(len(tokens.lengths) / count)  # rows of every rank, padded by repetition
        each = each if dynamic else math.ceil(each / rows) * rows
        taken = [own[n] if n < len(own) else (own or [0])[0] for n in range(each)]
        data = TensorDict(
            {
                "input_ids": jagged([torch.from_numpy(sequences[n]).long() for n in taken]),
                "position_ids": jagged([torch.arange(len(sequences[n])) for n in taken]),
                "loss_mask": jagged([torch.from_numpy(masks[n]).long() for n in taken]),
            },
            batch_size=len(taken),
        )
        tu.assign_non_tensor(
            data,
            use_remove_padding=self.packed,
            use_fused_kernels=self.engine_config.use_fused_kernels,
            use_dynamic_bsz=dynamic,
            max_token_len_per_gpu=most,
            micro_batch_size_per_gpu=rows,
            temperature=self.job.temperature,
            calculate_entropy=True,
            compute_loss=False,
        )
        with self.engine.eval_mode():
            output = self.engine.infer_batch(data)["model_output"]
        logprobs, entropy = output["log_probs"], output["entropy"]
        places = [np.flatnonzero(masks[n]) - 1 for n in own]  # position t predicts token t + 1
        return Scored(
            tuple(own),
            tuple(numbers(row)[at] for row, at in zip(logprobs.unbind(), places, strict=False)),
            tuple(numbers(row)[at] for row, at in zip(entropy.unbind(), places, strict=False)),
            dtype=short(logprobs.dtype),
        )

    def _batching(self, tokens: Tokens, variant: Variant) -> tuple[bool, int, int]:
        """Return whether micro-batches are cut by tokens, their most tokens, and their rows."""
        longest = int(tokens.lengths.max())
        rows = self.rows or 1
        if variant == "alone":
            return False, longest, 1
        if variant == "regrouped":
            return self.dynamic, max(longest, self.most_tokens // 4), max(1, rows // 2)
        return self.dynamic, max(longest, self.most_tokens), rows

    def facts(self) -> Facts:
        module = self.engine.module
        computing = short(self.autocast)
        attention = str(module.config._attn_implementation)
        by_tokens = f"at most {self.most_tokens} tokens"
        return Facts(
            code=f"verl {self.version}, {type(self.engine).__name__}.infer_batch",
            dtype=computing,
            layout="packing" if self.packed else "padding",
            attention=attention,
            master_dtype="fp32" if self.job.precision == "fp32" else self.engine_config.model_dtype,
            autocast=None if computing == "fp32" else computing,
            micro_batch=by_tokens if self.dynamic else f"{self.rows} rows",
            notes=tuple(self.notes),
            replaced=tuple(self.replaced),
            more={"strategy": self.engine_config.strategy} | sinks_of(module, attention),
        )


def composed(path: str | None, overrides: Sequence[str] = ()) -> Any:
    """Return verl's ``actor_rollout_ref`` section: its defaults, then the file, then overrides.

    Raises:
        MismatchError: no such file, no YAML mapping, or a variable that may hold a secret.
    """
    import verl.trainer.config as room
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("oc.env", hidden_variable, replace=True)
    base = OmegaConf.load(Path(room.__file__).with_name("_generated_ppo_trainer.yaml"))
    OmegaConf.set_struct(base, False)
    if path is not None:
        try:
            own = OmegaConf.create(read_yaml(path))
        except Exception as error:
            raise MismatchError(
                f"{path} cannot be read as a verl configuration: {error}",
                "give the YAML that verl prints when a run starts",
            ) from error
        base = OmegaConf.merge(base, own)
    base = OmegaConf.merge(base, OmegaConf.from_dotlist([text.lstrip("+") for text in overrides]))
    section = base.actor_rollout_ref
    try:
        OmegaConf.resolve(section)
    except Exception as error:
        raise MismatchError(f"{path}: {error}", "write the value into the file") from error
    return section


def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of logits that gets them in float32."""
    return lambda logits, *more, **named: function(logits.float(), *more, **named)


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return rows of different lengths as one nested tensor, as verl passes them on."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def numbers(row: torch.Tensor) -> np.ndarray:
    """Return a row in float32 on the CPU."""
    return row.detach().float().cpu().numpy()


def use_cpu() -> None:
    """Give verl a CPU platform through its public registry; all else does nothing there.

    CUDA's autocast computes softmax and log-softmax in float32, the CPU's in bf16: verl's functions
    of logits get float32 here, so that a CPU rounds where a GPU does.
    """
    from verl.plugin.platform import PlatformBase, set_platform

    members: dict[str, Any] = {
        name: lambda self, *args, **kwargs: None for name in PlatformBase.__abstractmethods__
    }
    members |= {
        "device_name": property(lambda self: "cpu"),
        "vendor_name": property(lambda self: "cpu"),
        "device_module": property(lambda self: torch.cpu),
        "is_available": lambda self: True,
        "is_platform_available": lambda self, use_smi_check=False: True,
        "current_device": lambda self: torch.device("cpu"),
        "device_count": lambda self: 1,
        "communication_backend_name": lambda self: "gloo",
        "nvtx_range": lambda self, message: contextlib.nullcontext(),
        "get_device_capability": lambda self, index=0: (None, None),
        "is_ipc_supported": lambda self: False,
    }
    set_platform(type("CpuPlatform", (PlatformBase,), members)())
    from verl.utils import torch_functional  # it asks for the platform

    for name in ("logprobs_from_logits_v2", "entropy_from_logits"):
        setattr(torch_functional, name, in_float32(getattr(torch_functional, name)))
