"""Ranks of another launcher agree through the run directory, whatever is there from before."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mismatch.errors import MismatchError
from mismatch.processes import launched
from mismatch.processes.launched import Launched, agreed
from mismatch.run import store


def meet(run: Path, commands: list[str], began: dict[str, Any], apart_s: float = 0.1) -> list[Any]:
    """Let one rank per command meet the others, the last rank first; what each got, or raised."""
    results: list[Any] = [None] * len(commands)

    def rank(number: int) -> None:
        world = Launched(number, len(commands), 1)
        try:
            found = agreed(run, world, commands[number], lambda: began)
            results[number] = {key: found[key] for key in began}
        except MismatchError as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(len(commands))]
    for thread in reversed(threads):
        thread.start()
        time.sleep(apart_s)  # rank 0 comes last, and clears what the others have left
    for thread in threads:
        thread.join()
    return results


def test_all_ranks_get_the_answer_of_this_start_and_not_of_an_earlier_one(tmp_path: Path) -> None:
    room = tmp_path / "jobs" / "ranks"
    room.mkdir(parents=True)
    for rank in (1, 2):  # of a start that was killed
        store.write_json(room / f"{rank}.json", {"number": f"old{rank}", "command": "same"})
    old = {"numbers": {"1": "old1", "2": "old2"}, "fault": "", "fix": "", "port": 1}
    store.write_json(room / "answer.json", old)
    for port in (2, 3):
        assert meet(tmp_path, ["same"] * 3, {"port": port}) == [{"port": port}] * 3


def test_ranks_with_another_command_and_ranks_that_do_not_come_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for result in meet(tmp_path, ["one", "another"], {}):
        assert isinstance(result, MismatchError)
        assert "different things" in result.message
    monkeypatch.setattr(launched, "MEET_S", 0.3)
    for rank in (0, 1):  # each on a machine with a file system of its own
        with pytest.raises(MismatchError) as refused:
            agreed(tmp_path / str(rank), Launched(rank, 2, 1), "one", dict)
        assert refused.value.fix == launched.SHARED


def test_rank_0_may_clear_the_folder_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks at once, again and again: the others list, write and read while it is cleared."""
    monkeypatch.setattr(launched, "POLL_S", 0.0005)
    monkeypatch.setattr(launched, "MEET_S", 10.0)
    for start in range(200):
        apart_s = 0.001 * (start % 4)
        assert meet(tmp_path, ["same"] * 3, {"port": start}, apart_s) == [{"port": start}] * 3
