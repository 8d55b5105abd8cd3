"""Client side of a link: connects through another endpoint, and runs the handshake."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IAddress, IProtocol, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure

from dmsg.keys import PubKey
from dmsg.net.links.interfaces import LinkUser
from dmsg.net.links.link import Link, MakeUser, OnFailure

MakeLink = Callable[[MakeUser, OnFailure], Link]
"""Function that makes the link of one connection. It has two arguments: the factory of the link's user (the object that
handles the frames), and the callback for a failed handshake."""
_U = TypeVar("_U", bound=LinkUser[Link])


class LinkClientEndpoint:
    """Client endpoint that connects through another endpoint and runs the handshake of a link.

    :param make_link: makes the link, see :data:`MakeLink`.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        endpoint: IStreamClientEndpoint,
        make_link: MakeLink,
    ) -> None:
        self._reactor = reactor
        self._endpoint = endpoint
        self._make_link = make_link

    def connect(self, make_user: Callable[[PubKey], _U]) -> Deferred[_U]:
        """Connect and run the handshake. When the link is up, call ``make_user`` with the peer's key; the Deferred
        fires with its result.

        The Deferred fails with HandshakeError or an error of Twisted. Cancelling the Deferred ends the connection.
        """
        links: list[Link] = []
        done: Deferred[_U] = Deferred(lambda _: self._cancel(dialling, links))

        def user_made(remote: PubKey) -> _U:
            user = make_user(remote)
            # The Deferred fires in the next reactor turn, so that link_up() runs before the caller uses the result.
            self._reactor.callLater(0, lambda: None if done.called else done.callback(user))
            return user

        def failed(link: Link, failure: Failure) -> None:
            if not done.called:
                done.errback(failure)

        def build() -> Link:
            links.append(self._make_link(user_made, failed))
            return links[-1]

        dialling = self._endpoint.connect(_LinkFactory(build))

        def dialled(result: IProtocol | Failure) -> None:
            if isinstance(result, Failure) and not done.called:
                done.errback(result)

        dialling.addBoth(dialled)
        return done

    @staticmethod
    def _cancel(dialling: Deferred[IProtocol], links: list[Link]) -> None:
        # The errback is added before cancel(), which fires the Deferred at once. Without an errback, the error would be
        # logged as unhandled.
        dialling.addErrback(lambda failure: failure.trap(CancelledError) and None)
        dialling.cancel()
        for link in links:
            link.abandon()


class _LinkFactory(Factory):
    noisy = False

    def __init__(self, build: Callable[[], Link]) -> None:
        self._build = build

    def buildProtocol(self, addr: IAddress | None) -> Link:
        return self._build()
