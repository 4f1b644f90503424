"""What is computed from rollouts and scorings, without torch, a disk or a word for readers."""
