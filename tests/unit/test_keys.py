"""Names of scorings: their parts, and that nobody else builds or splits them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import mismatch
from mismatch import keys
from mismatch.keys import FLOAT32, LONG, Key
from mismatch.run import store
from tests import frozen

SOURCES = sorted(Path(mismatch.__file__).parent.rglob("*.py"))
BUILT = re.compile(r'f"[^"]*\}:(decode|prefill|regrouped|repeated|grad|alone|fp32|long)\b')
SPLIT = re.compile(r"(name|scoring|left|right)\.r?(partition|split)\(\":\"")


@pytest.mark.parametrize(
    ("side", "kinds"),
    [
        ("vllm", ("decode", "prefill")),
        ("fsdp", ("", "regrouped", "new-replayed")),
        ("plain", ("", "trainer")),
        ("reference", ("",)),
        ("fix", ("attention-sinks", "fp16", "fp32", "experts=eager", "fp32+engine-fp32")),
    ],
)
def test_a_name_gives_back_the_parts_that_it_was_made_of(side: str, kinds: tuple[str, ...]) -> None:
    for kind, precision, tokens in itertools.product(kinds, ("", FLOAT32), ("", LONG)):
        key = Key.of(side, kind, precision, tokens)
        parts = (key.side, key.kind, key.precision, key.tokens)
        assert parts == (side, kind, precision, tokens), key
        assert Key(str(key)) == key


@pytest.mark.parametrize("name", ["plain:bf16", "plain:bf16-fp8_e4m3", "plain:fp16:long"])
def test_a_plain_forward_says_its_precision(name: str) -> None:
    key = Key(name)
    assert key.precision == name.split(":")[1]
    assert key.kind == ""
    assert Key.of(key.side, key.kind, key.precision, key.tokens) == name


@pytest.mark.parametrize("run", frozen.RUNS)
def test_names_on_disk_stay_as_they_are(run: str, tmp_path: Path) -> None:
    directory = frozen.unpack(run, tmp_path)
    folders = [directory, directory / "long", *(directory / "fixes").glob("*/")]
    names = [name for folder in folders for name in store.scoring_names(folder)]
    assert len(names) >= 2
    for name in names:
        key = Key(name)
        assert Key.of(key.side, key.kind, key.precision, key.tokens) == name


def test_constants_are_keys_of_their_parts() -> None:
    assert (keys.REFERENCE_LONG, keys.TRAINER_LONG) == ("reference:long", "fsdp:long")
    assert keys.REFERENCE.precision == keys.TRAINER_LONG.precision == FLOAT32
    assert keys.TRAIN.over_long() == "fsdp:as-run:long"


def test_no_other_module_builds_or_splits_a_name() -> None:
    found = [
        f"{path.relative_to(SOURCES[0].parent)}: {match[0]}"
        for path in SOURCES
        if path.name != "keys.py"
        for pattern in (BUILT, SPLIT)
        for match in pattern.finditer(path.read_text())
    ]
    known = {  # names of modules and objects
        "doctor/plan.py",
        "features/kernels/section.py",
        "features/losses/worker.py",
        "plugins.py",
        "trainers/worker.py",
        "training/user_kernels.py",
    }
    assert [each for each in found if each.split(":")[0] not in known] == []
