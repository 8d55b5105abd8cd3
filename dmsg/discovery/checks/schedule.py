"""Reachability checks: discovery connects to servers before it lists them, and periodically afterwards.

Strangers choose the addresses that discovery connects to by writing them into entries. So few checks run at a time. A
name is resolved once, and discovery connects only to the resulting IP address. The result of a check is reused for all
entries with the same address. Addresses that are not public are checked only for posters in the same kind of network
(:func:`may_check`). Otherwise anybody could use discovery to scan the private network in which it runs.

A server has to prove its key (:mod:`dmsg.discovery.checks.proof`) when it is posted, and once an hour. Servers of 2019
post their entry only once, so discovery also connects to them between proofs to see whether they still run.

The number of concurrent checks is limited. A server that accepts a connection but never answers occupies one of these
slots for seconds, so an attacker with many such servers could occupy all slots. Three rules prevent this: listed
servers have slots of their own; address blocks take turns; posters of silent servers wait in a queue of their own.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from twisted.internet.defer import CancelledError, Deferred, TimeoutError, gatherResults, maybeDeferred
from twisted.internet.error import ConnectError, TimeoutError as ConnectTimeout
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.bounded_tables import remember
from dmsg.base.buckets import RateLimit
from dmsg.discovery.checks import proof
from dmsg.discovery.checks.limits import Allowance, CheckPostponed, NameResolver, ProvedHosts
from dmsg.discovery.checks.proof import OPENINGS, Opening, Openings, openings_of
from dmsg.discovery.entries.dialects import decode
from dmsg.discovery.entries.entry import Entry, features
from dmsg.discovery.entries.rules import NEVER
from dmsg.discovery.store.base import DueServer, IEntryStore
from dmsg.errors import DmsgError, EntryError, HandshakeError
from dmsg.net.addresses import Address, block_of, kind_of, parse_address, parse_ip
from dmsg.net.blocks import blocks_of
from dmsg.net.carriers.names import PLAIN, Carrier, carriers_of
from dmsg.net.fair_queue import FairQueue, QueueCrowded
from dmsg.net.own_pauses import add_fair_timeout
from dmsg.net.retry_loop import RetryLoop

CHECK_INTERVAL = 5.0
"""Seconds between two rounds of checks."""
FIRST_CHECK_DELAY = 0.05
"""Seconds after the POST of a server's entry until the server is checked."""
MAX_OTHER_CHECKS, MAX_OWN_CHECKS = 32, 32
"""Maximum numbers of concurrent checks. ``MAX_OWN_CHECKS`` is the maximum for listed servers, and also for servers that
were posted from their own address block; ``MAX_OTHER_CHECKS`` is the maximum for all other servers.
"""
MAX_SILENT_CHECKS = 16
"""Maximum number of concurrent checks of servers from address blocks that have posted too many silent servers."""
CHECKS_PER_BLOCK, CHECKS_PER_WIDER_BLOCK = 8, 16
"""Maximum number of concurrent checks in each queue for one poster's address block, and for the wider block around
it."""
WAITING, WAITING_PER_BLOCK = 1024, 32
"""Maximum number of servers that wait in each queue: in all, and for one poster's address block. The checks of further
servers are postponed.
"""
CHECK_TIMEOUT, SHORT_TIMEOUT = 8.0, 1.5
"""Seconds that a server has to answer. The second, shorter time applies to unlisted servers while others wait for a
slot.
"""
SILENT_BURST, SILENT_RATE = 4.0, 1 / 60
"""Token bucket of a poster's address block: capacity, and tokens that return per second. Each silent server that the
block posts takes a token. While no token is left, the servers of the block wait in the queue for posters of silent
servers.
"""
NO_ANSWER = "no answer"
"""Beginning of the text that says why a check failed, if the server did not answer."""
MAX_UNDER_WAY = 4096
"""Maximum number of servers that are being checked or wait for a check at the same time."""
CHECKS_PER_TURN = 32
"""Maximum number of checks that begin in one reactor turn. The start of each takes about a millisecond, and a longer
turn would delay requests.
"""
POSTPONED_FOR = 20.0
"""Seconds after which a postponed check is tried again; more if many checks are postponed."""
POSTPONED_RATE = 300.0
"""Maximum number of postponed checks that are tried again per second."""
LOST_AFTER = 120.0
"""Seconds after which a check without a result is repeated, because the process that made it has probably ended."""
PROVED_FOR = 3600.0
"""Seconds for which a proof of a server's key is valid."""
UNLISTED_AFTER = 3
"""Number of consecutive failed checks after which a server is no longer listed."""
MAX_FAILED_CHECKS = 6
"""Number of consecutive failed checks after which a quiet server is not checked again before its next POST. A server is
quiet if it does not post its entry regularly.
"""
CHECKS_PER_TTL = 3
"""Number of checks of a quiet server within the time for which one successful check keeps it listed. So one or two
failed checks do no harm.
"""
MAX_INTERVAL = 3600.0
"""Longest interval in seconds between checks of an unreachable server that does not post its entry regularly."""
MAX_INTERVAL_REFRESHED = 300.0
"""Longest interval in seconds between checks of an unreachable server that posts its entry regularly."""
MAX_REMEMBERED = 10_000
"""Maximum number of rows in each table of earlier checks: results, proofs, and consecutive failures."""

