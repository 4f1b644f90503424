"""Say what a user's trainer can, before ranks start: ``python -m mismatch.trainers.look NAME``.

It imports the user's module in the user's interpreter, in a process of its own, and puts out one
line of JSON: ``{"function": bool, "float32": bool}``, or ``{"message": …, "fix": …}``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mismatch.errors import MismatchError, named_line
from mismatch.trainers.worker import line_of, load, place_of


def look(name: str) -> dict[str, Any]:
    """Return what the line says."""
    try:
        kind = load(name)
    except MismatchError as error:
        return {"message": error.message, "fix": error.fix}
    except Exception as error:
        message = f"--scorer {name}: {named_line(error)}{line_of(error)}"
        return {"message": message, "fix": f"correct {place_of(name)[0]}, which cannot be imported"}
    is_class = isinstance(kind, type)
    return {"function": not is_class, "float32": is_class and bool(getattr(kind, "float32", True))}


if __name__ == "__main__":
    print("\n" + json.dumps(look(sys.argv[1])))
