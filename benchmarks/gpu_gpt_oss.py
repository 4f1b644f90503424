"""gpt-oss-20b at full shape on one GPU, without its weights; and what only a GPU can answer.

    python benchmarks/gpu_gpt_oss.py [--tiny] [--json FILE] [--write docs/evidence/gpu-results.md]
    python benchmarks/gpu_gpt_oss.py --hub DIR

The real architecture (24 layers, 32 experts, vocabulary 201,088 …) gets random bf16 weights
straight on the device, shard by shard, so that neither a checkpoint on disk, nor a hub, nor an
engine is needed; scoring is the product's own path: FSDP2 at world size 1, routing recorded,
logprobs and entropies of every token. Random weights route more evenly than trained; nothing
else about speed or memory depends on their values. Needs one GPU of 80 GB or more.

Then the questions of benchmarks/gpu_parts.py are put, each answered yes, no or "not run" (with the
reason). About ten minutes in all on one GPU.

``--hub DIR`` measures nothing: it writes that shape with random MXFP4 experts into a cache of the
hub, 13 GB, so that ``HF_HUB_OFFLINE=1 HF_HOME=DIR mismatch check --model gpt-oss-20b`` runs.

``--tiny`` runs the same code on a model of a few thousand parameters, on a CPU as well.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_parts import WIDE, answers, released  # noqa: E402
from mismatch.specs import Pass, Sampling, TrainSpec  # noqa: E402
from mismatch.training.attention.resolve import resolve_for  # noqa: E402
from mismatch.training.distributed import MemoryPeak, World  # noqa: E402
from mismatch.training.load import LoadedModel, shard  # noqa: E402
from mismatch.training.score import run_batches  # noqa: E402
from mismatch.training.scorer import ForwardOptions, torch_dtype  # noqa: E402
from mismatch.training.source import skeleton  # noqa: E402
from tests.checkpoints import configuration, rollout  # noqa: E402

SHAPE: dict[str, Any] = {
    **WIDE,
    "num_hidden_layers": 24,
    "vocab_size": 201088,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
PROMPT = 64
GIB = 1 << 30
START, END = "<!-- gpt-oss-20b -->", "<!-- /gpt-oss-20b -->"


@dataclass(frozen=True)
class Measured:
    """One load of work.

    Attributes:
        peak_gib: most device memory in use at once, weights included.
    """

    name: str
    tokens: int
    seconds: float
    peak_gib: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def random_model(config: Any, spec: TrainSpec, world: World) -> LoadedModel:
    """Return the architecture with random weights, each rank making only that rank's shard."""
    import transformers

    bare = skeleton(config)
    attention = resolve_for(spec.attention, bare, world.device, torch_dtype(spec.dtype))
    build: Any = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = build(
            config,
            dtype=torch_dtype(spec.master_dtype),
            attn_implementation=attention.implementation,
        )
    scorer = shard(model, spec, world.mesh)
    scorer.to_empty(device=world.device)
    rope = model.model.rotary_emb  # its frequencies are buffers, and now empty as well
    model.model.rotary_emb = type(rope)(config).to(world.device)
    torch.manual_seed(world.rank)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            if "norm" in name:
                local.fill_(1.0)
            elif name.endswith("bias"):
                local.zero_()
            else:
                local.normal_(std=1.0 if "sinks" in name else 0.02)
    experts = model.config._experts_implementation
    return LoadedModel(
        scorer.eval(), spec, attention, experts, spec.master_dtype, None, None, world.device, {}
    )


