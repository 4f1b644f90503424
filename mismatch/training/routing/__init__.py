"""Routed experts of the trainer: capture, replay, and interventions on the routers."""
