"""Program of a process that ``dmsg host`` starts: runs ``twistd``, and ends when ``dmsg host`` ends.

The command line is ``python -m dmsg.cli.network.entity_process PARENT MODULE ARGUMENTS...``, with the process id of
``dmsg host``, the module of the entity's plugin, and the arguments of ``twistd``. The process imports the module, which
takes most of the time of a start, and waits for a byte on standard input before it runs ``twistd``.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Operation of prctl(2) that sets the signal which the kernel sends to this process when its parent ends."""


def end_with_parent(parent: int) -> None:
    """Let the kernel send SIGTERM to this process when its parent ends, even if the parent is killed.  Works only on
    Linux.

    :param parent: process id of the parent.
    :raises SystemExit: the parent has already ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(1)


def main() -> None:
    """Run ``twistd`` in a session of its own, so that Ctrl-C at the terminal reaches only the parent."""
    os.setsid()
    end_with_parent(int(sys.argv.pop(1)))
    from twisted.scripts.twistd import run

    importlib.import_module(sys.argv.pop(1))
    if os.read(sys.stdin.fileno(), 1):
        run()


if __name__ == "__main__":
    main()
