"""State machine of a client: stopped, searching for a server, unreachable, or online.

The client reports to the machine that its service starts or stops, and what its servers do. A client is unreachable if
it has servers, and none of them sends the requests of other clients to it.
The Deferreds in :attr:`LifecycleCore.waiting` fire once the client is online, and fail if it stops first. Every report
is accepted in every state, and is ignored if it changes nothing, so that callers need not know the state::

    stopped     -- start --------> searching
    searching   -- server_up ----> online
                -- unreachable --> unreachable
                -- stop ---------> stopped
    online      -- unreachable --> unreachable
                -- no_server ----> searching
                -- stop ---------> stopped
    unreachable -- server_up ----> online
                -- no_server ----> searching
                -- stop ---------> stopped
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from automat import TypeMachineBuilder
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from dmsg.errors import DmsgError


class Lifecycle(Protocol):
    """Interface through which a client reports events to its state machine."""

    def start(self) -> None:
        """Report that the service starts."""

    def server_up(self) -> None:
        """Report that at least one server is connected and sends the requests of other clients."""

    def unreachable(self) -> None:
        """Report that servers are connected, and that none of them sends the requests of other clients."""

    def no_server(self) -> None:
        """Report that no server is connected."""

    def stop(self) -> None:
        """Report that the service stops."""


@dataclass
class LifecycleCore:
    """State of a client.

    :ivar state: ``stopped``, ``searching``, ``unreachable`` or ``online``.
    :ivar waiting: Deferreds that wait for ``online``.
    """

    state: str = "stopped"
    waiting: list[Deferred[None]] = field(default_factory=list)

    def fire(self, result: Failure | None = None) -> None:
        """Fire all waiting Deferreds with ``result``, or fail them if it is a Failure."""
        # The list is emptied first, because a callback may add a Deferred to it.
        waiting, self.waiting = self.waiting, []
        for deferred in waiting:
            if not deferred.called:
                deferred.callback(result)


_builder = TypeMachineBuilder(Lifecycle, LifecycleCore)
_stopped = _builder.state("stopped")
_searching = _builder.state("searching")
_unreachable = _builder.state("unreachable")
_online = _builder.state("online")

# These reports change nothing: the client is already in the reported state, or it is stopped.
_searching.upon(Lifecycle.start).loop().returns(None)
_unreachable.upon(Lifecycle.start).loop().returns(None)
_online.upon(Lifecycle.start).loop().returns(None)
_online.upon(Lifecycle.server_up).loop().returns(None)
_searching.upon(Lifecycle.no_server).loop().returns(None)
_unreachable.upon(Lifecycle.unreachable).loop().returns(None)
_stopped.upon(Lifecycle.server_up).loop().returns(None)
_stopped.upon(Lifecycle.unreachable).loop().returns(None)
_stopped.upon(Lifecycle.no_server).loop().returns(None)
_stopped.upon(Lifecycle.stop).loop().returns(None)


@_stopped.upon(Lifecycle.start).to(_searching)
def _start(lifecycle: Lifecycle, core: LifecycleCore) -> None:
    core.state = "searching"


@_searching.upon(Lifecycle.server_up).to(_online)
@_unreachable.upon(Lifecycle.server_up).to(_online)
def _come_online(lifecycle: Lifecycle, core: LifecycleCore) -> None:
    core.state = "online"
    core.fire()


@_searching.upon(Lifecycle.unreachable).to(_unreachable)
@_online.upon(Lifecycle.unreachable).to(_unreachable)
def _become_unreachable(lifecycle: Lifecycle, core: LifecycleCore) -> None:
    core.state = "unreachable"


@_unreachable.upon(Lifecycle.no_server).to(_searching)
@_online.upon(Lifecycle.no_server).to(_searching)
def _go_offline(lifecycle: Lifecycle, core: LifecycleCore) -> None:
    core.state = "searching"


@_searching.upon(Lifecycle.stop).to(_stopped)
@_unreachable.upon(Lifecycle.stop).to(_stopped)
def _stop_searching(lifecycle: Lifecycle, core: LifecycleCore) -> None:
    core.state = "stopped"
    core.fire(Failure(DmsgError("the client is stopped")))


@_online.upon(Lifecycle.stop).to(_stopped)
def _stop_online(lifecycle: Lifecycle, core: LifecycleCore) -> None:
    core.state = "stopped"


make_lifecycle = _builder.build()
