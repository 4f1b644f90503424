"""What needs more passes than a check: planned and judged here, started elsewhere."""
