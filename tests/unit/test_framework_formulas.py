"""Other frameworks' metrics, written again from how they work, against ours and our conventions.

Each function below takes a padded batch as a trainer holds it, reduces it the way the framework
does, quirks included, and names its results as the framework logs them. What the table of aliases
says must come out: the same number as ours, or the number of the alias's convention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from mismatch.metrics import METRICS, framework_names
from mismatch.metrics.framework_formulas import value_of

LENGTHS = (7, 1, 12, 5, 30, 3)
PROMPT, WIDTH = 4, 40


@dataclass
class Batch:
    """[B, WIDTH] arrays: a prompt, a response that is partly a tool's, padding full of rubbish."""

    rollout: np.ndarray
    train: np.ndarray
    entropy: np.ndarray
    mask: np.ndarray

    @property
    def delta(self):
        return self.train - self.rollout

    @property
    def rows(self):
        return range(len(self.mask))

    def flat(self):
        """What this project works on: action tokens only, one after the other."""
        mask = self.mask
        sequence = np.repeat(np.arange(len(mask)), mask.sum(axis=1))
        return {
            "rollout": self.rollout[mask],
            "train": self.train[mask],
            "delta": self.train[mask] - self.rollout[mask],
            "sequence": sequence,
            "train_entropy": self.entropy[mask],
        }


def make_batch(scale: float, seed: int = 0, extreme: bool = False) -> Batch:
    rng = np.random.default_rng(seed)
    shape = (len(LENGTHS), WIDTH)
    rollout = -rng.exponential(1.0, shape)
    train = np.minimum(rollout + scale * rng.standard_t(3, shape), -1e-9)
    mask = np.zeros(shape, dtype=bool)
    for row, length in enumerate(LENGTHS):
        mask[row, PROMPT : PROMPT + length] = True
    mask[2, PROMPT + 3 : PROMPT + 6] = False  # a tool's output in the middle of the response
    if extreme:
        row, column = 4, PROMPT + 2
        rollout[row, column], train[row, column] = -0.1, -25.1  # beyond the clamp at 20
        rollout[0, PROMPT], train[0, PROMPT] = -26.0, -0.5
        train[5, PROMPT : PROMPT + 3] = rollout[5, PROMPT : PROMPT + 3] + 0.9  # exp(S) above 3
    rollout[~mask], train[~mask] = -3.0, 4.0  # may never be seen
    return Batch(rollout, train, rng.gamma(2.0, 0.5, shape), mask)


def masked_mean(values, mask, axis=None):
    return np.where(mask, values, 0.0).sum(axis=axis) / (mask.sum(axis=axis) + 1e-8)


def verl(batch: Batch) -> dict:
    """verl: everything on [B, T] with a response mask; weights exist with rollout_is=token."""
    mask, log_ratio = batch.mask, np.where(batch.mask, batch.delta, 0.0)
    p, q = np.exp(batch.rollout[mask]), np.exp(batch.train[mask])
    ppl_train = masked_mean(batch.train, mask, 1)
    ppl_rollout = masked_mean(batch.rollout, mask, 1)
    difference = ppl_rollout - ppl_train
    safe = np.clip(log_ratio, -20.0, 20.0)
    seq_sum = log_ratio.sum(axis=1)
    seq_safe = np.clip(seq_sum, -20.0, 20.0)
    raw = np.exp(safe) * mask
    cut = np.minimum(raw, 2.0)
    per_sequence = np.minimum(np.exp(seq_safe)[:, None] * mask, 2.0)
    mean = masked_mean(cut, mask)
    corr = {
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(np.exp(log_ratio) - log_ratio - 1, mask),
        "training_ppl": np.exp(-ppl_train).mean(),
        "rollout_ppl": np.exp(-ppl_rollout).mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": np.abs(difference).mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": np.exp(difference).mean(),
        "chi2_token": masked_mean(np.exp(safe) ** 2, mask) - 1,
        "chi2_seq": np.exp(2 * seq_safe).mean() - 1,
        "rollout_is_mean": mean,
        "rollout_is_std": np.sqrt(max(masked_mean(cut**2, mask) - mean**2, 0.0)),
        "rollout_is_max": cut[mask].max(),
        "rollout_is_min": cut[mask].min(),
        "rollout_is_ratio_fraction_high": masked_mean(raw > 2.0, mask),
    }
    logged = {f"rollout_corr/{name}": value for name, value in corr.items()}
    logged |= {
        "training/rollout_probs_diff_mean": np.abs(p - q).mean(),
        "training/rollout_probs_diff_max": np.abs(p - q).max(),
        "training/rollout_probs_diff_std": np.std(np.abs(p - q), ddof=1),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(q, p)[0, 1],
    }
    ess = "rollout_corr/rollout_is_eff_sample_size"
    logged[ess, "ess_token"] = 1 / masked_mean((cut / (mean + 1e-8)) ** 2, mask)
    mean = masked_mean(per_sequence, mask)
    logged[ess, "ess_seq"] = 1 / masked_mean((per_sequence / (mean + 1e-8)) ** 2, mask)
    return logged


