"""Shared clients for endpoint strings, which cannot name a client object.

A client is made at its first use and stopped with the reactor. All strings of the process with the same discovery and
key file share a client. Missing settings come from the environment: ``DMSG_DISCOVERY`` (URLs separated by blanks) and
``DMSG_KEY_FILE``. A client without a key file gets a new key for this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IListeningPort, IProtocol, IProtocolFactory

from dmsg.clients.client import CONNECT_TIMEOUT, AnyClient
from dmsg.keylock import hold_key, this_program
from dmsg.keys import PubKey, SecKey, load_or_create_key
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.endpoints import StreamOpener

C = TypeVar("C", bound=AnyClient)


class SharedClients(Generic[C]):
    """Clients of one protocol family that the process shares, by their settings.

    :param make: makes a client, given the reactor, the key, the URLs, and further settings by which clients differ.
    """

    def __init__(self, prefix: str, make: Callable[..., C]) -> None:
        self._prefix = prefix
        self._make = make
        self._clients: dict[tuple[Hashable, ...], C] = {}

    def get(self, reactor: Reactor, discovery: str | None = None, key: str | None = None, *others: Hashable) -> C:
        """Return the started client of this process for a discovery and a key file.

        :param discovery: URLs separated by blanks.
        :param key: path of a key file, which is created if absent.
        :raises ValueError: no discovery is named.
        :raises KeyFileError: the key file cannot be used, or another program uses it.
        """
        urls = tuple((discovery or os.environ.get("DMSG_DISCOVERY", "")).split())
        if not urls:
            raise ValueError(
                f"{self._prefix}: the endpoint needs discovery=URL or the environment variable DMSG_DISCOVERY"
            )
        key = key or os.environ.get("DMSG_KEY_FILE", "")
        # A client belongs to one reactor, so the reactor is a part of the table's key.
        name = (id(reactor), urls, key, *others)
        client = self._clients.get(name)
        if client is None:
            secret = load_or_create_key(key) if key else SecKey.generate()
            lock = hold_key(key, this_program()) if key else None
            client = self._clients[name] = self._make(reactor, secret, urls, *others)

            def stop(client: C = client) -> Deferred[None]:
                # A string that is used during the shutdown must not get a client that is stopping.
                self._clients.pop(name, None)
                if lock is not None:
                    lock.release()
                return client.stopService()

            reactor.addSystemEventTrigger("before", "shutdown", stop)
            client.startService()
        return client

    async def stop(self) -> None:
        """Stop all clients before the reactor stops."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.stopService()


class LazyClient:
    """Opener of streams with a client that is made when first needed."""

    def __init__(self, get: Callable[[], StreamOpener]) -> None:
        self._get = get

    def connect(
        self,
        remote: PubKey | DmsgAddress,
        factory: IProtocolFactory,
        port: int = 0,
        *,
        timeout: float = CONNECT_TIMEOUT,
    ) -> Deferred[IProtocol]:
        """Open a stream; see :class:`~dmsg.net.streams.endpoints.StreamOpener`."""
        return self._get().connect(remote, factory, port, timeout=timeout)

    def listen(self, factory: IProtocolFactory, port: int = 0) -> IListeningPort:
        """Accept streams; see :class:`~dmsg.net.streams.endpoints.StreamOpener`."""
        return self._get().listen(factory, port)
