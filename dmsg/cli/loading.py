"""While a command is being loaded Ctrl-C ends it as it ends any program: there is nothing to put away."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def loading() -> Iterator[None]:
    """Context in which only modules are imported, so that Ctrl-C may end the process at once."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def load(*modules: str) -> None:
    """Load what a command needs to run: before there is a reactor, to which Ctrl-C means something else."""
    with loading():
        for module in modules:
            import_module(module)
