"""Endpoint strings that begin with ``dmsg:``. Endpoints with equal options share a client
(:mod:`dmsg.clients.shared`)."""

from __future__ import annotations

from functools import partial

from dmsg.base.timeouts import CONNECT_TIMEOUT
from dmsg.clients.address_book import AddressBook
from dmsg.clients.shared import LazyClient, SharedClients
from dmsg.net.addresses import parse_port
from dmsg.net.reactor import Reactor
from dmsg.net.streams.endpoints import DmsgClientEndpoint, DmsgServerEndpoint
from dmsg.v2019.client import Client

_clients = SharedClients("dmsg", Client)
shared_client = _clients.get


def client_endpoint(
    reactor: Reactor,
    public_key: str,
    port: str = "0",
    discovery: str | None = None,
    key: str | None = None,
    timeout: str = str(CONNECT_TIMEOUT),
) -> DmsgClientEndpoint:
    """Parse ``dmsg:<key or name>[:<port>][:discovery=URL][:key=FILE][:timeout=SECONDS]``. Colons in URLs are written
    ``\\:``.

    :raises UnknownName: the key or name is neither a public key nor a name in the address book.
    :raises ValueError: ``port`` is not a port.
    """
    lazy = LazyClient(partial(shared_client, reactor, discovery, key))
    return DmsgClientEndpoint(lazy, AddressBook().find(public_key), parse_port(port), timeout=float(timeout))


def server_endpoint(
    reactor: Reactor, port: str = "", discovery: str | None = None, key: str | None = None
) -> DmsgServerEndpoint:
    """Parse ``dmsg:[<port>][:discovery=URL][:key=FILE]``. The default port is 0, which receives the streams of clients
    that name no port.

    :raises ValueError: ``port`` is not a port.
    """
    return DmsgServerEndpoint(LazyClient(partial(shared_client, reactor, discovery, key)), parse_port(port or "0"))
