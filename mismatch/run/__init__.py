"""One run directory: artefacts, manifest, lock, journal, what can be reused."""
