"""Settings and configuration files of RL frameworks, for a check."""

from mismatch.plugins import Feature

FEATURE = Feature("presets", configuration="mismatch.features.presets.flags:CONFIGURATION")
