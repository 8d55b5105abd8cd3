"""Program of a process that ``dmsg host`` starts: ``twistd``, which ends when the process that started it ends.

``python -m dmsg.cli.network.entity_process PARENT ARGUMENTS...``, with the process id of the parent and the arguments
of ``twistd``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): signal that the kernel sends to this process when its parent ends."""


def end_with_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent ends, also when the parent is killed. Only Linux can do this.

    :raises SystemExit: the parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(1)


def main() -> None:
    """Run ``twistd`` in a session of its own, because Ctrl-C at the terminal is for the parent alone."""
    os.setsid()
    end_with_parent(int(sys.argv.pop(1)))
    from twisted.scripts.twistd import run

    run()


if __name__ == "__main__":
    main()