def nemo_rl(batch: Batch) -> dict:
    """NeMo-RL: drops position 0 of every row, sums and divides by the number of valid tokens."""
    generation, prev = batch.rollout[:, 1:], batch.train[:, 1:]
    mask = batch.mask[:, 1:]
    tokens = mask.sum() + 1e-8

    def mean(values):
        return (values * mask).sum() / tokens

    def k3(logprobs, reference):
        logr = reference - logprobs
        return np.exp(logr) - 1 - logr

    error = np.abs(generation - prev)
    mixture = np.log(0.5 * np.exp(prev) + 0.5 * np.exp(generation))
    per_row = (np.exp(error * mask) * mask).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    valid = per_row[mask.sum(axis=1) > 0]
    return {
        "token_mult_prob_error": mean(np.exp(error * mask)),
        "gen_kl_error": mean(k3(generation, prev)),
        "policy_kl_error": mean(k3(prev, generation)),
        "js_divergence_error": mean(0.5 * k3(mixture, prev) + 0.5 * k3(mixture, generation)),
        "sampling_importance_ratio": mean(np.exp(prev - generation)),
        "max_seq_mult_prob_error": valid.max(),
        "mean_seq_mult_prob_error": valid.mean(),
        "min_seq_mult_prob_error": valid.min(),
    }


def trl(batch: Batch) -> dict:
    """TRL's default: a product per sequence, masked where above 3, its statistics after that."""
    difference = (batch.train - batch.rollout) * batch.mask
    ratio = np.exp(difference.sum(axis=-1, keepdims=True))
    ratio = np.where(ratio > 3.0, 0.0, ratio).ravel()
    gap = np.abs(batch.train - batch.rollout)[batch.mask]
    return {
        "sampling/sampling_logp_difference/mean": gap.mean(),
        "sampling/sampling_logp_difference/max": gap.max(),
        "sampling/importance_sampling_ratio/min": ratio.min(),
        "sampling/importance_sampling_ratio/mean": ratio.mean(),
        "sampling/importance_sampling_ratio/max": ratio.max(),
    }


def sample_mean(batch: Batch, values) -> float:
    """slime's reducer: a masked mean of every sample, summed, over the number of samples."""
    masks = batch.mask.astype(float)
    total = sum((values[i] * masks[i]).sum() / max(masks[i].sum(), 1) for i in batch.rows)
    return total / len(masks)


def slime(batch: Batch) -> dict:
    delta = np.where(batch.mask, batch.delta, 0.0)
    return {
        "train_rollout_logprob_abs_diff": sample_mean(batch, np.abs(delta)),
        "tis": sample_mean(batch, np.exp(delta)),
    }


def miles(batch: Batch) -> dict:
    """miles: slime's reducer; a k3 with two clamps; and the metrics of its mismatch helper."""
    delta = np.where(batch.mask, batch.delta, 0.0)
    clamped = np.clip(delta, -20.0, 20.0)
    k3 = np.clip(np.exp(clamped) - 1 - clamped, -10.0, 10.0)
    logged = {
        "train_rollout_logprob_abs_diff": sample_mean(batch, np.abs(delta)),
        "train_rollout_kl": sample_mean(batch, k3),
    }
    helper: dict[str, list[float]] = {}
    for row in batch.rows:
        own = batch.mask[row]
        s, r, d = batch.train[row][own], batch.rollout[row][own], delta[row][own]
        gap = r.mean() - s.mean()
        numbers = {
            "kl": (r - s).mean(),
            "k3_kl": (np.exp(d) - d - 1).mean(),
            "training_ppl": np.exp(-s.mean()),
            "rollout_ppl": np.exp(-r.mean()),
            "log_ppl_diff": gap,
            "log_ppl_abs_diff": abs(gap),
            "ppl_ratio": np.exp(gap),
            "chi2_token": (np.exp(np.clip(d, -20, 20)) ** 2).mean() - 1,
            "chi2_seq": np.exp(2 * np.clip(d.sum(), -20, 20)) - 1,
        }
        for name, value in numbers.items():
            helper.setdefault(f"mis_{name}", []).append(value)
    return logged | {name: float(np.mean(values)) for name, values in helper.items()}


