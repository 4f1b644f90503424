"""Where in a sequence the two sides part: an onset, growth, the first token, blocks.

|delta| is first divided by what tokens of that probability have on average, so that an unlikely
token is not taken for a place.
"""

from __future__ import annotations

import numpy as np

from mismatch.analysis.diagnosis.case import Case, above, correlation
from mismatch.analysis.diagnosis.detector import Detector, Evidence, Finding, Look, Repair, Side
from mismatch.analysis.diagnosis.detectors.displacement import CALM, UNLIKE, imbalance, legs_of
from mismatch.analysis.diagnosis.detectors.excess import excess
from mismatch.types import Bools, Floats, NotTested

MIN_TOKENS = 400
JUMP = 2.2  # times, that |delta| must rise by; clean blocks reach 1.5
FIRST = 4.0
OPENS = 3.0  # times the others, of tokens that open a block; the best of many lengths
BLOCKS = (16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048)
SPIKE = 0.5  # nats from float32, of a token that is far off
MOST_SPIKES = 0.03  # of the tokens; more are no few
MORE = 3.0  # times the prompts of the other side, whose router may round less
BY_CHANCE = 0.01  # 0.2 at least in 1,750 clean blocks
KINDS = {
    "sliding_window": "sliding-window",
    "max_num_batched_tokens": "chunked-prefill",
    "block_size": "kv-block",
}


def size(case: Case) -> Floats:
    """|delta| over its mean among tokens of like probability, [A]; 1 on average."""
    level = case.left + case.right
    edges = np.quantile(level[case.kept], np.linspace(0, 1, 11)[1:-1])
    group = np.searchsorted(edges, level)
    a = np.abs(case.delta)
    a = np.minimum(a, np.quantile(a[case.kept], 0.995))
    count = np.bincount(group[case.kept], minlength=10)
    mean = np.bincount(group[case.kept], a[case.kept], 10) / np.maximum(count, 1)
    floor = 1e-3 * float(a[case.kept].mean()) + 1e-12
    return np.asarray(a / np.maximum(mean, floor)[group])


def onset(case: Case) -> Look | NotTested:
    """The absolute position from which |delta| is larger, by a scan of all of them."""
    position = case.position
    scan = change(case, size(case), position)
    if scan is None:
        return NotTested("onset", f"needs {MIN_TOKENS} tokens at more than 16 positions")
    at, before, after, steep = scan
    evidence: tuple[Evidence, ...] = (
        Evidence("position of the onset", at),
        Evidence("|delta| after over before", after / before if before else float("inf"), "1"),
        Evidence("share of the rise at that place", steep),
    )
    if correlation(case) < UNLIKE:  # where nothing of the law is left a place says nothing
        return Look(evidence)
    later = position >= at
    u = size(case)
    rise = case.ratio(np.where(later, u, 0.0), np.where(later, before, 0.0) + 1e-12)
    if not above(rise, JUMP) or not case.beyond_rounding(later):
        return Look(evidence)
    scale = np.where(later, before / after, 1.0)
    effect = case.share(case.delta * scale)
    if not above(effect, 0.2):
        return Look(evidence)
    repair = Repair(case.left, case.left + case.delta * scale)
    if steep < 0.5:
        finding = Finding("grows-with-position", "either", effect, evidence, repair=repair,
                          alike=("rope-config", "fsdp-cast-inputs", "template-drift"))  # fmt: skip
        return Look(evidence, (finding,))
    if case.reference is not None and case.beyond_rounding(~later):
        return Look(evidence)  # what begins somewhere leaves nothing before it
    if _opens_blocks(case):
        return Look(evidence)
    cause, stated = _boundary(case, at)
    evidence += stated
    alike = ("fp8-kv-tile", "sliding-window", "chunked-prefill")
    finding = Finding(cause, _side(case, later), effect, evidence, repair=repair,
                      alike=tuple(name for name in alike if name != cause))  # fmt: skip
    return Look(evidence, (finding,))


def _side(case: Case, where: Bools) -> Side:
    """The side that is farther from float32 in these tokens, by its whole interval."""
    if (legs := legs_of(case)) is None:
        return "either"
    engine, trainer = (np.where(where, np.abs(leg), 0.0) for leg in legs)
    if above(case.ratio(engine, trainer), CALM):
        return "engine"
    return "trainer" if above(case.ratio(trainer, engine), CALM) else "either"


