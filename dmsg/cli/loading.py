"""Import of a command's modules.  Meanwhile Ctrl-C ends the process at once, because there is nothing to close yet."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from dmsg.base.interpreter import keep_modules


@contextmanager
def loading() -> Iterator[None]:
    """Context manager within which Ctrl-C ends the process at once.  Use it only around imports."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
        keep_modules()
    finally:
        signal.signal(signal.SIGINT, before)


def load(*modules: str) -> None:
    """Import the modules that a command needs, before a reactor exists that handles Ctrl-C in another way."""
    with loading():
        for module in modules:
            import_module(module)
