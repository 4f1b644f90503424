"""The version of the package, and what installs it."""

__version__ = "0.1.0"
# What pip is given in an environment without mismatch: a clone, and after the first release
# "train-infer-mismatch", which resolves already where mismatch is installed. Pages and the Action
# follow it: tests/unit/test_documentation.py.
INSTALLED_FROM = "./mismatch"
