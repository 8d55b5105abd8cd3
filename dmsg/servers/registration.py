"""Registration of a server: keeps the server's entry in discovery up to date."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IDelayedCall, IListeningPort, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.discovery.entries.entry import Entry, ServerMeta, features
from dmsg.discovery.lookup.key_conflict import CONFLICT_TIME, KeyConflict
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.lookup.lookups import STOP_TIMEOUT, Lookups, withdraw_in_time
from dmsg.errors import DiscoveryError, DmsgError
from dmsg.keys import PubKey, SecKey
from dmsg.net.deadlines import no_answer
from dmsg.net.reactor import cancel_call
from dmsg.net.retry import retry_delay

REFRESH_INTERVAL = 30.0
"""Seconds between two POSTs of an unchanged entry. After a POST, discovery lists the server for longer than this."""
CHANGE_DELAY = 2.0
"""Seconds from a change of the number of free connections to the POST, so that several changes need only one POST."""

_log = Logger()


class Registration:
    """Publisher of a server's entry, which posts it at intervals and when the number of free connections has changed.

    :param discovery: URLs of discoveries, or a client of them; if empty, the server is not registered.
    :param mark: function that returns the ``version`` of an entry with the server's features added to it.
    :param available: function that returns how many more clients can connect.
    :ivar address: ``host:port`` at which clients reach the server.
    :ivar shared_with: address of another server that posts an entry of the same key, or None.
    :ivar registered_at: time of the last accepted POST, in seconds of the reactor's clock.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        key: SecKey,
        discovery: Sequence[str] | Lookups,
        random: Random,
        *,
        mark: Callable[[str], str],
        available: Callable[[], int],
    ) -> None:
        self._key_conflict = KeyConflict(reactor.seconds)
        self._reactor = reactor
        self._key = key
        self._random = random
        self._mark = mark
        self._available = available
        if isinstance(discovery, Lookups):
            self._lookups: Lookups | None = discovery
        else:
            self._lookups = Lookups([Lookup(reactor, url) for url in discovery]) if discovery else None
        self._running = False
        self._posted: int | None = None
        self._has_posted = False
        """Whether a discovery may have an entry that this server posted."""
        self._failures = 0
        self._call: IDelayedCall | None = None
        self._registering: Deferred[None] | None = None
        self.address: str | None = None
        self.shared_with: str | None = None
        self.registered_at: float | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether there is a discovery in which the server is to be registered."""
        return self._lookups is not None

    @property
    def is_busy(self) -> bool:
        """Whether a POST is under way."""
        return self._registering is not None

    @property
    def is_registered(self) -> bool:
        """Whether discovery accepted the last POST."""
        return self._failures == 0 and self._posted is not None

    def start(self) -> None:
        """Post the entry now, and start to post it again at intervals."""
        self._running = True
        self._post_soon(0)

    def stop(self) -> None:
        """Stop posting."""
        self._running = False
        cancel_call(self._call)

    def changed(self) -> None:
        """Schedule a POST if the number of free connections has changed."""
        if self._available() != self._posted:
            self._post_soon(CHANGE_DELAY)

    async def other_servers(self) -> list[PubKey]:
        """Return the keys of other servers in discovery, to which clients can move; an empty list if discovery does not
        answer.
        """
        if self._lookups is None:
            return []
        try:
            entries = await self._lookups.available_servers().addTimeout(STOP_TIMEOUT, self._reactor, no_answer)
        except (DmsgError, TimeoutError):
            return []
        return [entry.key for entry in entries if entry.key != self._key.public]

    async def withdraw(self) -> None:
        """Withdraw the entry from discovery, if discovery answers in time."""
        if self._lookups is None or not self._has_posted:
            return
        await withdraw_in_time(self._lookups, self._reactor, self._key, "server", features(self._mark("")))

    async def close(self) -> None:
        """Close the connections to discovery."""
        if self._lookups is not None:
            await self._lookups.close()

    def _post_soon(self, delay: float) -> None:
        if not self._running or self._lookups is None or self.address is None:
            return
        call = self._call
        if call is not None and call.active():
            # After a failure the next attempt is already planned, with a growing delay. A change must not make it
            # earlier, because the servers would flood a failing discovery.
            if self._failures or call.getTime() <= self._reactor.seconds() + delay:
                return
            call.cancel()
        self._call = self._reactor.callLater(delay, self._register)

    def _register(self) -> None:
        assert self._lookups is not None
        # There is only one POST at a time. Discovery would refuse the second of two concurrent POSTs for its sequence.
        if self._registering is not None:
            return
        available = self._available()
        other: str | None = None

        def make(entry: Entry) -> Entry:
            nonlocal other
            assert self.address is not None
            # At the first POST, a different address in the present entry is ignored, because it may be this server's
            # address in an earlier run.
            there = entry.server
            other = there.address if there is not None and self._posted is not None else None
            return replace(entry, version=self._mark(entry.version), server=ServerMeta(self.address, available))

        def done(result: Failure | None) -> None:
            self._registering = None
            if not self._running:
                return
            if isinstance(result, Failure):
                self._failures += 1
                if result.check(DiscoveryError) is None:
                    _log.failure("unhandled error while the entry was posted to discovery", result)
                elif self._failures == 1:
                    # This log line must not contain "registered in discovery", because programs wait for these words in
                    # the log.
                    _log.warn("the server cannot register in discovery yet; retrying: {error}", error=str(result.value))
                self._post_soon(retry_delay(self._failures, self._random))
                return
            if self._failures or self._posted is None:
                _log.info("this server is registered in discovery as {address}", address=self.address)
            self._failures = 0
            self._posted = available
            self.registered_at = self._reactor.seconds()
            if other not in (None, self.address):
                self.shared_with = other
                given_up = self._key_conflict.note_replaced()
                _log.warn(
                    "another server, at {other}, posts the entry of this key: clients are sent to one or the other; "
                    "give one of them a key of its own",
                    other=other,
                )
                if given_up:
                    self._post_soon(CONFLICT_TIME)
                    return
            else:
                self.shared_with = None
            # The number of free connections may have changed while the POST was under way.
            self._post_soon(CHANGE_DELAY if self._available() != available else REFRESH_INTERVAL)

        self._has_posted = True
        self._registering = self._lookups.update(self._key, make)
        self._registering.addBoth(done)


def address_of(port: IListeningPort) -> str:
    """Return ``host:port`` of a listening port.

    :raises DmsgError: the port listens on all interfaces.
    """
    host = port.getHost()
    if isinstance(host, IPv4Address) and host.host != "0.0.0.0":  # noqa: S104
        return f"{host.host}:{host.port}"
    if isinstance(host, IPv6Address) and host.host != "::":
        return f"[{host.host}]:{host.port}"
    raise DmsgError("no public address is known: say with --public-address HOST:PORT where clients reach this server")
