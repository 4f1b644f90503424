"""The flag that keeps a check from running both sides module by module."""

from dataclasses import replace

from mismatch.cli.flags import switch
from mismatch.specs import TRAIN

NO_LOCATE = "no_locate"
HELP = "Do not locate the module if a float32 gap or an excess fails (see mismatch locate)."
FLAGS = (replace(switch(NO_LOCATE, TRAIN, HELP), rare=True),)