def prime_rl(batch: Batch) -> dict:
    """prime-rl: k3 of all tokens; an older version averaged over each sample, then over samples."""
    log_ratio = batch.delta[batch.mask]
    tokens = (np.exp(log_ratio) - log_ratio - 1).mean()
    per_sample = []
    for row in batch.rows:
        log_ratio = batch.delta[row][batch.mask[row]]
        term = np.exp(log_ratio) - log_ratio - 1
        per_sample.append(term.sum() / max(len(term), 1))
    return {
        "mismatch_kl/mean": float(np.mean(per_sample)),
        "mismatch_kl/all/mean": tokens,
        "kl_ent_ratio/mean": tokens / batch.entropy[batch.mask].mean(),
    }


def openrlhf(batch: Batch) -> dict:
    return {"vllm_kl": ((batch.rollout - batch.train) * batch.mask).sum() / batch.mask.sum()}


def skyrl(batch: Batch) -> dict:
    gap = np.abs(batch.rollout[batch.mask] - batch.train[batch.mask])
    return {"policy/rollout_train_logprobs_abs_diff_mean": gap.mean()}


def areal(batch: Batch) -> dict:
    """AReaL: proximal minus behaviour, over tokens whose behaviour weight is not zero."""
    approx = np.where(batch.mask, batch.train - batch.rollout, 0.0)
    return {"behave_approx_kl": approx.sum() / batch.mask.sum()}


FRAMEWORKS = {
    "verl": verl,
    "nemo-rl": nemo_rl,
    "trl": trl,
    "slime": slime,
    "miles": miles,
    "prime-rl": prime_rl,
    "openrlhf": openrlhf,
    "skyrl": skyrl,
    "areal": areal,
}
CASES = [
    (metric, alias)
    for metric, aliases in framework_names.ALIASES.items()
    for alias in aliases
    if alias.framework in FRAMEWORKS
]
BATCHES = {
    "step 0": make_batch(0.01),
    "drifted": make_batch(0.3, seed=1),
    "beyond every clamp": make_batch(0.3, seed=2, extreme=True),
}


def ours(metric: str, arrays: dict) -> float:
    return METRICS[metric](*(arrays[need] for need in METRICS[metric].needs))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("metric", "alias"), CASES, ids=lambda x: getattr(x, "label", x))
def test_the_framework_would_log_what_the_alias_says(metric, alias, batch):
    logged = FRAMEWORKS[alias.framework](BATCHES[batch])
    theirs = logged[alias.name, metric] if (alias.name, metric) in logged else logged[alias.name]
    arrays = BATCHES[batch].flat()
    value = ours(metric, arrays) if alias.value is None else value_of(alias.value, arrays)
    assert value == pytest.approx(theirs, rel=1e-6, abs=1e-9)


def test_every_number_that_was_written_again_is_in_the_table():
    batch = BATCHES["drifted"]
    for framework, function in FRAMEWORKS.items():
        names = {alias.name for _, alias in CASES if alias.framework == framework}
        written = {name[0] if isinstance(name, tuple) else name for name in function(batch)}
        assert written == names, framework


# Where a convention is said to give another number, it must do so; a batch that shows it.
@pytest.mark.parametrize(
    ("metric", "alias"),
    [case for case in CASES if case[1].value is not None],
    ids=lambda x: getattr(x, "label", x),
)
def test_another_convention_is_another_number(metric, alias):
    differs = []
    for batch in BATCHES.values():
        arrays = batch.flat()
        theirs = value_of(alias.value, arrays)
        differs.append(theirs != pytest.approx(ours(metric, arrays), rel=1e-6))
    assert any(differs)


def test_verl_clamps_at_20_and_we_say_how_often():
    arrays = BATCHES["beyond every clamp"].flat()
    assert ours("chi2_token_clamped", arrays) == 2
    naive = float(np.mean(np.exp(2 * arrays["delta"])) - 1)
    assert ours("chi2_token", arrays) < 0.01 * naive


def test_nemos_position_0_is_never_an_action():
    batch = make_batch(0.1)
    assert not batch.mask[:, 0].any()
    moved = make_batch(0.1)
    moved.train[:, 0] += 5.0
    assert nemo_rl(moved) == nemo_rl(batch)


def test_areals_sign_is_the_opposite():
    arrays = BATCHES["drifted"].flat()
    (alias,) = framework_names.of("kl", "areal")
    assert value_of(alias.value, arrays) == pytest.approx(-ours("kl", arrays))
