"""Twisted's reactor on the event loop of a program that runs on asyncio.

The program runs the event loop, before and after its use of dmsg. So the reactor is started, but its ``run()`` is never
called, and it never stops the loop.
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
    """Error: Twisted's reactor in this process does not run on this program's event loop."""


def reactor_of(loop: asyncio.AbstractEventLoop) -> Reactor:
    """Return the started reactor of an event loop; create and install it at the first call.

    If the event loop of an earlier reactor is closed, as after ``asyncio.run()``, a new reactor replaces that one.

    :raises WrongEventLoop: the installed reactor does not use asyncio, or uses another event loop that is not closed.
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
        # Twisted has no public attribute for the event loop of a reactor.
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
        # The reactor installs no signal handlers, because the program handles its signals itself.
        cast(Any, found).startRunning(installSignalHandlers=False)
        let_process_end(found)
    return found
