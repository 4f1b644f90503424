"""On the path of a command under test: kill whichever process renames KILL_AT into place.

The moment is the one between the temporary file and its final name, in the tool itself, in the
engine's process or in a rank.
"""

import os
import signal

TARGET = os.environ.get("KILL_AT")

if TARGET:
    replace = os.replace

    def killing(source, target, **options):  # type: ignore[no-untyped-def]
        if str(target).endswith(TARGET):
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(source, target, **options)

    os.replace = killing
