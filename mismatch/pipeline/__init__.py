"""What each command runs, in its order; returns a report."""