_log = Logger()


def may_check(address: str, poster: str, anywhere: bool = False) -> bool:
    """Whether to check a server at ``address`` whose entry was posted from ``poster``.

    The answer is True for every valid host name, because only the resolved address shows in which network it is.

    :param poster: an address, or a block of addresses.
    :param anywhere: whether to check private addresses no matter who posted them.
    """
    found = _read(address)
    if found is None:
        return False
    target, _, _ = found
    return target is None or kind_of(target) in _kinds(poster, anywhere)


def _kinds(poster: str, anywhere: bool) -> frozenset[str]:
    """Return the kinds of networks in which servers of this poster are checked."""
    source = parse_ip(poster.partition("/")[0])
    kind = "public" if source is None else kind_of(source)
    kinds = {"public"} if kind == "none" else {"public", kind}
    return frozenset(kinds | {"private", "loopback"}) if anywhere else frozenset(kinds)


def _read(address: str) -> tuple[Address | None, str, int] | None:
    """Parse an entry's address into IP address (None for a name), host and port.

    :returns: None if the address cannot be checked.
    """
    try:
        host, port = parse_address(address)
    except DmsgError:
        return None
    # Addresses with a zone are not checked, because a zone has a meaning only on the server's machine.
    return None if "%" in host else (parse_ip(host), host, port)


class _CheckedAddress(NamedTuple):
    """Target of a check.

    :ivar number: IP address.
    :ivar place: address block of the poster.
    :ivar listed: whether the server is listed.
    :ivar carrier: carrier protocol at the port, as the entry says.
    :ivar name: host of the server's address.
    """

    number: str
    port: int
    place: str
    listed: bool
    carrier: Carrier
    name: str


_Target = tuple[str, int, str]
"""IP address, port, and the key to be proved. The key is empty for a check that only connects."""


