"""What this machine could measure, what a run would need, and whether the two fit."""
