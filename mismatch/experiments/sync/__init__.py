"""What the training loop asks of a path of weights, until it asks sync_drivers itself."""
