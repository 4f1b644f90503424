"""Fixes: small changes of a spec that are applied for real, measured, and ranked."""
