"""Megatron-Core's own GPT model: its layer specs, dispatchers and vocabulary-parallel numbers.

Every rank builds its part as a training script does, from Megatron's ``TransformerConfig``, loads
it by a small table of names, and runs forward passes by Megatron's own schedule. Layers are
TransformerEngine's where that package is installed, else Megatron-Core's own. Not Megatron's are
the choice of micro-batches and the entropy. Dropout is off and the model is in eval mode, as where
verl and NeMo-RL compute log-probabilities.
"""

from __future__ import annotations

import math
import os
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mismatch.errors import MismatchError
from mismatch.features.megatron.layout import Layout, read_layout, require_fit, require_tensors
from mismatch.features.megatron.names import shape_of
from mismatch.run.files import parse_json, read_regular
from mismatch.trainers.protocol import Facts, Replaced, Scored, Tokens, TrainerJob, Variant

warnings.filterwarnings("ignore", "Apex is not installed")
try:
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.activations import quick_gelu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import (
        model_parallel_cuda_manual_seed,
        vocab_parallel_cross_entropy,
    )
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mismatch.features.megatron import weights
except ImportError as cause:
    raise MismatchError(
        f"Megatron-Core cannot be imported: {cause}",
        "name the interpreter of your training environment: --python train=PATH",
    ) from cause

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LOWEST = torch.finfo(torch.float32).min
LLAMA_ROPE = {  # what Megatron-Core's own rope_scaling has built in
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Megatron:
    """One ``GPTModel`` with its weights loaded, spread as a layout says."""

    def __init__(self, job: TrainerJob) -> None:
        self.job = job
        self.replaced: list[Replaced] = []
        self.notes: list[str] = []
        self.dtype = "fp32" if job.precision == "fp32" else job.dtype or "bf16"
        folder = self._folder()
        self.shape = shape_of(parse_json(read_regular(folder / "config.json")))
        self.engine = find_spec("transformer_engine") is not None
        asked = read_layout(job.config, job.overrides)
        self.layout = self._layout(asked)
        self._join()
        require_fit(self.layout, self.shape, dist.get_world_size())
        require_tensors(folder, self.shape)
        self.vocab = math.ceil(self.shape.number("vocab_size") / self.layout.tp) * self.layout.tp
        if self.vocab > self.shape.number("vocab_size"):
            self.notes.append("padded entries of the vocabulary have no probability here")
        self.config = self._config()
        model = self._model()
        half = self.dtype != "fp32"
        self.model = Float16Module(self.config, model) if half else model
        weights.load(model, folder, self.shape, self.shape.experts // self.layout.ep)
        self.model.eval()

    def _folder(self) -> Path:
        """Return the checkpoint's directory; of a hub's model the files in its cache."""
        if Path(self.job.model).is_dir():
            return Path(self.job.model)
        from huggingface_hub import snapshot_download

        wanted = ["*.json", "*.safetensors"]
        found = snapshot_download(self.job.model, revision=self.job.revision, allow_patterns=wanted)
        return Path(found)

    def _layout(self, asked: Layout) -> Layout:
        """Return the layout that can run here."""
        changed: dict[str, Any] = {}

        def instead(key: str, name: str, ran: Any, why: str) -> None:
            changed[key] = ran
            self.replaced.append(Replaced(name, str(getattr(asked, key)), str(ran), why))

        if asked.cp > 1:
            instead("cp", "context_parallel_size", 1, "this adapter scores whole sequences")
        if asked.sp and not self.engine and find_spec("apex") is None:
            why = "Megatron-Core's norms do it with TransformerEngine or Apex alone"
            instead("sp", "sequence_parallel", False, why)
        return Layout(**{**vars(asked), **changed})

    def _join(self) -> None:
        """Let the ranks meet, once in a process."""
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        try:
            self.device = torch.device(torch.cuda.current_device())
        except (RuntimeError, AssertionError) as error:
            fault = "Megatron-Core needs a GPU: it asks for CUDA wherever it runs"
            raise MismatchError(fault, "score where your training runs") from error
        if not dist.is_initialized():
            dist.init_process_group("nccl" if on_gpu else "gloo")
        if not parallel_state.model_parallel_is_initialized():
            require_fit(self.layout, self.shape, dist.get_world_size())
            parallel_state.initialize_model_parallel(
                self.layout.tp,
                self.layout.pp,
                expert_model_parallel_size=self.layout.ep,
                expert_tensor_parallel_size=self.layout.expert_tp,
            )
            model_parallel_cuda_manual_seed(self.job.seed)

    def _config(self) -> Any:
        """Return Megatron's configuration of this model in this layout."""
        shape, layout, values = self.shape, self.layout, self.shape.config
        gpt_oss = values["model_type"] == "gpt_oss"
        more: dict[str, Any] = {}
        if shape.experts:
            layers = range(shape.number("num_hidden_layers"))
            more |= {
                "num_moe_experts": shape.experts,
                "moe_ffn_hidden_size": shape.expert_width,
                "moe_router_topk": shape.number("num_experts_per_tok"),
                # Scores are normalised over the chosen experts, or over all of them.
                "moe_router_pre_softmax": values.get("norm_topk_prob") is False,
                "moe_router_load_balancing_type": "none",
                "moe_router_dtype": layout.router or None,
                "moe_aux_loss_coeff": 0.0,
                "moe_token_dispatcher_type": layout.dispatcher,
                "moe_grouped_gemm": self.engine,
                "moe_layer_freq": [int(shape.is_moe(layer)) for layer in layers],
            }
        if window := values.get("sliding_window") if values.get("use_sliding_window", True) else 0:
            kinds = values.get("layer_types") or ["sliding_attention"]
            more["window_size"] = (window - 1, 0)  # tokens before the query's own
            more["window_attn_skip_freq"] = [int(k == "sliding_attention") for k in kinds]
            if not any(more["window_attn_skip_freq"]):
                del more["window_size"], more["window_attn_skip_freq"]
            elif len(kinds) == 1:
                del more["window_attn_skip_freq"]
        if gpt_oss:
            more |= {
                "activation_func": quick_gelu,
                "glu_linear_offset": 1.0,
                "activation_func_clamp_value": float(values.get("swiglu_limit", 7.0)),
                "softmax_type": "learnable",
                "add_bias_linear": True,
            }
        config = TransformerConfig(
            **{
                "num_layers": shape.number("num_hidden_layers"),
                "hidden_size": shape.number("hidden_size"),
                "ffn_hidden_size": shape.number("intermediate_size"),
                "num_attention_heads": shape.heads,
                "num_query_groups": shape.groups,
                "kv_channels": shape.head_dim,
                "layernorm_epsilon": float(values.get("rms_norm_eps", 1e-6)),
                "normalization": "RMSNorm",
                "qk_layernorm": shape.family.qk_norm,
                "add_bias_linear": False,
                "add_qkv_bias": shape.biased,
                "gated_linear_unit": True,
                "activation_func": torch.nn.functional.silu,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "perform_initialization": False,
                "params_dtype": DTYPES[self.dtype],
                "pipeline_dtype": DTYPES[self.dtype],
                "bf16": self.dtype == "bf16",
                "fp16": self.dtype == "fp16",
                "tensor_model_parallel_size": layout.tp,
                "pipeline_model_parallel_size": layout.pp,
                "expert_model_parallel_size": layout.ep,
                "expert_tensor_parallel_size": layout.expert_tp,
                "sequence_parallel": layout.sp,
                "gradient_accumulation_fusion": False,
                "bias_activation_fusion": False,
                "masked_softmax_fusion": False,
                "apply_rope_fusion": False,
                **more,
            }
        )
        for name, value in self._rope().items():
            setattr(config, name, value)
        return config

    def _rope(self) -> dict[str, Any]:
        """Return what ``GPTModel`` reads of rotary positions from its configuration.

        Raises:
            MismatchError: a scaling that Megatron-Core does not have.
        """
        values = self.shape.config
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        base = float(rope.get("rope_theta", values.get("rope_theta", 10000.0)))
        self.scaling = 0.0
        if kind == "default":
            return {"rotary_base": base, "position_embedding_type": "rope"}
        if kind == "llama3" and all(rope.get(name) == value for name, value in LLAMA_ROPE.items()):
            self.scaling = float(rope["factor"])
            return {"rotary_base": base, "position_embedding_type": "rope"}
        if kind == "yarn" and not {"mscale", "mscale_all_dim", "attention_factor"} & rope.keys():
            return {
                "rotary_base": base,
                "position_embedding_type": "yarn",
                "yarn_rotary_scaling_factor": float(rope["factor"]),
                "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
                "yarn_beta_fast": float(rope.get("beta_fast", 32.0)),
                "yarn_beta_slow": float(rope.get("beta_slow", 1.0)),
                "yarn_mscale": 1.0,
                "yarn_mscale_all_dim": 0.0,
                "yarn_correction_range_round_to_int": bool(rope.get("truncate", True)),
            }
        raise MismatchError(
            f"Megatron-Core has no rotary positions of the kind {kind} with {dict(rope)}",
            "score with your own loader: --scorer package.module:Class",
        )

    def _model(self) -> Any:
        """Return this rank's part of the model, its weights not yet loaded."""
        return GPTModel(
            self.config,
            get_gpt_decoder_block_spec(self.config, self.engine, normalization="RMSNorm"),
            vocab_size=self.vocab,
            max_sequence_length=self.shape.number("max_position_embeddings"),
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=bool(self.shape.config.get("tie_word_embeddings")),
            position_embedding_type=self.config.position_embedding_type,
            rotary_base=self.config.rotary_base,
            rope_scaling=self.scaling > 0,
            rope_scaling_factor=self.scaling or 8.0,
        ).to(self.device)

    def score(self, tokens: Tokens, variant: Variant) -> Scored:
        """Score this rank's share; ranks of one data-parallel group take the same sequences.

        Experts are shared by data-parallel ranks, so that all ranks take equally many steps of the
        same shape; a rank that has no sequence left scores its first one again.
        """
        groups = parallel_state.get_data_parallel_world_size()
        own = list(range(parallel_state.get_data_parallel_rank(), len(tokens.lengths), groups))
        rows = max(1, self.job.micro_batch_tokens // int(tokens.lengths.max()))
        if variant == "regrouped":
            rows = rows // 2 or 2
        rows = 1 if variant == "alone" else rows
        sequences, masks = tokens.sequences(), tokens.masks()
        steps = math.ceil(math.ceil(len(tokens.lengths) / groups) / rows)
        logprobs: dict[int, Any] = {}
        entropy: dict[int, Any] = {}
        for step in range(steps):
            all_of_step = tokens.lengths[step * rows * groups : (step + 1) * rows * groups]
            width = math.ceil(int(all_of_step.max()) / self.layout.tp) * self.layout.tp
            mine = own[step * rows : (step + 1) * rows]
            batch = mine + [(mine or own or [0])[0]] * (rows - len(mine))
            ids = torch.zeros(rows, width, dtype=torch.long, device=self.device)
            for row, number in enumerate(batch):
                part = torch.from_numpy(sequences[number][:width])
                ids[row, : len(part)] = part
            for values, entropies in self._forward(ids):
                for row, number in enumerate(mine):
                    places = np.flatnonzero(masks[number]) - 1  # position t predicts token t + 1
                    logprobs[number] = values[row].cpu().numpy()[places]
                    entropy[number] = entropies[row].cpu().numpy()[places]
        speaks = parallel_state.get_tensor_model_parallel_rank() == 0 and (
            parallel_state.is_pipeline_last_stage()
        )
        given = tuple(own) if speaks else ()
        return Scored(
            given, tuple(logprobs[n] for n in given), tuple(entropy[n] for n in given), "fp32"
        )

    def _forward(self, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return log-probabilities and entropies [rows, T], on the last pipeline stage alone.

        Args:
            ids: [rows, T]; no token of a sequence sees the padding behind it.
        """
        rows, width = ids.shape
        positions = torch.arange(width, device=ids.device).expand(rows, width)
        mask = None
        if not self.engine:
            mask = torch.ones(1, 1, width, width, dtype=torch.bool, device=ids.device).triu(1)

        def step(_: Any, model: torch.nn.Module) -> Any:
            return model(ids, positions, mask), partial(self._numbers, ids)

        with torch.no_grad():
            done: list[tuple[torch.Tensor, torch.Tensor]] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=None,
                model=[self.model],
                num_microbatches=1,
                seq_length=width,
                micro_batch_size=rows,
                forward_only=True,
                collect_non_loss_data=True,
            )
        return done

    def _numbers(
        self, ids: torch.Tensor, logits: torch.Tensor, non_loss_data: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies [rows, T] of this rank's logits [rows, T, V / tp].

        The log-probabilities are Megatron's vocabulary-parallel cross-entropy with its sign turned.
        """
        logits = logits.float() / self.job.temperature
        group = parallel_state.get_tensor_model_parallel_group()
        first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        logits[..., max(0, self.shape.number("vocab_size") - first) :] = LOWEST
        largest = logits.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        weights_ = (logits - largest).exp()
        sums = torch.stack((weights_.sum(-1), (weights_ * logits).sum(-1)))
        dist.all_reduce(sums, group=group)
        entropy = sums[0].log() + largest[..., 0] - sums[1] / sums[0]
        targets = torch.cat((ids[:, 1:], ids[:, :1]), 1)  # the last position predicts none
        return -vocab_parallel_cross_entropy(logits.contiguous(), targets), entropy

    def facts(self) -> Facts:
        """Return what ran."""
        layers = "TransformerEngine's" if self.engine else "Megatron-Core's"
        sinks = {"honours_sinks": True} if self.config.softmax_type == "learnable" else {}
        return Facts(
            code=f"Megatron-Core {megatron.core.__version__}, GPTModel with {layers} layers",
            dtype=self.dtype,
            attention="TEDotProductAttention" if self.engine else "DotProductAttention",
            master_dtype=self.dtype,
            micro_batch=f"at most {self.job.micro_batch_tokens} tokens with padding",
            notes=tuple(self.notes),
            replaced=tuple(self.replaced),
            more={
                "strategy": str(self.layout),
                "router_dtype": self.layout.router or None,
                "moe": bool(self.shape.experts),
                "honours_sinks": sinks.get("honours_sinks"),
            },
        )
