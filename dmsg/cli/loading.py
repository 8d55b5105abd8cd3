"""Import of a program's modules.  Meanwhile Ctrl-C ends the process at once, because there is nothing to close yet.

At the top, this module imports only what it needs to handle Ctrl-C: before that, Ctrl-C prints a traceback. It does not
import ``signal``, whose own imports take most of the time that Python needs to begin a program.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # mypy knows only the module ``signal``, which is built on it.

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class Loading:
    """Context manager within which Ctrl-C ends the process at once.  Use it only around imports, and at the end of the
    process.

    If SIGINT is ignored, it stays ignored: a shell lets the programs that it starts in the background ignore Ctrl-C.
    """

    _before: Callable[[int, FrameType | None], object] | int | None = None

    def __enter__(self) -> None:
        if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
            self._before = _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

    def __exit__(self, failed: object, *_: object) -> None:
        from dmsg.base.interpreter import keep_modules

        if failed is None:
            keep_modules()
        if self._before is not None:
            _signal.signal(_signal.SIGINT, self._before)


def loading() -> Loading:
    """Return a context manager within which Ctrl-C ends the process at once."""
    return Loading()


def load(*modules: str) -> None:
    """Import the modules that a command needs, before a reactor exists that handles Ctrl-C in another way."""
    from importlib import import_module

    with loading():
        for module in modules:
            import_module(module)
