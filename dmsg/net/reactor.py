"""The type of a reactor that does more than tell the time.

What only waits takes :class:`~twisted.internet.interfaces.IReactorTime`, and so
a :class:`~twisted.internet.task.Clock` in tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.internet.interfaces import IReactorCore, IReactorFDSet, IReactorProcess, IReactorTCP, IReactorTime

if TYPE_CHECKING:
    # as Twisted types its global reactor
    from twisted.internet import _IReactorCommon

    Reactor = _IReactorCommon
else:

    class Reactor(IReactorCore, IReactorTime, IReactorFDSet, IReactorTCP, IReactorProcess):
        """Sockets, processes, time, and a start and stop."""


def the_reactor(given: Reactor | None = None) -> Reactor:
    """The one that is given, or that of this process, which is made now."""
    if given is not None:
        return given
    from twisted.internet import reactor

    return reactor
