"""Whether weights arrive: known updates, pushed by an engine's own path, and what it holds then."""
