"""The experts of one gpt-oss-20b layer, run four ways: memory, time and error.

    python benchmarks/experts.py [--tiny] [--only IMPLEMENTATION] [--json FILE]

32 experts of 2,880 x 2,880, four per token, bf16: 1.6 GB of weights, as much again for their
gradient. ``eager``, ``grouped_mm`` and ``batched_mm`` are transformers' own, ``bounded`` is ours
(mismatch/training/experts.py). Every measurement is a separate process, so that no freed memory
of one hides in the next.

"forward" is what a forward pass without gradients takes above the weights; "backward" is what a
forward and a backward pass take above the weights *and* their gradient: activations and copies.
Peaks are the kernel's high-water mark (benchmarks/memory.py says how). The error is the largest
difference of the output, and of the gradient of the input, to the same arithmetic in float64, as a
share of the largest value there. ``batched_mm`` gets few tokens, because it cannot get more.

Goals: at 1,024 tokens ``bounded`` takes at most half of what the best of transformers' takes in the
backward pass, its output is eager's bit for bit, and predictions are within 25 % (``BAND``) of what
was measured, or 16 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.memory import status  # noqa: E402

MIB = 1 << 20
BAND = 0.25
FLOOR = 16 * MIB  # below this a prediction need not be exact: libraries' own buffers
FULL = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32}
TINY = {"hidden_size": 256, "intermediate_size": 256, "num_local_experts": 8}
TOP_K = 4
MANY = (256, 1024)
FEW_BACKWARD = (2, 4, 8)
FEW = (16, 32)  # of batched_mm, forward only: 14 GB with gradients
BATCHED = "batched_mm"
IMPLEMENTATIONS = ("eager", "grouped_mm", "bounded", BATCHED)


@dataclass(frozen=True)
class Row:
    """One implementation at one number of tokens; bytes, seconds, shares of the largest value."""

    implementation: str
    tokens: int
    rows: int  # of the busiest expert
    forward_bytes: int
    backward_bytes: int | None
    forward_s: float
    backward_s: float | None
    output_error: float
    gradient_error: float | None
    digest: str  # of the output's bits
    predicted_forward: int
    predicted_backward: int | None


# ---------------------------------------------------------------- the layer


def layer(sizes: dict[str, Any], implementation: str) -> Any:
    """Return a layer's experts in bf16 with cheap deterministic weights: one expert, rolled."""
    import torch
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    from mismatch.training.experts import register
    from tests.checkpoints import configuration

    register()
    config = configuration("gpt_oss", **sizes, num_experts_per_tok=TOP_K)
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = GptOssExperts(config)
    experts = experts.to(torch.bfloat16).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            one = torch.randn(parameter.shape[1:], generator=generator)
            one *= 0.1 if "bias" in name else sizes["hidden_size"] ** -0.5
            for index in range(len(parameter)):
                parameter[index] = one.roll(37 * index, -1)
    return experts


def inputs(sizes: dict[str, Any], tokens: int) -> tuple[Any, Any, Any, Any]:
    """Hidden states, ids, weights, and a gradient of the output."""
    import torch

    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, sizes["hidden_size"], generator=generator).bfloat16()
    scores = torch.randn(tokens, sizes["num_local_experts"], generator=generator)
    top = scores.topk(TOP_K)
    grad = torch.randn(hidden.shape, generator=generator).bfloat16()
    return hidden, top.indices, top.values.softmax(-1).bfloat16(), grad


def reference(sizes: dict[str, Any], tokens: int) -> tuple[Any, Any]:
    """Output and gradient of the input in float64, one expert after the other."""
    import torch

    experts = layer(sizes, "eager")
    hidden, ids, weights, grad = inputs(sizes, tokens)
    out, back = torch.zeros(hidden.shape).double(), torch.zeros(hidden.shape).double()
    for index in range(sizes["num_local_experts"]):
        token, slot = (ids == index).nonzero(as_tuple=True)
        rows = hidden[token].double().requires_grad_()
        up = rows @ experts.gate_up_proj[index].detach().double()
        up = up + experts.gate_up_proj_bias[index].detach().double()
        gate, linear = up[:, ::2].clamp(max=experts.limit), up[:, 1::2]
        linear = linear.clamp(-experts.limit, experts.limit) + 1
        state = linear * gate * torch.sigmoid(experts.alpha * gate)
        state = state @ experts.down_proj[index].detach().double()
        state = state + experts.down_proj_bias[index].detach().double()
        state = state * weights[token, slot, None].double()
        (share,) = torch.autograd.grad(state, rows, grad[token].double())
        out.index_add_(0, token, state.detach())
        back.index_add_(0, token, share)
    return out, back


