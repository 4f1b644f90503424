"""What a fingerprint says of servers: their own words, what they showed, and what stays open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mismatch.engines.base import Mode
from mismatch.engines.servers.member import Member
from mismatch.engines.servers.survey import SAME, Server
from mismatch.types import Sampling

NO_WEIGHTS = "a server does not show its parameters"


def served_facts(server: Server, sampling: Sampling, mode: Mode) -> dict[str, Any]:
    """Facts that all servers of a run share, taken from one of them."""
    facts, law = server.facts, server.law
    temperature: float | None = 1.0
    if mode == "decode" and sampling.temperature not in (0.0, 1.0):
        temperature = {True: sampling.temperature, False: 1.0, None: None}[law.tempered]
    cut = mode == "decode" and sampling.truncates
    return {
        "mode": mode,
        "served_by": facts.kind,
        "version": facts.version,
        "versions": {facts.kind: facts.version},
        "source_files": {},  # those of the servers cannot be read
        "dtype": facts.dtype,
        **facts.details,
        "logprobs_mode": f"{law.name} (probed)" if mode == "decode" else "prompt_logprobs",
        "logprobs_temperature": temperature,
        "logprobs_truncated": law.truncated if cut else False,
        "max_model_len": facts.max_model_len,
        "weights_not_comparable": NO_WEIGHTS,
    }


def record(member: Member, sequences: int, notes: dict[str, Any]) -> dict[str, Any]:
    """One server's part in a run.

    Args:
        notes: what :func:`mismatch.engines.servers.survey.verify` has noted.
    """
    server: Server = member.server
    return {
        "url": server.url,
        "version": server.facts.version,
        "configuration": server.facts.configuration,
        "sequences": sequences,
        "unconfirmed": len(member.unconfirmed),
        "noise": server.noise,
        "drift": notes["drift"],
        "restarts": len(notes["restarts"]),
        "dropped": member.dropped,
        **member.counts,
    }


def open_questions(members: Sequence[Member], model_type: str) -> list[str]:
    """What is not known about these servers, one sentence each."""
    first, said = members[0].server, []
    details = first.facts.details
    portable = (details.get("device"), details.get("attention")) == ("cpu", "torch_native")
    if first.facts.kind == "sglang" and model_type == "gpt_oss" and portable:
        said.append(
            "server: attention sinks: SGLang's portable attention has none, that of "
            "mismatch.engines.sglang.cpu.serve is a substitute, and a server does not say which it "
            "runs"
        )
    if first.facts.dtype is None:
        said.append("server: the dtype that it computes in: it does not say")
    if first.law.tempered is None:
        said.append("server: which law its logprobs are of: its probes did not tell")
    if len({member.server.facts.configuration for member in members}) > 1:
        said.append("server: equal settings of all servers: their configurations differ")
    for member in members:
        if member.server.noise > SAME:
            said.append(
                f"server: that one model answers at {member.name}: its probe logprobs differ by "
                f"{member.server.noise:.2g} on average from one look to the next"
            )
        if member.unconfirmed:
            said.append(
                f"server: the weights of {member.name} to its end: it was dropped "
                f"({member.dropped}) before {len(member.unconfirmed)} of its answers were "
                "confirmed by probe prompts"
            )
        if member.counts["timeouts"]:
            said.append(
                f"server: {member.counts['timeouts']} requests to {member.name} ran out of "
                "time and were sampled again, which favours short responses"
            )
    return said