class ServerChecks:
    """Service that checks the servers in a store periodically.

    :param store: provides :class:`~dmsg.discovery.store.base.IEntryStore`.
    :param now: clock, in seconds since 1970.
    :param ttl: seconds for which a quiet server is listed after its last successful check.
    :param lasts: seconds for which the store keeps the entry of a quiet server after a successful check.
    :param openings: handshakes by which servers can prove their keys.
    :param anywhere: whether to check private addresses no matter who posted them.
    :param checked_at: addresses at which certain servers are checked, in place of those in their entries, by the
        server's key in hexadecimal.
    :param reach: function that connects to a server; its arguments are those of
        :func:`dmsg.discovery.checks.proof.reach` after the reactor.
    :ivar attempts: number of connections attempted.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        store: IEntryStore,
        now: Callable[[], float],
        ttl: float,
        *,
        lasts: float = 0.0,
        openings: Openings = OPENINGS,
        anywhere: bool = False,
        checked_at: Mapping[str, str] = MappingProxyType({}),
        reach: Callable[[str, int, Opening | None, Carrier, str], Awaitable[object]] | None = None,
        random: Random | None = None,
    ) -> None:
        self._random = random or Random()
        self._reactor = reactor
        self._store = store
        self._now = now
        self._ttl = ttl
        self._lasts = lasts
        self._openings = openings
        self._anywhere = anywhere
        self._checked_at = checked_at
        self._reach = reach or partial(proof.reach, reactor)
        self._check_loop = RetryLoop(reactor, self._round, lambda failures: CHECK_INTERVAL, "checking servers")
        self._under_way: dict[Deferred[None], None] = {}
        self._stopped = True
        self._failures: OrderedDict[str, int] = OrderedDict()
        self._results: OrderedDict[_Target, tuple[float, str]] = OrderedDict()
        self._proved: OrderedDict[_Target, float] = OrderedDict()
        self._pending: dict[_Target, list[Deferred[str | None]]] = {}
        self._allowance = Allowance(ttl / CHECKS_PER_TTL)
        self._names = NameResolver(reactor)
        self._hosts = ProvedHosts(2 * PROVED_FOR)
        self._listed, self._own_block, self._other_blocks, self._silent = (
            FairQueue(most, CHECKS_PER_BLOCK, CHECKS_PER_WIDER_BLOCK, WAITING, WAITING_PER_BLOCK)
            for most in (MAX_OWN_CHECKS, MAX_OWN_CHECKS, MAX_OTHER_CHECKS, MAX_SILENT_CHECKS)
        )
        self._silences = RateLimit(SILENT_RATE, SILENT_BURST, blocks_of)
        self._postponed: deque[float] = deque()
        self.attempts = 0

    def start(self) -> None:
        """Start checking."""
        self._stopped = False
        self._check_loop.start()
        self._check_loop.soon(CHECK_INTERVAL)

    def soon(self) -> None:
        """Schedule a round of checks within ``FIRST_CHECK_DELAY`` seconds, because a server was posted."""
        self._check_loop.soon(FIRST_CHECK_DELAY)

    async def stop(self) -> None:
        """Stop checking, and cancel the checks under way."""
        self._stopped = True
        self._check_loop.stop()
        for look in list(self._under_way):
            look.cancel()

    async def _round(self) -> float:
        room = min(CHECKS_PER_TURN, MAX_UNDER_WAY - len(self._under_way))
        due: list[DueServer] = []
        if room > 0:
            now = self._now()
            try:
                due = await self._store.due(room, now, now + LOST_AFTER)
            except Exception as error:
                # Each HTTP request that fails because of the store is logged as an error, so a line of level info is
                # enough here.
                _log.info("no servers are checked, because the store cannot be read: {error}", error=str(error))
            for one in due:
                self._begin(one)
        return FIRST_CHECK_DELAY if len(due) == CHECKS_PER_TURN else CHECK_INTERVAL

    def _begin(self, due_server: DueServer) -> None:
        def over(result: object) -> None:
            self._under_way.pop(look, None)
            if isinstance(result, Failure) and not self._stopped:
                _log.info("the check of a server could not be finished: {error}", error=str(result.value))

        look = Deferred.fromCoroutine(self._check_server(due_server))
        self._under_way[look] = None
        look.addBoth(over)

    async def _check_server(self, due_server: DueServer) -> None:
        try:
            entry = decode(due_server.json)
        except EntryError:
            return
        if entry.server is None:
            return
        address = entry.server.address
        try:
            why = await self._reason_against(entry, due_server.place, due_server.refreshes, due_server.listed)
        except CheckPostponed:
            await self._store.record_check(entry.static, address, None, self._now() + self._postponement_delay())
            return
        now = self._now()
        if not why:
            if self._failures.pop(entry.static, 0) >= UNLISTED_AFTER:
                _log.info("server {key} is reachable again", key=entry.static)
            next_look = now + (PROVED_FOR if due_server.refreshes else self._ttl / CHECKS_PER_TTL)
            await self._store.record_check(entry.static, address, now, next_look, self._lasts)
            return
        failures = self._failures.pop(entry.static, 0) + 1
        if failures == 1:
            _log.info("server {key} is not reachable: {why}", key=entry.static, why=why)
        remember(self._failures, entry.static, failures, MAX_REMEMBERED)
        listed = failures < UNLISTED_AFTER
        if failures >= MAX_FAILED_CHECKS and not due_server.refreshes:
            self._failures.pop(entry.static, None)
            await self._store.record_check(entry.static, address, None, NEVER, listed=False)
            return
        longest = MAX_INTERVAL_REFRESHED if due_server.refreshes else MAX_INTERVAL
        delay = min(longest, self._ttl / CHECKS_PER_TTL * 2 ** min(failures - 1, 20))
        await self._store.record_check(entry.static, address, None, now + delay, listed=listed)

    def _postponement_delay(self) -> float:
        """Return the seconds after which a postponed check is tried again.

        A check may be postponed many times. The delay grows with the number of postponed checks, because their requests
        to the store would otherwise delay the checks of listed servers.
        """
        now = self._reactor.seconds()
        while self._postponed and self._postponed[0] <= now:
            self._postponed.popleft()
        seconds = max(POSTPONED_FOR, len(self._postponed) / POSTPONED_RATE)
        # The random factor spreads checks that were postponed together. If all were tried again at once, they would
        # delay the checks of new servers.
        seconds *= self._random.uniform(0.5, 1.5)
        self._postponed.append(now + seconds)
        return seconds

    async def _reason_against(self, entry: Entry, place: str, refreshes: bool, listed: bool = False) -> str:
        """Check a server. Return an empty string if the check succeeds, otherwise the reason why it failed.

        :raises CheckPostponed: the server cannot be checked now.
        """
        assert entry.server is not None
        override = self._checked_at.get(entry.static)
        found = _read(override or entry.server.address)
        if found is None:
            return "its address is malformed"
        number, host, port = found
        # An override may be any address, because the operator has chosen it. The server still has to prove its key
        # there.
        kinds = _kinds(place, self._anywhere or override is not None)
        # The connection is made to the IP address that was examined here, never to the stranger's host name. A second
        # resolution of the name could return another address.
        candidates = [number] if number is not None else await self._names.resolve(host, place)
        numbers = [one for one in candidates if kind_of(one) in kinds]
        if not numbers:
            return "its address is in a network from which its entry was not posted" if candidates else "no such host"
        carrier = PLAIN if override else carriers_of(features(entry.version), port)[0]
        why = ""
        for one in numbers[:2]:
            why = await self._ask(_CheckedAddress(str(one), port, place, listed, carrier, host), entry, refreshes)
            if not why:
                if number is None:
                    self._names.remember_addresses(host, [one])
                break
        return why

    async def _ask(self, checked: _CheckedAddress, entry: Entry, refreshes: bool) -> str:
        """Check a server by a proof of its key if a proof is due, otherwise only by connecting."""
        target = checked.number, checked.port, entry.static
        now = self._reactor.seconds()
        proved = self._proved.get(target)
        known = proved is not None or checked.listed
        if not refreshes and proved is not None and now - proved < PROVED_FOR:
            return await self._check_once(
                (checked.number, checked.port, ""), checked, known, lambda: self._connect(checked, None)
            )
        why = await self._check_once(target, checked, known, lambda: self._prove(checked, entry))
        if not why and not self._hosts.has_room(checked.number, entry.static, now):
            return "its address already has the maximum number of servers"
        if not why:
            remember(self._proved, target, now, MAX_REMEMBERED)
        return why

    async def _check_once(
        self, target: _Target, checked: _CheckedAddress, known: bool, ask: Callable[[], Awaitable[str]]
    ) -> str:
        """Return the result of a check of ``target``: a recent one, one under way, or a new one.

        :param known: whether the server has proved its key at the target before.
        :param ask: function that makes a new check.
        """
        now = self._reactor.seconds()
        anybody = checked.number, checked.port, ""
        for one in (target, anybody):
            at, why = self._results.get(one, (-self._ttl, ""))
            # A failure to connect applies to all servers at this address. A successful connection proves nothing about
            # another server's key, so a success is reused only for the same target.
            if now - at < self._ttl / CHECKS_PER_TTL and (one == target or why):
                return why
        waiting = self._pending.get(target)
        if waiting is not None:
            shared: Deferred[str | None] = Deferred()
            waiting.append(shared)
            said = await shared
            if said is None:
                raise CheckPostponed("another check of the server ended without a result")
            return said
        self._allowance.take(checked.number, checked.port, checked.place, is_known=known, now=now)
        self._pending[target] = []
        found: str | None = None
        try:
            found = await self._in_turn(checked, ask)
        finally:
            for shared in self._pending.pop(target):
                shared.callback(found)
        remember(self._results, target, (now, found), MAX_REMEMBERED)
        return found

    def _queue(self, checked: _CheckedAddress) -> FairQueue:
        """Return the queue in which a server waits for its check."""
        if checked.listed:
            return self._listed
        if self._silences.is_exhausted(checked.place, self._reactor.seconds()):
            return self._silent
        return self._own_block if block_of(checked.number) == checked.place else self._other_blocks

    async def _in_turn(self, checked: _CheckedAddress, ask: Callable[[], Awaitable[str]]) -> str:
        """Wait for a slot, and run a check. If the server stays silent, count it against its poster."""
        queue = self._queue(checked)
        try:
            await queue.acquire(checked.place)
        except QueueCrowded:
            raise CheckPostponed("too many servers are waiting for their check") from None
        try:
            why = await ask()
            if why.startswith(NO_ANSWER):
                self._silences.charge(checked.place, 1.0, self._reactor.seconds())
            return why
        finally:
            queue.release(checked.place)

    def _is_short(self, checked: _CheckedAddress) -> bool:
        """Whether this server gets less time to answer, because it is unlisted and other servers wait for its slot."""
        return not checked.listed and self._queue(checked).is_scarce

    async def _prove(self, checked: _CheckedAddress, entry: Entry) -> str:
        openings = openings_of(entry, self._openings)
        # While other servers wait for a slot, all kinds of handshake that suit the entry are tried at the same time.
        # Otherwise a silent server would occupy its slot for one timeout per kind.
        if len(openings) > 1 and self._is_short(checked):
            tries = [Deferred.fromCoroutine(self._connect(checked, opening(entry.key))) for opening in openings]
            found = await gatherResults(tries, consumeErrors=True)
            return "" if "" in found else found[0]
        why = "its entry names no protocol that can be checked"
        for opening in openings:
            why = await self._connect(checked, opening(entry.key))
            if not why or (checked.number, checked.port, "") in self._results:
                break
        return why

    async def _connect(self, checked: _CheckedAddress, opening: Opening | None) -> str:
        number, port = checked.number, checked.port
        self.attempts += 1
        self._results.pop((number, port, ""), None)
        try:
            reaching: Deferred[object] = maybeDeferred(
                self._reach, number, port, opening, checked.carrier, checked.name
            )
            seconds = SHORT_TIMEOUT if self._is_short(checked) else CHECK_TIMEOUT
            await add_fair_timeout(reaching, seconds, self._reactor)
        except CancelledError:
            if self._stopped:
                raise
            return NO_ANSWER
        except HandshakeError as error:
            return f"{number}:{port} does not prove its key: {error}"
        # Any exception here means that the server is unreachable, and connecting raises exceptions of many types.
        except Exception as error:
            _log.debug("no connection to {host}:{port} for a check: {error!r}", host=number, port=port, error=error)
            why = f"{number}:{port}: {str(error) or type(error).__name__}"
            if isinstance(error, TimeoutError | ConnectTimeout):
                why = f"{NO_ANSWER} from {number}:{port}"
            if isinstance(error, ConnectError):
                remember(self._results, (number, port, ""), (self._reactor.seconds(), why), MAX_REMEMBERED)
            return why
        return ""
