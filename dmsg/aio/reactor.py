"""Twisted's reactor on the event loop of a program that runs on asyncio.

The loop belongs to the program: it already runs, and continues when dmsg is no longer used. So the reactor is started
here but never run, and stops nothing when it is released.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

from dmsg.errors import DmsgError
from dmsg.net.reactor import Reactor, use_monotonic_clock
from dmsg.net.threads import let_process_end

_MODULE = "twisted.internet.reactor"


class WrongEventLoop(DmsgError):
    """Twisted's reactor in this process does not run on this program's event loop."""


def reactor_of(loop: asyncio.AbstractEventLoop) -> Reactor:
    """Return the started reactor of an event loop; make and install it at the first call.

    When the loop of an earlier reactor is closed, as after ``asyncio.run()``, a new reactor takes its place.

    :raises WrongEventLoop: another reactor is installed, or its loop is not this one.
    """
    from twisted.internet.asyncioreactor import AsyncioSelectorReactor
    from twisted.internet.main import installReactor

    installed = sys.modules.get(_MODULE)
    if installed is not None:
        if not isinstance(installed, AsyncioSelectorReactor):
            name = type(installed).__name__
            raise WrongEventLoop(
                f"Twisted's {name} is installed already: import nothing that imports twisted.internet.reactor before "
                "dmsg.aio is used, or install twisted.internet.asyncioreactor"
            )
        # The private attribute is used, because Twisted has no public name for the event loop.
        theirs: asyncio.AbstractEventLoop = installed._asyncioEventloop  # noqa: SLF001
        if theirs is loop:
            return _start_reactor(installed)
        if not theirs.is_closed():
            raise WrongEventLoop(
                "dmsg.aio already uses another event loop of this process: use that loop, or close it first"
            )
        del sys.modules[_MODULE]
    reactor = AsyncioSelectorReactor(loop)
    installReactor(reactor)
    return _start_reactor(reactor)


def _start_reactor(reactor: object) -> Reactor:
    found = cast(Reactor, reactor)
    if not found.running:
        use_monotonic_clock(found)
        # The reactor installs no signal handlers, because signals are left to the program that runs the loop.
        cast(Any, found).startRunning(installSignalHandlers=False)
        let_process_end(found)
    return found
