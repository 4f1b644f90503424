"""The training side: FSDP2 loading, attention kernels, low-memory logprobs, routing, the world."""
