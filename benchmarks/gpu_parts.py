"""What a GPU has to show except speed: one function a question, each with its answer or why not.

Run by ``benchmarks/gpu_gpt_oss.py``; nothing here needs vLLM or a network, and the parts that would
use vLLM say so where it is missing. On a CPU the same code runs on tiny sizes.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from mismatch.engines.distribution_capture import stable_top_k
from mismatch.models.digests import digest_tensor
from mismatch.run import store
from mismatch.specs import Pass, TrainSpec
from mismatch.training.attention.resolve import OUR_KERNELS, register_kernels
from mismatch.training.attention.trial import Geometry, try_kernel
from mismatch.training.distributed import World, pin_precision
from mismatch.training.load import load
from mismatch.training.packing import Batch, collate, plan_batches
from mismatch.training.routing.capture import recording
from mismatch.training.score import score_pass
from mismatch.training.scorer import Scorer
from mismatch.training.source import skeleton
from mismatch.types import Rollout, Routing
from tests.checkpoints import configuration, make, rollout, tokenizer

MIB = 1 << 20
HEADS = Geometry(64, 8, 64, 64, True, True, 0.125)  # gpt-oss-20b's
# gpt-oss-20b's layer. Its width decides which kernel vLLM takes.
WIDE = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
}
# So few prompts may leave a metric undecided.
SHORT = (
    "--num-prompts",
    "16",
    "--samples-per-prompt",
    "2",
    "--max-tokens",
    "64",
    "--fail-on",
    "unfit",
)
EAGER, MARLIN = "enforce_eager=true", "moe_backend=marlin"
VARIANTS = {  # the float32 engine and the noise floor once: ten minutes in all
    "auto with CUDA graphs": (),
    "auto, eager": ("--depth", "quick", "--engine-arg", EAGER),
    "Marlin, eager": ("--depth", "quick", "--engine-arg", EAGER, "--engine-arg", MARLIN),
    "auto on two GPUs": ("--depth", "quick", "--tensor-parallel-size", "2"),
}
COMPARED = ("auto, eager", "Marlin, eager")
# What no check of this size tests; and what a quick check leaves out.
EXPECTED = (
    *("sharding", "positions beyond", "several turns", "weight syncs", "sequence weights"),
    "chat template",  # the model has none
    "the same tokens",  # a batch's other rows move a GPU's last digits
)
QUICK = ("rounding or fault",)
AGREE = 0.99  # attention's own noise moves choices that all but tie
FLASH = {
    "FlashAttention 2": ("flash_attention_2", False),  # takes no sinks: it must be found out
    "FlashAttention 3 with sinks": ("kernels-community/vllm-flash-attn3", True),
}


@dataclass(frozen=True)
class Answer:
    """One question.

    Attributes:
        state: "yes", "no", or "not run".
    """

    question: str
    state: str
    detail: str
    seconds: float = 0.0


class NotHere(Exception):
    """What a part needs is not on this machine."""


def ask(question: str, part: Callable[[], str]) -> Answer:
    """Run one part; an AssertionError is a "no", anything else that is raised is told too."""
    start = time.monotonic()
    try:
        state, detail = "yes", part()
    except NotHere as reason:
        state, detail = "not run", str(reason)
    except AssertionError as error:
        state, detail = "no", str(error) or "it does not hold"
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        state, detail = "no", f"{type(error).__name__}: {first}"
    return Answer(question, state, detail, time.monotonic() - start)


def answers(world: World) -> Iterator[Answer]:
    """All parts, cheapest first."""
    device = world.device
    yield ask("weights are digested under a default device", lambda: digests(device))
    yield ask("float32 is not TF32 whatever the container sets", lambda: tf32(device))
    for name, (kernel, sinks) in FLASH.items():
        yield ask(f"{name}: its sinks are judged right", partial(flash, kernel, sinks, device))
    yield ask("triton_kernels route by a stable descending sort", lambda: triton_ties(device))
    yield ask("sink-sdpa runs all kinds of passes", lambda: passes(device))
    yield ask("bf16 at rest is float32 at rest, bit for bit", lambda: masters(world))
    yield from whole_checks(device)


def need_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise NotHere("no GPU here")


def digests(device: torch.device) -> str:
    values = torch.randn(1000, device=device).bfloat16()
    digest = digest_tensor(values)
    with torch.device(device if device.type == "cuda" else "meta"):
        assert digest_tensor(values) == digest, "another digest under a default device"
    assert digest_tensor(values.cpu()) == digest, "another digest on the CPU"
    return "equal on the device, on the CPU and under a default device"


def tf32(device: torch.device) -> str:
    need_cuda(device)
    left, right = (torch.randn(1024, 1024, device=device) for _ in range(2))
    exact = left.double() @ right.double()

    def error() -> float:
        return float(((left @ right).double() - exact).norm() / exact.norm())

    torch.set_float32_matmul_precision("high")
    loose = error()
    pin_precision()
    pinned = error()
    assert pinned < 1e-6, f"relative error {pinned:.1e}"
    return f"relative error {loose:.1e} with TF32 allowed, {pinned:.1e} pinned"


def flash(kernel: str, sinks: bool, device: torch.device) -> str:
    need_cuda(device)
    from transformers import AttentionInterface  # noqa: F401 (registers its kernels)

    package = "flash_attn" if kernel == "flash_attention_2" else "kernels"
    if importlib.util.find_spec(package) is None:
        raise NotHere(f"the package {package} is not installed")
    found = try_kernel(kernel, HEADS, device, torch.bfloat16)
    if found.fault.startswith("it does not run"):
        raise NotHere(found.fault)
    told = f"output: {found.fault or 'right'}; gradients: {found.backward_fault or 'right'}"
    assert bool(found.fault) != sinks, told
    return told


def triton_ties(device: torch.device) -> str:
    need_cuda(device)
    with suppress(ImportError):  # vLLM's copy is found under its plain name only after this
        importlib.import_module("vllm.utils.import_utils").import_triton_kernels()
    for name in ("vllm.third_party.triton_kernels.topk", "triton_kernels.topk"):
        try:
            topk = importlib.import_module(name).topk
            break
        except ImportError:
            continue
    else:
        raise NotHere("no triton_kernels: neither vLLM nor the package is installed")
    logits = torch.randn(4096, 32, device=device).bfloat16()
    taken = topk(logits, 4, apply_softmax=True)
    ids = (taken[1] if isinstance(taken, tuple) else taken.indx).long()
    wanted = stable_top_k(logits, 4)
    same = (ids.sort(1).values == wanted.sort(1).values).all(1)
    tied = (logits.float().topk(5).values.diff(dim=1) == 0).any(1).sum()
    other = (logits.topk(4).indices.sort(1).values != wanted.sort(1).values).any(1).sum()
    assert bool(same.all()), f"{int((~same).sum())} of 4,096 rows differ, {int(tied)} hold ties"
    return f"4,096 rows, {int(tied)} with ties; torch.topk differs in {int(other)}"


def passes(device: torch.device) -> str:
    """Run padding and packing, recording or not, with gradients or not, in bf16 and fp32."""
    from transformers import AutoModelForCausalLM

    register_kernels()
    attention = OUR_KERNELS["sink-sdpa"]
    config = configuration("gpt_oss", head_dim=64)
    draw = np.random.default_rng(0)
    rows = [draw.integers(1, config.vocab_size, int(n)) for n in draw.integers(60, 200, 24)]
    told = []
    for dtype in (torch.bfloat16, torch.float32):
        build: Any = AutoModelForCausalLM.from_config
        model = build(config, dtype=dtype, attn_implementation=attention).to(device)
        scorer = Scorer(model.eval())
        start = time.monotonic()
        for layout, budget, record, grad in (
            ("padding", 600, False, False),
            ("padding", 200, True, False),
            ("packing", 600, True, False),
            ("padding", 600, False, True),
        ):
            for plan in plan_batches([len(row) for row in rows], budget, layout):
                batch = collate([rows[i] for i in plan.sequences], layout, device)
                run_one(scorer, batch, record, grad)
        told.append(f"{dtype}: {time.monotonic() - start:.1f} s")
    if device.type == "cuda":
        told.append(f"peak {torch.cuda.max_memory_allocated() / MIB:.0f} MiB")
    return "; ".join(told)


def run_one(scorer: Scorer, batch: Batch, record: bool, grad: bool) -> None:
    with torch.set_grad_enabled(grad), recording(scorer.moe) if record else nullcontext():
        hidden = scorer.hidden(batch)
    if grad:
        hidden.float().square().mean().backward()
        scorer.zero_grad()


def masters(world: World) -> str:
    """Two layers of full width on a GPU; and the first load's memory is given back."""
    wide = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 8, "head_dim": 64}
    shape = wide if world.device.type == "cuda" else {}
    with tempfile.TemporaryDirectory() as place:
        model = make("gpt_oss", Path(place) / "model", **shape)
        told = []
        for dtype in ("bf16", "fp32"):
            spec = TrainSpec(model=str(model), dtype=dtype)
            scored = []
            for master in ("auto", "fp32"):
                one = replace(spec, master_dtype=master)
                loaded = load(one, world.mesh, world.device)
                scored.append(score_pass(world, loaded, rollout(), Pass("fsdp", one)))
                del loaded
            left, right = scored
            assert left is not None
            assert right is not None
            assert np.array_equal(left.logprobs, right.logprobs), f"{dtype}: other logprobs"
            told.append(f"{dtype}: equal, at rest {left.fingerprint['master_dtype']} and fp32")
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        told.append(f"{torch.cuda.memory_allocated() / MIB:.0f} MiB held after all loads")
    return "; ".join(told)


