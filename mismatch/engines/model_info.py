"""What a checkpoint says about itself, read before any weight is."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError, first_line
from mismatch.models import tokenizers
from mismatch.models.config import ModelConfig, read_config
from mismatch.run.hub import small_files
from mismatch.specs import EngineSpec

MISSING = re.compile(r"No module named '(\w+)")  # Python's words
# "(EngineCore pid=7) ERROR 01-02 03:04:05 [core.py:9] KindError: text", as vLLM's children log.
LOGGED_ERROR = re.compile(
    r"\([\w ]+pid=\d+\)\s+(?:ERROR \S+ \S+ \[\S+\]\s+)?"
    r"[A-Za-z_][\w.]*(?:Error|Exception): (?P<text>.+)"
)
GENERATIVE = ("CausalLM", "ConditionalGeneration", "LMHead")
REQUIRED_FILES = {
    "config.json": ["config.json"],
    "weights (*.safetensors)": ["*.safetensors", "*.bin"],
    "tokenizer (tokenizer.json)": ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"],
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The parts of a model's configuration that the engines need.

    Attributes:
        context: positions that the model was made for, or None where it does not say.
        stop_ids: every id that ends a response (EOS of config, generation config, tokenizer).
        num_experts, top_k: of its MoE layers, 0 for a dense model.
        rope_switch: as of :class:`mismatch.models.config.ModelConfig`.
    """

    vocab_size: int
    context: int | None
    stop_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    rope_switch: int = 0

    @property
    def moe(self) -> bool:
        return self.num_experts > 0 and self.top_k > 0


def require_model(spec: EngineSpec) -> None:
    """Check that a model given as a directory has its files.

    Raises:
        MismatchError: no such directory, or no config.json or weights in it.
    """
    path = Path(spec.model)
    if not path.exists():
        if spec.model.count("/") == 1 and not spec.model.startswith((".", "/", "~")):
            return  # a hub id
        fault = f"model {spec.model!r} does not exist"
        fix = "give a directory with config.json, a hub id (org/name), or tiny-gpt-oss"
        raise MismatchError(fault, fix)
    for what, patterns in REQUIRED_FILES.items():
        if not any(any(path.glob(pattern)) for pattern in patterns):
            fault = f"model {spec.model}: no {what}"
            fix = "save it with save_pretrained() of the model and of its tokenizer"
            raise MismatchError(fault, fix)


def load_tokenizer(spec: EngineSpec) -> Any:
    """Load the tokenizer of an engine's model; see :mod:`mismatch.models.tokenizers`."""
    return tokenizers.load_tokenizer(spec.model, spec.revision, spec.trust_remote_code)


def read_model_info(spec: EngineSpec) -> ModelInfo:
    """Read config.json, generation_config.json and the tokenizer.

    Raises:
        MismatchError: they are missing or cannot be read.
    """
    require_model(spec)
    config = _configuration(spec)
    parsed = isinstance(config, Mapping)
    names = list((config.get("architectures") if parsed else config.architectures) or [])
    generates = any(kind in name for name in names for kind in GENERATIVE)
    if names and not generates and not spec.trust_remote_code:
        fault = f"model {spec.model} is a {names[0]}: not a causal language model"
        raise MismatchError(fault, "choose a model that generates text (…ForCausalLM)")
    model, tokenizer = ModelConfig.of(config), load_tokenizer(spec)
    if not model.vocab:  # transformers knows what a family leaves out of its file
        fault = f"config.json of {spec.model} does not say how large its vocabulary is"
        raise MismatchError(fault, "--python PATH names an environment that has transformers")
    return ModelInfo(
        vocab_size=model.vocab,
        context=model.context,
        stop_ids=tokenizers.stop_ids(
            spec.model, spec.revision, model.end_ids, tokenizer.eos_token_id
        ),
        num_experts=model.experts + model.extra_experts if model.top_k else 0,
        top_k=model.top_k,
        rope_switch=model.rope_switch,
    )


def _configuration(spec: EngineSpec) -> Any:
    """Return the configuration as transformers reads it, or else the parsed config.json.

    Raises:
        MismatchError: it cannot be read.
    """
    try:
        if find_spec("transformers") is None:
            return read_config(small_files(spec.model, spec.revision))
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(
            spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
    except MismatchError:
        raise
    except Exception as error:
        raise MismatchError(
            f"configuration of {spec.model} cannot be read: {first_line(error)}",
            "check the model's name and config.json; a model with custom code needs "
            "--trust-remote-code, a new architecture a newer transformers",
        ) from error


class CauseInLog(MismatchError):
    """A process that the engine started has failed, and only the log of this worker says why."""

    def explained(self, log: str) -> MismatchError:
        """Return the error with its cause, where the log has it."""
        if cause := logged_cause(log):
            return MismatchError(f"{self.message}: {cause}", load_fix(ValueError(cause)))
        return self


def logged_cause(log: str) -> str:
    """Return the last error that a child process wrote with its traceback, in one line; "": none.

    Errors that only point to another error ("see root cause above") are passed over.

    >>> logged_cause("(EngineCore pid=7) ERROR 01-02 03:04:05 [core.py:9] ValueError: no room")
    'no room'
    """
    causes = [
        match["text"]
        for line in log.splitlines()
        if (match := LOGGED_ERROR.fullmatch(line.strip())) and "root cause" not in match["text"]
    ]
    return textwrap.shorten(causes[-1], 400, placeholder=" …") if causes else ""


def load_fix(error: BaseException) -> str:
    """Say what may help when an engine cannot load a model."""
    text = str(error).lower()
    if (missing := MISSING.search(str(error))) is not None:
        return f"install it into the engine's environment: pip install {missing[1]}"
    if "routed" in text or "auxoutput" in text:
        return "run without routing: --no-routing"
    if "deserializ" in text or "metadata" in text:
        return "the weight files are damaged: copy or download them again"
    if "shared memory" in text or "/dev/shm" in text:
        return "in a container: docker run --shm-size=2g (or --ipc=host)"
    if "memory" in text:
        return "lower --gpu-memory-utilization or --max-model-len, or use --tensor-parallel-size"
    if "not supported" in text or "architecture" in text:
        return "choose a model that this engine supports, or another engine: --engine …"
    return "look into logs/engine.log; --engine-arg key=value passes further options to the engine"
