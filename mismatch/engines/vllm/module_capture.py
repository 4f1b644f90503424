"""Its modules can be recorded."""

from mismatch.engines.module_capture import record as record
