"""Data-parallel replicas: an engine several times, each in a process of its own with a share.

Prompts go to the replicas in blocks, in their order; each knows its place in the whole (its
``first_prompt``, and ``CaptureRequest.first``), so that seeds and captured positions are those
of one engine. A replica is ``python -m mismatch.engines.replicas FD`` behind a socket: it takes
(method, arguments, place in the rollout) and gives ("progress", …), ("result", value) or
("error", …).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Self, cast

from mismatch.engines.base import Engine, LoadedWeights, Mode, Progress, Sample
from mismatch.engines.distribution_capture import CaptureRequest, join_collected
from mismatch.engines.model_info import CauseInLog
from mismatch.engines.registry import engine_class
from mismatch.errors import MismatchError, named_line
from mismatch.run.machine import local_gpus, visible_gpus
from mismatch.run.messages import exit_worker
from mismatch.specs import EngineSpec
from mismatch.types import Fingerprint, Floats, Sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mismatch.engines.base import ExpertLayout

END_S = 30.0  # for a replica to give its GPUs back, once it is asked
ENGINE_SEEDS = "engine"  # how an engine seeds that cannot seed each request


def quiet(done: int, total: int, tokens: int) -> None:
    """No progress is shown."""


def blocks(count: int, parts: int) -> list[slice]:
    """``count`` items in order over ``parts`` replicas, sizes as equal as can be.

    >>> blocks(5, 2)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    size, more = divmod(count, parts)
    ends = [(part + 1) * size + min(part + 1, more) for part in range(parts)]
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def replica_environment(index: int, spec: EngineSpec, count: int) -> dict[str, str]:
    """GPUs of one replica; on a CPU its share of the cores."""
    gpus = visible_gpus() or [str(number) for number in range(local_gpus())]
    if gpus:
        width = spec.tensor_parallel_size
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * width : (index + 1) * width])}
    threads = str(max(1, (os.cpu_count() or 2) // 2 // count))
    shared = {"OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {name: os.environ.get(name) or value for name, value in shared.items()}


def make_engine(kind: type[Engine], spec: EngineSpec, sampling: Sampling, longest: int) -> Engine:
    """An engine of this kind, or several behind one where the spec asks for replicas."""
    if (spec.data_parallel_size or 1) > 1:
        return cast(Engine, Replicas(spec, sampling, longest))
    return kind(spec, sampling, longest)


class Replicas:
    """Several engines as one; see :class:`mismatch.engines.base.Engine`."""

    likeliest = 0

    def __init__(self, spec: EngineSpec, sampling: Sampling, longest: int) -> None:
        self.name, self.spec, self.sampling = spec.engine, spec, sampling
        self.job = (replace(spec, data_parallel_size=None), sampling, longest)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        self.wanted: CaptureRequest | None = None

    def __enter__(self) -> Self:
        count = self.spec.data_parallel_size or 1
        try:
            for index in range(count):
                self._start(replica_environment(index, self.spec, count))
            self._collect(quiet)
            self._require_alike()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        with theirs:
            self.processes.append(
                subprocess.Popen(command, env=os.environ | environment, pass_fds=[theirs.fileno()])
            )
        self.connections.append(Connection(ours.detach()))
        self.connections[-1].send(self.job)

    def _require_alike(self) -> None:
        """One law and one set of weights.

        Raises:
            MismatchError: replicas differ, or cannot seed each request.
        """
        facts, weights = self._all("fingerprint", "decode"), self._all("weights")
        if any(other != weights[0] for other in weights):
            raise MismatchError("the engine's replicas hold other weights", "is a GPU at fault?")
        if facts[0].get("seeding") == ENGINE_SEEDS:
            raise MismatchError(
                "replicas of an engine that cannot seed requests would repeat its random numbers",
                "--data-parallel-size 1",
            )

    def __exit__(self, *exc: object) -> None:
        for connection in self.connections:
            connection.close()  # the end of its input is the end of a replica at rest
        for process in self.processes:
            if exc == () or exc[0] is not None:
                process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()

    # ------------------------------------------------------------ the protocol

    def generate(
        self, prompts: Sequence[list[int]], progress: Progress, turn: int = 1
    ) -> list[list[Sample]]:
        shares = self._blocks(len(prompts))
        if self.wanted is not None:
            parts = [(self._wanted_of(share),) for share in shares]
            self._ask("capture_distributions", parts, [0] * len(parts), quiet)
        firsts = [share.start for share in shares]
        asked = self._ask(
            "generate",
            [(prompts[share], turn, self.likeliest) for share in shares],
            firsts,
            progress,
        )
        return [samples for part in asked for samples in part]

    def prefill(
        self,
        sequences: Sequence[list[int]],
        starts: Sequence[int],
        temperature: float,
        progress: Progress,
    ) -> list[Floats]:
        shares = self._blocks(len(sequences))
        parts = [(sequences[share], starts[share], temperature) for share in shares]
        asked = self._ask("prefill", parts, [0] * len(parts), progress)
        return [scores for part in asked for scores in part]

    def stop_at(self, texts: Sequence[str]) -> None:
        self._all("stop_at", texts)

    def capture_distributions(self, wanted: CaptureRequest) -> None:
        self.wanted = wanted

    def _wanted_of(self, share: slice) -> CaptureRequest:
        assert self.wanted is not None
        if self.wanted.places:  # a later turn: one request a prompt
            return replace(self.wanted, places=self.wanted.places[share])
        return replace(self.wanted, first=share.start * self.sampling.samples_per_prompt)

    def captured_distributions(self) -> dict[str, NDArray[Any]]:
        assert self.wanted is not None
        return join_collected(self._all("captured_distributions"), self.wanted)

    def experts(self) -> ExpertLayout | None:
        return cast("ExpertLayout | None", self._all("experts")[0])

    def weights(self) -> LoadedWeights:
        return cast(LoadedWeights, self._all("weights")[0])

    def fingerprint(self, mode: Mode) -> Fingerprint:
        facts: Fingerprint = self._all("fingerprint", mode)[0]
        return facts | {"data_parallel_size": len(self.processes)}

    # ------------------------------------------------------------ the replicas

    def _blocks(self, count: int) -> list[slice]:
        return blocks(count, len(self.connections))

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        count = len(self.connections)
        return self._ask(method, [arguments] * count, [0] * count, quiet)

    def _ask(
        self, method: str, parts: list[tuple[Any, ...]], firsts: list[int], progress: Progress
    ) -> list[Any]:
        """Ask every replica, each with its arguments; what they give, in their order."""
        for connection, part, first in zip(self.connections, parts, firsts, strict=True):
            connection.send((method, part, first))
        return self._collect(progress)

    def _collect(self, progress: Progress) -> list[Any]:
        """One result of each replica, in their order.

        Raises:
            MismatchError: a replica failed or ended; which one.
        """
        results: dict[int, Any] = {}
        done: dict[int, tuple[int, int, int]] = {}
        while len(results) < len(self.connections):
            waiting = {c: i for i, c in enumerate(self.connections) if i not in results}
            for connection in wait(list(waiting)):
                index = waiting[cast(Connection, connection)]
                kind, value = self._receive(index)
                if kind == "result":
                    results[index] = value
                else:
                    done[index] = value
                    finished, total, tokens = map(sum, zip(*done.values(), strict=True))
                    progress(finished, total, tokens)
        return [results[index] for index in range(len(results))]

    def _receive(self, index: int) -> tuple[str, Any]:
        which = f"replica {index + 1} of {len(self.connections)}"
        try:
            kind, value = self.connections[index].recv()
        except (EOFError, OSError) as error:
            code = self.processes[index].wait(END_S)
            raise MismatchError(
                f"{which} of the engine has ended (exit code {code})", "logs/engine.log says why"
            ) from error
        if kind == "error":
            message, fix, in_log = value
            raise (CauseInLog if in_log else MismatchError)(f"{which}: {message}", fix)
        return kind, value


# ---------------------------------------------------------------- a replica


def serve(connection: Connection) -> None:
    """Run one engine until nobody asks any more."""
    spec, sampling, longest = connection.recv()
    with engine_class(spec.engine)(spec, sampling, longest) as engine:
        connection.send(("result", None))
        while True:
            try:
                method, arguments, first = connection.recv()
            except EOFError:
                return
            connection.send(("result", answer(engine, method, arguments, first, connection)))


def answer(
    engine: Engine, method: str, arguments: tuple[Any, ...], first: int, connection: Connection
) -> Any:
    """Do what was asked; ``first``: place of the first of its prompts among all."""

    def progress(done: int, total: int, tokens: int) -> None:
        connection.send(("progress", (done, total, tokens)))

    if method not in ("generate", "prefill"):
        return getattr(engine, method)(*arguments)
    if not arguments[0]:
        return []  # fewer of them than replicas
    if method == "generate":
        prompts, turn, engine.likeliest = arguments
        cast(Any, engine).first_prompt = first
        return engine.generate(prompts, progress, turn)
    return getattr(engine, method)(*arguments, progress)


def main(descriptor: str) -> int:
    """The process of one replica."""
    connection = Connection(int(descriptor))
    try:
        serve(connection)
    except Exception as error:
        traceback.print_exc()
        if not isinstance(error, MismatchError):
            error = MismatchError(named_line(error), "logs/engine.log has it whole")
        with contextlib.suppress(OSError):
            connection.send(("error", (error.message, error.fix, isinstance(error, CauseInLog))))
        return 1
    return 0


if __name__ == "__main__":
    exit_worker(main(sys.argv[1]))
