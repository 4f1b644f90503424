"""A tiny HTTP server that says what a test tells it to: a vLLM server as seen from outside.

It samples from a distribution of its own (a function of the last id alone), so that every number is
known; faults are planted per request.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

VOCABULARY = 16
VERSION = "0.32.0"


def logits(last: int, weights: int = 0) -> np.ndarray:
    """Return those of the next token after ``last``; ``weights`` names a checkpoint."""
    return np.random.default_rng([last, weights]).normal(0.0, 1.5, VOCABULARY)


def law(last: int, temperature: float = 1.0, top_k: int = 0, weights: int = 0) -> np.ndarray:
    """Return logprobs [V] of the distribution that samples, -inf where it never goes."""
    scaled = logits(last, weights) / (temperature or 1.0)
    if top_k:
        scaled[scaled < np.sort(scaled)[-top_k]] = -np.inf
    return scaled - np.log(np.exp(scaled).sum())


class ScriptedServer:
    """One server on a free port of the loopback; a context manager.

    Attributes:
        faults: called with (number of the sampling request, body); returns a fault's name or None.
        weights: which checkpoint it has; may change while it runs.
        mode: "raw" or "processed", of its logprobs.
        seen: (path, headers, body) of every request.
    """

    def __init__(self, name: str = "tiny", **settings: Any) -> None:
        self.name = name
        self.root = f"/models/{name}"
        self.weights = 0
        self.mode = "raw"
        self.prompt_logprobs = True
        self.logprobs = True
        self.routes = False
        self.cached: int | None = None  # prompt tokens that it says it read from its cache
        self.delay_s = 0.0
        self.key: str | None = None
        self.shows: Callable[[list[str], list[str]], str] | None = None  # its parameters
        self.version = VERSION
        self.max_model_len = 512
        self.configuration = "vllm-0.32.0-abc"
        self.started = 1.0
        self.most_at_once = 0
        self.faults: Callable[[int, dict[str, Any]], str | None] = lambda number, body: None
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.sampled = 0
        for key, value in settings.items():
            assert hasattr(self, key), key
            setattr(self, key, value)
        self._flying = 0
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.answer(self, {})

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                owner.answer(self, json.loads(self.rfile.read(size)))

            def log_message(self, *args: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *args: Any) -> None:
                pass  # clients that went away

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> ScriptedServer:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Go away: connections are refused from now on."""
        self._http.shutdown()
        self._http.server_close()

    # ------------------------------------------------------------ answering

    def answer(self, http: Any, body: dict[str, Any]) -> None:
        with self._lock:
            self.seen.append((http.path, dict(http.headers), body))
        path = http.path.partition("?")[0]
        guarded = path.startswith("/v1")
        if guarded and self.key and http.headers.get("Authorization") != f"Bearer {self.key}":
            error = f"no access with {http.headers.get('Authorization')}"
            return self.send(http, 401, {"error": error})
        if path == "/version":
            return self.send(http, 200, {"version": self.version})
        if path == "/v1/models":
            card = {"id": self.name, "root": self.root, "owned_by": "vllm", "parent": None}
            return self.send(http, 200, {"data": [card | {"max_model_len": self.max_model_len}]})
        if path == "/metrics":
            return self.send(http, 200, f"process_start_time_seconds {self.started}\n")
        if self.shows is not None and body.get("method") == "mismatch_held_json":
            return self.send(http, 200, {"results": [self.shows(*body["args"])]})
        if path != "/v1/completions":
            return self.send(http, 404, {"detail": "Not Found"})
        with self._lock:
            self._flying += 1
            self.most_at_once = max(self.most_at_once, self._flying)
        try:
            self.complete(http, body)
        finally:
            with self._lock:
                self._flying -= 1

    def complete(self, http: Any, body: dict[str, Any]) -> None:
        probing = body["max_tokens"] < 3  # probes and scoring; runs of the tests sample more
        fault = None
        if not probing:
            with self._lock:
                number, self.sampled = self.sampled, self.sampled + 1
            fault = self.faults(number, body)
            time.sleep(self.delay_s)
        if fault is not None:
            return self.misbehave(http, fault, body)
        self.send(http, 200, self.completion(body))

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = list(body["prompt"])
        temperature, top_k = body["temperature"], body["top_k"]
        # The whole request decides the tokens: the same job gets the same answer anywhere.
        rng = np.random.default_rng([*ids, body.get("seed") or 0, body["max_tokens"]])
        sampled, logprobs, tops = [], [], []
        last = ids[-1]
        for _ in range(body["max_tokens"]):
            probs = np.exp(law(last, temperature, top_k, self.weights))
            token = int(probs.argmax() if temperature == 0 else rng.choice(VOCABULARY, p=probs))
            row = (
                law(last, temperature, top_k, self.weights)
                if self.mode == "processed"
                else law(last, weights=self.weights)
            )
            sampled.append(token)
            logprobs.append(float(row[token]))
            best = np.argsort(-row)[: max(body.get("logprobs") or 0, 1)]
            tops.append({f"token_id:{i}": max(float(row[i]), -9999.0) for i in best})
            last = token
            if token in body["stop_token_ids"]:
                break
        stopped = sampled[-1] in body["stop_token_ids"]
        choice: dict[str, Any] = {
            "token_ids": sampled,
            "prompt_token_ids": ids,
            "finish_reason": "stop" if stopped else "length",
            "routed_experts": None,
            "logprobs": None,
        }
        if self.routes:  # two layers, as .npy
            rows = np.arange((len(ids) + len(sampled) - 1) * 2 * 2, dtype=np.uint8) % 4
            packed = io.BytesIO()
            np.save(packed, rows.reshape(-1, 2, 2))
            choice["routed_experts"] = base64.b64encode(packed.getvalue()).decode()
        if self.logprobs and body.get("logprobs") is not None:
            names = [f"token_id:{i}" for i in sampled]
            choice["logprobs"] = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops}
        if self.prompt_logprobs and body.get("prompt_logprobs") is not None:
            rows: list[Any] = [None]
            for before, token in itertools.pairwise(ids):
                row = law(before, weights=self.weights)
                rows.append({str(token): {"logprob": float(row[token]), "rank": 1}})
            choice["prompt_logprobs"] = rows
        details = None if self.cached is None else {"cached_tokens": self.cached}
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": details}
        return {"choices": [choice], "system_fingerprint": self.configuration, "usage": usage}

    def misbehave(self, http: Any, fault: str, body: dict[str, Any]) -> None:
        kind, _, detail = fault.partition(":")
        if kind == "status":
            status, _, wait = detail.partition(":")
            headers = {"Retry-After": wait} if wait else {}
            self.send(http, int(status), {"error": {"message": "not now"}}, headers)
        elif kind == "hang":
            time.sleep(float(detail))
        elif kind == "reset":
            # A linger time of 0 makes closing the socket a reset.
            linger = struct.pack("ii", 1, 0)
            http.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            http.close_connection = True
            http.connection.close()
        elif kind == "half":
            data = json.dumps(self.completion(body)).encode()
            self.send(http, 200, data[: len(data) // 2], {"Content-Length": str(len(data))})
            http.close_connection = True
        elif kind == "dribble":
            http.send_response(200)
            http.end_headers()
            for _ in range(100):
                http.wfile.write(b" ")
                http.wfile.flush()
                time.sleep(0.05)
        elif kind == "text":
            self.send(http, 200, "<html>bad gateway</html>")
        elif kind == "json":
            self.send(http, 200, json.loads(detail))
        else:
            raise AssertionError(fault)

    def send(
        self, http: Any, status: int, body: Any, headers: dict[str, str] | None = None
    ) -> None:
        if not isinstance(body, bytes):
            body = (body if isinstance(body, str) else json.dumps(body)).encode()
        http.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            http.send_header(name, value)
        http.end_headers()
        http.wfile.write(body)


class ScriptedSglang(ScriptedServer):
    """The same law behind SGLang's endpoints: tempered logprobs, before any truncation."""

    def __init__(self, **settings: Any) -> None:
        self.weight_version = "default"
        super().__init__(**settings)
        self.mode = "processed"

    def answer(self, http: Any, body: dict[str, Any]) -> None:
        with self._lock:
            self.seen.append((http.path, dict(http.headers), body))
        if http.path == "/model_info":
            model = {"model_path": self.root, "served_model_name": self.name}
            info = model | {"weight_version": self.weight_version, "is_generation": True}
            return self.send(http, 200, info)
        if http.path == "/server_info":
            took = {"tokenizer_e2e": self.started}
            info = {"version": "0.5.23", "dtype": "bfloat16", "api_key": "leak", "device": "cuda"}
            return self.send(http, 200, info | {"startup_time": took})
        if http.path == "/v1/models":
            return self.send(http, 200, {"data": [{"max_model_len": self.max_model_len}]})
        if http.path != "/generate":
            return self.send(http, 404, {})
        return self.generate(http, body)

    def generate(self, http: Any, body: dict[str, Any]) -> None:
        given = body["sampling_params"]
        if given["max_new_tokens"] >= 3:
            with self._lock:
                number, self.sampled = self.sampled, self.sampled + 1
            fault = self.faults(number, body)
            if fault == "abort":
                reason = {"type": "abort", "message": "out of room"}
                answer = {"output_ids": [], "meta_info": {"finish_reason": reason}}
                return self.send(http, 200, answer)
        facts: dict[str, Any] = {"weight_version": self.weight_version}
        ids, sampled = list(body["input_ids"]), []
        if body["logprob_start_len"] >= 0:
            start = body["logprob_start_len"]
            rows = [law(a, weights=self.weights)[b] for a, b in itertools.pairwise(ids)]
            scored = [[None, ids[start], None]]
            scored += [[rows[at - 1], ids[at], None] for at in range(start + 1, len(ids))]
            facts["input_token_logprobs"] = scored
        if given["max_new_tokens"]:
            asked = {
                "prompt": ids,
                "temperature": given["temperature"],
                "logprobs": 0,
                "top_k": max(given["top_k"], 0),
                "stop_token_ids": given["stop_token_ids"],
                "max_tokens": given["max_new_tokens"],
                "seed": given.get("sampling_seed"),
            }
            (choice,) = self.completion(asked)["choices"]
            sampled = choice["token_ids"]
            before = [ids[-1], *sampled]
            laws = [law(a, given["temperature"], weights=self.weights) for a in before]
            facts["output_token_logprobs"] = [
                [float(row[token]), token, None] for row, token in zip(laws, sampled, strict=False)
            ]
            best = [np.argsort(-row)[: body.get("top_logprobs_num", 1)] for row in laws]
            facts["output_top_logprobs"] = [
                [[float(row[i]), int(i), None] for i in ids]
                for row, ids, _ in zip(laws, best, sampled, strict=False)
            ]
            facts["finish_reason"] = {"type": choice["finish_reason"]}
        if self.routes and body.get("return_routed_experts"):
            rows = np.arange((len(ids) + len(sampled) - 1) * 2 * 2, dtype="<i4") % 4
            facts["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        self.send(http, 200, {"output_ids": sampled, "meta_info": facts})
