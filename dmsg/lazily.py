"""Public names of packages, imported when they are first asked for.

``import dmsg`` must not import Twisted, HTTP and a database: the command would
start late, and workers of Spark, which need one module of it, would need all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def public(package: str, modules: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """``__all__`` and ``__getattr__`` of a package.

    :param modules: of each module, its public names, separated by spaces.
    """
    where = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(where[name]), name)

    return sorted(where), find