def _opens_blocks(case: Case) -> bool:
    """Whether float32 shows that tokens which open a block are off, and no others."""
    look = blocks(case) if legs_of(case) is not None else None
    return isinstance(look, Look) and bool(look.findings)


def change(case: Case, u: Floats, position: np.ndarray) -> tuple[int, float, float, float] | None:
    """Where u changes most, its mean before and after, and the share of the rise that is a step."""
    kept = case.kept
    if kept.sum() < MIN_TOKENS:
        return None
    width = int(position.max()) + 2
    count = np.bincount(position[kept], minlength=width).astype(float)
    total = np.bincount(position[kept], u[kept], width)
    n, s = np.cumsum(count)[:-1], np.cumsum(total)[:-1]
    N, S = count.sum(), total.sum()
    allowed = (n >= 0.05 * N) & (n <= 0.95 * N)
    if allowed.sum() < 16:
        return None
    with np.errstate(all="ignore"):
        gain = (S * n / N - s) / np.sqrt(n * (N - n) / N)  # above 0: larger afterwards
    gain[~allowed] = -np.inf
    best = int(np.argmax(gain))
    before, after = float(s[best] / n[best]), float((S - s[best]) / (N - n[best]))
    # A step keeps its height close by; growth has only a part of it there.
    near = max(4, int(0.08 * width))
    low, high = slice(max(0, best + 1 - near), best + 1), slice(best + 1, best + 1 + near)
    if min(count[low].sum(), count[high].sum()) < 20 or after <= before:
        return best + 1, max(before, 1e-9), max(after, 1e-9), 0.0
    jump = total[high].sum() / count[high].sum() - total[low].sum() / count[low].sum()
    return best + 1, max(before, 1e-9), max(after, 1e-9), float(jump / (after - before))


def _boundary(case: Case, at: int) -> tuple[str, tuple[Evidence, ...]]:
    """What both sides say of their windows, blocks and chunks, held against an onset."""
    for name, cause in KINDS.items():
        for side in (case.engine, case.trainer):
            length = side.fingerprint.get(name)
            if not isinstance(length, int) or length <= 1:
                continue
            if abs(at - length) <= 2 and (cause != "kv-block" or at <= length + 2):
                return cause, (Evidence(name, length),)
    return "onset", ()


def first_token(case: Case) -> Look | NotTested:
    """Whether the first sampled token is far worse than the others, and how it falls off."""
    first = (case.index == 0) & case.kept
    rest = (case.index > 0) & case.kept
    if first.sum() < 8 or rest.sum() < 64:
        return NotTested("first token", "needs 8 rows of several tokens")
    u = size(case)
    elsewhere = float(u[rest].mean())
    ratio = case.ratio(np.where(first, u, 0.0), np.where(first, elsewhere, 0.0) + 1e-12)
    early = (case.index >= 1) & (case.index < 8) & case.kept
    late = (case.index >= 24) & case.kept
    falls = float(u[early].mean() / u[late].mean()) if early.any() and late.sum() >= 64 else 1.0
    evidence = (
        Evidence("|delta| of the first token over the others", ratio.value, "1"),
        Evidence("tokens 2 to 8 over those after 24", falls, "1"),
    )
    if not above(ratio, FIRST) or not case.beyond_rounding(first):
        return Look(evidence)
    if _far(case, case.index >= 8):  # what the first tokens alone have leaves the others right
        return Look(evidence)
    scale = np.where(case.index == 0, 1 / ratio.value, 1.0)
    effect = case.share(case.delta * scale)
    if not above(effect, 0.05):
        return Look(evidence)
    repair = Repair(case.left, case.left + case.delta * scale)
    finding = Finding("first-token", "either", effect, evidence, repair=repair,
                      alike=("attention-sinks", "packing-leak", "position-ids"))  # fmt: skip
    return Look(evidence, (finding,))


def _far(case: Case, where: Bools) -> bool:
    """Whether one side is far from float32 in these tokens, where that is known."""
    return legs_of(case) is not None and imbalance(case, where) > CALM


