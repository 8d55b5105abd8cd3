"""Proof of a server's key: discovery begins a handshake with the server, and stops after the server's first answer.

In the handshakes of all protocol families the server proves its key in its first answer. Then discovery closes the
connection, without sending the client's next message. A server thus sees one unfinished handshake for each proof,
usually one per hour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, cast

from twisted.internet import protocol
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IReactorTime, IStreamClientEndpoint, ITCPTransport
from twisted.python.failure import Failure

from dmsg.discovery.entries.entry import Entry, features
from dmsg.errors import HandshakeError
from dmsg.keys import PubKey, SecKey
from dmsg.net.carriers.endpoint import over_carrier
from dmsg.net.carriers.names import PLAIN, Carrier
from dmsg.net.own_pauses import add_fair_timeout
from dmsg.net.socket_endpoints import TCPEndpoint
from dmsg.noise.xk import XKHandshake

CONNECT_TIMEOUT = 3.0
"""Seconds to wait for the connection."""
PROOF_TIMEOUT = 5.0
"""Seconds to wait for the server's answer."""


class Opening(Protocol):
    """Interface of the client's side of a handshake, which produces and consumes bytes."""

    def data_to_send(self) -> bytes:
        """Return the bytes to send to the server now."""

    def receive_data(self, data: bytes) -> None:
        """Process bytes from the server.

        :raises HandshakeError: the server does not have the key.
        """


Openings = Mapping[str, Callable[[PubKey], Opening]]
"""Functions that begin handshakes, by the feature in a server's entry that announces each handshake. The argument of a
function is the server's public key.
"""

RELAY = "relay1"


def _xk(remote: PubKey) -> Opening:
    return XKHandshake(SecKey.generate(), remote)


OPENINGS: Openings = {RELAY: _xk}
"""Handshakes of the family ``v2019``. Callers add those of other families as arguments, because discovery must not
import these families.
"""


def openings_of(entry: Entry, known: Openings) -> list[Callable[[PubKey], Opening]]:
    """Return the handshakes to try: those of the features that the entry names, or all known ones if it names none."""
    said = features(entry.version) & known.keys()
    return [opening for feature, opening in known.items() if not said or feature in said]


class _Prover(protocol.Protocol):
    def __init__(self, opening: Opening | None) -> None:
        self._opening = opening
        self.done: Deferred[None] = Deferred(lambda _: self._leave())

    def connectionMade(self) -> None:
        if self._opening is None:
            self._finish(None)
        elif self.transport is not None:
            self.transport.write(self._opening.data_to_send())

    def dataReceived(self, data: bytes) -> None:
        assert self._opening is not None
        if self.done.called:
            return
        try:
            self._opening.receive_data(data)
        except HandshakeError as error:
            self._finish(error)
            return
        # The handshake has a next message only once the server's answer has arrived completely and is valid. That
        # message is not sent.
        if self._opening.data_to_send():
            self._finish(None)

    def connectionLost(self, reason: Failure = protocol.connectionDone) -> None:
        if not self.done.called:
            self.done.errback(reason)

    def _finish(self, error: Exception | None) -> None:
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


async def reach(
    reactor: IReactorTime, host: str, port: int, opening: Opening | None, carrier: Carrier = PLAIN, name: str = ""
) -> None:
    """Connect to a server, and wait until it has proved its key.

    :param opening: handshake in which the server proves its key; None to connect without a handshake.
    :param host: IP address, not a name.
    :param carrier: carrier protocol at the port.
    :param name: host in the server's address, for TLS (SNI) and HTTP (``Host``).
    :raises HandshakeError: the server does not have the key.
    :raises Exception: Twisted's connection errors, and TimeoutError.
    """
    endpoint: IStreamClientEndpoint = TCPEndpoint(reactor, host, port, CONNECT_TIMEOUT)
    if opening is not None and carrier != PLAIN:
        endpoint = over_carrier(reactor, endpoint, name, port, carrier, encrypted=True, timeout=CONNECT_TIMEOUT)
    prover = await endpoint.connect(_Factory(opening))
    assert isinstance(prover, _Prover)
    await add_fair_timeout(prover.done, PROOF_TIMEOUT, reactor)
