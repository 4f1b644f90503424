"""Child processes: engines and training worlds, started, watched and ended."""
