"""Planted templates over a real tokenizer: each fault is found by its own check and by no other."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mismatch.errors import MismatchError
from mismatch.features.turns.template import TemplateReport, examine
from mismatch.models import EMBEDDED
from mismatch.models.tokenizers import load_tokenizer, stop_ids
from tests.command import mismatch

MODEL = str(EMBEDDED["tiny-gpt-oss"])
HEAD = "{%- for m in messages -%}<|start|>{{ m.role }}<|message|>"
FOOT = "{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant<|message|>{%- endif -%}"
CALL = (
    "{%- if m.tool_calls -%}{%- set f = m.tool_calls[0].function -%}"
    "{{ 'call ' + f.name + ' ' }}{{ f.arguments }}{%- endif -%}"
)
BODY = "{%- if m.thinking -%}{{ m.thinking + '. ' }}{%- endif -%}{{ m.content }}" + CALL
END = "{{ '<|return|>' if m.role == 'assistant' else '<|end|>' }}"
CLEAN = HEAD + BODY + END + FOOT


def rendered(template: str, name: str = "made") -> TemplateReport:
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = template
    return examine(name, tokenizer, STOP)


TOKENIZER: Any = load_tokenizer(MODEL)
TOKENIZER.model_max_length = 10**9
STOP = stop_ids(MODEL, None, TOKENIZER.eos_token_id)


def failing(report: TemplateReport) -> set[str]:
    return {check.id for check in report.checks if check.status == "failed"}


def test_a_template_that_only_appends_passes_every_check() -> None:
    report = rendered(CLEAN)
    states = {(check.id, check.where): check.status for check in report.checks}
    assert states.pop(("reasoning-kept", "reasoning_content")) == "not_tested"
    assert set(states.values()) == {"passed"}
    assert report.after_end == ""


FAULTS = {
    "append-only": CLEAN.replace(HEAD, "{{ messages | length }} messages" + HEAD),
    # Earlier answers end with another token than was sampled, as gpt-oss's own template has it.
    "append-only, end token": CLEAN.replace(
        END, END.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    ),
    "generation-prompt": CLEAN.replace(FOOT, "{%- endfor -%}"),
    "end-of-turn": CLEAN.replace(END, "<|end|>"),
    "reasoning-kept": CLEAN.replace("if m.thinking", "if m.thinking and loop.last"),
    "white-space-kept": CLEAN.replace(
        "{{ m.content }}", "{{ m.content if m.role == 'tool' else m.content | trim }}"
    ),
    "tool-call-kept": CLEAN.replace("f.arguments }}", "f.arguments | tojson }}"),
    "tool-output-kept": CLEAN.replace(
        "{{ m.content }}", "{{ m.content[:4000] if m.role == 'tool' else m.content }}"
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_its_own_check_alone(fault: str) -> None:
    assert FAULTS[fault] != CLEAN
    assert failing(rendered(FAULTS[fault])) == {fault.partition(",")[0]}


def test_a_template_that_needs_no_generation_prompt_passes() -> None:
    """An answer behind its question, or behind empty reasoning that only a whole one has."""
    bare = "{%- for m in messages -%}" + BODY + END + "{%- endfor -%}"
    thinking = BODY.replace(
        "{{ m.content }}", "{{ '<think>' if m.role == 'assistant' }}{{ m.content }}"
    )
    for template in (bare, CLEAN.replace(BODY, thinking)):
        assert "generation-prompt" not in failing(rendered(template))


def test_a_change_shows_the_ids_on_both_sides() -> None:
    (check,) = (c for c in rendered(FAULTS["append-only, end token"]).checks if c.change)
    change = check.change
    assert change is not None
    ids = {token: TOKENIZER.convert_tokens_to_ids(token) for token in ("<|return|>", "<|end|>")}
    assert (change.turn, change.expected[0], change.got[0]) == (
        1,
        ids["<|return|>"],
        ids["<|end|>"],
    )
    assert change.expected_text.startswith("<|return|>")


def test_what_is_added_after_the_end_token_is_counted_apart() -> None:
    report = rendered(CLEAN.replace(END, END + "{{ '\\n' }}"))
    assert not report.failed
    assert report.after_end == "\n"


def test_a_template_without_tools_is_not_judged_by_them() -> None:
    strict = HEAD + "{%- if m.role == 'tool' -%}{{ raise_exception('no tools') }}{%- endif -%}"
    states = {c.id: (c.status, c.reason) for c in rendered(strict + BODY + END + FOOT).checks}
    assert states["tool-output-kept"][0] == "not_tested"
    assert "no tools" in states["tool-output-kept"][1]
    assert rendered(CLEAN.replace(BODY, "{{ m.content }}")).failed is False


@pytest.mark.parametrize("template", [None, "", "{{ raise_exception('never') }}", "{% broken"])
def test_no_template_and_one_that_refuses_all_are_errors(template: str | None) -> None:
    with pytest.raises(MismatchError) as caught:
        rendered(template)  # type: ignore[arg-type]
    assert "--chat-template" in caught.value.fix


# ---------------------------------------------------------------- the command


@pytest.mark.grid
def test_the_command_judges_several_models_by_the_worst(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text(FAULTS["white-space-kept"])
    flags = ("template", "--model", "tiny-gpt-oss", "--model", str(tmp_path / "other"))
    done = mismatch(*flags, "--format", "json")
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "mismatch.template/2"
    failed = [
        [check["id"] for check in report["checks"] if check["status"] == "failed"]
        for report in document["templates"]
    ]
    assert failed[0] == []
    assert set(failed[1]) == {"white-space-kept"}
    printed = mismatch(*flags)
    assert printed.returncode == 1
    assert "use_conversation_multi_turn" in printed.stdout
    lines = [line for line in printed.stdout.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80


def test_bad_input_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jinja"
    bad.write_bytes(b"\xff\xfe")
    for flags in (
        (),
        ("--model", str(tmp_path)),
        ("--model", "tiny-gpt-oss", "--chat-template", str(tmp_path / "none")),
        ("--model", "tiny-gpt-oss", "--chat-template", str(bad)),
        ("--model", "tiny-gpt-oss", "--chat-template", str(tmp_path)),
    ):
        done = mismatch("template", *flags)
        assert (done.returncode, "fix:" in done.stderr) == (2, True), (flags, done.stderr)
        assert "Traceback" not in done.stderr
