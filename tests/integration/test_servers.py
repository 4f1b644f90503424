"""Real servers on the loopback, asked over HTTP: numbers, and what happens when one dies.

A vLLM server runs in float32 with processed logprobs and behind an API key; the last test that
needs it kills it. An SGLang server shows its routes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

from mismatch.features.sync.in_framework import EXTENSION, probe
from mismatch.features.sync.judge import judge
from mismatch.models import EMBEDDED
from mismatch.models.tokenizers import token_texts
from mismatch.models.weight_states import Checkpoint
from mismatch.processes.launch import own_python
from mismatch.prompts.environments import between_turns
from mismatch.prompts.sources import read_prompts, render_prompts
from mismatch.run import store
from mismatch.specs import EngineSpec, PromptSpec
from mismatch.types import CACHED, PREFILL, ROUTES
from tests.contract.goes_on import TEXT
from tests.environments import base_python
from tests.integration.conftest import Run
from tests.sameness import FLIPS

MODEL = EMBEDDED["tiny-gpt-oss"]
KEY = "sk-loopback-0815"
START_S = 420.0
SERVE = (
    *("--model", str(MODEL), "--served-model-name", "tiny-gpt-oss"),
    *("--dtype", "float32", "--max-model-len", "512", "--enforce-eager"),
    *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
    *("--worker-extension-cls", EXTENSION, "--enable-prompt-tokens-details"),
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_API_KEY": KEY,
    "VLLM_SERVER_DEV_MODE": "1",  # allows new weights
}
FP32 = ("--model", "tiny-gpt-oss", "--dtype", "fp32")
# The trainer's side of a check is another test's: one process, no second scoring.
ALONE = ("--train-dtype", "fp32", "--no-noise-floor", "--nproc-per-node", "1")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


TURNS = (
    *("--environment", "tests.contract.goes_on:GoesOn", "--max-turns", "3"),
    *("--num-prompts", "6", "--samples-per-prompt", "2", "--max-tokens", "96"),
    *("--max-observation-tokens", "8"),
)


@dataclass
class Served:
    """A server's process and address."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """At once, with its engine's process, as an out-of-memory killer would."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def await_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(
                httpx.TransportError
            ):  # whoever else had the port for a moment
                httpx.get(f"{self.url}/health", timeout=30.0).raise_for_status()
                return
            time.sleep(0.25)
        raise AssertionError(f"no server after {START_S} s: {self.log.read_text()[-3000:]}")


def serve(command: list[str], log: Path) -> Served:
    """A server on a free port; ready later, see :meth:`Served.await_ready`."""
    port = free_port()
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
    return Served(process, port, log)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pytest.importorskip("vllm", reason="engine: vllm is not installed: make env")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *SERVE]
    started = serve(command, tmp_path_factory.mktemp("server") / "log")
    try:
        started.await_ready()
        yield started
    finally:
        started.kill()


def start(verb: str, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mismatch", verb, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MISMATCH_API_KEY": KEY},
    )


def run(directory: Path, verb: str, *flags: str) -> Run:
    process = start(verb, *flags)
    output, _ = process.communicate(timeout=300)
    return Run(directory, process.returncode, output)


def sampled_tokens(server: Served) -> float:
    """All tokens that a server has sampled so far."""
    metrics = httpx.get(f"{server.url}/metrics", timeout=30.0).text
    return sum(map(float, re.findall(r"^vllm:generation_tokens_total\S* (\S+)", metrics, re.M)))


