"""What a page holds of the tokens: within a budget, near what was measured, harmless."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mismatch.pipeline.tokens import arrow_lists
from mismatch.reports.html import to_html
from mismatch.reports.sections import explorer
from mismatch.reports.sections.explorer import EXACT, LONGEST, Packed, notes, pack, section
from mismatch.reports.sections.tokens import comparable
from mismatch.run.provenance import redact
from tests.explorer_fixture import many
from tests.reports_fixture import HOSTILE, make_empty_report, make_report, make_tokens
from tests.tables import values as cells_of


def unpacked(packed: Packed) -> dict[str, Any]:
    """What the page's script reads."""
    blocks: dict[str, Any] = {}
    for line in packed.text.split("\n"):
        name, text = line.split(" ")
        data = zlib.decompress(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        as_json = name in ("meta", "contexts", "words", "exact")
        blocks[name] = json.loads(data) if as_json else np.frombuffer(data, np.uint8)
    return blocks


@pytest.mark.parametrize(("fine", "step"), [(10**6, 0.06), (10, 0.25)])
def test_every_value_comes_back_within_its_step(
    monkeypatch: pytest.MonkeyPatch, fine: int, step: float
) -> None:
    monkeypatch.setattr(explorer, "FINE", fine)
    table = many()
    blocks = unpacked(pack(table, {}))
    rows = len(table)
    word = blocks["word"][:rows] + 256 * blocks["word"][rows:].astype(int)
    assert [blocks["words"]["texts"][i] for i in word] == table["token"].tolist()
    left = table["rollout_logprob"].to_numpy()
    wanted = {
        "delta": table["delta"].to_numpy(),
        "left": -left,
        "entropy": table["entropy"].to_numpy(),
        "margin": table["routing_margin"].to_numpy(),
        "reference": table["reference_logprob"].to_numpy() - left,
        "fix": table["fix_logprob"].to_numpy() - left,
    }
    for name, values in wanted.items():
        scale = np.array(blocks["meta"]["scales"][name])
        got = scale[blocks[name]]
        near = np.abs(values) >= scale[1]
        assert near.mean() > 0.5, name
        assert np.abs(got[near] / values[near] - 1).max() < (0.06 if name == "delta" else step), (
            name
        )
        assert np.abs(got[~near] - values[~near]).max(initial=0) <= scale[1], name
    layers = blocks["meta"]["layers"]
    masks = blocks["layers"].reshape(-1, rows)
    for row in (0, 1, 777):
        bits = [layer for i, layer in enumerate(layers) if masks[i // 8, row] >> i % 8 & 1]
        assert bits == list(table["routing_flipped_layers"][row])


def test_the_worst_and_the_likeliest_are_exact() -> None:
    table = many()
    blocks = unpacked(pack(table, {}))
    exact = blocks["exact"]
    worst = table["delta"].abs().nlargest(EXACT).index
    tops = np.arange(0, len(table), 97)
    assert exact["at"] == sorted({*worst, *tops})
    assert exact["delta"] == pytest.approx(table["delta"][exact["at"]].tolist(), rel=1e-6)
    word, left, right = exact["top"]["97"][0]
    assert blocks["words"]["texts"][word] == "</script>"
    assert (left, right) == (-0.5, None)
    contexts = blocks["contexts"]
    assert contexts["at"] == list(range(0, len(table), 100))
    assert set(contexts["of"]) == set(range(15))  # of a prompt's four samples it is kept once
    assert [blocks["words"]["texts"][i] for i in contexts["texts"][2]] == [" q2", " is", "?"]


def test_what_a_side_did_not_name_is_bounded_by_what_it_named() -> None:
    table = many(2, 50)
    logprobs = {"rollout": [-0.1, -2.5, np.nan, -np.inf], "train": [-0.2, -3.0, -2.0, np.nan]}
    ends = np.concatenate([[0], np.full(99, 4), [4]]).clip(max=4)
    for side, values in logprobs.items():
        table[f"top_{side}"] = arrow_lists(np.array(values), ends)
    table["top_tokens"] = arrow_lists(list("abcd"), ends, "string")
    table["top_ids"] = arrow_lists(np.arange(4), ends)
    top = unpacked(pack(table, {}))["exact"]["top"]["0"]
    # Of the train side nothing above exp(-3) is missing: 1 - (-3).
    assert [row[1:] for row in top] == [[-0.1, -0.2], [-2.5, -3.0], [None, -2.0], [None, 4.0]]


def test_every_one_of_the_worst_has_its_likeliest_and_so_have_others() -> None:
    """1,000 worst tokens and 512 others with outcomes: none of them is left out."""
    table = many(60, 100)
    worst = table["delta"].abs().nlargest(EXACT).index
    chosen = np.zeros(len(table), np.int64)
    chosen[worst] = 1
    chosen[np.flatnonzero(chosen == 0)[:512]] = 1
    ends = np.concatenate([[0], np.cumsum(chosen)])
    for name in ("rollout", "train"):
        table[f"top_{name}"] = arrow_lists(np.full(ends[-1], -0.5), ends)
    table["top_tokens"] = arrow_lists(["a"] * ends[-1], ends, "string")
    table["top_ids"] = arrow_lists(np.zeros(ends[-1], np.int64), ends)
    packed = pack(table, {})
    assert (packed.worst, packed.with_tops) == (EXACT, EXACT)
    assert len(unpacked(packed)["exact"]["top"]) == EXACT + 512


def test_a_budget_takes_whole_sequences() -> None:
    table = many()
    whole = pack(table, {})
    assert whole.tokens == len(table)
    table.loc[5 * 100 + 7, "delta"] = 9.0
    few = pack(table, {}, budget=len(whole.text) // 3)
    assert len(few.text) <= len(whole.text) // 3
    assert 0 < few.tokens < len(table)
    assert few.tokens == 100 * few.sequences
    assert 5 in unpacked(few)["meta"]["numbers"]  # the sequence of the worst token
    text = " ".join(notes(few, len(table), 60))
    assert f"{few.sequences} of 60 sequences" in text
    assert "tokens.parquet" in text
    assert "sample" not in " ".join(notes(whole, len(table), 60)).lower()


def test_a_note_says_at_how_many_of_the_worst_the_likeliest_tokens_are_kept() -> None:
    table = many()
    packed = pack(table, {})
    worst = table["delta"].abs().nlargest(EXACT).index
    assert packed.worst == EXACT
    assert packed.with_tops == (worst % 97 == 0).sum() > 0
    assert f"kept at {packed.with_tops} of the 1,000" in " ".join(notes(packed, len(table), 60))
    whole = pack(table[table.index % 97 == 0], {})
    assert whole.with_tops == whole.worst
    assert "--exact-kl" not in " ".join(notes(whole, whole.tokens, whole.sequences))
    none = pack(table.drop(columns=["top_ids", "top_tokens", "top_rollout", "top_train"]), {})
    assert none.with_tops == 0


def test_a_table_of_version_one_is_packed_too() -> None:
    tokens = make_tokens()
    blocks = unpacked(pack(comparable(tokens), {}))
    assert len(blocks["delta"]) == len(tokens)
    assert "reference" not in blocks
    assert blocks["contexts"]["at"] == []
    assert section(*make_empty_report()) is None


@pytest.mark.parametrize("text", [*HOSTILE, "\ud83d", "a" * 100_000, "\u200d" * 90, ""])
def test_hostile_texts_are_harmless_and_short(text: str) -> None:
    table = many(4, 20)
    table["token"] = pd.Series([text] * len(table), dtype=object)
    packed = pack(table, {"fix": text})
    assert re.fullmatch(r"[a-z]+ [A-Za-z0-9_-]+(\n[a-z]+ [A-Za-z0-9_-]+)*", packed.text)
    shown = unpacked(packed)["words"]["texts"][0]
    assert len(shown) <= 8 * LONGEST
    assert not set(shown) & set("\u202e\x1b\x00\ud83d\u200d")


def test_a_page_has_one_script_and_allows_no_other() -> None:
    page = to_html(make_report(), many())
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert policy.count("script-src") == 1
    assert not re.search(r"\b(eval|Function|innerHTML|outerHTML|insertAdjacentHTML|fetch|"
                         r"XMLHttpRequest|document\.write)\b", scripts[0])  # fmt: skip
    assert redact(page) == page  # or the packed data would be damaged where it is written


def test_data_that_could_end_its_element_are_refused() -> None:
    from dataclasses import replace

    from mismatch.reports.html import show_page
    from mismatch.reports.section import Widget
    from mismatch.reports.sections import page

    shown = page(make_report())
    section = replace(shown.sections[0], widget=Widget("explorer", "</script>"))
    with pytest.raises(ValueError, match="explorer"):
        show_page(replace(shown, sections=(section,)))


def test_paper_lists_the_tokens_of_largest_delta() -> None:
    tokens = pd.DataFrame(
        {
            "sequence": [0, 0, 1],
            "position": [4, 5, 9],
            "token_id": [1, 2, 3],
            "token": ["a", " b", "c"],
            "rollout_logprob": [-1.0, -1.5, -1.0],
            "train_logprob": [-1.0, -1.0, -3.0],
            "delta": [0.0, 0.5, -2.0],
        }
    )
    (table,) = explorer.worst_tokens(tokens)
    rows = cells_of(table)
    assert [(row["token"], row["Δ, nats"]) for row in rows] == [("c", -2.0), ("␣b", 0.5)]
    assert [row[-1].link for row in table.cells()] == ["s1t9", "s0t5"]
    assert explorer.worst_tokens(tokens[:1]) == []  # delta 0 is not a disagreement
