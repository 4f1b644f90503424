"""The root module that FSDP2 wraps: decoder, head and logprobs in one forward.

The head's weights are gathered only while the root's forward runs, so the chunked logprobs are
computed inside it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from mismatch.errors import MismatchError
from mismatch.specs import TORCH_NAMES, Sampling
from mismatch.training.logprobs import (
    CapturedRows,
    DistributionCapture,
    Earlier,
    Rounding,
    TokenStats,
    token_stats,
)
from mismatch.training.packing import Batch
from mismatch.training.routing.capture import LayerRoutes, moe_layers, recording
from mismatch.training.routing.interventions import RouterIntervention, intervening
from mismatch.training.routing.keys import KeyRecorder, key_layers


@dataclass(frozen=True, slots=True)
class ForwardOptions:
    """How to run the forward passes of one scoring pass.

    Attributes:
        sampling: the sampling transforms of the rollout, applied to the logits.
        autocast: dtype of autocast; None: off.
        head_dtype: of the language-model head; None: that of the computation.
        routing: record the experts.
        interventions: on the routers: replayed routes, injected noise, another dtype.
        capture: the positions whose full distributions are kept.
        likeliest: most likely ids that are kept of every position.
        ends: ids of end tokens whose probability is kept of every position.
        counting: keep the probability of what stood before, too.
        earlier: what stood before the tokens of this micro-batch, where that is kept.
    """

    sampling: Sampling
    autocast: torch.dtype | None = None
    head_dtype: torch.dtype | None = None
    routing: bool = False
    rounding: Rounding = field(default_factory=Rounding)
    interventions: tuple[RouterIntervention, ...] = ()
    capture: DistributionCapture | None = None
    likeliest: int = 0
    ends: tuple[int, ...] = ()
    counting: bool = False
    earlier: Earlier | None = None


class Scorer(nn.Module):
    """A causal language model that returns per-token statistics instead of logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.decoder_config = model.config.get_text_config()
        self.moe = moe_layers(self.decoder)
        self.sparse = key_layers(self.decoder)
        self.show_logits: Callable[[torch.Tensor], None] | None = None
        """Called with the logits of every chunk, as the log-softmax takes them."""

    @property
    def decoder(self) -> nn.Module:
        model: Any = self.model
        decoder: Any = model.get_decoder()
        whole = decoder is self.model  # Llama 4 names itself; we run the part without the head
        part: nn.Module = model.model if whole else decoder
        return part

    def forward(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call ``work(*args)`` inside FSDP2's hooks: the root's parameters are gathered.

        Args:
            work: one of the methods below. It returns tensors or tuples of them, on which FSDP2
                hooks its backward pass.
        """
        return work(*args)

    def score(
        self,
        batch: Batch,
        predicting: torch.Tensor,
        targets: torch.Tensor,
        options: ForwardOptions,
        captured: CapturedRows | None = None,
        keys: KeyRecorder | None = None,
    ) -> tuple[tuple[torch.Tensor | None, ...], list[LayerRoutes] | None]:
        """Return statistics of ``targets`` [n], each predicted at flattened row ``predicting`` [n].

        Args:
            captured: the targets whose full distributions are kept.
            keys: records what sparse attention selects.

        Returns:
            The fields of :class:`TokenStats`, and the routes of every MoE layer or None.
        """
        with ExitStack() as stack:
            if options.autocast is not None:
                stack.enter_context(torch.autocast(batch.input_ids.device.type, options.autocast))
            with ExitStack() as routers:
                routers.enter_context(intervening(self.decoder, self.moe, options.interventions))
                recorder = routers.enter_context(recording(self.moe)) if options.routing else None
                if keys is not None:
                    routers.enter_context(keys.recording())
                hidden = self.hidden(batch)
            routes = recorder.finished() if recorder is not None else None
            stats = token_stats(
                hidden.reshape(-1, hidden.shape[-1])[predicting],
                targets,
                self._shown(self._head(options)),
                int(self.model.get_output_embeddings().weight.shape[0]),
                options.sampling,
                rounding=options.rounding,
                captured=captured,
                likeliest=options.likeliest,
                ends=options.ends,
                earlier=options.earlier,
            )
        return tuple(getattr(stats, item.name) for item in fields(TokenStats)), routes

    def head_gap(self, batch: Batch) -> torch.Tensor:
        """Largest difference of our logits from the family's own forward, relative to their range.

        Large where a family transforms its logits in a way that :func:`finish_logits` lacks. What
        two equal passes differ by (dropout that is on) is no such way: the run's passes show it.
        """
        head = self._head(ForwardOptions(Sampling()))
        ours, again = (head(self.hidden(batch)).float() for _ in range(2))
        own: torch.Tensor = self.model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
        ).logits
        off = (own.float() - ours).abs().max() - 2 * (again - ours).abs().max()
        gap: torch.Tensor = off.clamp(min=0.0) / own.float().abs().max()
        return gap

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return the last hidden states [B, S, H]."""
        mask: Any = batch.attention_mask
        whole = batch.whole or batch
        if whole.position_ids is not None:
            mask = self._packed_masks(whole)
        out = self.decoder(
            input_ids=batch.input_ids,
            attention_mask=mask,
            position_ids=batch.position_ids,
            use_cache=False,
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def _packed_masks(self, batch: Batch) -> Any:
        """Block-diagonal masks, one per layer type: positions alone do not separate documents.

        gpt-oss builds its masks without looking at the positions, and leaks silently otherwise.
        """
        from transformers import masking_utils

        weight = self.model.get_input_embeddings().weight
        shape = (*batch.input_ids.shape, 1)
        like = torch.empty(shape, dtype=weight.dtype, device=batch.input_ids.device)
        family = self.decoder_config.model_type
        try:
            masks = masking_utils.create_masks_for_generate(
                self.decoder_config, like, None, None, position_ids=batch.position_ids
            )
        except TypeError as error:  # a layer type whose mask transformers cannot build from outside
            fault = f"{family}: no masks for packed documents: {error}"
            raise MismatchError(fault, "use --layout padding") from error
        if not isinstance(masks, dict):
            return masks
        # Whether the decoder's forward accepts ``{"full_attention": mask, …}``.
        source = inspect.getsource(inspect.unwrap(type(self.decoder).forward))
        if re.search(r"isinstance\([^)]*attention_mask[^)]*dict\)", source):
            return masks
        if len(masks) == 1:
            return next(iter(masks.values()))
        raise MismatchError(
            f"{family} mixes {', '.join(sorted(masks))} layers and takes no mask per layer type: "
            "packed documents would leak",
            "use --layout padding",
        )

    def _shown(self, head: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        show = self.show_logits
        if show is None:
            return head

        def shown(hidden: torch.Tensor) -> torch.Tensor:
            logits = head(hidden)
            show(logits)
            return logits

        return shown

    def _head(self, options: ForwardOptions) -> Any:
        """Hidden states [c, H] to logits [c, V], as the family's own forward ends."""
        head = self.model.get_output_embeddings()
        dtype = options.head_dtype
        if dtype is None:
            return lambda hidden: finish_logits(head(hidden), self.decoder_config)
        weight = head.weight.to(dtype)
        bias = None if head.bias is None else head.bias.to(dtype)

        def in_dtype(hidden: torch.Tensor) -> torch.Tensor:
            # The requested dtype must not be undone by an enclosing autocast.
            with torch.autocast(hidden.device.type, enabled=False):
                logits = nn.functional.linear(hidden.to(dtype), weight, bias)
                return finish_logits(logits, self.decoder_config)

        return in_dtype


def finish_logits(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Scaling and soft-capping after the head, as in Granite, Cohere and Gemma 2."""
    if divisor := getattr(config, "logits_scaling", None):
        logits = logits / divisor
    if factor := getattr(config, "logit_scale", None):
        logits = logits * factor
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a spec's short name: ``"bf16"`` is ``torch.bfloat16``."""
    return getattr(torch, TORCH_NAMES[name])  # type: ignore[no-any-return]
