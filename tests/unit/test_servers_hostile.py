"""Servers that answer badly: in time or not, in shape or not, no server can do more than fail.

The argument: whatever single thing is wrong with an answer, the request is ``Unavailable`` (the
work goes elsewhere) or ``Refused``, or the answer is right; nothing else ever leaves the API.
"""

import base64
import copy
import io
import json
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

from mismatch.engines.base import ExpertLayout
from mismatch.engines.servers import http
from mismatch.engines.servers.address import parse_address, unprotected
from mismatch.engines.servers.http import Refused, RetryingClient, Unavailable
from mismatch.engines.servers.scheduler import JobCallbacks, Scheduler, ServerState
from mismatch.engines.servers.server_api import ServerFacts
from mismatch.engines.servers.sglang_api import SglangAPI
from mismatch.engines.servers.vllm_api import VllmAPI
from mismatch.errors import MismatchError
from mismatch.types import Sampling

# ---------------------------------------------------------------- time and size


@contextmanager
def raw_server(pieces, pause_s=0.0, repeat=None):
    """Sends bytes as they are, one piece after the other, then ``repeat`` for ever."""
    listening = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def serve():
        while not stopped.is_set():
            try:
                peer, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=feed, args=(peer,), daemon=True).start()

    def feed(peer):
        try:
            peer.recv(65536)
            for piece in pieces:
                peer.sendall(piece)
                time.sleep(pause_s)
            while repeat and not stopped.is_set():
                peer.sendall(repeat)
                time.sleep(pause_s)
        except OSError:
            pass
        finally:
            peer.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        stopped.set()
        listening.close()


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
DRIPS = {
    "headers, byte by byte": ([HEAD], b"x"),
    "endless headers": ([HEAD], b"X-More: 1\r\n"),
    "endless 100 Continue": ([], b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a chunk's size, byte by byte": ([CHUNKED], b"0"),
    "chunks of one byte": ([CHUNKED], b"1\r\n \r\n"),
    "a body, byte by byte": ([HEAD + b"Content-Length: 100000\r\n\r\n"], b" "),
    "nothing": ([HEAD], None),
}


@pytest.mark.parametrize("case", DRIPS)
def test_one_deadline_holds_for_the_whole_request(case):
    pieces, repeat = DRIPS[case]
    with raw_server(pieces, 0.1, repeat) as url:
        start = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            RetryingClient(parse_address(url), timeout_s=1.0).get("/version")
    assert time.monotonic() - start < 3
    assert caught.value.kind in ("slow", "failed")


def test_a_handshake_that_never_ends_is_late_too():
    with raw_server([b"\x16\x03\x03"], 0.1, b"\x00") as url:
        start = time.monotonic()
        with pytest.raises(Unavailable):
            RetryingClient(parse_address(url.replace("http", "https")), timeout_s=1.0).get(
                "/version"
            )
    assert time.monotonic() - start < 3


def test_an_answer_has_a_limit(monkeypatch):
    monkeypatch.setattr(http, "LARGEST_OTHER", 1 << 20)
    with raw_server([HEAD + b"\r\n"], 0.0, b" " * 65536) as url:
        start = time.monotonic()
        with pytest.raises(Unavailable, match="more than"):
            RetryingClient(parse_address(url), timeout_s=20.0).get("/version")
        assert time.monotonic() - start < 10


def test_a_fatal_answer_ends_at_once_beside_a_slow_one():
    def ask(server, job):
        if job == 0:
            raise MismatchError("the key is not accepted")
        time.sleep(8)

    scheduler = Scheduler([ServerState("a", None)], lambda server: None, 2)
    start = time.monotonic()
    with pytest.raises(MismatchError, match="key"):
        scheduler.run([0, 1], JobCallbacks(ask, lambda *rest: None, lambda *rest: None))
    assert time.monotonic() - start < 2


NONSENSE = {
    "no status": b"hello\r\n\r\n",
    "endless digits": HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
    "odd digits": HEAD + "Content-Length: ²\r\n\r\n{}".encode("latin-1", "replace"),
    "negative length": HEAD + b"Content-Length: -1\r\n\r\n{}",
    "deep JSON": HEAD + b"\r\n" + b"[" * 100_000,
    "deep error": b"HTTP/1.1 500 Bad\r\n\r\n" + b"[" * 2000,
    "no UTF-8": HEAD + b"\r\n\xff\xfe",
    "NaN": HEAD + b"\r\nNaN",
    "no number to wait": b"HTTP/1.1 503 Busy\r\nRetry-After: nan\r\n\r\n",
    "a date beyond dates": b"HTTP/1.1 503 B\r\nRetry-After: Mon, 99 Foo 99999 99:99:99\r\n\r\n",
    "bad chunk": CHUNKED + b"zz\r\n",
    "many headers": HEAD + b"X: 1\r\n" * 200 + b"\r\n{}",
    "a long header": HEAD + b"X: " + b"a" * 100_000 + b"\r\n\r\n{}",
    "null bytes": b"\0" * 100,
}


READABLE = ("odd digits", "negative length")


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_unavailable(case):
    with raw_server([NONSENSE[case]]) as url:
        client = RetryingClient(parse_address(url), timeout_s=5.0)
        if case in READABLE:
            assert client.get("/version") == {}
            return
        with pytest.raises(Unavailable) as caught:
            client.get("/version")
    assert caught.value.retry_after_s is None


# ---------------------------------------------------------------- keys

KEY = "sk-abcdef123456"
ECHOES = {
    "location": f"HTTP/1.1 302 Moved\r\nLocation: http://h/{KEY}\r\n\r\n",
    "error": f'HTTP/1.1 400 Bad\r\n\r\n{{"error": "no {KEY}"}}',
    "escaped error": 'HTTP/1.1 400 Bad\r\n\r\n{"error": "no \\u0073k-abcdef123456"}',
    "reason": f"HTTP/1.1 400 {KEY}\r\n\r\n",
    "status line": f"{KEY}\r\n\r\n",
}


@pytest.mark.parametrize("case", ECHOES)
def test_a_key_that_is_echoed_is_not_shown(case):
    with raw_server([ECHOES[case].encode()]) as url:
        with pytest.raises((Refused, Unavailable)) as caught:
            RetryingClient(parse_address(url), 5.0, KEY).get("/version")
        assert KEY not in str(caught.value)


@pytest.mark.parametrize("text", [KEY, KEY.replace("s", "\\u0073", 1), "\\u0073" + KEY[1:]])
def test_a_key_in_an_answer_is_cut_out(text):
    body = f'{{"version": "{text}", "{text}": ["{text}"]}}'
    with raw_server([HEAD + b"\r\n" + body.encode()]) as url:
        assert KEY not in json.dumps(RetryingClient(parse_address(url), 5.0, KEY).get("/version"))


@pytest.mark.parametrize(
    ("url", "risky"),
    [
        ("http://127.0.0.1:1", False),
        ("http://localhost:1", False),
        ("http://[::1]:1", False),
        ("https://example.com", False),
        ("http://example.com", True),
        ("http://10.0.0.7:8000", True),
    ],
)
def test_a_key_over_plain_http_to_another_host_is_known(url, risky):
    assert unprotected(parse_address(url)) is risky


@pytest.mark.parametrize("url", ["http://x y:80", "http://a\0b:1", "http://h/a b", "http://h\x1b"])
def test_addresses_with_odd_characters_are_refused(url):
    with pytest.raises(MismatchError):
        parse_address(url)


# ---------------------------------------------------------------- answers with one thing wrong


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def packed(array):
    return base64.b64encode(np.ascontiguousarray(array, np.int32).tobytes()).decode()


IDS = [1, 2, 3]
LAYOUT = ExpertLayout((0, 1), 4, 2)
SGLANG_TOKENS = [[-1.0, 4, None], [-2.0, 5, None], [-0.5, 6, None], [-0.1, 7, None]]
GOOD = {
    (VllmAPI, "generate"): {
        "choices": [
            {
                "prompt_token_ids": IDS,
                "token_ids": [4, 5, 6, 7],
                "finish_reason": "length",
                "logprobs": {
                    "tokens": ["token_id:4"] * 4,
                    "token_logprobs": [-1.0, -2.0, -0.5, -0.1],
                },
                "routed_experts": npy(np.zeros((6, 2, 2), np.uint8)),
            }
        ],
        "system_fingerprint": "a",
    },
    (VllmAPI, "score"): {
        "choices": [
            {
                "prompt_token_ids": IDS,
                "prompt_logprobs": [None, {"2": {"logprob": -1.0}}, {"3": {"logprob": -2.0}}],
            }
        ]
    },
    (VllmAPI, "top_logprobs"): {
        "choices": [{"logprobs": {"top_logprobs": [{"token_id:4": -1.0, "token_id:5": -2.0}]}}]
    },
    (SglangAPI, "generate"): {
        "output_ids": [4, 5, 6, 7],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 4},
            "output_token_logprobs": SGLANG_TOKENS,
            "routed_experts": packed(np.zeros((6, 2, 2))),
            "weight_version": "default",
        },
    },
    (SglangAPI, "score"): {
        "meta_info": {
            "input_token_logprobs": [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]],
        }
    },
    (SglangAPI, "top_logprobs"): {
        "meta_info": {"output_top_logprobs": [[[-1.0, 4, None], [-2.0, 5, None]]]}
    },
}
FACTS = {
    VllmAPI: {
        "/v1/models": {
            "data": [
                {"id": "t", "root": "/m/t", "owned_by": "vllm", "parent": None, "max_model_len": 9}
            ]
        },
        "/version": {"version": "0.32.0"},
        "/metrics": 'process_start_time_seconds 1.5\nvllm:cache_config_info{cache_dtype="auto"} 1',
        "/server_info?config_format=json": {
            "vllm_config": {
                "model_config": {"dtype": "torch.bfloat16", "logprobs_mode": "raw_logprobs"},
                "parallel_config": {"tensor_parallel_size": 1},
                "device_config": {"device_type": "cpu"},
            }
        },
    },
    SglangAPI: {
        "/model_info": {
            "model_path": "/m/t",
            "is_generation": True,
            "weight_version": "default",
            "served_model_name": "t",
        },
        "/server_info": {
            "version": "0.5.23",
            "dtype": "auto",
            "startup_time": {"tokenizer_e2e": 1.2},
            "model_path": "/m/t",
            "context_length": 512,
        },
        "/v1/models": {"data": [{"max_model_len": 512}]},
    },
}
DELETED = object()
JUNK = [
    *(None, True, False, 0, -1, 10**30, 1.5, 1e999, "", "x", "token_id:-3", "1e9", [], {}),
    *([None], [[]], {"a": 1}, "A" * 50, -5, "token_id:x", [[1, 2, 3]], DELETED),
    *(npy(np.zeros((0,), np.uint8)), npy(np.zeros((2, 2), np.float32))),
    *(npy(np.zeros((3, 9, 9), np.int64) - 1), packed(np.zeros(5)), ["1"], [1.5]),
]


