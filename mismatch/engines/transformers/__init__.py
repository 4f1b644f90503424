"""transformers as an engine: for small models and tests."""
