"""The flags that commands share, in the order of the help.

Those of specs come from their fields; a flag that is in no spec is written here, once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from mismatch.cli.configuration import configurations
from mismatch.cli.flags import (
    FAIL_ON,
    LEVELS,
    LOG_TO,
    NAME_FLAGS,
    REQUIRE,
    Option,
    flags_of,
    switch,
)
from mismatch.engines.registry import startable_engines
from mismatch.plugins import features, load
from mismatch.specs import (
    ENGINE,
    MODEL,
    OUTPUT,
    TRAIN,
    CheckSpec,
    EngineSpec,
    PromptSpec,
    RolloutSpec,
    Sampling,
    TrainSpec,
)

OUT = Option("out", Path | None, OUTPUT, "Run directory; default: runs/TIME-MODEL.")

MODEL_FLAGS = (
    Option("model", str | None, MODEL, "Embedded model, hub id or directory."),
    *flags_of(EngineSpec, "revision trust_remote_code"),
)
LAYERS = flags_of(EngineSpec, "layers")
TRAIN_MODEL = Option("train_model", str | None, MODEL, "Another checkpoint for the trainer.")
ADAPTER = flags_of(EngineSpec, "adapter adapter_as")
TRAIN_ADAPTER = flags_of(TrainSpec, "adapter")
PROMPT_FLAGS = (
    *flags_of(
        PromptSpec,
        "task path dataset dataset_config dataset_split prompt_column answer_column num_prompts",
    ),
    *flags_of(Sampling, "samples_per_prompt max_tokens temperature top_p top_k min_p"),
    *flags_of(Sampling, "repetition_penalty"),
    *flags_of(PromptSpec, "seed environment max_turns max_observation_tokens"),
)
ENGINE_FLAGS = (
    replace(flags_of(EngineSpec, "engine")[0], help=f"{', '.join(startable_engines())}."),
    *flags_of(EngineSpec, "dtype tensor_parallel_size max_model_len"),
    *flags_of(EngineSpec, "gpu_memory_utilization"),
    *flags_of(EngineSpec, "args prefill"),
    *flags_of(RolloutSpec),
)
# Of an engine that scores the tokens of a run that it need not have sampled.
SCORING_ENGINE = tuple(
    option
    for option in ENGINE_FLAGS
    if option.name not in {"prefill", *(each.name for each in flags_of(RolloutSpec))}
)
SERVER_FLAGS = flags_of(EngineSpec, "servers served_model server_concurrency server_timeout_s")
ROUTING = flags_of(EngineSpec, "routing")
DEPTH = Option(
    "depth",
    Literal["quick", "normal", "full"],
    TRAIN,
    "quick: no float32 passes, so faults look like rounding; full: also PPO's two passes with "
    "router replay.",
    default="normal",
)
TRAIN_FLAGS = (
    *flags_of(CheckSpec, "nproc_per_node"),
    *(option for each in configurations() for option in each.trainer_flags),
    *flags_of(TrainSpec, "scorer scorer_config accelerate_config"),
    *flags_of(
        TrainSpec, "dtype master_dtype offload autocast attention experts head_dtype router_dtype"
    ),
    *flags_of(TrainSpec, "temperature_in logprobs_dtype micro_batch_tokens"),
    *flags_of(TrainSpec, "layout sequence_parallel replay_routing"),
    DEPTH,
    *flags_of(CheckSpec, "noise_floor two_passes inject"),
)
PYTHON = Option(
    "python",
    list[str] | None,
    ENGINE,
    "Python of your training environment (mismatch need not be installed there), for both sides; "
    "engine=PATH or train=PATH: for one; repeatable.",
)
WEIGHTS = Option(
    "weights",
    list[str] | None,
    ENGINE,
    "engine=FORM, train=FORM: change the weights of a side; effect=FORM: also score with the "
    "trainer's in that form; docs/how-to/quantised-rollouts.md.",
)
CONFIGURATION_FLAGS = tuple(option for each in configurations() for option in each.flags)
NEW_RUN = (
    OUT,
    Option(
        "resume",
        str | None,
        OUTPUT,
        "Continue this run, or (without a directory) the newest unfinished run with these flags.",
        alone="newest",
    ),
)
TRUST_RUN = switch(
    "trust_run",
    OUTPUT,
    "Trust this run: allow code and arguments recorded in it.",
)
FIX_FLAGS = flags_of(CheckSpec, "fixes budget_minutes verdict explain")
FEATURE_FLAGS: tuple[Option, ...] = tuple(
    option for feature in features() if feature.check_flags for option in load(feature.check_flags)
)
DRY_RUN = switch(
    "dry_run", OUTPUT, "Show the plan (minutes, kernels, memory of both sides) and start nothing."
)
GPUS = Option(
    "gpus", str | None, OUTPUT, "With --dry-run: plan for GPUs like 8xH100-80GB instead of these."
)
FORCE = switch("force", OUTPUT, "Start even if memory does not suffice.")
CONFIG_HELP = "TOML file of flags (same names); flags given here override it."
CONFIG = Option("config", Path | None, OUTPUT, CONFIG_HELP)
# Flags of a check that say nothing of what is run.
AROUND = (
    *(LEVELS, *NAME_FLAGS, LOG_TO, FAIL_ON, REQUIRE, *NEW_RUN, TRUST_RUN),
    *(DRY_RUN, GPUS, FORCE, CONFIG),
)
CHECK = (
    *MODEL_FLAGS,
    *LAYERS,
    TRAIN_MODEL,
    *ADAPTER,
    *TRAIN_ADAPTER,
    *PROMPT_FLAGS,
    PYTHON,
    WEIGHTS,
    *ENGINE_FLAGS,
    *SERVER_FLAGS,
    *ROUTING,
    *TRAIN_FLAGS,
    *flags_of(CheckSpec, "overlap context_length"),
    *CONFIGURATION_FLAGS,
    *AROUND,
    *FIX_FLAGS,
    *FEATURE_FLAGS,
)
AROUND_A_RUN = frozenset(option.name for option in AROUND)
