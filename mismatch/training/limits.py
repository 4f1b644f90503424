"""Sizes that bound the trainer's memory; predictions need them too, so nothing here needs torch."""

EXPERT_ROWS = 4096  # of one matmul in `bounded` experts; more would only add memory
