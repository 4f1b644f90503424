"""Estimator-side corrections tried on the rollouts at hand; see docs/corrections.md."""
