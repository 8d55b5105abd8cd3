"""The first lines of the ``dmsg`` program."""

from __future__ import annotations

import signal


def entry() -> None:
    """Run it.  While it is still being loaded Ctrl-C ends it as it ends any program: there is nothing to put away."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dmsg.cli.main import entry as run

    signal.signal(signal.SIGINT, before)
    run()
