"""An engine as somebody would add it: a folder with a declaration and a class."""

from mismatch.engines.registry import EngineInfo

INFO = EngineInfo(
    engine="tests.toy_engine.engine:ToyEngine",
    module="tests.toy_engine",
    packages=("pyarrow",),  # stands for a package of its own
    install_hint="pip install toy",
    import_check="import pyarrow",
    preflight="tests.toy_engine.engine:require_small",
    own_environment=True,
    gives_routing_weights=True,
    verl_name="toy_rollout",
)
