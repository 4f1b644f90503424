"""One module a kind of cause; each lists its detectors as ``DETECTORS``."""
