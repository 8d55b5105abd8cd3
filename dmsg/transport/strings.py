"""``dmsg:`` endpoint strings.

A string has no client, so one is made: started at first use, shared by all
strings of the process with the same discovery and key file, stopped with the
reactor.  What a string leaves out comes from the environment:
``DMSG_DISCOVERY`` (URLs, separated by blanks) and ``DMSG_KEY_FILE``; a client
without a key file gets a key for this process.
"""

from __future__ import annotations

import os
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IListeningPort, IProtocol, IProtocolFactory

from dmsg.keys import PubKey, SecKey, load_or_create_key
from dmsg.names import Names
from dmsg.net.endpoints import CONNECT_TIMEOUT, DmsgClientEndpoint, DmsgServerEndpoint
from dmsg.transport.service import Client

_clients: dict[tuple[int, tuple[str, ...], str], Client] = {}


def shared_client(reactor: Any, discovery: str | None = None, key: str | None = None) -> Client:
    """The process's client for that discovery and key file, started.

    :param discovery: URLs separated by blanks.
    :param key: path of a key file, made if absent.
    :raises ValueError: no discovery is named.
    :raises KeyFileError: the key file cannot be used.
    """
    urls = tuple((discovery or os.environ.get("DMSG_DISCOVERY", "")).split())
    if not urls:
        raise ValueError("dmsg: endpoint needs discovery=URL or the variable DMSG_DISCOVERY")
    key = key or os.environ.get("DMSG_KEY_FILE", "")
    name = (id(reactor), urls, key)
    client = _clients.get(name)
    if client is None:
        client = _clients[name] = Client(reactor, load_or_create_key(key) if key else SecKey.generate(), urls)

        def stop() -> Any:
            del _clients[name]
            return client.stopService()

        reactor.addSystemEventTrigger("before", "shutdown", stop)
        client.startService()
    return client


class _Lazy:
    """Opens streams with a client that is made when it is first needed."""

    def __init__(self, reactor: Any, discovery: str | None, key: str | None) -> None:
        self._arguments = (reactor, discovery, key)

    def connect(
        self, remote: PubKey, factory: IProtocolFactory, timeout: float = CONNECT_TIMEOUT, *, port: int = 0
    ) -> Deferred[IProtocol]:
        return shared_client(*self._arguments).connect(remote, factory, timeout, port=port)

    def listen(self, factory: IProtocolFactory, port: int = 0) -> IListeningPort:
        return shared_client(*self._arguments).listen(factory, port)


def parse_port(text: str) -> int:
    """:raises ValueError: not 0 to 65535."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise ValueError(f"{text[:20]!r} is not a port, 0 to 65535")
    return int(text)


def client_endpoint(
    reactor: Any,
    public_key: str,
    port: str = "0",
    discovery: str | None = None,
    key: str | None = None,
    timeout: str = str(CONNECT_TIMEOUT),
) -> DmsgClientEndpoint:
    """``dmsg:<key or name>[:<port>][:discovery=URL][:key=FILE][:timeout=SECONDS]``; colons in URLs are written ``\\:``.

    :raises UnknownName: not a public key, nor a name in the address book.
    :raises ValueError: not a port.
    """
    lazy = _Lazy(reactor, discovery, key)
    return DmsgClientEndpoint(lazy, Names().find(public_key), float(timeout), port=parse_port(port))


def server_endpoint(
    reactor: Any, port: str = "", discovery: str | None = None, key: str | None = None
) -> DmsgServerEndpoint:
    """``dmsg:[<port>][:discovery=URL][:key=FILE]``; without a port it is 0, which those ask for who name none.

    :raises ValueError: not a port.
    """
    return DmsgServerEndpoint(_Lazy(reactor, discovery, key), parse_port(port or "0"))
