"""Cost of Python's interpreter to a program: garbage collection, and the clean-up at its end."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from typing import Any

GC_THRESHOLDS = (20_000, 20, 100)
"""Thresholds of Python's garbage collector: allocations between collections of the youngest generation, and collections
of each generation between those of the next one. Full collections are rare, because with many connections each takes a
tenth of a second. With Python's own thresholds, an eighth of the CPU time of a program's start would go into
collections that find nothing, because imported modules stay.
"""


def begin_process() -> None:
    """Set the thresholds of garbage collection for this process, before it imports its modules."""
    gc.set_threshold(*GC_THRESHOLDS)


def keep_modules() -> None:
    """Exclude all present objects from garbage collection, because the modules that were just imported stay."""
    gc.freeze()


def end_process(status: object) -> None:
    """End this process as the interpreter would, but without its clean-up of modules.

    The clean-up takes a fifth of the CPU time of a short command. Before the end, threads are waited for, functions of
    ``atexit`` are called, and garbage is collected, which reports errors that nobody handled. The function returns if
    the output cannot be written, or if the status is a message, which the interpreter prints.

    :param status: argument of ``SystemExit``.
    """
    if not (status is None or isinstance(status, int)):
        return
    end_threads: Any = getattr(threading, "_shutdown")  # noqa: B009  # It also ends the pools of concurrent.futures.
    end_threads()
    atexit._run_exitfuncs()  # noqa: SLF001  # Python has no public name for it.
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit((status or 0) & 0xFF)
