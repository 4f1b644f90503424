"""Text of others cannot steer a terminal or a page; odd streams and files give no traceback."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mismatch import reports
from mismatch.cli import main as cli
from mismatch.cli.output import say
from mismatch.cli.session import ConsoleNarrator
from mismatch.engines.servers import discovery
from mismatch.errors import MismatchError
from mismatch.models.moe import require_routes
from mismatch.run import store
from mismatch.run.directory import load_spec
from mismatch.specs import EngineSpec

from ..command import mismatch
from ..made_run import make_run, rollout, scoring

ESCAPES = "\x1b]0;pwned\x07 \x1b[31m \u202e \x9b31m"
RAW = ("\x1b", "\x07", "\u202e", "\x9b")


def test_errors_show_no_escapes(capsys):
    with pytest.raises(SystemExit):
        cli._complain(f"HTTP 500: {ESCAPES}", f"try {ESCAPES}\nor not")
    shown = capsys.readouterr().err
    assert not [character for character in RAW if character in shown]
    assert shown.count("\n") == 3


def test_notes_and_progress_show_no_escapes(capsys):
    from rich.console import Console

    say(ESCAPES)
    narrator = ConsoleNarrator(Console())
    narrator.note(ESCAPES)
    with narrator.stage("rollout") as progress:
        progress(ESCAPES)
    shown = capsys.readouterr().out
    assert not [character for character in RAW if character in shown]


def test_progress_on_a_terminal_is_no_markup():
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True)
    with ConsoleNarrator(console).stage("rollout [/red]") as progress:
        progress("[/bold] 1/2 \x1b]0;x\x07")
    assert "\x1b]0" not in console.file.getvalue()


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["latin-1", "C"],
)
def test_a_stream_that_is_no_utf8_is_written_to(environment, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mismatch", "metrics"],
        capture_output=True,
        env={**os.environ, **environment},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr


DEEP = "x = " + "[" * 5000 + "]" * 5000
FILES = {
    "deep config": ("--config", "c.toml", DEEP),
    "deep levels": ("--thresholds", "t.toml", DEEP),
    "deep configuration": ("--framework-config", "v.yaml", "a: " + "[" * 5000 + "]" * 5000),
    "a flag twice": ("--config", "c.toml", "max_tokens = 3\nmax-tokens = 4\n"),
}


@pytest.mark.parametrize("case", FILES)
def test_odd_files_are_refused_with_their_name(case, tmp_path, monkeypatch, capsys):
    flag, name, text = FILES[case]
    (tmp_path / name).write_text(text)
    arguments = ["mismatch", "check", "--model", "tiny-gpt-oss", flag, str(tmp_path / name)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert name in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("content", ["[]", "null", "3", "[" * 5000, '{"model_type": [1]}'])
def test_a_config_that_is_none_is_refused(content, tmp_path, monkeypatch, capsys):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(content)
    flags = ["--engine", "transformers", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["mismatch", "check", "--model", str(tmp_path / "m"), *flags])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert "Traceback" not in shown, shown


def test_a_page_cannot_be_given_a_base_or_a_form():
    page = (Path(reports.__file__).parent / "templates" / "page.html").read_text()
    assert "base-uri 'none'" in page
    assert "form-action 'none'" in page


def test_foreign_names_give_no_command_to_a_runner_of_jobs(tmp_path, capsys):
    """Columns of a dump in the log of a job: GitHub reads ``::name::`` at the start of a line."""
    rows = ({"prompt": "a", "completion": "b", "x\n::set-output name=a::b": 1, "\n::error::x": 2},)
    dump = tmp_path / "dump.jsonl"
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = mismatch("postmortem", dump, "--out", tmp_path / "out", cwd=tmp_path)
    said = done.stdout + done.stderr
    assert not [line for line in said.splitlines() if line.lstrip().startswith("::")]
    with pytest.raises(SystemExit):
        cli._complain("a server says\n::stop-commands::x\n  ::add-mask::y ##[group]z", "")
    said = capsys.readouterr().err
    assert not [line for line in said.splitlines() if line.lstrip().startswith("::")]
    assert "##[" not in said


def test_a_suggested_command_quotes_what_a_server_says():
    spec = EngineSpec(engine="vllm", model="mine", servers=("http://127.0.0.1:1",))
    served = "m; rm -r x\n::error::y"
    server = SimpleNamespace(names=(served,), url="http://127.0.0.1:1")
    with pytest.raises(MismatchError) as found:
        discovery._require_model(server, spec)
    assert shlex.quote(" ".join(served.split())) in found.value.fix
    assert "\n" not in found.value.message


def test_stored_settings_are_shown_as_what_they_say_and_on_one_line(tmp_path):
    """A disturbance that nothing here could plant, and a preset, of a stranger's spec."""
    run, samples = make_run(tmp_path / "run"), rollout()
    new = scoring("fsdp:new", samples, 0.011)
    new.fingerprint["injected"] = {"evil:f\n::error::x": 1.0, "router-noise": 0.1, "seed": 3}
    store.save_scoring(run, new, samples)
    spec = json.loads((run / "spec.json").read_text())
    spec |= {"inject": [["evil:f\n::error::x", 1]], "preset": "evil\n::error::x"}
    (run / "spec.json").write_text(json.dumps(spec))
    assert mismatch("compare", run).returncode == 1
    for form in ("text", "markdown", "github", "junit"):
        done = mismatch("report", run, "--details", "--format", form, COLUMNS="1000")
        named = [line for line in done.stdout.splitlines() if "evil" in line]
        assert named or form == "junit"
        assert not [line for line in named if "stored" not in line]
        assert "\n::error::x" not in done.stdout
    with pytest.raises(MismatchError, match="evil"):
        require_routes(load_spec(run))
