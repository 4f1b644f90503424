"""What mismatch does to the policy gradient: gradients of one batch, taken and compared."""
