"""Memory of one forward pass over one micro-batch, moment by moment (see mismatch.doctor.memory).

Counted from transformers' code: which tensors a function still refers to at its worst line. A pass
with gradients keeps one input per layer (gradient checkpointing) and needs the same otherwise.
"""

from __future__ import annotations

from mismatch.doctor.experts import forward_bytes
from mismatch.doctor.parts import BYTES, Part, Work
from mismatch.models.config import ModelConfig
from mismatch.specs import TrainSpec
from mismatch.training.logprobs import CHUNK_BYTES, STRIP_BYTES

BLOCKED = ("sink-sdpa", "no-sinks")  # our kernels: a block of queries at a time
EXTRA = 8  # columns that they append to a head
EXPERTS = {  # implementation: name of the part, formula (see mismatch.doctor.experts)
    "eager": ("expert by expert", "N·K·E·8 + N·(H + 9I)·b at most"),
    "grouped_mm": ("experts workspace", "N·K·max(H + 9I, 5H)·b"),
    "batched_mm": ("weights gathered per token and expert", "3·N·K·H·I·b"),
    "bounded": ("experts in parts", "N·H·b + min(N, 4096)·max(7I, 2H + 4I)·b"),
}


class Forward:
    """Tensors of a pass over [B, T] tokens, bytes by part."""

    def __init__(
        self, shape: ModelConfig, spec: TrainSpec, rows: int, longest: int, device: str
    ) -> None:
        self.shape = shape
        self.spec = spec
        self.device = device
        self.rows, self.longest = rows, longest
        self.tokens = rows * longest
        self.b = BYTES[spec.autocast or spec.dtype]
        self.kernel = spec.attention
        if self.kernel in ("auto", "transformers"):
            self.kernel = "sink-sdpa" if shape.sinks else "sdpa"
        self.experts = "grouped_mm" if spec.experts == "auto" else spec.experts
        self.scores = rows * shape.heads * longest * longest  # elements of [B, h, T, T]

    # ------------------------------------------------------------ attention

    def attention(self) -> list[Part]:
        """At the worst line of a layer's attention."""
        s, b = self.shape, self.b
        given = 2 * s.hidden + s.q_width + 2 * s.kv_width
        kernel = {"eager": 2 * s.q_width}.get(self.kernel, 0)
        if self.kernel in BLOCKED:  # the last block's keys and values, head by head; the output
            kernel = 3 * s.heads * (s.head_dim + EXTRA)
        rotary = self.tokens * b * (2 * s.hidden + 4 * s.q_width + 2 * s.kv_width)
        scores = self._score_bytes()
        states = max(self.tokens * b * (given + kernel), rotary - scores)
        return [
            Part("attention scores", scores, self._score_formula()),
            Part("attention masks", self._masks(), "kinds·B·T²·b"),
            Part("attention states", states, "N·b·(2H + q, k, v and the kernel's copies)"),
        ]

    def _score_bytes(self) -> int:
        if self.kernel != "eager":
            return 0
        if self.shape.sinks:
            return 3 * self.scores * self.b  # scores, with the sink's column, less their maximum
        # Scores, then their float32 copy and its softmax.
        return self.scores * (self.b + 8 if self.b == 2 else 2 * self.b)

    def _score_formula(self) -> str:
        if self.kernel != "eager":
            return "0: never whole"
        return "3·B·h·T²·b" if self.shape.sinks else "B·h·T²·(b + 8)"

    def _masks(self) -> int:
        """[B, 1, T, T] per kind of layer; fused kernels need none for plain causal rows."""
        kinds = 2 if self.shape.window else 1
        square = self.rows * self.longest**2
        if self.kernel == "eager":
            return kinds * square * self.b
        return kinds * square if self.kernel == "sdpa" and self.spec.layout == "packing" else 0

    def _kept_scores(self) -> int:
        """The eager kernel returns its weights, and the layer holds them until the MLP is done."""
        return self.scores * self.b if self.kernel == "eager" else 0

    # ------------------------------------------------------------ MLP or experts

    def mlp(self) -> list[Part]:
        """At the worst line of a layer's MLP or experts."""
        s, b = self.shape, self.b
        around = 2 * self.tokens * s.hidden * b
        parts = [
            Part("attention weights held on", self._kept_scores(), "B·h·T²·b"),
            Part("attention masks", self._masks(), "kinds·B·T²·b"),
            Part("hidden states", around, "2·N·H·b"),
        ]
        if not s.experts:
            return [*parts, Part("MLP", 3 * self.tokens * s.width * b, "3·N·I·b")]
        return [*parts, *self._experts(), self._routes()]

    def _experts(self) -> list[Part]:
        size = forward_bytes(self.shape, self.experts, self.tokens, self.b)
        name, formula = EXPERTS.get(self.experts, EXPERTS["grouped_mm"])
        return [Part(name, size, formula)]

    def _routes(self) -> Part:
        s = self.shape
        taken = s.layers * self.tokens * (12 * s.top_k + 4) if self.spec.routing else 0
        return Part("recorded routes", taken + 8 * self.tokens * s.experts, "L·N·(12K + 4)")

    # ------------------------------------------------------------ logprobs

    def head(self, work: Work) -> list[Part]:
        """While the chunks of logits are turned into logprobs."""
        s = self.shape
        n = self.tokens
        b_head = BYTES[self.spec.head_dtype or self.spec.autocast or self.spec.dtype]
        rows = -(-n // -(-n // max(1, CHUNK_BYTES // (b_head * s.vocab))))
        strip = max(1, min(STRIP_BYTES // (4 * s.vocab), n))
        # Two float32 buffers serve all strips; with gradients every step is a new tensor.
        each = 16 if self.spec.grad else 8
        if work.sampling.truncates:
            each += 17  # sorted, as mass, renormalised, summed up
        return [
            Part("logits chunk", b_head * rows * s.vocab, f"b·rows·V, {rows} rows"),
            Part("float32 strips", each * strip * s.vocab, f"{each}·rows·V, {strip} rows"),
            Part("hidden states", 2 * n * s.hidden * self.b, "2·N·H·b"),
            *([self._routes()] if s.experts else []),
        ]

    # ------------------------------------------------------------ gradients

    def saved(self, layers: int) -> list[Part]:
        """What is kept for a backward pass after so many layers: their inputs (checkpointing)."""
        if not self.spec.grad:
            return []
        size = layers * self.tokens * self.shape.hidden * self.b
        return [Part("kept for the backward pass", size, "L·N·H·b, one input per layer")]
