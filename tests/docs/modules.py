"""Modules of the product, parsed once for all checks of their texts."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = "dmsg/rmb/envelope/envelope_pb2.py"
"""Module that protoc writes."""


@cache
def modules() -> tuple[tuple[str, ast.Module], ...]:
    """Return the path below the root, with slashes, and the syntax tree of each module that people write."""
    places = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "dmsg").rglob("*.py"))
    # The garbage collector would go through a million living nodes again and again, which takes six times the parsing.
    gc.disable()
    try:
        return tuple((place, ast.parse((ROOT / place).read_text())) for place in places if place != GENERATED)
    finally:
        gc.freeze()
        gc.enable()
