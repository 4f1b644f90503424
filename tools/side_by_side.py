"""Write docs/engines-side-by-side.md: vLLM and SGLang against each other and against the trainer.

    .venv/bin/python tools/side_by_side.py            (about ten minutes on two cores)

Runs `mismatch check --engine vllm --engine sglang` on the embedded model in bf16 and, as a control,
in float32. Needs both engines: `make env env-sglang`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from mismatch.experiments.engine_pair import TRAINER, Triangle
from mismatch.pipeline.document import report_from_json
from mismatch.reports.formatting import number, percent, plural
from mismatch.reports.markdown import plain, show_table, table
from mismatch.reports.sections.square import engines, engines_sentences, party
from mismatch.run import store
from mismatch.types import Report

PAGE = Path(__file__).resolve().parent.parent / "docs" / "engines-side-by-side.md"
MODEL = "tiny-gpt-oss"
ENGINES = ("--engine", "vllm", "--engine", "sglang")
RUNS = {
    "bf16": ("--exact-kl", "0"),
    "float32, as a control": ("--exact-kl", "0", "--dtype", "fp32", "--train-dtype", "fp32"),
}
HEAD = """# vLLM and SGLang side by side

<!-- written by tools/side_by_side.py; do not edit -->

The embedded model, both engines and the trainer on one CPU ({versions}). On a CPU SGLang's
gpt-oss attention with sinks is this package's substitute ([sglang.md](sglang.md)), so this page
says how the pieces around it agree, and nothing about SGLang's GPU kernels. How to read it:
[two-engines.md](two-engines.md).

Made by `.venv/bin/python tools/side_by_side.py`.
"""


def main() -> None:
    reports = {name: run(flags) for name, flags in RUNS.items()}
    parts = [part(name, report) for name, report in reports.items()]
    first = next(iter(reports.values()))
    head = HEAD.format(versions=versions(first))
    PAGE.write_text("\n".join([head, *parts]), encoding="utf-8")
    print(f"wrote {PAGE}")


def run(flags: tuple[str, ...]) -> Report:
    """One check; its report."""
    with tempfile.TemporaryDirectory() as scratch:
        line = ["check", "--model", MODEL, *ENGINES, *flags, "--out", "run"]
        done = subprocess.run([sys.executable, "-m", "mismatch", *line], cwd=scratch, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(f"mismatch {' '.join(line)} measured nothing")
        return report_from_json(store.read_json(Path(scratch) / "run" / "report.json"))


def versions(report: Report) -> str:
    """Of the engines and of the trainer."""
    made = triangle_of(report)
    known = [f"{one.engine} {one.version}" for one in made.sides]
    trainer = report.fingerprints["fsdp"].get("versions", {})
    return ", ".join([*known, *(f"{name} {trainer[name]}" for name in ("torch", "transformers"))])


def part(title: str, report: Report) -> str:
    """One precision: each engine against the trainer, then all edges, then what follows."""
    made = triangle_of(report)
    size = f"{plural(report.run['n_prompts'], 'prompt')}, {plural(report.run['n_tokens'], 'token')}"
    return "\n\n".join(
        [
            f"## In {title}",
            f"    mismatch check --model {MODEL} {' '.join((*ENGINES, *RUNS[title]))}",
            f"{size} of the first engine.",
            table(
                ["engine, as it sampled", "mean \\|delta\\|:", "k3 KL:", "worst token:",
                 "routing flips:", "verdict"],
                [own_row(made, one.engine) for one in made.sides],
            ),
            "\n".join(f"- {plain(sentence)}" for sentence in engines_sentences(made, report)[:-1]),
            show_table(engines(made, report).tables[0]),
        ]
    ) + "\n"  # fmt: skip


def own_row(made: Triangle, engine: str) -> list[str]:
    """An engine against the trainer on its own tokens."""
    edge = made.edge(engine, TRAINER, engine, "decode")
    row = next(one for one in made.sides if one.engine == engine)
    if edge is None or edge.comparison is None:
        raise SystemExit(f"{engine} against the trainer was not measured")
    known = edge.comparison.metrics
    flips = edge.comparison.routing.get("routing_disagree_layer")
    return [
        f"{party(engine)} {row.version}",
        number(known["logprob_abs_diff_mean"].value),
        number(known["k3_kl"].value),
        number(known["logprob_abs_diff_max"].value),
        percent(flips.value) if flips else "not captured",
        row.verdict.status if row.verdict else "not judged",
    ]


def triangle_of(report: Report) -> Triangle:
    if report.result("engines") is None:
        raise SystemExit("the check had one engine")
    return report.result("engines")


if __name__ == "__main__":
    main()
