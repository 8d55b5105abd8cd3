"""Successive protocols of a connection: first a negotiation, such as with a proxy, then the caller's protocol."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IReactorTime, ITransport
from twisted.internet.protocol import Protocol, connectionDone
from twisted.protocols.policies import ProtocolWrapper
from twisted.python.failure import Failure

from dmsg.errors import DmsgError
from dmsg.net.own_pauses import add_fair_timeout
from dmsg.net.tls_errors import tls_error_text


def change_protocol(transport: ITransport, protocol: IProtocol) -> None:
    """Deliver the bytes that ``transport`` receives to ``protocol`` from now on.

    :param transport: TCP transport, or TLS protocol around one.
    """
    if isinstance(transport, ProtocolWrapper):
        transport.wrappedProtocol = protocol
    else:
        transport.protocol = protocol  # type: ignore[attr-defined]


class Negotiation(Protocol):
    """Base of protocols that negotiate on a new connection, and then pass the connection on to the caller's protocol.

    :cvar errors: class of the errors by which the negotiation fails.
    :ivar opened: Deferred that fires with the caller's protocol.
    """

    errors: ClassVar[type[DmsgError]]

    def __init__(self, factory: IProtocolFactory) -> None:
        self._factory = factory
        self._received = b""
        self.opened: Deferred[IProtocol] = Deferred()

    def _negotiate(self) -> None:
        """Process the received bytes.

        :raises DmsgError: the negotiation has failed; an error of the class ``errors``.
        """
        raise NotImplementedError

    def _raise_late(self, seconds: float) -> NoReturn:
        """Raise the error about an answer that has not arrived in ``seconds``."""
        raise NotImplementedError

    def _lost_error(self, tls_error: str) -> DmsgError:
        """Return the error about a connection that was lost.

        :param tls_error: text of the TLS error that ended the connection; empty if there was none.
        """
        raise NotImplementedError

    async def wait(self, reactor: IReactorTime, timeout: float) -> IProtocol:
        """Wait until the caller's protocol is connected, and return that protocol. Otherwise abort the connection.

        :param timeout: seconds to wait.
        :raises DmsgError: the negotiation has failed; an error of the class ``errors``.
        """

        def too_late(result: object, seconds: float) -> IProtocol:
            self._raise_late(seconds)

        try:
            return await add_fair_timeout(self.opened, timeout, reactor, too_late)
        except BaseException:
            self._give_up()
            raise

    def dataReceived(self, data: bytes) -> None:
        if self.opened.called:
            return  # TLS may still deliver data after the negotiation has failed or timed out.
        self._received += data
        try:
            self._negotiate()
        except self.errors as error:
            self._give_up()
            if not self.opened.called:
                self.opened.errback(error)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if not self.opened.called:
            self.opened.errback(self._lost_error(tls_error_text(reason.value)))

    def _give_up(self) -> None:
        if self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]
