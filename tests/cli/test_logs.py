"""`mismatch postmortem LOG`: what frameworks print and log, read without a dump.

TRL's lines are printed by transformers' own callback, the offline run by W&B, event files by
tensorboardX. verl's, SkyRL's, slime's, NeMo-RL's and prime-rl's lines are their exact layouts.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .. import recorded_folders
from ..command import mismatch

STEPS = 12
ALL = range(1, STEPS + 1)


def numbers(step: int, growing: bool = True) -> dict[str, float]:
    """Return what a step has: the distance doubles every second step, and the clip is idle."""
    size = 1e-3 * 2 ** (step / 2 if growing else 0)
    return {"k3": size, "abs": size**0.5, "clip": 0.0, "reward": 0.1 * step}


def verl_line(step: int, of: dict[str, float]) -> str:
    named = {"actor/pg_clipfrac": of["clip"], "rollout_corr/k3_kl": of["k3"],
             "critic/rewards/mean": of["reward"], "actor/grad_norm": 0.5}  # fmt: skip
    return " - ".join([f"step:{step}", *(f"{name}:{value!r}" for name, value in named.items())])


def skyrl_line(step: int, of: dict[str, float]) -> str:
    return (f"(skyrl_entrypoint pid=7) step:{step} - policy/ppo_clip_ratio:{of['clip']} - "
            f"policy/rollout_train_logprobs_abs_diff_mean:{of['abs']}")  # fmt: skip


def slime_line(step: int, of: dict[str, float]) -> str:
    held = {"train/loss": 0.1, "train/pg_clipfrac": of["clip"],
            "train/train_rollout_logprob_abs_diff": of["abs"], "train/ppo_kl": 0.0}  # fmt: skip
    return f"\x1b[36m(MegatronTrainRayActor pid=1)\x1b[0m step {step}: {held}"


def prime_line(step: int, of: dict[str, float]) -> str:
    return (f"12:00:01  SUCCESS Step {step} | Time: 3.20s | Loss: 0.0100 | Entropy: 0.3000 | "
            f"Mismatch KL: {of['k3']:.4f} | Grad. Norm: 0.1000 | LR: 1.00e-06")  # fmt: skip


def nemo_lines(step: int, of: dict[str, float]) -> str:
    bar = "=" * 25
    return (
        f"\n{bar} Step {step}/{STEPS} {bar}\n📊 Training Results:\n  • Loss: 0.0100\n"
        f"  • Generation KL Error: {of['k3']:.4f}\n  • Avg Reward: {of['reward']:.4f}"
    )


LAYOUTS: dict[str, Any] = {
    "verl": verl_line, "skyrl": skyrl_line, "slime": slime_line, "prime-rl": prime_line,
    "nemo-rl": nemo_lines,
}  # fmt: skip


def console(
    path: Path, layout: Any, steps: Any = range(1, STEPS + 1), growing: bool = True
) -> Path:
    noise = "INFO 11-29 vllm.py:12] loading weights"
    lines = [f"{noise}\n{layout(step, numbers(step, growing))}" for step in steps]
    path.write_text("\n".join(lines) + "\n")
    return path


def shown(path: Path) -> tuple[int, dict[str, Any]]:
    done = mismatch("postmortem", path, "--format", "json")
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("framework", LAYOUTS)
def test_a_console_log_gives_curves_and_the_first_crossing(framework: str, tmp_path: Path) -> None:
    code, found = shown(console(tmp_path / "train.log", LAYOUTS[framework]))
    assert found["framework"] == framework
    assert found["steps"] == STEPS
    curve = next(each for each in found["curves"] if each["unfit"] is not None)
    name = "abs" if "abs" in curve["what"] else "k3"
    assert curve["values"] == pytest.approx(
        [numbers(step)[name] for step in range(1, STEPS + 1)], abs=6e-5
    )
    bound = {"abs": 0.08, "k3": 0.013}[name]
    assert curve["unfit"] == next(s for s in range(1, 99) if numbers(s)[name] > bound)
    assert code == 1
    assert found["dump"]


@pytest.mark.parametrize("framework", ["verl", "skyrl", "slime"])
def test_an_idle_clip_is_named_where_the_sampler_moves_away(framework: str, tmp_path: Path) -> None:
    _, found = shown(console(tmp_path / "train.log", LAYOUTS[framework]))
    assert found["findings"][0]["kind"] == "idle-clip"
    code, found = shown(console(tmp_path / "calm.log", LAYOUTS[framework], growing=False))
    assert {each["kind"] for each in found["findings"]} <= {"not-healthy"}
    assert code == 0


def test_steps_that_are_no_numbers_and_metrics_that_are_lost_are_named(tmp_path: Path) -> None:
    def line(step: int, of: dict[str, float]) -> str:
        text = verl_line(step, of | {"k3": float("nan") if step == 7 else 1e-4})
        return text.replace(" - actor/grad_norm:0.5", "") if step > 9 else text

    code, found = shown(console(tmp_path / "train.log", line))
    assert code == 1
    kinds = [(each["kind"], each["name"], each["step"]) for each in found["findings"]]
    wanted = [("not-finite", "rollout_corr/k3_kl", 7), ("lost", "actor/grad_norm", 9)]
    assert kinds == wanted


def test_a_cut_line_and_steps_that_go_back_are_said_and_nothing_is_lost(tmp_path: Path) -> None:
    path = console(tmp_path / "train.log", verl_line, [*range(1, 9), *range(5, 11)])
    path.write_text(path.read_text() + verl_line(11, numbers(11))[:40])
    _, found = shown(path)
    assert found["steps"] == 10
    assert "cut off" in found["remarks"][-1]
    assert "8 to 5" in found["remarks"][0]


def test_json_lines_of_verls_file_logger(tmp_path: Path) -> None:
    entries = [
        {
            "step": step,
            "data": {"rollout_corr/k3_kl": numbers(step)["k3"]},
        }
        for step in range(1, STEPS + 1)
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    code, found = shown(path)
    assert (code, found["framework"], found["steps"]) == (1, "verl", STEPS)


def clean_verl(step: int, of: dict[str, float]) -> str:
    """A healthy run: its correlation and effective size are high, which is good."""
    named = {"training/rollout_actor_probs_pearson_corr": 0.9995, "actor/pg_clipfrac": 0.01,
             "rollout_corr/rollout_is_eff_sample_size": 0.99, "rollout_corr/k3_kl": 1e-4,
             "timing_s/val": float("nan")}  # fmt: skip
    return " - ".join([f"step:{step}", *(f"{name}:{value}" for name, value in named.items())])


def test_a_healthy_log_has_no_finding_and_is_not_called_healthy(tmp_path: Path) -> None:
    """Numbers that are better when they are higher, and one that no level is of."""
    path = console(tmp_path / "train.log", clean_verl)
    code, found = shown(path)
    assert (code, found["findings"]) == (0, [])
    done = mismatch("postmortem", path)
    assert "verdict: inconclusive" in done.stdout
    assert mismatch("postmortem", path, "--fail-on", "inconclusive").returncode == 1
    low = console(tmp_path / "low.log", lambda *of: clean_verl(*of).replace("0.9995", "0.9"))
    code, found = shown(low)
    assert code == 1
    assert [each["kind"] for each in found["findings"]] == ["unfit"]


def test_a_log_that_does_not_measure_the_mismatch_says_so(tmp_path: Path) -> None:
    path = console(tmp_path / "train.log", lambda step, _: f"step:{step} - actor/grad_norm:0.5")
    done = mismatch("postmortem", path)
    assert done.returncode == 0
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("verdict: inconclusive")
    assert "compares" in last


def test_a_format_of_reports_is_refused(tmp_path: Path) -> None:
    done = mismatch("postmortem", console(tmp_path / "a.log", verl_line), "--format", "junit")
    assert done.returncode == 2
    assert "--format" in done.stderr


def test_a_folder_of_dumps_with_event_files_is_read_as_dumps(tmp_path: Path) -> None:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "run" / "tb"))
    writer.add_scalar("train/gen_kl_error", 0.5, 1)
    writer.close()
    recorded_folders.generic(tmp_path / "run" / "step_1.jsonl", recorded_folders.samples(32))
    done = mismatch("postmortem", tmp_path / "run", "--out", tmp_path / "out")
    assert done.returncode in (0, 1), done.stderr
    assert (tmp_path / "out" / "report.json").exists()


@pytest.mark.parametrize(
    "data",
    [
        b'{"step": 1, "data": {"rollout_corr/k3_kl": 0.1}}\n' + b'{"a": ' + b"[" * 100_000,
        b'{"step": Infinity, "rollout_corr/k3_kl": 0.1}\n{"step": 1e400, "entropy": 1}\n',
        b'{"step": 1, "rollout_corr/k3_kl": 1' + b"0" * 400 + b"}\n",
    ],
    ids=["deep", "infinite step", "large number"],
)
def test_odd_lines_end_in_no_traceback(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(data)
    done = mismatch("postmortem", tmp_path / "run.jsonl", "--format", "json")
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr
    assert done.returncode in (0, 1, 2)


def test_trainer_state_of_transformers(tmp_path: Path) -> None:
    from transformers.trainer_callback import TrainerState

    state = TrainerState()
    for step in ALL:
        of = {"step": step, "sampling/sampling_logp_difference/mean": numbers(step)["abs"]}
        state.log_history.append(of | {"clip_ratio/region_mean": 0.0})
    state.save_to_json(str(tmp_path / "trainer_state.json"))
    code, found = shown(tmp_path / "trainer_state.json")
    assert (code, found["framework"], found["steps"]) == (1, "trl", STEPS)
    (tmp_path / "trainer_state.json").write_text('{"log_history": [3, null, "a"]}')
    assert mismatch("postmortem", tmp_path / "trainer_state.json").returncode == 2


def test_what_transformers_prints_of_trl(tmp_path: Path) -> None:
    from transformers.trainer_callback import PrinterCallback, TrainerControl, TrainerState

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for step in range(1, STEPS + 1):
            logs = {"loss": 0.1, "reward": 0.5, "clip_ratio/region_mean": 0.0,
                    "sampling/sampling_logp_difference/mean": numbers(step)["abs"]}  # fmt: skip
            state = TrainerState(is_local_process_zero=True)
            PrinterCallback().on_log(None, state, TrainerControl(), logs=logs)
    (tmp_path / "train.log").write_text(out.getvalue())
    code, found = shown(tmp_path / "train.log")
    assert (code, found["framework"], found["steps"]) == (1, "trl", STEPS)
    assert found["findings"][0]["kind"] == "idle-clip"


def test_event_files_of_tensorboard(tmp_path: Path) -> None:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "tb"))
    for step in range(1, STEPS + 1):
        writer.add_scalar("train/gen_kl_error", numbers(step)["k3"], step)
        writer.add_scalar("train/grad_norm", 0.5, step)
    writer.close()
    code, found = shown(tmp_path / "tb")
    assert (code, found["framework"], found["steps"]) == (1, "nemo-rl", STEPS)
    (file,) = (tmp_path / "tb").iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    _, found = shown(file)
    assert found["steps"] == STEPS
    assert "cut off" in found["remarks"][0]


def test_an_offline_run_of_wandb(tmp_path: Path) -> None:
    code = """
