"""Settings that reduce what Python's interpreter costs a program, in garbage collection, memory allocation, and the
clean-up at its end."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from typing import Any

GC_THRESHOLDS = (20_000, 20, 100)
"""Thresholds of Python's garbage collector, which has three generations of objects.

The first threshold is the number of allocations between two collections of the youngest generation. The others are
numbers of collections of one generation between two collections of the next older one. Full collections are rare,
because each takes a tenth of a second if there are many connections. With Python's own thresholds, an eighth of the CPU
time of a program's start would be spent on collections that free nothing, because imported modules stay in memory.
"""


_MALLOC_OPTIONS = {-3: 4 << 20, -1: 16 << 20, -2: 1 << 20}
"""Options of glibc's ``mallopt``: ``M_MMAP_THRESHOLD``, ``M_TRIM_THRESHOLD`` and ``M_TOP_PAD``, in bytes. By default,
buffers of some hundred KiB are returned to the system when they are freed, and their pages are zeroed when they are
allocated again."""


def begin_process() -> None:
    """Set the thresholds of garbage collection for this process, before it imports its modules."""
    gc.set_threshold(*GC_THRESHOLDS)


def keep_modules() -> None:
    """Exclude all existing objects from garbage collection, because the modules that were just imported stay in
    memory."""
    gc.freeze()


def keep_large_blocks() -> bool:
    """Make the allocator keep freed buffers for reuse, unless variables of the environment configure it.

    :returns: False if the allocator is not glibc's, or is configured already.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    return all(mallopt(option, value) for option, value in _MALLOC_OPTIONS.items())


def return_freed_memory() -> None:
    """Tell glibc to return freed memory to the system. Without this call, glibc retains freed memory that is below
    memory in use."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def end_process(status: object) -> None:
    """End this process as the interpreter would, but without the interpreter's clean-up of modules.

    The clean-up would take a fifth of the CPU time of a short command. This function first waits for threads, calls the
    functions of ``atexit``, and collects garbage, which reports errors that nobody handled. It returns without ending
    the process if the output cannot be written, or if the status is a message. The interpreter then ends the process
    and prints the message.

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
