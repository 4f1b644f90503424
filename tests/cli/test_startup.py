"""The command starts without heavy imports, and the wheel holds only `mismatch`."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.made_run import make_run

ROOT = Path(__file__).parent.parent.parent
HEAVY = ("torch", "pandas", "matplotlib", "transformers", "vllm", "sglang", "pyarrow", "numpy")
HEAVY += ("pydantic", "rich", "httpx")


@pytest.mark.parametrize(
    ("arguments", "also"),
    [
        # The flags of a check ask every installed package for features, which imports email.
        (["--help"], ()),
        (["check", "--help"], ()),
        (["kernels", "--help"], ()),
        (["--version"], ("email",)),
    ],
)
def test_help_imports_nothing_heavy(arguments, also):
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['mismatch', *{arguments!r}]\n"
        "try: runpy.run_module('mismatch', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        f"loaded = [name for name in {HEAVY + also!r} if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("plan", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("verb", "flag", "value", "said"),
    [
        ("check", "--experts-implementation", "groupedmm", "did you mean grouped_mm"),
        ("check", "--engine-arg", "enforce_eagr=1", "did you mean enforce_eager"),
        ("check", "--fix", "attention-sink", "did you mean attention-sinks"),
        ("check", "--scorer", "ver", "did you mean verl"),
        ("check", "--layers", "5", "the model has 4 layers"),
        ("check", "--environment", "calculater", "did you mean calculator"),
        ("check", "--out", ".", "exists and is not empty"),
        ("loop", "--attention", "eagr", "did you mean eager"),
        ("loop", "--arms", "as-is,attention-sink", "did you mean attention-sinks"),
        ("sync-probe", "--engine-arg", "enforce_eagr=1", "did you mean enforce_eager"),
    ],
)
def test_what_cannot_run_is_refused_before_torch_is_imported(verb, flag, value, said, plan):
    """Within a second, that is: torch and a model's code take five."""
    start = [sys.executable, "-X", "importtime", "-m", "mismatch", verb, "--model", "tiny-gpt-oss"]
    done = subprocess.run([*start, flag, value, *plan], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "mismatch.cli" in imported
    assert not imported & {"torch", "transformers", "vllm"}


def test_a_report_imports_few_modules_and_none_that_measures(tmp_path):
    """Of a plain run; sections of further results import their own. Every module is counted."""
    run = make_run(tmp_path / "run")
    build = [sys.executable, "-m", "mismatch", "compare", str(run), "--quiet"]
    assert subprocess.run(build, capture_output=True).returncode == 1
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['mismatch', 'report', {str(run)!r}]\n"
        "try: runpy.run_module('mismatch', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 1, end.code\n"
        "print('imported:', *sys.modules)\n"
    )
    start = [sys.executable, "-c", code]
    done = subprocess.run(start, capture_output=True, text=True, check=True)
    page, _, imported = done.stdout.partition("imported:")
    assert "verdict:" in page
    imported = set(imported.split())
    ours = {name for name in imported if name.partition(".")[0] == "mismatch"}
    assert {"mismatch.reports.html", "mismatch.features.corrections.section"} <= ours
    assert len(ours) < 89, sorted(ours)
    measuring = {"mismatch.metrics.estimator", "mismatch.analysis.comparison", "scipy", "torch"}
    assert not imported & measuring
    rooms = {f"mismatch.{name}" for name in ("engines", "processes", "doctor", "prompts", "models")}
    assert not ours & rooms


def test_the_top_level_links_show_the_two_rooms_a_user_meets_first():
    assert (ROOT / "cli").resolve() == ROOT / "mismatch" / "cli"
    assert (ROOT / "reports").resolve() == ROOT / "mismatch" / "reports"


@pytest.mark.slow
def test_the_wheel_holds_only_mismatch(tmp_path):
    source = tmp_path / "source"  # a copy: a stale build folder must not decide what is inside
    ignore = shutil.ignore_patterns(".venv*", "runs", ".git", "build", "*.egg-info")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["-w", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"mismatch"}
    for needed in (
        "mismatch/models/tiny-gpt-oss/model.safetensors",
        "mismatch/models/tiny-gpt-oss/chat_template.jinja",
        "mismatch/py.typed",
    ):
        assert needed in names
    assert any(name.startswith("mismatch/reports/templates/") for name in names)


@pytest.mark.parametrize(
    ("verb", "fix"), [("check", "with --resume"), ("kernels", "run the same command again")]
)
def test_interrupted_says_how_to_go_on(monkeypatch, capsys, verb, fix):
    from mismatch.cli import main

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", interrupted)
    monkeypatch.setattr("sys.argv", ["mismatch", verb])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 130
    assert fix in capsys.readouterr().err
