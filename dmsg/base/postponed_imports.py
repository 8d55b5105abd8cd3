"""Imports of other packages that are postponed until the imported module is used.

Twisted's reactor and pyOpenSSL import modules for TLS, certificates and cookies, and use them only inside functions. In
a command that uses no TLS, these modules would take an eighth of the CPU time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # At run time, the import would load eight more modules.
    from importlib.abc import Loader

POSTPONED_MODULES = frozenset(("cryptography.x509", "http.cookiejar", "twisted.internet.ssl"))
"""Modules whose code runs when they are first used. They import almost 50 others."""

_lock = RLock()
_loaders: dict[str, Loader] = {}
"""Loader of each module whose code has not run yet."""


class _PostponedModule(ModuleType):
    """Module whose code runs when an attribute is read that the import system has not set.

    ``importlib.util.LazyLoader`` cannot be used, because it refuses modules that replace themselves in ``sys.modules``.
    Twisted does so with modules that have deprecated names.
    """

    def __getattr__(self, name: str) -> Any:
        # Another thread waits until the code has run. The loader is removed before that, so if the code itself reads a
        # name that it has not defined yet, the code does not run again, and the read fails as in any module.
        with _lock:
            loader = _loaders.pop(self.__name__, None)
            if loader is not None:
                try:
                    loader.exec_module(self)
                except BaseException:
                    _loaders[self.__name__] = loader
                    raise
                self.__class__ = ModuleType  # type: ignore[assignment]
        return ModuleType.__getattribute__(self, name)


class _PostponingLoader:
    """Loader that creates a module without running its code, which runs when the module is first used."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _PostponedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        _loaders[module.__name__] = self._loader


class _PostponingFinder:
    """Import finder for the modules of ``POSTPONED_MODULES``."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in POSTPONED_MODULES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PostponingLoader(spec.loader)  # type: ignore[assignment]
        return spec


def postpone_imports() -> None:
    """Postpone the imports of the modules in ``POSTPONED_MODULES``.

    Only the ``dmsg`` program calls this function. In an application that uses the library, the function would change
    the application's own imports, too.
    """
    if _PostponingFinder not in sys.meta_path:
        sys.meta_path.insert(0, _PostponingFinder)
