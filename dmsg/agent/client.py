"""Client that uses the key and the connections of the agent, in place of a client in the program itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IListeningPort, IProtocol, IProtocolFactory
from twisted.internet.task import deferLater
from twisted.logger import Logger

from dmsg.agent.connections import ANSWER_TIMEOUT, NO_AGENT_ERRORS, AgentConnections, StreamConnection
from dmsg.agent.listening import AgentListeningPort
from dmsg.agent.local_stream import OpenedStream
from dmsg.agent.socket_path import FoundAgent
from dmsg.base.timeouts import CONNECT_TIMEOUT
from dmsg.errors import ConnectTimeout
from dmsg.keys import PubKey
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress

RETRY_DELAY = 0.25
"""Seconds between two attempts of ``connect`` to reach an agent that is not running."""

_log = Logger()


class AgentClient:
    """Client that opens streams over the agent's connections, with the agent's key.

    The class has the methods of :class:`~dmsg.v2019.client.Client` with which programs connect and listen.  One of them
    differs: ``listen`` returns a Deferred, because only the agent knows whether the port is free.

    :param agent: the agent, from :func:`dmsg.agent.find_agent`.
    :param program: name of this program in ``dmsg status``.
    :param on_warning: callback invoked with each warning for the program's user.
    """

    def __init__(
        self,
        reactor: Reactor,
        agent: FoundAgent,
        program: str,
        *,
        on_warning: Callable[[str], None] = lambda text: _log.warn("{text}", text=text),
    ) -> None:
        self._reactor = reactor
        self._key = agent.key
        self._connections = AgentConnections(reactor, agent.path, program)
        self._services: dict[AgentListeningPort, None] = {}
        self._on_warning = on_warning
        self.status = "online"
        self.last_error = ""
        self.waiting_for = "the agent to be online"

    @property
    def public_key(self) -> PubKey:
        """Public key of the agent, which is also the address of the programs that use the agent."""
        return self._key

    # --- methods of a Twisted service ---

    def startService(self) -> None:
        """Do nothing, because the agent is already running."""

    async def _stop(self) -> None:
        for one in list(self._services):
            await one.stopListening()
        for stream in list(self._connections.streams):
            stream.stop()
        waiting = [stream.closed for stream in self._connections.streams]
        for over in waiting:
            await over

    def stopService(self) -> Deferred[None]:
        """Stop the services of this program, and end its streams.

        Streams that the application has closed have some seconds to send their data.  Other streams are aborted.
        """
        return Deferred.fromCoroutine(self._stop())

    def expect(self, remote: PubKey) -> None:
        """Do nothing: the agent is online already, so no connection to ``remote`` needs to be prepared."""

    def when_online(self, timeout: float | None = None) -> Deferred[None]:
        """Return a Deferred that fires when the agent is connected to a server."""
        return self._wait(timeout, published=False)

    def when_published(self, timeout: float | None = None) -> Deferred[None]:
        """Return a Deferred that fires when the entry of the agent's key is in discovery, so that peers can connect."""
        return self._wait(timeout, published=True)

    def _wait(self, timeout: float | None, *, published: bool) -> Deferred[None]:
        request = {"do": "wait", "published": published, "timeout": timeout or ANSWER_TIMEOUT}
        answer = Deferred.fromCoroutine(self._connections.ask(request, (timeout or ANSWER_TIMEOUT) + ANSWER_TIMEOUT))
        return answer.addCallback(lambda _: None)

    # --- streams ---

    def connect(
        self,
        remote: PubKey | DmsgAddress,
        factory: IProtocolFactory,
        port: int = 0,
        *,
        timeout: float = CONNECT_TIMEOUT,
        via: PubKey | None = None,
        resumable: bool = True,
    ) -> Deferred[IProtocol]:
        """Open a stream, as :meth:`dmsg.v2019.client.Client.connect` does.

        If the agent is not running, the call waits for it.  The waiting time counts towards ``timeout``.
        """
        address = DmsgAddress.of(remote, port)
        request: dict[str, object] = {
            "do": "connect",
            "to": str(address.public_key),
            "port": address.port,
            "timeout": timeout,
            "resumable": resumable,
            "half_close": True,
            "as": str(self._key),
        }
        if via is not None:
            request["via"] = str(via)
        return Deferred.fromCoroutine(self._connect(address, request, factory, timeout))

    async def _connect(
        self, address: DmsgAddress, request: dict[str, object], factory: IProtocolFactory, timeout: float
    ) -> IProtocol:
        deadline = self._reactor.seconds() + timeout
        while True:
            connection = StreamConnection(self._connections, partial(_build, factory))
            try:
                await self._connections.open(connection, request)
            except NO_AGENT_ERRORS:
                if self._reactor.seconds() + RETRY_DELAY >= deadline:
                    raise ConnectTimeout(
                        f"{address.public_key.short}: the agent is not running; start it with: dmsg up"
                    ) from None
                await deferLater(self._reactor, RETRY_DELAY)
                continue
            return await self._connections.with_timeout(connection.started, timeout + ANSWER_TIMEOUT)

    # --- services ---

    def listen(self, factory: IProtocolFactory, port: int = 0) -> Deferred[IListeningPort]:
        """Accept streams with ``factory`` at a port of the agent's key.

        The Deferred fires when the agent has opened the port for this program.  It fails with
        :class:`~dmsg.errors.DmsgError` if another program uses the port.  If the agent restarts, the port is registered
        again.

        The factory may have two optional attributes:

        * ``admits``: a function that gets an address and returns whether that address may connect.  If the function has
          an attribute ``keys``, a set of keys or None for anyone, the agent gets these keys and refuses other peers
          itself.
        * ``offers``: a text about the service.  ``dmsg status`` shows this text and the keys.

        :raises ValueError: ``port`` is not a port.
        """
        if not 0 <= port < 65536:
            raise ValueError("port must be from 0 to 65535")
        return Deferred.fromCoroutine(self._listen(factory, port))

    async def _listen(self, factory: IProtocolFactory, port: int) -> IListeningPort:
        listening = AgentListeningPort(self._connections, self._key, self._services, self._on_warning, factory, port)
        await listening.register()
        self._services[listening] = None
        factory.doStart()
        listening.watch()
        return listening


def _build(factory: IProtocolFactory, opened: OpenedStream) -> IProtocol | None:
    return factory.buildProtocol(opened.peer)