def score(world: World, loaded: LoadedModel, name: str, lengths: list[int]) -> Measured:
    """Every token behind the prompt of sequences of these lengths, once; the first to run warms."""
    config = loaded.scorer.decoder_config
    work = rollout(tuple((PROMPT, n - PROMPT) for n in lengths), vocabulary=config.vocab_size)
    ask, job = ForwardOptions(Sampling(), routing=True), Pass(name, loaded.spec)
    _wait(world.device)
    resident = _allocated(world.device)
    with torch.no_grad(), MemoryPeak(world.device, True) as peak:
        started = time.perf_counter()
        parts = run_batches(world, loaded, work, job, ask)
        _wait(world.device)
        seconds = time.perf_counter() - started
    scored = sum(len(part.targets) for part in parts)
    assert scored == work.n_actions, f"{scored} of {work.n_actions} tokens were scored"
    assert peak.bytes is not None
    return Measured(name, sum(lengths), seconds, (resident + peak.bytes) / GIB)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def run(tiny: bool, keep: Path | None) -> dict[str, Any]:
    """Measure, then ask; ``keep`` holds what is known so far, should the machine be taken away."""
    world = World.start()
    if not tiny and world.device.type != "cuda":
        world.close()
        raise SystemExit("no GPU here: use --tiny to run the same code on a tiny model")
    config = configuration("gpt_oss", **({} if tiny else SHAPE))
    long, many = (512, [256] * 4) if tiny else (16384, [2048] * 16)
    # Room for a long sequence alone, or for eight of the others in one forward pass.
    spec = TrainSpec("random", dtype="bf16", master_dtype="bf16", micro_batch_tokens=long)
    with MemoryPeak(world.device, True) as peak:
        started = time.perf_counter()
        loaded = random_model(config, spec, world)
        _wait(world.device)
        build_s = time.perf_counter() - started
    score(world, loaded, "warm-up", [256])
    works = [(f"{len(many)} x {many[0]}", many), (f"1 x {long}", [long])]
    measured = [score(world, loaded, name, lengths) for name, lengths in works]
    facts: dict[str, Any] = {
        "model": "tiny" if tiny else "gpt-oss-20b shape, random weights",
        "parameters": sum(p.numel() for p in loaded.scorer.parameters()),
        "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "attention": loaded.attention.label,
        "experts": loaded.experts,
        "build_s": build_s,
        "build_peak_gib": (peak.bytes or 0) / GIB,
        "date": time.strftime("%Y-%m-%d"),
        "scored": [{**asdict(one), "tokens_per_s": one.tokens_per_s} for one in measured],
        "answers": [],
    }
    del loaded
    for one in answers(world):
        facts["answers"].append(asdict(one))
        print(f"{one.seconds:.0f} s: {one.question}: {one.state}: {one.detail}", flush=True)
        if keep:
            keep.write_text(json.dumps(facts, indent=1))
    world.close()
    return facts


def offline_hub(home: Path, shape: dict[str, Any]) -> Path:
    """Write the checkpoint where the hub's client looks for openai/gpt-oss-20b without network."""
    cached, commit = home / "hub" / "models--openai--gpt-oss-20b", "0" * 40
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = released(cached / "snapshots" / commit, device, **shape)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    return made


def markdown(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['date']}: {facts['device']}, torch {facts['torch']}, Python {facts['python']}; "
        f"{facts['parameters'] / 1e9:.1f} billion parameters ({facts['model']}), bf16, "
        f"attention {facts['attention']}, experts {facts['experts']}.",
        "",
        f"Built in {facts['build_s']:.1f} s with a peak of {facts['build_peak_gib']:.1f} GiB.",
        "",
        "| tokens | seconds | tokens/s | peak memory |",
        "| --- | ---: | ---: | ---: |",
    ]
    for one in facts["scored"]:
        lines.append(
            f"| {one['name']} | {one['seconds']:.2f} | {one['tokens_per_s']:.0f} | "
            f"{one['peak_gib']:.1f} GiB |"
        )
    lines += ["", "| question | | |", "| --- | --- | --- |"]
    for one in facts["answers"]:
        lines.append(f"| {one['question']} | {one['state']} | {one['detail']} |")
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    """Replace the text between the two marks."""
    before, mark, rest = path.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{path} lacks the marks {START} and {END}")
    path.write_text(f"{before}{START}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, also on a CPU")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--write", type=Path, help="put the table into this Markdown file")
    parser.add_argument(
        "--hub", type=Path, metavar="DIR", help="write a checkpoint for this HF_HOME"
    )
    options = parser.parse_args()
    if options.hub:
        print(offline_hub(options.hub, {} if options.tiny else SHAPE))
        return
    facts = run(options.tiny, options.json)
    print(markdown(facts))
    gone_wrong = [one["question"] for one in facts["answers"] if one["state"] == "no"]
    if options.write:
        write(options.write, markdown(facts))
    if gone_wrong:
        raise SystemExit(f"does not hold: {'; '.join(gone_wrong)}")


if __name__ == "__main__":
    main()
