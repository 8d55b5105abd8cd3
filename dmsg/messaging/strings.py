"""``dmsg-messaging:`` endpoint strings; their clients are shared, see :mod:`dmsg.delegation.shared`."""

from __future__ import annotations

from functools import partial
from typing import Any

from dmsg.delegation.client import CONNECT_TIMEOUT
from dmsg.delegation.shared import LazyClient, SharedClients
from dmsg.keys import SecKey
from dmsg.messaging.service import Client
from dmsg.messaging.wire import Profile
from dmsg.names import Names
from dmsg.net.endpoints import DmsgClientEndpoint, DmsgServerEndpoint


def _make(reactor: Any, key: SecKey, urls: tuple[str, ...], profile: Profile) -> Client:
    return Client(reactor, key, urls, profile=profile)


_clients = SharedClients("dmsg-messaging", _make)
shared_client = _clients.get


def client_endpoint(
    reactor: Any,
    public_key: str,
    discovery: str | None = None,
    key: str | None = None,
    timeout: str = str(CONNECT_TIMEOUT),
    profile: str = Profile.SEED.value,
) -> DmsgClientEndpoint:
    """``dmsg-messaging:<key or name>[:discovery=URL][:key=FILE][:timeout=SECONDS][:profile=PROFILE]``.

    Colons in URLs are written ``\\:``.

    :raises UnknownName: not a public key, nor a name in the address book.
    :raises ValueError: not a profile.
    """
    lazy = LazyClient(partial(shared_client, reactor, discovery, key, Profile(profile)))
    return DmsgClientEndpoint(lazy, Names().find(public_key), float(timeout))


def server_endpoint(
    reactor: Any, discovery: str | None = None, key: str | None = None, profile: str = Profile.SEED.value
) -> DmsgServerEndpoint:
    """``dmsg-messaging:[discovery=URL][:key=FILE][:profile=PROFILE]``.

    :raises ValueError: not a profile.
    """
    return DmsgServerEndpoint(LazyClient(partial(shared_client, reactor, discovery, key, Profile(profile))))
