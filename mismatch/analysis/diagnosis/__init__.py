"""Detectors: scorings in, findings with their evidence out. No torch, no disk, no printing."""
