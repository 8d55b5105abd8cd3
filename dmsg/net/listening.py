"""Base of services that listen on ports. Their ``ready`` Deferred fires once the ports are open."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.application.service import Service
from twisted.internet.defer import Deferred, DeferredList, maybeDeferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.interfaces import IListeningPort, IProtocolFactory
from twisted.logger import Logger

from dmsg.base.options import Text
from dmsg.net.reactor import Reactor
from dmsg.net.socketopts import tune_listening

_log = Logger()


def check_endpoint(description: str) -> str:
    """Return a Twisted endpoint string unchanged if it is valid. No port is opened.

    :raises ValueError: the string is not valid.
    """
    from twisted.internet import reactor

    try:
        port = getattr(serverFromString(reactor, description), "_port", 0)
        if isinstance(port, int) and not 0 <= port < 65536:
            raise ValueError(f"{port} is not a port, 0 to 65535")
    except Exception as error:
        raise ValueError(f"{description!r} is not an endpoint string such as tcp:8080: {error}") from None
    return description


async def open_port(reactor: Reactor, description: str, factory: IProtocolFactory) -> IListeningPort:
    """Listen on an endpoint string, and return the port. Connections with TLS are guarded, see
    :mod:`dmsg.net.tls_guard`.
    """
    endpoint = serverFromString(reactor, description)
    port: IListeningPort = await endpoint.listen(factory)
    options = getattr(endpoint, "_sslContextFactory", None)
    if options is not None:
        # The import is here, because OpenSSL takes a tenth of a second to import.
        from dmsg.net.tls_guard import guard_tls

        guard_tls(port, options.getContext())
    return port


ENDPOINT = Text("endpoint string", check_endpoint)


class ListeningService(Service):
    """Base of services that listen, which opens and closes their ports.

    A subclass implements ``_start``, which must call ``_listen``, and ``_stop``, which must first call
    ``_stop_listening``.

    :param listen: Twisted endpoint strings.
    :ivar ports: ports that are open.
    :ivar ready: Deferred that fires with the ports, or fails with the error of ``_start``.
    """

    listens_as = "entity"
    """Name of the service in log lines."""

    def __init__(self, reactor: Reactor, listen: Sequence[str]) -> None:
        self._reactor = reactor
        self._descriptions = tuple(listen)
        self.ports: list[IListeningPort] = []
        self.ready: Deferred[list[IListeningPort]] = Deferred()

    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self.ready = Deferred.fromCoroutine(self._begin())

    async def _begin(self) -> list[IListeningPort]:
        await self._start()
        return self.ports

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def _start(self) -> None:
        """Create the objects that serve the ports, then listen."""
        raise NotImplementedError

    async def _stop(self) -> None:
        """Accept no new connections, and release all resources."""
        raise NotImplementedError

    async def _listen(self, factory: IProtocolFactory) -> bool:
        """Open the ports.

        :returns: whether accepted connections inherit their socket options from each port, see
            :func:`~dmsg.net.socketopts.tune_listening`.
        """
        tuned = True
        for description in self._descriptions:
            port = await open_port(self._reactor, description, factory)
            tuned = tune_listening(port) and tuned
            self.ports.append(port)
            _log.info("{who} listens on {address}", who=self.listens_as, address=str(port.getHost()))
        return tuned

    async def _stop_listening(self, *others: IListeningPort | None) -> None:
        """Close the ports and ``others``. If ports are still being opened, cancel that first."""
        self.ready.addErrback(lambda _: None)
        self.ready.cancel()
        ports = [port for port in (*self.ports, *others) if port is not None]
        await DeferredList([maybeDeferred(port.stopListening) for port in ports], consumeErrors=True)
        self.ports.clear()
