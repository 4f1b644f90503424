"""What Megatron-Core lacks on a CPU, so that tests run its real code there under gloo.

Megatron-Core 0.16.1 names CUDA though nothing that the tests run needs it. With ``hook/`` in
PYTHONPATH, a process that imports ``megatron.core`` gets these names replaced first:

1. streams, events, ``current_device`` and ``synchronize``, which do nothing on a CPU;
2. ``device="cuda"`` of a few factories, which becomes the CPU;
3. Megatron's tracker of CUDA's random states, which has none: dropout is off;
4. ``all_to_all_single`` with split sizes in tensors, as ``.tolist()`` of them.

No number is computed here: attention, experts, dispatchers and collectives are the package's own.
"""
