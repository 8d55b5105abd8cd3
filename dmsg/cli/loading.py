"""Import of a command's modules, during which Ctrl-C ends the process at once because there is nothing to close."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from dmsg.base.interpreter import keep_modules


@contextmanager
def loading() -> Iterator[None]:
    """Context manager for code that only imports modules, so that Ctrl-C may end the process at once."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
        keep_modules()
    finally:
        signal.signal(signal.SIGINT, before)


def load(*modules: str) -> None:
    """Import modules that a command needs, before there is a reactor that handles Ctrl-C in its own way."""
    with loading():
        for module in modules:
            import_module(module)