def paths(value, here=()):
    yield here
    if isinstance(value, list):
        value = dict(enumerate(value))
    for name, part in value.items() if isinstance(value, dict) else ():
        yield from paths(part, (*here, name))


def mutations(good):
    """Every answer with one part replaced by every piece of junk, or left out."""
    for path in paths(good):
        for junk in JUNK:
            if not path:
                if junk is not DELETED:
                    yield junk
                continue
            changed = copy.deepcopy(good)
            node = changed
            for step in path[:-1]:
                node = node[step]
            if junk is DELETED:
                del node[path[-1]]
            else:
                node[path[-1]] = junk
            yield changed


class Canned:
    """A client whose answers are given."""

    address = parse_address("http://127.0.0.1:1")

    def __init__(self, posted=None, got=None):
        self.posted, self.got = posted, got or {}

    def post(self, path, body):
        return copy.deepcopy(self.posted)

    def get(self, path, timeout_s=None):
        if path not in self.got:
            raise Refused(404, "not found")
        return copy.deepcopy(self.got[path])

    def text(self, path, timeout_s=None):
        return str(self.got.get(path, ""))


def ask(kind, what, answer):
    api = kind(Canned(answer), ServerFacts("x", "1", "t", ("t",)))
    if what == "generate":
        return api.generate(IDS, api.settings(Sampling(max_tokens=4), ()), None, LAYOUT)
    if what == "score":
        return api.score(IDS, 1)
    return api.top_logprobs(IDS, api.settings(Sampling(max_tokens=1), ()), 5)