def blocks(case: Case) -> Look | NotTested:
    """Whether tokens that open a block of the KV cache or a chunk are worse than the others."""
    if case.kept.sum() < MIN_TOKENS:
        return NotTested("block boundaries", f"needs {MIN_TOKENS} tokens")
    u = size(case)
    forward = case.position - 1  # the forward that predicts a token is that of the one before
    fits: list[tuple[float, float, int]] = []
    for length in BLOCKS:
        opens = (forward % length == 0) & case.kept
        if opens.sum() < 24:
            continue
        ratio = case.ratio(np.where(opens, u, 0.0), opens + 1e-12)
        if ratio.low is not None:
            scaled = np.where(opens, case.delta / max(ratio.low, 1.0), case.delta)
            fits.append((case.share(scaled).value, ratio.low, length))
    if not fits:
        return NotTested("block boundaries", "too few tokens open a block")
    # Of a length and its multiples, all of which may stand out, the one that explains most.
    _, times, length = max(fits, key=lambda fit: (fit[1] >= OPENS, fit[0], fit[1]))
    evidence = (
        Evidence("block length that fits best", length),
        Evidence("|delta| of tokens that open one, at least", times, "1"),
    )
    opens = forward % length == 0
    if times < OPENS or not case.beyond_rounding(opens) or _far(case, ~opens):
        return Look(evidence)
    scale = np.where(opens, 1 / times, 1.0)
    effect = case.share(case.delta * scale)
    if not above(effect, 0.05):
        return Look(evidence)
    repair = Repair(case.left, case.left + case.delta * scale)
    finding = Finding("kv-block", "engine", effect, evidence, repair=repair,
                      alike=("chunked-prefill",))  # fmt: skip
    return Look(evidence, (finding,))


def scattered(case: Case) -> Look | NotTested:
    """Whether a few tokens of one side are far from float32 while all its others are not.

    Rounding and flips of experts make such tokens on both sides; a kernel, a setting or weights
    move the others as well.
    """
    legs = legs_of(case)
    if legs is None:
        return NotTested("scattered tokens", "needs float32 and both sides in one dtype")
    sizes = [np.abs(leg) for leg in legs]
    far = [(a > SPIKE) & (b < a / 4) & case.kept for a, b in (sizes, sizes[::-1])]
    counts = [int(tokens.sum()) for tokens in far]
    n = int(counts[1] > counts[0])
    side: Side = ("engine", "trainer")[n]
    rest = case.kept & ~far[0] & ~far[1]
    calm = imbalance(case, rest)
    evidence = (
        Evidence(f"tokens of the {side} that alone are far from float32", counts[n], "few"),
        Evidence("the same, on the other side", counts[1 - n]),
        Evidence("distances from float32 of the others, larger over smaller", calm, "1 to 1.1"),
    )
    if (
        not _in_more_prompts(case, far[n], far[1 - n])
        or counts[n] > MOST_SPIKES * case.kept.sum()
        or calm > CALM
    ):
        return Look(evidence)
    # At some place, or on a side whose other tokens are off as well, they are not scattered.
    others = excess(case.repaired(case.left, case.right, rest))
    if _opens_blocks(case) or any(isinstance(look, Look) and look.findings
                                  for look in (onset(case), others)):  # fmt: skip
        return Look(evidence)
    repair = Repair(case.left, case.right, ~far[n])
    effect = case.share(np.where(far[n], 0.0, case.delta))
    finding = Finding("scattered-tokens", side, effect, evidence, confirmed=True, repair=repair)
    return Look(evidence, (finding,))


def _in_more_prompts(case: Case, tokens: Bools, others: Bools) -> bool:
    """Whether some tokens lie in over :data:`MORE` times as many prompts as others (binomial test
    at 1 %). Prompts are counted, for a flip of experts moves several tokens of one."""
    from scipy.special import bdtrc

    more, fewer = (len(np.unique(case.prompt[some])) for some in (tokens, others))
    return more > fewer and float(bdtrc(more - 1, more + fewer, MORE / (1.0 + MORE))) < BY_CHANCE


DETECTORS = (
    Detector("scattered", "position", ("scattered-tokens",), scattered,
             "float32 and both sides in one dtype", 16, alone=True),
    Detector("onset", "position", ("onset", *KINDS.values(), "grows-with-position"), onset,
             order=40),
    Detector("first-token", "position", ("first-token",), first_token, order=41),
    Detector("blocks", "position", ("kv-block",), blocks, order=42),
)  # fmt: skip
