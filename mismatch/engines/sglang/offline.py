"""SGLang's offline engine with processes that can be called beside the model."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from mismatch.engines.sglang import wire
from mismatch.engines.sglang.child import run_detokenizer, run_scheduler
from mismatch.errors import MismatchError


def offline() -> Any:
    """SGLang's ``Engine``, whose processes begin in mismatch/engines/sglang/child.py."""
    from sglang.srt.entrypoints.engine import Engine

    class Offline(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(run_scheduler)
        run_detokenizer_process_func = staticmethod(run_detokenizer)

        def mismatch_called(self, method: str, *args: Any) -> Any:
            """What a call beside the model answers, of the first rank; see ``child.call``."""
            with tempfile.TemporaryDirectory(prefix="mismatch-sglang-") as place:
                answer = Path(place) / "answer.json"
                try:
                    self.collective_rpc(
                        "mismatch_call", name=method, args=list(args), answer=str(answer)
                    )
                except AssertionError as error:
                    raise MismatchError(f"SGLang failed: {error}", wire.LOG_FIX) from error
                return json.loads(answer.read_text())

    return Offline
