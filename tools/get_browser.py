"""Get a Chromium for the tests of the report's page, the first way that works here.

1. Use one that is on the PATH, or that Playwright has already installed.
2. ``playwright install chromium``: Playwright's own build, in the user's cache.
3. ``apt-get install chromium``, where the user is root and the distribution has apt.

Exit code 0 in every case: without a browser the tests of the page are skipped, and the last line
of ``make test`` says so with the command that helps.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.browser.chromium import find_chromium

DOWNLOAD_S = 300  # Chromium has 150 MB


def main() -> int:
    if find_chromium() is not None:
        return 0
    for command in ways():
        print(f"no Chromium here: {' '.join(command)}", flush=True)
        if succeeds(command) and find_chromium() is not None:
            return 0
    print("no Chromium could be had: the tests of the page will be skipped")
    return 0


def ways() -> list[list[str]]:
    """Return the commands that may install a Chromium here, the least intrusive first."""
    commands = [[sys.executable, "-m", "playwright", "install", "chromium"]]
    if os.geteuid() == 0 and shutil.which("apt-get"):
        install = "apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium"
        commands.append(["sh", "-c", install])
    return commands


def succeeds(command: list[str]) -> bool:
    """Run a command without its output, for at most :data:`DOWNLOAD_S`."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=DOWNLOAD_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    raise SystemExit(main())
