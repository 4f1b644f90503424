"""transformers behind the engine protocol."""

from mismatch.engines.registry import EngineInfo
from mismatch.errors import INSTALL_SCORE

INFO = EngineInfo(
    engine="mismatch.engines.transformers.engine:TransformersEngine",
    module="transformers",
    packages=("transformers",),
    install_hint=INSTALL_SCORE,
    import_check="import transformers",
    gives_routing_weights=True,
    verl_name="hf",
    sync_driver="mismatch.engines.transformers.sync_driver:TransformersDriver",
    weight_paths={"load": "parameters copied in place, name by name"},
)
