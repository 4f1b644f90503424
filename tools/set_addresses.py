"""Write the addresses of a repository into the package's metadata and the site's configuration.

    python tools/set_addresses.py OWNER/NAME

The workflows for the release and the site run it before they build, so that a clone or a fork names
nobody else's pages. Reports and help read the address of the documentation from the metadata of the
installed package; a checkout has none, so there they have no links.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(repository: str, root: Path = ROOT) -> int:
    owner, _, name = repository.partition("/")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        print(f"{repository!r} is not OWNER/NAME", file=sys.stderr)
        return 2
    site, source = f"https://{owner.lower()}.github.io/{name}/", f"https://github.com/{repository}"
    project, pages = root / "pyproject.toml", root / "mkdocs.yml"
    if "[project.urls]" in project.read_text("utf-8"):
        print("pyproject.toml has [project.urls] already", file=sys.stderr)
        return 2
    addresses = {
        "Documentation": site,
        "Source": source,
        "Issues": f"{source}/issues",
        "Changelog": f"{source}/blob/main/CHANGELOG.md",
    }
    lines = ["", "[project.urls]", *(f'{key} = "{value}"' for key, value in addresses.items()), ""]
    with project.open("a", encoding="utf-8") as file:
        file.write("\n".join(lines))
    with pages.open("a", encoding="utf-8") as file:
        file.write(f"site_url: {site}\nrepo_url: {source}\n")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repository", metavar="OWNER/NAME")
    raise SystemExit(main(parser.parse_args().repository))
