"""SGLang behind the engine protocol."""

from mismatch.engines.registry import EngineInfo
from mismatch.version import INSTALLED_FROM

INFO = EngineInfo(
    engine="mismatch.engines.sglang.engine:SglangEngine",
    module="sglang",
    packages=("sglang",),
    install_hint="in a separate environment, because its pins clash with vLLM's: `make env-sglang` "
    f"in a clone; elsewhere pip install '{INSTALLED_FROM}[sglang]' there and name its "
    "interpreter: --python sglang=ENV/bin/python",
    import_check="import sglang",
    preflight="mismatch.engines.sglang.wire:require_arguments",
    own_environment=True,
    sync_driver="mismatch.engines.sglang.sync_driver:SglangDriver",
    weight_paths={
        "disk": "update_weights_from_disk(…), which drops the cache",
        "tensor": "update_weights_from_tensor(…) of some tensors at a time, the cache kept",
    },
)