def released(place: Path, device: torch.device, **shape: Any) -> Path:
    """Write gpt-oss with random weights as it is published: experts in MXFP4, in several files.

    Two layers of gpt-oss-20b's width by default. The head is small, so that what random routers
    make of rounding stays below the levels of a check. On a GPU 20b takes 16 s.
    """
    config = configuration("gpt_oss", **{**WIDE, **shape})
    draw = torch.Generator(device).manual_seed(0)
    place.mkdir(parents=True, exist_ok=True)
    parameters = list(skeleton(config).named_parameters())
    layers = sorted({layer_of(name) for name, _ in parameters})
    files = {
        layer: f"model-{i:05}-of-{len(layers):05}.safetensors" for i, layer in enumerate(layers, 1)
    }
    index: dict[str, str] = {}
    for layer, file in files.items():
        held: dict[str, torch.Tensor] = {}
        for name, parameter in parameters:
            if layer_of(name) == layer:
                held |= drawn(name, parameter.shape, draw)
        save_file(held, place / file, {"format": "pt"})
        index |= dict.fromkeys(held, file)
    written = {"metadata": {}, "weight_map": index}
    (place / "model.safetensors.index.json").write_text(json.dumps(written))
    config.architectures, config.dtype = ["GptOssForCausalLM"], "bfloat16"
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


