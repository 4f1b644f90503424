"""Write docs/evidence/moe-families.md: try to capture and replay the routing of each family.

    .venv/bin/python tools/moe_families.py

Real checks of trained models, with vLLM, are in benchmarks/families.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import families  # noqa: E402
from tests.family_configs import COMPOSITES  # noqa: E402

PAGE = ROOT / "docs" / "evidence" / "moe-families.md"


HEAD = """# MoE families

Families of transformers' causal language models (`model_type`) whose routing mismatch captures and
replays, with {version}. Each was tried on a tiny random model:

    .venv/bin/python tools/moe_families.py

| what | how it was tried | families |
| --- | --- | --- |
"""
CAPTURE = (
    "each expert is set to zero in turn: tokens whose output changes were routed to it, "
    "and the capture names the same experts"
)
MARGIN = "the gap between the last chosen and the first rejected expert is recorded"
REPLAYED = "every token gets random other experts, and these run"
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
# Where vLLM 0.32 on a CPU chose other experts than transformers, both in float32.
OTHER = "vLLM on a CPU chose other experts in float32 for {} of the rows; not investigated"
FOUND = {
    "cohere2_moe": OTHER.format("5 %"),
    "ernie4_5_moe": "vLLM's CPU router leaves out the selection bias (`e_score_correction_bias`) "
    "of softmax routers without groups",
    "lfm2_moe": OTHER.format("4 %"),
}
REPLAY = {
    "deepseek_v2": "experts outside the groups that the model's router chose get weight 0",
    "deepseek_v4": "layers that route by token id have no choice to answer",
}


def page() -> str:
    """Return the whole page, with every family tried now."""
    import torch

    from mismatch.training.routing.capture import SPECIAL_FAMILIES, why_unreadable

    notes = {name: family.note for name, family in SPECIAL_FAMILIES.items() if family.note}
    tried = {name: families.trial(name) for name in families.tried()}
    for name, trial in tried.items():
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


def _version(package: str, name: str = "") -> str:
    from importlib import metadata

    return f"{name or package} {metadata.version(package)}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
