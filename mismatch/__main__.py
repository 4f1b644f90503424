"""`python -m mismatch`."""

from mismatch.cli.main import main

main()
