"""Lazy import of the public names of packages.

``import dmsg`` must not import Twisted, HTTP and a database. Otherwise commands would start slowly, and Spark's
workers, which use a few modules of dmsg, would need all of these packages.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def public(
    package: str, modules: Mapping[str, str]
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` for a package whose public names are imported at their first
    use.

    With ``__dir__``, interactive shells can complete these names.

    :param package: name of the package.
    :param modules: public names by the module that defines them, separated by spaces.
    """
    where = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # The import is here, because the ``dmsg`` program imports this module before it can handle Ctrl-C.
        from importlib import import_module

        return getattr(import_module(where[name]), name)

    def names() -> list[str]:
        return sorted({*where, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return sorted(where), find, names
