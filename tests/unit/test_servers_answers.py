"""Servers whose answers are wrong in shape: every answer with one part replaced or left out.

Whatever single thing is wrong, the request has failed or the answer is right; nothing else ever
leaves the API.
"""

import base64
import copy
import io
import json
from collections import Counter

import numpy as np
import pytest

from mismatch.engines.base import ExpertLayout
from mismatch.engines.servers.address import parse_address
from mismatch.engines.servers.client import RequestFailed, usable_answer, wait_for
from mismatch.engines.servers.sglang_api import SglangServer
from mismatch.engines.servers.vllm_api import VllmServer
from mismatch.errors import MismatchError
from mismatch.types import Sampling


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
    (VllmServer, "generate"): {
        "choices": [
            {
                "prompt_token_ids": IDS,
                "token_ids": [4, 5, 6, 7],
                "finish_reason": "length",
                "logprobs": {
                    "tokens": ["token_id:4"] * 4,
                    "token_logprobs": [-1.0, -2.0, -0.5, -0.1],
                    "top_logprobs": [{"token_id:4": -1.0, "token_id:5": -2.0}] * 4,
                },
                "routed_experts": npy(np.zeros((6, 2, 2), np.uint8)),
            }
        ],
        "system_fingerprint": "a",
    },
    (VllmServer, "score"): {
        "choices": [
            {
                "prompt_token_ids": IDS,
                "prompt_logprobs": [None, {"2": {"logprob": -1.0}}, {"3": {"logprob": -2.0}}],
            }
        ]
    },
    (SglangServer, "generate"): {
        "output_ids": [4, 5, 6, 7],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 4},
            "output_token_logprobs": SGLANG_TOKENS,
            "output_top_logprobs": [[[-1.0, 4, None], [-2.0, 5, None]]] * 4,
            "routed_experts": packed(np.zeros((6, 2, 2))),
            "weight_version": "default",
        },
    },
    (SglangServer, "score"): {
        "meta_info": {"input_token_logprobs": [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]]}
    },
}
FACTS = {
    VllmServer: {
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
    SglangServer: {
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

    async def post(self, path, body, read, most):
        with usable_answer():
            return read(copy.deepcopy(self.posted))

    async def get(self, path, read=None):
        if path not in self.got:
            raise RequestFailed("HTTP 404", "refused")
        return str(self.got[path]) if read else copy.deepcopy(self.got[path])


def ask(kind, what, answer):
    api = kind(Canned(answer), "1", ("t",), layout=LAYOUT)
    settings = api.settings(Sampling(max_tokens=4))
    if what == "score":
        return wait_for(api.score(IDS, 1))
    return wait_for(api.generate(IDS, settings, likeliest=2))


def described(kind, documents):
    return wait_for(kind.recognised(Canned(got=documents), None))


@pytest.mark.parametrize(("kind", "what"), GOOD, ids=lambda part: getattr(part, "__name__", part))
def test_an_answer_with_one_thing_wrong_is_a_failed_request(kind, what):
    ask(kind, what, GOOD[kind, what])
    outcomes = Counter()
    for answer in mutations(GOOD[kind, what]):
        try:
            given = ask(kind, what, answer)
        except (RequestFailed, MismatchError) as error:
            outcomes[type(error).__name__] += 1
            continue
        outcomes["taken"] += 1
        if what == "generate":
            assert all(type(i) is int and 0 <= i < 2**31 for i in given[0].token_ids), answer
            assert np.isfinite(given[0].logprobs).all(), answer
            assert len(given[0].logprobs) == len(given[0].token_ids)
            top = given[0].likeliest
            assert top is None or len(top.ids) == len(given[0].token_ids)
        elif what == "score":
            assert given.shape == (2,)  # finite or not: the engine looks at that
    assert outcomes["RequestFailed"] > 50, outcomes


@pytest.mark.parametrize("kind", FACTS)
def test_facts_with_one_thing_wrong_are_a_failed_request_or_of_another_kind(kind):
    assert described(kind, FACTS[kind]) is not None
    count = 0
    for path, document in FACTS[kind].items():
        for changed in mutations(document):
            count += 1
            try:
                facts = described(kind, {**FACTS[kind], path: changed})
            except (RequestFailed, MismatchError):
                continue
            if facts is not None:
                assert facts.max_model_len is None or facts.max_model_len > 0
                assert isinstance(facts.version, str)
                json.dumps(facts.details)
    assert count > 300
