"""Tasks that ship with the package: prompts and verifiable rewards."""
