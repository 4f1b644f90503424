"""CUDA's names on a CPU, for Megatron-Core alone; see tests/megatron_cpu."""

import contextlib
import functools

import torch


class Nothing:
    """A stream or an event: everything on a CPU is done when the call returns."""

    def __init__(self, *given, **named):
        pass

    def __getattr__(self, name):
        return lambda *given, **named: Nothing()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


class Tracker:
    """Megatron's random states of CUDA, of which a CPU has none."""

    @contextlib.contextmanager
    def fork(self, name=None):
        yield

    def is_initialized(self):
        return True

    def get_states(self):
        return {}

    def add(self, *given):
        pass


def on_cpu(make):
    """Return a factory of tensors that takes the CPU for CUDA."""

    @functools.wraps(make)
    def made(*given, **named):
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return make(*given, **named)

    return made


@functools.cache
def of_torch():
    """Replace what Megatron-Core asks of torch for CUDA; no arithmetic is among it."""
    if torch.cuda.is_available():
        return
    torch.cuda.Stream = torch.cuda.Event = Nothing
    for name in ("current_stream", "default_stream", "stream"):
        setattr(torch.cuda, name, lambda *given, **named: Nothing())
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *given, **named: None
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.cuda = lambda self, *given, **named: self
    torch.Tensor.record_stream = lambda self, *given: None
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *given, **named: None
    for name in ("zeros", "ones", "empty", "tensor", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    exchange = torch.distributed.all_to_all_single

    def with_lists(output, given, output_split_sizes=None, input_split_sizes=None, **named):
        sizes = [
            None if each is None else [int(number) for number in each]
            for each in (output_split_sizes, input_split_sizes)
        ]
        return exchange(output, given, *sizes, **named)

    torch.distributed.all_to_all_single = with_lists


def random_states(module):
    """Replace Megatron's random states of CUDA."""
    tracker = Tracker()
    module.get_cuda_rng_tracker = lambda *given, **named: tracker
    module.model_parallel_cuda_manual_seed = lambda *given, **named: None


def no_engine(module):
    """Name TransformerEngine's product as missing: 0.16.1 asks for the name alone."""
    module.te_general_gemm = None


OF_MEGATRON = {
    "megatron.core.tensor_parallel.random": random_states,
    "megatron.core.transformer.moe.moe_utils": no_engine,
}
