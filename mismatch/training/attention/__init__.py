"""Attention kernels of the trainer: choice, trial on random tokens, kernels with learned sinks."""
