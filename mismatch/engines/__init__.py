"""Inference engines behind one protocol: what samples the tokens and scores them again."""
