"""A new run against an old one: what an upgrade of the engine (or of anything) has changed."""