@pytest.mark.parametrize(("kind", "what"), GOOD, ids=lambda part: getattr(part, "__name__", part))
def test_an_answer_with_one_thing_wrong_is_unavailable(kind, what):
    ask(kind, what, GOOD[kind, what])
    outcomes = Counter()
    for answer in mutations(GOOD[kind, what]):
        try:
            given = ask(kind, what, answer)
        except (Unavailable, MismatchError) as error:
            outcomes[type(error).__name__] += 1
            continue
        outcomes["taken"] += 1
        if what == "generate":
            assert all(type(i) is int and 0 <= i < 2**31 for i in given.sample.token_ids), answer
            assert np.isfinite(given.sample.logprobs).all(), answer
            assert len(given.sample.logprobs) == len(given.sample.token_ids)
        elif what == "score":
            assert given.shape == (2,)  # finite or not: the engine looks at that
    assert outcomes["Unavailable"] > 50, outcomes


@pytest.mark.parametrize("kind", FACTS)
def test_facts_with_one_thing_wrong_are_unavailable_or_of_another_kind(kind):
    assert kind.describe(Canned(got=FACTS[kind]), None) is not None
    count = 0
    for path, document in FACTS[kind].items():
        for changed in mutations(document):
            count += 1
            try:
                facts = kind.describe(Canned(got={**FACTS[kind], path: changed}), None)
            except (Unavailable, MismatchError):
                continue
            if facts is not None:
                assert facts.max_model_len is None or facts.max_model_len > 0
                assert isinstance(facts.version, str)
                json.dumps(facts.details)
    assert count > 300


