"""Endpoint strings that begin with ``dmsg-messaging:``. They share clients (:mod:`dmsg.clients.shared`)."""

from __future__ import annotations

from functools import partial

from dmsg.base.timeouts import CONNECT_TIMEOUT
from dmsg.clients.address_book import AddressBook
from dmsg.clients.shared import LazyClient, SharedClients
from dmsg.keys import SecKey
from dmsg.messaging.client import Client
from dmsg.messaging.core.dialect import ACKS, IDS, Acks, Dialect, dialect_of
from dmsg.messaging.core.wire import Profile
from dmsg.net.reactor import Reactor
from dmsg.net.streams.endpoints import DmsgClientEndpoint, DmsgServerEndpoint


def _make(reactor: Reactor, key: SecKey, urls: tuple[str, ...], dialect: Dialect) -> Client:
    return Client(reactor, key, urls, profile=dialect.profile, acks=dialect.acks, two_ids=dialect.two_ids)


def _dialect(profile: str, acks: str, ids: str) -> Dialect:
    """Return the dialect for the options of an endpoint string.

    :raises ValueError: an option is invalid, or the profile does not support it.
    """
    if acks not in ACKS or ids not in IDS:
        raise ValueError(f"acks={acks} or ids={ids} is not valid: acks must be auto, yes or no, and ids one or two")
    return dialect_of(Profile(profile), ACKS[acks], IDS[ids])


_clients = SharedClients("dmsg-messaging", _make)


def shared_client(
    reactor: Reactor,
    discovery: str | None = None,
    key: str | None = None,
    profile: Profile = Profile.SEED,
    acks: Acks = None,
    two_ids: bool = False,
) -> Client:
    """Return the running client that the process shares for this discovery, key file and dialect.

    :param discovery: URLs separated by blanks.
    :param key: path of a key file, which is created if it does not exist.
    :raises ValueError: no discovery is given, or the profile does not support ``acks`` or ``two_ids``.
    :raises KeyFileError: the key file cannot be used, or another program uses it.
    """
    return _clients.get(reactor, discovery, key, dialect_of(profile, acks, two_ids))


def client_endpoint(
    reactor: Reactor,
    public_key: str,
    discovery: str | None = None,
    key: str | None = None,
    timeout: str = str(CONNECT_TIMEOUT),
    profile: str = Profile.SEED.value,
    acks: str = "auto",
    ids: str = "one",
) -> DmsgClientEndpoint:
    """Return the client endpoint for the string ``dmsg-messaging:<key or name>``.

    The options ``[:discovery=URL][:key=FILE][:timeout=SECONDS][:profile=PROFILE]`` may follow, and with the ``skywire``
    profile also ``[:acks=yes][:ids=two]``.  A colon in a URL is written ``\\:``.

    :raises UnknownName: the name is neither a public key nor in the address book.
    :raises ValueError: the profile, ``acks`` or ``ids`` is invalid.
    """
    lazy = LazyClient(partial(_clients.get, reactor, discovery, key, _dialect(profile, acks, ids)))
    return DmsgClientEndpoint(lazy, AddressBook().find(public_key), timeout=float(timeout))


def server_endpoint(
    reactor: Reactor,
    discovery: str | None = None,
    key: str | None = None,
    profile: str = Profile.SEED.value,
    acks: str = "auto",
    ids: str = "one",
) -> DmsgServerEndpoint:
    """Return the server endpoint for the string ``dmsg-messaging:``.

    The options are ``[discovery=URL][:key=FILE][:profile=PROFILE][:acks=yes][:ids=two]``.

    :raises ValueError: the profile, ``acks`` or ``ids`` is invalid.
    """
    return DmsgServerEndpoint(LazyClient(partial(_clients.get, reactor, discovery, key, _dialect(profile, acks, ids))))
