"""Write docs/fixes/ from the catalogue and the guides of mismatch/experiments/fixes."""

from __future__ import annotations

from pathlib import Path

from mismatch.experiments.fixes.pages import pages

FOLDER = Path(__file__).parent.parent / "docs" / "fixes"


def main() -> None:
    made = pages()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for known in FOLDER.glob("*.md"):
        if known.name not in made:
            known.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(made)} pages in {FOLDER}")


if __name__ == "__main__":
    main()