import wandb
run = wandb.init(project="p", mode="offline")
for step in range(1, 13):
    held = {"mismatch_kl/all/mean": 1e-3 * 2 ** (step / 2), "optim/grad_norm": 0.1}
    run.log(held | {"text": "x" * 9000}, step=step)
run.finish()
"""
    env = os.environ | {"WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, timeout=120)
    status, found = shown(tmp_path / "wandb")
    assert (status, found["framework"], found["steps"]) == (1, "prime-rl", STEPS)
    (curve,) = [each for each in found["curves"] if each["what"] == "k3_kl"]
    assert curve["values"] == pytest.approx([1e-3 * 2 ** (s / 2) for s in range(1, 13)])


def test_a_log_of_another_program_is_refused_and_names_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "other.log").write_text("step:1 - speed:3\nGET /index.html 200\n")
    done = mismatch("postmortem", tmp_path / "other.log")
    assert done.returncode == 2
    assert "NeMo-RL" in done.stderr
    assert mismatch("postmortem", tmp_path / "absent.log").returncode == 2


def test_the_terminal_says_that_tokens_need_a_dump_and_how(tmp_path: Path) -> None:
    done = mismatch("postmortem", console(tmp_path / "train.log", verl_line))
    assert "MISMATCH_WATCH_DIR" in done.stdout
    assert "verdict: unfit" in done.stdout
