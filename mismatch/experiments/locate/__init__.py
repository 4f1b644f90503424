"""Where two sides part: which module, given the same input, gives another output."""
