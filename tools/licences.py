"""Write docs/contribute/licences.md: what the project depends on, and under which licence.

.venv/bin/python tools/licences.py > docs/contribute/licences.md
"""

from __future__ import annotations

import argparse
import re
import tomllib
from importlib.metadata import PackageMetadata, PackageNotFoundError, distributions, metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """# Licences

`mismatch` is under Apache-2.0 (LICENSE, NOTICE). This project trained the embedded models
`tiny-gpt-oss` and `tiny-gpt-oss-tools` on text that it generates; they have the same licence. The
package ships no third-party fonts, scripts or images: the HTML report uses the reader's system
fonts. The tests include axe-core 4.14.1 (tests/data/axe.min.js, MPL-2.0, unchanged), which is not
in the package.

Direct dependencies, as `make env` installs them on a CPU (versions: `constraints/`).
`tools/licences.py` writes this table.

| package | needed for | licence |
| --- | --- | --- |"""

ELSEWHERE = {
    "trackio": "MIT",
    "mkdocs-material": "MIT",
}  # what is in no environment here, else Apache-2.0
SGLANG_PLACES = sorted((ROOT / ".venv-sglang" / "lib").glob("python3.*/site-packages"))
SGLANG = """
`make env-sglang` and `make test` install SGLang in a separate environment;
constraints/sglang-cpu.txt lists its packages. There SGLang also imports torchvision ({}), triton
({}) and soundfile ({}), whose wheel contains libsndfile (LGPL-2.1-or-later). mismatch
ships none of these packages."""


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    print(HEADER)
    groups = {"base": project["dependencies"], **project["optional-dependencies"]}
    for group, requirements in groups.items():
        for requirement in requirements:
            name = re.split(r"[\[<>=~! ]", requirement)[0]
            if name == project["name"]:
                continue
            try:
                facts = metadata(name)
            except PackageNotFoundError:
                known = ELSEWHERE.get(name, "Apache-2.0")
                print(f"| {name} | {group} | {known} |")
                continue
            print(f"| {name} | {group} | {licence(facts)} |")
    licences = []
    for name in ("torchvision", "triton", "soundfile"):
        (found, *_) = distributions(name=name, path=[str(place) for place in SGLANG_PLACES])
        licences.append(licence(found.metadata))
    print(SGLANG.format(*licences))
    print("\n**Next:** [run the tests](testing.md).")


def licence(facts: PackageMetadata) -> str:
    """Return the SPDX expression where there is one, else the classifier, else the first line."""
    if facts["License-Expression"]:
        return facts["License-Expression"]
    lines = facts.get_all("Classifier") or []
    classifiers = [line.split(" :: ")[-1] for line in lines if "License :: OSI" in line]
    return classifiers[0] if classifiers else (facts["License"] or "unknown").splitlines()[0]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main()