# ---------------------------------------------------------------- inside a child


def child(job: dict[str, Any]) -> dict[str, Any]:
    """One measurement: {"bytes", "seconds", "rows"}; the tensors land in job["out"]."""
    import torch

    sizes, backward = job["sizes"], job["backward"]
    experts = layer(sizes, job["implementation"])
    touch_libraries()
    hidden, ids, weights, grad = inputs(sizes, job["tokens"])
    rows = int(torch.bincount(ids.reshape(-1)).max())
    for tensor in (hidden, weights):
        tensor.requires_grad_(backward)
    base = status("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is resident now
    start = time.monotonic()
    with torch.set_grad_enabled(backward):
        out = experts(hidden, ids, weights)
        if backward:
            out.backward(grad)
    seconds = time.monotonic() - start
    peak = status("VmHWM") - status("RssFile") - status("RssShmem") - base
    if backward:
        peak -= sum(p.grad.numel() * p.grad.element_size() for p in experts.parameters())
    torch.save((out.detach(), hidden.grad), job["out"])
    return {"bytes": peak, "seconds": seconds, "rows": rows}


def touch_libraries() -> None:
    """Let the matmul libraries allocate what they keep for good before anything is measured."""
    import torch

    small = torch.rand(64, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.rand(4, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.arange(1, 5, dtype=torch.int32) * 16
    torch.nn.functional.grouped_mm(small, weight, offs=ends).square().sum().backward()
    torch.bmm(small.view(4, 16, 64), weight).square().sum().backward()
    (small @ weight[0]).square().sum().backward()


# ---------------------------------------------------------------- outside


def spawn(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    job = {**job, "out": str(folder / "out.pt")}
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # A freed tensor leaves the process at once: the mark follows what is alive.
        "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
        "MALLOC_MMAP_MAX_": "1000000",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1",
    }
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{job}: failed\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def shape_of(sizes: dict[str, Any]) -> Any:
    from mismatch.models.config import FoundConfig
    from mismatch.models.sizes import sized
    from tests.checkpoints import configuration

    config = configuration("gpt_oss", **sizes, num_experts_per_tok=TOP_K)
    return sized(FoundConfig(config.to_dict(), "made here", None))


def backward_bytes(
    shape: Any, implementation: str, tokens: int, b: int, rows: int | None = None
) -> int:
    """Predict the bytes of a trainer's passes, above weights, their gradient and the input.

    Where the highest moment comes before a gradient is there, that gradient's place is used.
    """
    from mismatch.training.packing import EXPERT_ROWS

    hidden, width, pairs = shape.hidden, shape.width, tokens * shape.top_k
    matrix = hidden * width  # a third of an expert; matmul libraries rearrange two of them at most
    biased = shape.biased_experts
    if implementation == "batched_mm":
        # Of the copies and their gradients the larger half; the gradient of all experts comes last.
        return max(2 * pairs, 4 * pairs - 2 * shape.experts) * matrix * b
    if implementation == "eager":
        # Every expert's gradient is a zero-filled one of all experts, added to the sum so far.
        zeros, saved = 2 * (shape.experts + 1) * matrix, 2 * hidden + (8 if biased else 4) * width
        return (zeros + pairs * saved + 2 * tokens * hidden) * b
    if implementation == "bounded":
        rows = min(tokens if rows is None else rows, EXPERT_ROWS)
        work = 4 * hidden + (14 if biased else 8) * width
        return 32 * pairs + (rows * work + 2 * tokens * hidden + 2 * matrix) * b
    return (pairs * (3 * hidden + 2 * width) + 2 * matrix) * b


def measure(sizes: dict[str, Any], implementation: str, tokens: int, backward: bool) -> Row:
    """Both passes of one implementation, each in a separate process."""
    import torch

    from mismatch.doctor.memory import forward_bytes

    job = {"sizes": sizes, "implementation": implementation, "tokens": tokens}
    exact, exact_gradient = _reference(tokens, sizes)
    with tempfile.TemporaryDirectory() as folder:
        forward = spawn({**job, "backward": False}, Path(folder))
        out, _ = torch.load(Path(folder) / "out.pt")
        both, gradient = None, None
        if backward:
            both = spawn({**job, "backward": True}, Path(folder))
            _, gradient = torch.load(Path(folder) / "out.pt")
    shape, rows = shape_of(sizes), forward["rows"]
    return Row(
        implementation,
        tokens,
        rows,
        forward["bytes"],
        None if both is None else both["bytes"],
        forward["seconds"],
        None if both is None else both["seconds"],
        _error(out, exact),
        None if gradient is None else _error(gradient, exact_gradient),
        _digest(out),
        forward_bytes(shape, implementation, tokens, 2, rows),
        backward_bytes(shape, implementation, tokens, 2, rows) if both else None,
    )


_references: dict[int, Any] = {}


def _reference(tokens: int, sizes: dict[str, Any]) -> Any:
    if tokens not in _references:
        _references[tokens] = reference(sizes, tokens)
    return _references[tokens]


def _error(found: Any, exact: Any) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def _digest(tensor: Any) -> str:
    import hashlib

    import torch

    return hashlib.sha256(tensor.view(torch.int16).numpy().tobytes()).hexdigest()[:16]


def run(sizes: dict[str, Any], names: list[str]) -> list[Row]:
    found = []
    print(HEADER, flush=True)
    few = (*FEW_BACKWARD, *FEW) if sizes == FULL else (32,)
    for name in names:
        for tokens in few if name == BATCHED else MANY[sizes == TINY :]:
            backward = name != BATCHED or tokens in FEW_BACKWARD
            found.append(measure(sizes, name, tokens, backward))
            show(found[-1])
    return found


HEADER = (
    f"{'implementation':<14} {'tokens':>6} {'rows':>5} {'forward':>10} {'predicted':>10} {'s':>7} "
    f"{'backward':>10} {'predicted':>10} {'s':>7} {'error':>8} {'gradient':>8}"
)


def show(row: Row) -> None:
    def mib(count: int | None) -> str:
        return f"{'-' if count is None else f'{count / MIB:,.1f}':>10}"

    back = "-" if row.backward_s is None else f"{row.backward_s:.2f}"
    error = "-" if row.gradient_error is None else f"{row.gradient_error:.1e}"
    print(
        f"{row.implementation:<14} {row.tokens:>6} {row.rows:>5} {mib(row.forward_bytes)} "
        f"{mib(row.predicted_forward)} {row.forward_s:>7.2f} {mib(row.backward_bytes)} "
        f"{mib(row.predicted_backward)} {back:>7} {row.output_error:>8.1e} {error:>8}",
        flush=True,
    )


def verdict(rows: list[Row]) -> list[str]:
    """Return what misses its goal, in words; print the slope of batched_mm."""
    missed = []
    by = {(row.implementation, row.tokens): row for row in rows}
    few = [row for row in rows if row.implementation == BATCHED]
    if len(few) > 1:
        first, last = few[0], few[-1]
        slope = (last.forward_bytes - first.forward_bytes) / (last.tokens - first.tokens)
        print(f"{BATCHED}: {slope / 1e6:,.1f} MB per token, forward")
    for row in rows:
        pairs = (
            ("forward", row.forward_bytes, row.predicted_forward),
            ("backward", row.backward_bytes, row.predicted_backward),
        )
        for kind, seen, said in pairs:
            if seen is None or said is None:
                continue
            if abs(said - seen) > max(BAND * seen, FLOOR):
                missed.append(
                    f"{row.implementation}, {row.tokens} tokens, {kind}: predicted / measured "
                    f"{said / seen:.2f}"
                )
    for tokens in MANY:
        eager, grouped, bounded = (
            by.get((name, tokens)) for name in ("eager", "grouped_mm", "bounded")
        )
        if eager is None or grouped is None or bounded is None:
            continue
        if bounded.digest != eager.digest:
            missed.append(f"bounded, {tokens} tokens: other bits than eager")
        if tokens == max(MANY):
            ours, *theirs = (row.backward_bytes or 0 for row in (bounded, eager, grouped))
            ratio = ours / min(theirs)
            print(f"bounded, {tokens} tokens, backward: {ratio:.2f} of the best of transformers'")
            if ratio > 0.5:
                missed.append(f"bounded takes {ratio:.2f} of the best; wanted: 0.5")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small layer: a trial of this script")
    parser.add_argument("--only", action="append", choices=IMPLEMENTATIONS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(json.loads(arguments.child))))
        return 0
    rows = run(TINY if arguments.tiny else FULL, arguments.only or list(IMPLEMENTATIONS))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    missed = verdict(rows)
    for text in missed:
        print(f"missed: {text}")
    return 1 if missed and not arguments.tiny else 0


if __name__ == "__main__":
    sys.exit(main())
