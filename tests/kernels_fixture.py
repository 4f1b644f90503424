"""A made-up audit of kernels: every outcome, verdict and missing number that a rendering meets."""

from __future__ import annotations

from mismatch.features.kernels.results import (
    ATTENTION_COLUMNS,
    EXPERT_COLUMNS,
    Audit,
    AuditReport,
    Error,
    Finding,
)

TAG = "<script>alert(2)</script>"
HOSTILE = "my.<script>alert(1)</script>:attend\x1b[31m"
ASKED = {
    "sinks": Finding("sinks", "failed", "the sinks change nothing", 1.0, 0.01),
    "sink_gradient": Finding("sink_gradient", "failed", "no gradient arrives", 1.0, 0.02),
    "forward": Finding("forward", "failed", f"{TAG} is off", 0.213, 1e-5),
    "batches": Finding("batches", "failed", "other bits beside a longer row", 3e-8, 0.0, False),
    "offsets": Finding("offsets", "not_tested", "it takes no cache"),
}


def findings(*faults: str, columns: tuple[str, ...] = ATTENTION_COLUMNS) -> tuple[Finding, ...]:
    return tuple(
        ASKED[name] if name in faults else Finding(name, "passed", "as it should be", 1e-7, 1e-5)
        for name in columns
    )


def errors(scale: float = 1.0, sinks: float | None = None) -> tuple[Error, ...]:
    floors = {"fp32": 6e-8, "bf16": 2.1e-3}
    return tuple(
        Error(
            dtype,
            floor * scale,
            {
                "q": floor * 2 * scale,
                "k": floor * 2,
                "v": floor,
                "sinks": 3 * floor if sinks is None else sinks,
            },
            floor,
        )
        for dtype, floor in floors.items()
    )


def make_audit_report(hostile: str = HOSTILE) -> AuditReport:
    audits = (
        Audit("sink-sdpa", "attention", "ours", "sound", "", True, True, findings(), errors(),
              2.5),
        Audit("eager", "attention", "transformers", "sound", "", True, False,
              findings("batches"), errors(1.4), 3.0),
        Audit("sdpa", "attention", "transformers", "unusable", "gpt-oss refuses it: no sinks",
              False, False, findings("sinks", "sink_gradient", "forward"), errors(1e4, 1.0)),
        Audit("flash_attention_2", "attention", "transformers", "unusable",
              f"the package flash_attn is not installed {TAG}", False),
        Audit(hostile, "attention", "yours", "wrong", "", True, False,
              findings("sinks", "sink_gradient", "offsets"), errors(1e5, 1.0)),
        Audit("my.kernels:dies", "attention", "yours", "unusable",
              "crashed: its process was ended by signal 11 (SIGSEGV)", False, crashed=True),
        Audit("grouped_mm", "experts", "transformers", "sound", "", True, True,
              findings(columns=EXPERT_COLUMNS),
              (Error("bf16", 0.002, {"hidden": 0.003, "router": 0.004}, 0.002),)),
    )  # fmt: skip
    return AuditReport(
        model="tiny-gpt-oss",
        device="cpu",
        geometry={"heads": 8, "kv_heads": 2, "head_dim": 32, "window": 64, "sinks": True,
                  "experts": 8, "top_k": 2},
        audits=audits,
        facts={"versions": {"torch": "2.0"}, "seed": 0, "created": "2026-01-01T00:00:00+00:00"},
        not_tested=(f"GPU kernels: there is no GPU {TAG}",),
    )  # fmt: skip


def sound_report() -> AuditReport:
    """Nothing wrong with anything that was run."""
    full = make_audit_report()
    return AuditReport(full.model, full.device, full.geometry, full.audits[:4], full.facts)