def test_a_check_with_a_server_is_healthy_and_keeps_no_secret(
    server: Served, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = ("--num-prompts", "8", "--samples-per-prompt", "2", "--max-tokens", "24")
    law = ("--temperature", "0.7", *ALONE)
    done = run(out, "check", *FP32, *flags, *law, "--server", server.url, "--out", str(out))
    done.require_judged()
    decode = store.load_scoring(out, "server:decode")
    train = store.load_scoring(out, "fsdp")
    # The server's law at T = 0.7 is the trainer's: so it is the processed one, as probed.
    assert np.abs(decode.logprobs - train.logprobs).max() < 1e-4
    facts = decode.fingerprint
    assert (facts["served_by"], facts["version"]) == ("vllm", "0.32.0")
    assert facts["logprobs_mode"] == "processed (probed)"
    assert facts["logprobs_temperature"] == 0.7
    assert facts["server"]["url"] == server.url
    assert done.checks["temperature"] == "passed"
    assert {ROUTES, PREFILL} <= {entry["what"] for entry in done.report["not_tested"]}
    for path in [file for file in out.rglob("*") if file.is_file()]:
        assert KEY.encode() not in path.read_bytes(), path
    assert KEY not in done.output


@pytest.mark.grid
def test_the_base_package_samples_from_the_environment_that_it_is_given(
    server: Served, tmp_path: Path
) -> None:
    """Without torch and transformers of its own; the long sequence is cut to the server's 512."""
    out, few = tmp_path / "run", ("--num-prompts", "4", "--samples-per-prompt", "2")
    both = ("--python", sys.executable, "--train-dtype", "fp32", "--nproc-per-node", "1")
    flags = (*FP32, *few, *both, "--max-tokens", "8", "--server", server.url, "--out", str(out))
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [base_python(tmp_path / "base"), "-m", "mismatch", "check", *flags],
        cwd=tmp_path,
        env={**alone, "OMP_NUM_THREADS": "1", "MISMATCH_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (out / "report.json").exists(), done.stdout + done.stderr
    longest = store.load_rollout(out / "long")
    assert 400 < len(longest.token_ids) < 512
    delta = (
        store.load_scoring(out, "fsdp").logprobs - store.load_scoring(out, "server:decode").logprobs
    )
    assert np.abs(delta).max() < 1e-4


def test_the_base_package_alone_samples_the_prompts_that_transformers_makes(
    server: Served, tmp_path: Path
) -> None:
    """Without torch, transformers and `--python`: a rollout of two turns."""
    out, few = tmp_path / "run", ("--num-prompts", "6", "--samples-per-prompt", "6")
    turns = ("--environment", "retry", "--max-turns", "2", "--max-observation-tokens", "64")
    flags = (*FP32, *few, *turns, "--max-tokens", "96", "--server", server.url, "--out", str(out))
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [base_python(tmp_path / "base"), "-m", "mismatch", "rollout", *flags],
        cwd=tmp_path,
        env={**alone, "OMP_NUM_THREADS": "1", "MISMATCH_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rollout, theirs = store.load_rollout(out), AutoTokenizer.from_pretrained(MODEL)
    prompts = render_prompts(read_prompts(PromptSpec(num_prompts=6)), theirs, len(theirs))
    stops = rollout.fingerprint["stop_token_ids"]
    wrong = {"role": "user", "content": "That is not right. Try again."}
    reply, replies = between_turns(theirs, wrong, stops), 0
    for number, (start, end) in enumerate(itertools.pairwise(rollout.offsets)):
        ids, sampled = rollout.token_ids[start:end], rollout.action_mask[start:end]
        first = int(np.argmax(sampled))
        assert ids[:first].tolist() == prompts[rollout.prompt_index[number]]
        given = ids[first:][~sampled[first:]].tolist()
        assert given in ([], reply)
        replies += given == reply
    assert replies  # of 36 answers, about a third are wrong
    texts = store.load_vocabulary(out)
    assert texts == token_texts(theirs, texts)
    decode, prefill = (store.load_scoring(out, f"server:{name}") for name in ("decode", "prefill"))
    assert np.abs(decode.logprobs - prefill.logprobs).max() < 1e-4


def test_without_the_key_and_with_another_model_it_ends_at_once(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mismatch.engines.servers.discovery import recognise
    from mismatch.errors import MismatchError

    url = server.url
    monkeypatch.delenv("MISMATCH_API_KEY", raising=False)
    with pytest.raises(MismatchError, match=r"MISMATCH_API_KEY.*401"):
        recognise(EngineSpec("server", str(MODEL), servers=(url,)))
    monkeypatch.setenv("MISMATCH_API_KEY", KEY)
    with pytest.raises(MismatchError, match=r"tiny-gpt-oss,.*--model other"):
        recognise(EngineSpec("server", "org/other", servers=(url,)))


@pytest.mark.grid
def test_the_weight_sync_of_a_server_is_judged_by_its_parameters(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's reload on a CPU leaves experts and sinks stale; the first weights are back after."""
    monkeypatch.setenv("MISMATCH_API_KEY", KEY)
    url, checkpoint = server.url, Checkpoint(MODEL, 0)
    own = {name: tensor.float() for name, tensor in checkpoint.tensors(0)}
    folders = iter([checkpoint.write(push, tmp_path / str(push)) for push in (1, 2)] + [MODEL])

    def reload() -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(next(folders))}}
        head = {"Authorization": f"Bearer {KEY}"}
        httpx.post(f"{url}/collective_rpc", json=call, headers=head, timeout=120).raise_for_status()

    report = probe(url, own, reload)
    assert judge(report).status == "broken"
    assert len(report.of_status("stale")) == 20
    assert len(report.of_status("arrived")) == 51


@pytest.mark.grid
def test_samples_are_in_order_and_prefill_scores_them_as_decoding_did(
    server: Served, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = ("--num-prompts", "8", "--samples-per-prompt", "2", "--max-tokens", "24")
    done = run(out, "rollout", *FP32, *flags, "--server", server.url, "--out", str(out))
    assert done.code == 0, done.output
    assert store.load_rollout(out).prompt_index.tolist() == [p for p in range(8) for _ in range(2)]
    decode, prefill = (store.load_scoring(out, f"server:{name}") for name in ("decode", "prefill"))
    assert np.abs(decode.logprobs - prefill.logprobs).max() < 1e-4


@pytest.mark.grid
def test_the_loss_of_the_server_ends_the_run(server: Served, tmp_path: Path) -> None:
    out, begun = tmp_path / "run", sampled_tokens(server)
    long = ("--num-prompts", "20", "--samples-per-prompt", "2", "--max-tokens", "48")
    flags = ("--server-concurrency", "2", "--server", server.url, "--out", str(out))
    process = start("rollout", *FP32, *long, *flags)
    deadline = time.monotonic() + 120
    while sampled_tokens(server) - begun < 300:  # more than probes sample
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    server.kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert f"{server.url} did not answer" in output
    assert "--resume" in output
    assert not (out / "rollout.parquet").exists()


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served | None]:
    """An SGLang server that is about to start; None where it is not installed."""
    python = own_python(EngineSpec("sglang"))
    if python is None:
        yield None
        return
    command = [python, "-m", "tests.sglang_cpu.serve", "--model-path", str(MODEL)]
    command += ["--dtype", "float32", "--context-length", "512", "--skip-server-warmup"]
    command += ["--enable-return-routed-experts", "--api-key", KEY]
    server = serve(command, tmp_path_factory.mktemp("sglang") / "log")
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.grid
def test_a_check_with_an_sglang_server_has_its_routes(
    sglang: Served | None, tmp_path: Path
) -> None:
    if sglang is None:
        pytest.skip("engine: no SGLang here: make env-sglang")
    out = tmp_path / "run"
    sglang.await_ready()
    flags = ("--num-prompts", "8", "--samples-per-prompt", "2", "--max-tokens", "24", *ALONE)
    done = run(out, "check", *FP32, *flags, "--server", sglang.url, "--out", str(out))
    done.require_judged()
    decode, train = (store.load_scoring(out, name) for name in ("server:decode", "fsdp"))
    prefill = store.load_scoring(out, "server:prefill")
    assert np.abs(decode.logprobs - train.logprobs).max() < 1e-4
    assert np.abs(prefill.logprobs - train.logprobs).max() < 1e-4
    facts = decode.fingerprint
    assert (facts["served_by"], facts["dtype"], facts["device"]) == ("sglang", "fp32", "cpu")
    assert facts["logprobs_mode"] == "tempered (probed)"
    routing = done.headline["routing"]["routing_disagree_layer"]
    assert routing["value"] <= FLIPS
    assert routing["n_tokens"] > 100
    for path in [file for file in out.rglob("*") if file.is_file()]:
        assert KEY.encode() not in path.read_bytes(), path


def require_turns(directory: Path) -> np.ndarray:
    """Require several turns, some ended at a text, scored by prefill as they were sampled.

    Returns:
        [A] tokens of each turn's context that the servers read from their prefix caches.
    """
    rollout = store.load_rollout(directory)
    assert rollout.turn.max() == 3
    texts = store.load_vocabulary(directory)
    ids, last = rollout.token_ids, rollout.actions[np.diff(rollout.actions, append=10**9) > 1]
    assert [texts[int(token)].strip() for token in ids[last]].count(TEXT) >= 3
    decode = store.load_scoring(directory, "server:decode")
    prefill = store.load_scoring(directory, "server:prefill")
    assert np.abs(decode.logprobs - prefill.logprobs).max() < 1e-4
    read = decode.extra[CACHED]
    assert np.isfinite(read).all()
    return read


@pytest.mark.grid
def test_turns_on_an_sglang_server(sglang: Served | None, tmp_path: Path) -> None:
    if sglang is None:
        pytest.skip("engine: no SGLang here: make env-sglang")
    out = tmp_path / "run"
    sglang.await_ready()
    done = run(out, "rollout", *FP32, *TURNS, "--server", sglang.url, "--out", str(out))
    assert done.code == 0, done.output
    rollout, read = store.load_rollout(out), require_turns(out)
    assert (read[rollout.turn[rollout.actions] > 1] > 0).all()
