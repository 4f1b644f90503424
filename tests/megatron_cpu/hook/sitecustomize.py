"""Prepare a process for Megatron-Core on a CPU, when it imports it (tests/megatron_cpu)."""

import importlib.abc
import importlib.util
import os
import sys

ADAPTER = "mismatch.features.megatron.adapter"


def plant(adapter):
    """Plant the fault that a test asks for (tests/megatron_cpu/faults.py)."""
    import tests.megatron_cpu.faults as faults

    faults.plant(adapter)


class Around(importlib.abc.MetaPathFinder):
    """Replace torch's names of CUDA before megatron.core is imported, and Megatron's after."""

    busy = False

    def find_spec(self, name, path=None, target=None):
        if self.busy or not name.startswith(("megatron.core", ADAPTER)):
            return None
        import cuda_names

        cuda_names.of_torch()
        change = cuda_names.OF_MEGATRON.get(name)
        if name == ADAPTER and "MEGATRON_FAULT" in os.environ:
            change = plant
        if change is None:
            return None
        self.busy = True
        spec = importlib.util.find_spec(name)
        self.busy = False
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Around())
