"""What an audit of kernels found, and what counts as wrong."""