def test_a_key_that_goes_unencrypted_is_warned_of(monkeypatch, capsys):
    from mismatch.cli.session import warn_of_key
    from mismatch.specs import EngineSpec, RolloutSpec

    def spec(url):
        return RolloutSpec(engine=EngineSpec(engine="server", servers=(url,)))

    warn_of_key(spec("http://10.0.0.7:8000"))
    assert not capsys.readouterr().out
    monkeypatch.setenv("MISMATCH_API_KEY", KEY)
    warn_of_key(spec("https://10.0.0.7:8000"))
    warn_of_key(spec("http://127.0.0.1:8000"))
    assert not capsys.readouterr().out
    warn_of_key(spec("http://10.0.0.7:8000"))
    shown = capsys.readouterr().out
    assert "http://10.0.0.7:8000" in shown
    assert KEY not in shown


# ---------------------------------------------------------------- the journal


@pytest.fixture
def journal(tmp_path):
    from mismatch.engines.base import Sample
    from mismatch.engines.servers.journal import Journal

    written = Journal.open(tmp_path, "asked")
    written.begin({"kind": "vllm"})
    for job in range(3):
        written.add(job, Sample([1, 2], np.zeros(2), "stop"), "http://a")
    return written.path


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(
    "junk", [b"{oops\n", b"[]\n", b'{"job": 1}\n', b'{"void": 3}\n', b"\xff\n"]
)
def test_a_damaged_line_is_named_and_nothing_is_lost(tmp_path, journal, number, junk):
    from mismatch.engines.servers.journal import Journal

    lines = journal.read_bytes().splitlines(keepends=True)
    lines[number] = junk
    journal.write_bytes(b"".join(lines))
    if number == 0 and junk.startswith(b'{"'):
        return  # a header of something else: its sequences are not asked for
    with pytest.raises(MismatchError, match=f":{number + 1} "):
        Journal.open(tmp_path, "asked")
    assert journal.read_bytes() == b"".join(lines)


def test_a_last_line_that_was_cut_is_taken_off(tmp_path, journal):
    from mismatch.engines.servers.journal import Journal

    journal.write_bytes(journal.read_bytes()[:-5])
    assert sorted(Journal.open(tmp_path, "asked").samples) == [0, 1]
