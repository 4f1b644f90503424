"""Every flag once, in groups that the verbs share.

A group is a class: annotated attributes are flags, their values the defaults. A verb names its
groups (:func:`mismatch.cli.flags.with_flags`). A new flag is one attribute here, and appears in the
help, in ``--config`` files and in ``--print-config`` of every verb that has the group.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class DtypeName(StrEnum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Layout(StrEnum):
    padding = "padding"
    packing = "packing"


class TemperatureIn(StrEnum):
    fp32 = "fp32"
    logits = "logits"
    rounded = "logits-rounded"


class Framework(StrEnum):
    verl = "verl"
    nemo_rl = "nemo-rl"
    trl = "trl"
    prime_rl = "prime-rl"
    slime = "slime"
    miles = "miles"
    openrlhf = "openrlhf"
    skyrl = "skyrl"
    areal = "areal"


class WeightsForm(StrEnum):
    as_stored = "as-stored"
    bf16 = "bf16"
    mxfp4 = "mxfp4"
    rounded = "mxfp4-rounded"


class ReplayRouting(StrEnum):
    ids = "ids"
    weights = "ids+weights"


class VerdictFrom(StrEnum):
    as_is = "as-is"
    after_fixes = "after-fixes"


class FailOn(StrEnum):
    critical = "critical"
    warn = "warn"


MODEL, PROMPTS, ENGINE, TRAIN, FIXES, OUTPUT = (
    "Model",
    "Prompts and sampling",
    "Engine (rollout side)",
    "Trainer (FSDP2 side)",
    "Fixes",
    "Verdict and output",
)


def _flag(panel: str, help: str | None = None) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=help, rich_help_panel=panel)
    return option


class ModelFlags:
    model: Annotated[str | None, _flag(MODEL, "Embedded model, hub id or directory.")] = None
    revision: Annotated[str | None, _flag(MODEL, "Revision of a hub model.")] = None
    trust_remote_code: Annotated[bool, _flag(MODEL, "Run code that comes with the model.")] = False


class TrainModelFlags:
    train_model: Annotated[str | None, _flag(MODEL, "Another checkpoint for the trainer.")] = None


class PromptFlags:
    prompts: Annotated[
        str | None,
        _flag(
            PROMPTS,
            "JSONL file: prompt, messages or prompt_token_ids per line. "
            "Default: built-in arithmetic.",
        ),
    ] = None
    dataset: Annotated[
        str | None,
        _flag(PROMPTS, "Hub id, file (jsonl, json, parquet, csv) or save_to_disk directory."),
    ] = None
    dataset_config: Annotated[str | None, _flag(PROMPTS, "Configuration of a hub data set.")] = None
    dataset_split: Annotated[str, _flag(PROMPTS, "Split of the data set.")] = "train"
    prompt_column: Annotated[
        str | None, _flag(PROMPTS, "Column with the prompts; default: found by its name.")
    ] = None
    answer_column: Annotated[
        str | None, _flag(PROMPTS, "Column with the answers (whole numbers), for rewards.")
    ] = None
    num_prompts: Annotated[
        int | None, _flag(PROMPTS, "Default: 64, or all of a --prompts file.")
    ] = None
    samples_per_prompt: Annotated[int, _flag(PROMPTS, "Samples of each prompt.")] = 4
    max_tokens: Annotated[int, _flag(PROMPTS, "Longest response.")] = 128
    temperature: Annotated[float, _flag(PROMPTS)] = 1.0
    top_p: Annotated[float, _flag(PROMPTS, "1: off.")] = 1.0
    top_k: Annotated[int, _flag(PROMPTS, "0: off.")] = 0
    seed: Annotated[int, _flag(PROMPTS, "Of prompts, sampling and intervals.")] = 0


class EngineFlags:
    engine: Annotated[
        list[str] | None,
        _flag(
            ENGINE,
            "vllm (default), sglang or transformers; twice: each scores the other's tokens.",
        ),
    ] = None
    vllm_python: Annotated[
        str | None,
        _flag(ENGINE, "Interpreter of the environment that holds vLLM, where it is another."),
    ] = None
    sglang_python: Annotated[
        str | None,
        _flag(ENGINE, "The same for SGLang; default: .venv-sglang beside this environment."),
    ] = None
    dtype: Annotated[DtypeName, _flag(ENGINE, "Of the engine.")] = DtypeName.bf16
    tensor_parallel_size: Annotated[int, _flag(ENGINE)] = 1
    max_model_len: Annotated[int | None, _flag(ENGINE)] = None
    gpu_memory_utilization: Annotated[float | None, _flag(ENGINE)] = None
    engine_arg: Annotated[
        list[str] | None,
        _flag(ENGINE, "Any other argument of the (first) engine, key=value (JSON); repeatable."),
    ] = None
    rollout_weights: Annotated[
        WeightsForm,
        _flag(ENGINE, "Form of the experts that the engine serves; docs/quantised-rollouts.md."),
    ] = WeightsForm.as_stored
    prefill: Annotated[bool, _flag(ENGINE, "Rescore by the engine's prefill.")] = True
    exact_kl: Annotated[
        int, _flag(ENGINE, "Tokens at which whole distributions are kept, for exact KL; 0: off.")
    ] = 512
    exact_kl_top_k: Annotated[
        int, _flag(ENGINE, "Ids kept of each, where the vocabulary has over 4,096.")
    ] = 64


class OtherEngineFlags:
    other_engine_arg: Annotated[
        list[str] | None,
        _flag(ENGINE, "As --engine-arg, of the second --engine; repeatable."),
    ] = None


class ServerFlags:
    server: Annotated[
        list[str] | None,
        _flag(ENGINE, "URL of a running vLLM or SGLang server; repeatable; docs/servers.md."),
    ] = None
    served_model: Annotated[
        str | None, _flag(ENGINE, "The model's name on the servers, where it is another.")
    ] = None
    server_concurrency: Annotated[int, _flag(ENGINE, "Requests at a time, per server.")] = 32
    server_timeout: Annotated[float, _flag(ENGINE, "Seconds that one request may take.")] = 600.0


class RoutingFlags:
    routing: Annotated[bool, _flag(ENGINE, "Capture routed experts.")] = True


class TrainFlags:
    nproc_per_node: Annotated[int | None, _flag(TRAIN, "Ranks; default: GPUs, or 2 on a CPU.")] = (
        None
    )
    trainer: Annotated[
        str | None,
        _flag(TRAIN, "Run what a framework's FSDP trainer runs: verl, verl-legacy, trl, skyrl."),
    ] = None
    train_dtype: Annotated[DtypeName, _flag(TRAIN, "Of the computation.")] = DtypeName.bf16
    master_dtype: Annotated[DtypeName, _flag(TRAIN, "Of the sharded parameters.")] = DtypeName.fp32
    autocast: Annotated[
        DtypeName | None, _flag(TRAIN, "Run under torch.autocast, as verl does.")
    ] = None
    attention: Annotated[
        str,
        _flag(
            TRAIN,
            "auto, eager, sdpa, sink-sdpa …, or your own package.module:function; "
            "no-sinks is a planted fault.",
        ),
    ] = "auto"
    experts_implementation: Annotated[
        str, _flag(TRAIN, "auto, eager, grouped_mm, batched_mm; bounded: least memory.")
    ] = "auto"
    head_dtype: Annotated[DtypeName | None, _flag(TRAIN, "Of the LM head.")] = None
    router_dtype: Annotated[DtypeName | None, _flag(TRAIN, "Of the routers.")] = None
    temperature_in: Annotated[
        TemperatureIn, _flag(TRAIN, "Where logits are divided by the temperature.")
    ] = TemperatureIn.fp32
    logprobs_dtype: Annotated[
        DtypeName | None, _flag(TRAIN, "Round logprobs on their way out.")
    ] = None
    micro_batch_tokens: Annotated[int, _flag(TRAIN)] = 4096
    train_weights: Annotated[WeightsForm, _flag(TRAIN, "Form of the experts that are loaded.")] = (
        WeightsForm.as_stored
    )
    weights_effect: Annotated[
        WeightsForm | None,
        _flag(
            TRAIN, "Also score with the trainer's experts in this form: what the form alone does."
        ),
    ] = None
    layout: Annotated[Layout, _flag(TRAIN, "One sequence per row, or several.")] = Layout.padding
    replay_routing: Annotated[
        ReplayRouting | None,
        _flag(TRAIN, "Run the engine's experts in the trainer: router replay (R3)."),
    ] = None
    noise_floor: Annotated[bool, _flag(TRAIN, "Also measure what noise alone does.")] = True
    two_passes: Annotated[
        bool | None,
        _flag(
            TRAIN,
            "PPO's old against new pass, with router replay (two more passes); "
            "default: as far as the noise floor has it.",
        ),
    ] = None
    inject: Annotated[
        list[str] | None,
        _flag(TRAIN, "router-noise=SIGMA: disturb the new pass on purpose; repeatable."),
    ] = None


class VerlFlags:
    verl_config: Annotated[Path | None, _flag(TRAIN, "Your verl run's YAML, for both sides.")] = (
        None
    )
    verl_override: Annotated[
        list[str] | None, _flag(TRAIN, "key=value, as on verl's command line; repeatable.")
    ] = None


class LevelFlags:
    thresholds: Annotated[Path | None, _flag(OUTPUT, "TOML file that overrides levels.")] = None


class NamesFlags:
    names: Annotated[
        Framework | None,
        _flag(OUTPUT, "Also show a framework's names, and values by its conventions."),
    ] = None
    details: Annotated[
        bool,
        typer.Option("--details", help="Print every analysis in full.", rich_help_panel=OUTPUT),
    ] = False


class ForecastFlags:
    forecast_length: Annotated[
        int, _flag(OUTPUT, "Planned response length, to forecast importance weights at.")
    ] = 16_384


class ExitFlags:
    fail_on: Annotated[FailOn, _flag(OUTPUT, "Verdict from which the exit code is 1.")] = (
        FailOn.critical
    )


class NewRunFlags:
    out: Annotated[Path | None, _flag(OUTPUT, "Run directory; default: runs/TIME-MODEL.")] = None
    resume: Annotated[
        str | None,
        _flag(
            OUTPUT,
            "Go on with this run, or (without a directory) with the newest unfinished one of "
            "these flags.",
        ),
    ] = None


class FixFlags:
    fix: Annotated[
        list[str] | None,
        _flag(
            FIXES,
            "Apply and measure: ids of `mismatch fixes` with commas, a+b together, a side "
            "(engine, train, estimator), or all; repeatable.",
        ),
    ] = None
    budget_minutes: Annotated[
        float | None, _flag(FIXES, "That fixes may take beyond the check; default: no limit.")
    ] = None
    verdict: Annotated[
        VerdictFrom, _flag(FIXES, "Take verdict and exit code as-is, or after the best fixes.")
    ] = VerdictFrom.as_is


class GradientFlags:
    gradients: Annotated[
        bool,
        typer.Option(
            "--gradients",
            help="Also take the policy gradient of one batch under the trainer, the float32 "
            "reference and each fix of the trainer.",
            rich_help_panel=TRAIN,
        ),
    ] = False
    gradient_prompts: Annotated[int, _flag(TRAIN, "Prompts of that batch, at most.")] = 16


class DryRunFlags:
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show the plan (stages, kernels, memory of both sides) and start nothing.",
            rich_help_panel=OUTPUT,
        ),
    ] = False


class ConfigFlags:
    config: Annotated[
        Path | None,
        _flag(OUTPUT, "TOML file of flags (same names); flags given here override it."),
    ] = None
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config", help="Print all flags as TOML and exit.", rich_help_panel=OUTPUT
        ),
    ] = False


class RunArgument:
    run: Annotated[Path, typer.Argument(help="Run directory.")]


ALL_GROUPS = (
    ModelFlags,
    TrainModelFlags,
    PromptFlags,
    EngineFlags,
    OtherEngineFlags,
    ServerFlags,
    RoutingFlags,
    TrainFlags,
    VerlFlags,
    LevelFlags,
    NamesFlags,
    ExitFlags,
    ForecastFlags,
    FixFlags,
    GradientFlags,
    NewRunFlags,
    DryRunFlags,
    ConfigFlags,
)