def layer_of(name: str) -> str:
    return name.split(".")[2].zfill(3) if ".layers." in name else ""


def drawn(name: str, size: torch.Size, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Draw a parameter: bf16, or 4-bit values two to a byte and one exponent per 32 of them."""
    if name.endswith(("gate_up_proj", "down_proj")):
        experts, inputs, outputs = size
        usual = 127 - round(math.log2(3 * inputs**0.5))
        shape = (experts, outputs, inputs // 32, 16)
        like: Any = {"generator": draw, "device": draw.device, "dtype": torch.uint8}
        blocks = torch.randint(0, 256, shape, **like)
        scales = torch.randint(usual - 1, usual + 2, shape[:3], **like)
        return {f"{name}_blocks": blocks.cpu(), f"{name}_scales": scales.cpu()}
    noise = torch.randn(size, generator=draw, device=draw.device)
    if "norm" in name:
        noise = 1 + 0.1 * noise
    elif "bias" in name:
        noise *= 0.1
    elif "sinks" not in name and "embed" not in name:
        noise *= (0.5 if "lm_head" in name else 1.2) / size[-1] ** 0.5
    return {name: noise.bfloat16().cpu()}


def whole_checks(device: torch.device) -> Iterator[Answer]:
    """Check the model in MXFP4 with the kernel that vLLM chooses, and with Marlin's.

    "auto" is what this GPU gets: Triton's or FlashInfer's kernel on Hopper and Blackwell, Marlin's
    on Ampere. On two GPUs the engine is split and the trainer has two ranks.
    """
    with tempfile.TemporaryDirectory() as place:
        made: list[Path] = []

        def model() -> Path:
            need_cuda(device)
            if importlib.util.find_spec("vllm") is None:
                raise NotHere("vLLM is not installed")
            if not made:
                made.append(released(Path(place) / "model", device))
            return made[0]

        for name, flags in VARIANTS.items():
            part = partial(whole_check, model, Path(place) / name.replace(" ", "-"), flags)
            yield ask(f"vLLM: a whole check of MXFP4 experts, {name}", part)
        yield ask(
            "the chosen kernel routes as Marlin's does",
            partial(same_routes, *(Path(place) / name.replace(" ", "-") for name in COMPARED)),
        )


def whole_check(model: Callable[[], Path], out: Path, flags: tuple[str, ...]) -> str:
    """Run one check from the command line and read its report."""
    directory = model()
    if "--tensor-parallel-size" in flags and torch.cuda.device_count() == 1:
        raise NotHere("one GPU")
    command = [sys.executable, "-m", "mismatch", "check", "--model", str(directory)]
    command += ["--out", str(out), "--no-locate", "--no-explain", *SHORT, *flags]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    told = f"{done.stdout}\n{done.stderr if done.returncode else ''}".strip().splitlines()
    last = next((line for line in told if line.startswith("error: ")), (told or ["no output"])[-1])
    assert done.returncode == 0, last
    fault = fault_of(out)
    assert not fault, fault
    return last


def fault_of(run: Path) -> str:
    """Return what a check on a GPU must not say; "": it says nothing of the kind."""
    report = json.loads((run / "report.json").read_text("utf-8"))
    if not (run / "routing" / "vllm-decode.safetensors").exists():
        return "the engine gave no routes"
    missing = {entry["what"]: entry["reason"] for entry in report["not_tested"]}
    expected = (*EXPECTED, *QUICK) if report["run"]["spec"]["quick"] else EXPECTED
    unexpected = {what: reason for what, reason in missing.items() if not what.startswith(expected)}
    return "; ".join(f"not tested: {what}: {reason}" for what, reason in unexpected.items())


def same_routes(one: Path, other: Path) -> str:
    """Compare the experts that two kernels chose for the same prompts.

    The first layer's router reads what attention gives, before any expert: it must agree.
    """
    sides = []
    for run in (one, other):
        if not (run / "routing" / "vllm-decode.safetensors").exists():
            raise NotHere("one of the two checks left no routes")
        sides.append((store.load_rollout(run), store.load_scoring(run, "vllm:decode").routing))
    shares = equal_choices(*sides)
    assert shares[0] > AGREE, f"{1 - shares[0]:.2%} of the first layer's choices differ"
    return "equal choices by layer: " + ", ".join(f"{share:.2%}" for share in shares)


def equal_choices(*sides: tuple[Rollout, Routing | None]) -> list[float]:
    """Return for every layer how many of the experts of the prompts' tokens two sides share."""
    chosen = []
    for sampled, routing in sides:
        assert routing is not None
        starts = sampled.offsets[:-1]
        masks = np.split(sampled.action_mask, sampled.offsets[1:-1])
        firsts = [int(np.flatnonzero(mask)[0]) for mask in masks]
        rows = [np.arange(start, start + n) for start, n in zip(starts, firsts, strict=True)]
        chosen.append(np.sort(routing.ids[np.concatenate(rows)], -1))
    return [float(x) for x in (chosen[0] == chosen[1]).all(-1).mean(0)]
