"""Probes: streams of other clients that only measure round trips with empty frames. No application sees them."""

from __future__ import annotations

from collections import Counter

from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure

from dmsg.net.reactor import cancel_call

MAX_PROBES = 64
"""Maximum number of open probes of other clients. Above it, the peer with most probes loses its oldest probe."""
PROBE_TIME = 60.0
"""Seconds after which a probe is ended."""


class Probes(Factory):
    """Factory that accepts the probes of ``dmsg ping``, which measure round trips with empty frames."""

    noisy = False

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self.open: dict[_ProbeProtocol, IDelayedCall] = {}

    def buildProtocol(self, addr: IAddress | None) -> _ProbeProtocol:
        if len(self.open) >= MAX_PROBES:
            counts = Counter(one.peer for one in self.open)
            # Among peers with equally many probes, max returns the peer with the oldest probe.
            most = max(counts, key=counts.__getitem__)
            next(one for one in self.open if one.peer == most).end()
        probed = _ProbeProtocol(self, addr)
        self.open[probed] = self._reactor.callLater(PROBE_TIME, probed.end)
        return probed


class _ProbeProtocol(Protocol):
    """Protocol of one probe. Closes the connection if data arrive, because a probe must not send any."""

    def __init__(self, probes: Probes, peer: IAddress | None) -> None:
        self._probes = probes
        self.peer = peer

    def end(self) -> None:
        if self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]
        self._forget()

    def dataReceived(self, data: bytes) -> None:
        self.end()

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self._forget()

    def _forget(self) -> None:
        cancel_call(self._probes.open.pop(self, None))
