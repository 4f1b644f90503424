"""A short on-policy RL run: what a mismatch does to training, and what a fix restores."""
