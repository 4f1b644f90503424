"""The RL frameworks that mismatch knows, and the version of each that was read.

Fixes (experiments/fixes/guide-*.toml) and corrections hold their settings, features/presets/*.toml
their trainers, metrics/framework_names.py their metrics; all of them name frameworks from here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Framework:
    """One framework.

    Attributes:
        id: as in ``--framework ID``.
        title: as it writes its name.
        version: that was read; "" where a source names a commit itself.
        logs: its source was read for the metrics that it logs.
    """

    id: str
    title: str
    version: str = ""
    logs: bool = True

    @property
    def read_in(self) -> str:
        """Title and version."""
        return f"{self.title} {self.version}".strip()


FRAMEWORKS = {
    framework.id: framework
    for framework in (
        Framework("verl", "verl", "0.9.1"),
        Framework("nemo-rl", "NeMo-RL", "main (2026)"),
        Framework("trl", "TRL", "1.16.0"),
        Framework("prime-rl", "prime-rl", "main (2026)"),
        Framework("slime", "slime", "main (2026)"),
        Framework("miles", "miles", "main (2026)"),
        Framework("openrlhf", "OpenRLHF"),
        Framework("skyrl", "SkyRL", "0.3.0"),
        Framework("areal", "AReaL"),
        # Second-hand: what others write of them.
        Framework("llama.cpp", "llama.cpp", logs=False),
        Framework("r3", "R3 paper", logs=False),
    )
}
BY_TITLE = {framework.title: framework for framework in FRAMEWORKS.values()}
# In the order in which a report shows their settings.
CORRECTING = tuple(FRAMEWORKS[id].title for id in ("verl", "trl", "nemo-rl", "prime-rl"))
# Of kernels with sinks: eager has 3 copies of the scores of 64 heads in bf16.
KERNEL_COSTS = {
    "flex_attention": "stores no attention matrix, needs a GPU",
    "eager": "stores the attention matrix: 98 GB at 16,000 tokens",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to write into one framework's configuration."""

    framework: str
    lines: tuple[str, ...]
    """The setting, as lines of its file; empty where the framework lacks it."""
    remark: str
    """What to know about it, or why there is none."""
    source: str
    """What the keys were read from."""
    selects: str = ""
    """What the lines select, where that may be another thing than what the fix sets."""

    @classmethod
    def of(cls, framework: str, entry: dict[str, str], source: str) -> Recipe:
        """Return an entry of a file; a source without a path names a commit itself."""
        lines, known = entry.get("lines", "").strip("\n").splitlines(), BY_TITLE.get(framework)
        if known is not None and known.version and "#" not in source.partition(";")[0]:
            source = f"{known.read_in}, {source}"
        selects = entry.get("selects", "")
        return cls(framework, tuple(lines), entry.get("remark", ""), source, selects)

    def proof(self, ran: tuple[str, ...], *, in_trainer: bool) -> str:
        """Return whether the lines set what was measured; "" of an engine's own setting.

        Args:
            ran: the attention kernel that ran with the fix, and the fix's value.
            in_trainer: the fix is one of the trainer, which is another program in a framework.
        """
        cost = f", {KERNEL_COSTS[self.selects]}" if self.selects in KERNEL_COSTS else ""
        if self.selects and self.selects not in ran:
            return f"not run, should give the same result: {self.selects}{cost}"
        if self.selects and self.selects == ran[0]:
            return f"measured: {self.selects}{cost}"
        return "the same setting, not run in this framework" if in_trainer else ""
