"""Scorings in, numbers and judgements out: no torch, no disk, no printing."""
