"""Features around the core: one folder each, registered by ``FEATURE`` in its ``__init__.py``.

See :mod:`mismatch.plugins`. The core never imports a feature, and features do not import each
other: deleting a folder here removes its commands and report sections and nothing else.
"""
