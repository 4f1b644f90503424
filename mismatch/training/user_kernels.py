"""Kernels of the user's own: ``package.module:function``, with the signature of transformers.

Attention: ``function(module, query, key, value, attention_mask, scaling=…, dropout=…, s_aux=…,
**kwargs) -> (out [B, T, H, Dv], None)``; experts: ``function(module, hidden [T, H], ids [T, K],
weights [T, K]) -> [T, H]``. An attention function says after ``@`` which kind of mask it takes:

- ``sdpa`` (the default): boolean [B, 1, T, S], True where a query may look;
- ``eager``: the same as numbers to add, 0 or the dtype's least;
- ``flash``: [B, S] of real tokens, or None where all are; window and documents come as arguments
  (``sliding_window``, ``position_ids``), as for flash kernels; causal where ``module.is_causal``;
- ``none``: no mask at all.

Modules are found on the Python path, and after that in the current directory.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError, named_line

MASKS = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2", "none": None}
DEFAULT_MASK = "sdpa"
PATTERN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*(@\w*)?")


def is_user_kernel(text: str) -> bool:
    """Return whether a kernel's name is a user's function.

    >>> is_user_kernel("my.kernels:attend@flash"), is_user_kernel("sink-sdpa")
    (True, False)
    """
    return PATTERN.fullmatch(text) is not None


def load_function(text: str) -> tuple[Callable[..., Any], str]:
    """Import ``package.module:function[@MASK]``.

    Returns:
        The function, and the kind of mask: a key of :data:`MASKS`.

    Raises:
        MismatchError: another form, a module that cannot be imported, a name that is not there or
            cannot be called, an unknown mask.
    """
    path, _, mask = text.partition("@")
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        fault = f"{text!r} names no function"
        raise MismatchError(fault, "write it as package.module:function, or with @MASK")
    if "@" in text and mask not in MASKS:
        fault = f"{text}: there is no mask {mask!r}"
        raise MismatchError(fault, f"write one of these after @: {', '.join(MASKS)}")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        function: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        fix = "put the folder that holds it on PYTHONPATH, or install the package"
        if not isinstance(error, ModuleNotFoundError):
            fix = f"repair the module: `python -c 'import {module_name}'` shows the whole error"
        fault = f"{text}: cannot import {module_name}: {named_line(error)}"
        raise MismatchError(fault, fix) from error
    for part in name.split("."):
        if not hasattr(function, part):
            raise MismatchError(f"{text}: {module_name} has no {name}", "check the name after ':'")
        function = getattr(function, part)
    if not callable(function):
        raise MismatchError(f"{text}: {name} is no function", "name a function or another callable")
    return function, mask or DEFAULT_MASK


def mask_function(mask: str) -> Callable[..., Any] | None:
    """Return transformers' builder of that kind of mask; None for ``none``.

    ``sdpa`` and ``eager`` are always built: transformers omits a mask that is plainly causal, and a
    function that takes no mask as no restriction would attend to future tokens.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    registered = MASKS[mask]
    if registered is None:
        return None
    builder: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[registered]
    if mask == "flash":
        return builder

    def whole(*args: Any, **kwargs: Any) -> Any:
        return builder(*args, **{**kwargs, "allow_is_causal_skip": False})

    return whole


def register_attention(text: str) -> str:
    """Make the function known to transformers; its name there, always the same for the same text.

    Raises:
        MismatchError: see :func:`load_function`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    function, mask = load_function(text)
    name = registered_name(text)
    AttentionInterface.register(name, function)
    builder = mask_function(mask)
    if builder is not None:  # transformers builds none for a name that it has no builder for
        AttentionMaskInterface.register(name, builder)
    return name


def registered_name(text: str) -> str:
    """Return a name without the words that transformers searches for (flash, sdpa, slashes)."""
    return f"mismatch_yours_{sha256(text.encode()).hexdigest()[:12]}"
