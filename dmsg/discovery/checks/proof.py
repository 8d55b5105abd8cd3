"""Whether whoever answers at an address has the key that an entry names: a handshake as far as the server's proof.

In the handshakes of all families the server proves its key in its first answer.
What a client would say then is not said: the connection ends there, and a server
sees one that was not finished, once an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, cast

from twisted.internet import protocol
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint
from twisted.internet.interfaces import IAddress, IReactorTime, ITCPTransport
from twisted.python.failure import Failure

from dmsg.discovery.entries.entry import Entry, features
from dmsg.errors import HandshakeError
from dmsg.keys import PubKey, SecKey
from dmsg.noise.xk import XKHandshake

CONNECT_TIMEOUT = 3.0
"""Seconds for a connection."""
PROOF_TIMEOUT = 5.0
"""Seconds for the server's answer."""


class Opening(Protocol):
    """A client's side of a handshake over bytes."""

    def data_to_send(self) -> bytes:
        """What has to go to the server now."""

    def receive_data(self, data: bytes) -> None:
        """:raises HandshakeError: the server does not have the key."""


Openings = Mapping[str, Callable[[PubKey], Opening]]
"""How a handshake begins with the server of a key, by the feature that servers name that speak it."""

RELAY = "relay1"


def _xk(remote: PubKey) -> Opening:
    return XKHandshake(SecKey.generate(), remote)


OPENINGS: Openings = {RELAY: _xk}
"""Those of the main family; others stand above discovery, and are told to it."""


def openings_of(entry: Entry, known: Openings) -> list[Callable[[PubKey], Opening]]:
    """How a server may speak: as it says, or, when it says nothing, in any way that is known."""
    said = features(entry.version) & known.keys()
    return [opening for feature, opening in known.items() if not said or feature in said]


class _Prover(protocol.Protocol):
    def __init__(self, opening: Opening | None) -> None:
        self._opening = opening
        self.done: Deferred[None] = Deferred(lambda _: self._leave())

    def connectionMade(self) -> None:
        if self._opening is None:
            self._over(None)
        elif self.transport is not None:
            self.transport.write(self._opening.data_to_send())

    def dataReceived(self, data: bytes) -> None:
        assert self._opening is not None
        if self.done.called:
            return
        try:
            self._opening.receive_data(data)
        except HandshakeError as error:
            self._over(error)
            return
        # it goes on only when the proof was good
        if self._opening.data_to_send():
            self._over(None)

    def connectionLost(self, reason: Failure = protocol.connectionDone) -> None:
        if not self.done.called:
            self.done.errback(reason)

    def _over(self, error: Exception | None) -> None:
        if error is None:
            self.done.callback(None)
        else:
            self.done.errback(error)
        self._leave()

    def _leave(self) -> None:
        if self.transport is not None:
            cast(ITCPTransport, self.transport).abortConnection()


class _Factory(protocol.Factory):
    noisy = False

    def __init__(self, opening: Opening | None) -> None:
        self._opening = opening

    def buildProtocol(self, addr: IAddress | None) -> _Prover:
        return _Prover(self._opening)


async def reach(reactor: IReactorTime, host: str, port: int, opening: Opening | None) -> None:
    """Returns when the server proved its key, or, without an opening, when a connection could be made.

    :param host: an address, no name.
    :raises HandshakeError: whoever is there does not have the key.
    :raises Exception: Twisted's errors of connections, TimeoutError.
    """
    kind = TCP6ClientEndpoint if ":" in host else TCP4ClientEndpoint
    prover = await kind(reactor, host, port, timeout=CONNECT_TIMEOUT).connect(_Factory(opening))
    assert isinstance(prover, _Prover)
    await prover.done.addTimeout(PROOF_TIMEOUT, reactor)
