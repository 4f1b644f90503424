"""Write the SHA-256 of every file that pip may take into the lists of constraints/.

    python tools/hash_constraints.py

Reads the pins of each list (``name==version``), asks the package index for the files of that
version, and keeps wheels for CPython 3.11 to 3.14 on Linux (x86-64), or source where a version has
no such wheel. pip refuses a file of another hash. Comments at the top of a list stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LISTS = sorted((Path(__file__).resolve().parents[1] / "constraints").glob("*.txt"))
INDEX = os.environ.get("PACKAGE_INDEX", "https://pypi.org/simple")
PIN = re.compile(r"^([\w.-]+)==([^\s\\]+)", re.M)
# Wheels by their tags: of this Python, or of any with a stable interface; of this platform, or any.
USABLE = re.compile(
    r"-(cp31[1-4]-cp31[1-4]|cp3\d+-abi3|py3|py2\.py3|py3\d)(-none)?-"
    r"(any|(manylinux|linux)\w*x86_64(\.\w+)*)\.whl$"
)


def files_of(name: str) -> list[dict[str, Any]]:
    """Return the index's entry of every file of a package."""
    wanted = {"Accept": "application/vnd.pypi.simple.v1+json"}
    request = urllib.request.Request(f"{INDEX}/{name}/", headers=wanted)
    with urllib.request.urlopen(request, timeout=60) as answer:
        files: list[dict[str, Any]] = json.load(answer)["files"]
    return files


def hashes(pin: tuple[str, str]) -> list[str]:
    """Return the hashes of the files that pip may take for one pin, sorted.

    Raises:
        SystemExit: the version has no file that fits.
    """
    name, version = pin
    of_version = re.compile(rf"^[\w.-]+?-{re.escape(version)}(-|\.tar\.gz$|\.zip$)")
    files = [file for file in files_of(name) if of_version.search(file["filename"])]
    wheels = [file for file in files if USABLE.search(file["filename"])]
    source = [file for file in files if file["filename"].endswith((".tar.gz", ".zip"))]
    if not (taken := wheels or source):
        raise SystemExit(f"{name}=={version}: no file for Linux in {INDEX}")
    return sorted(file["hashes"]["sha256"] for file in taken)


def main() -> None:
    for path in LISTS:
        text = path.read_text("utf-8")
        pins = PIN.findall(text)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(hashes, pins))
        head = [line for line in text.splitlines() if line.startswith("#")]
        lines = [
            " \\\n    ".join((f"{name}=={version}", *(f"--hash=sha256:{each}" for each in of_it)))
            for (name, version), of_it in zip(pins, found, strict=True)
        ]
        path.write_text("\n".join([*head, *lines, ""]), "utf-8")
        print(f"{path.name}: {len(pins)} packages, {sum(map(len, found))} files")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main()
