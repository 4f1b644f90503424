"""Audit of kernels: attention and expert implementations against float64, forward and backward."""
