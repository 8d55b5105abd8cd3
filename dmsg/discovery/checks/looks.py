"""Whether servers are there: discovery connects to them before it lists them, and from time to time.

What is connected to is what strangers write into entries, so: few at a time; an
address is resolved once and then connected to as a number; each once in a while,
however many entries name it.  What is not public is looked at only for who
posted from the same kind of network (:func:`may_look`), or anybody could ask
this machine what is beside it.

A server has to prove its key (:mod:`dmsg.discovery.checks.proof`) when it comes, and
once an hour.  Programs of 2019 post their entry once: between proofs a TCP
connection says whether they are still there.

A server that takes connections and says nothing keeps a place for seconds, and
who has many such servers would keep all of them.  So servers that are listed
have places of their own, blocks of addresses have turns, and whoever posted
silent ones waits with the others who did.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import NamedTuple

from twisted.internet.defer import CancelledError, Deferred, TimeoutError, gatherResults, maybeDeferred
from twisted.internet.error import ConnectError, TimeoutError as ConnectTimeout
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.buckets import RateLimit
from dmsg.base.tables import remember
from dmsg.discovery.checks import proof
from dmsg.discovery.checks.manners import Allowance, Hosts, Names, Postponed
from dmsg.discovery.checks.proof import OPENINGS, Opening, Openings, openings_of
from dmsg.discovery.entries.dialects import decode
from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.entries.rules import NEVER
from dmsg.discovery.store.base import Due, IEntryStore
from dmsg.errors import DmsgError, EntryError, HandshakeError
from dmsg.net.addresses import Address, block_of, kind_of, literal, parse_address
from dmsg.net.again import Again
from dmsg.net.blocks import blocks_of
from dmsg.net.fair_queue import Crowded, FairQueue

LOOK_EVERY = 5.0
"""Seconds between rounds."""
SOON = 0.05
"""Seconds after which a server is looked at whose entry came just now."""
AT_ONCE, AT_ONCE_OWN = 32, 32
"""Servers that are looked at at a time; and of those that are listed, and of those posted from where they are, each."""
AT_ONCE_SILENT = 16
"""Servers that are looked at at a time for blocks of addresses that have posted too many silent ones."""
AT_ONCE_OF_PLACE, AT_ONCE_OF_WIDE = 8, 16
"""Of each kind, for entries that are posted from one place, and from a block of addresses around it."""
WAITING, WAITING_OF_PLACE = 1024, 32
"""Servers of each kind that wait for their turn; of these, for one place.  Others are postponed."""
PATIENCE, SHORT_PATIENCE = 8.0, 1.5
"""Seconds that a server has to answer; and when others wait, unless it is listed."""
SILENT_BURST, SILENT_RATE = 4.0, 1 / 60
"""Silent servers that a place may post before it waits with others who did; and how many are forgotten in a second."""
NO_ANSWER = "no answer"
"""What is said of a server that is silent begins so."""
IN_ROUND = 4096
"""Servers that are looked at, or wait for it, at a time; the kinds have fewer."""
IN_SLICE = 32
"""Servers whose looks begin in one turn of the reactor: a millisecond each."""
POSTPONED_FOR = 20.0
"""Seconds after which a server is looked at again for which there was no room; longer when there are many such."""
POSTPONED_RATE = 300.0
"""Servers a second, at most, that are looked for again because they were postponed."""
LOST_AFTER = 120.0
"""Seconds after which a server is looked at again whose look never ended: the process did."""
PROVED_FOR = 3600.0
"""Seconds for which a proof is good."""
UNLISTED_AFTER = 3
"""Looks in a row after which a server is not listed any more that was not there."""
TRIES = 6
"""Looks in a row after which a quiet server is not looked at any more before its entry is posted again."""
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*\.?")
LOOKS_IN_TTL = 3
"""How often a quiet server is looked at in the time after which it is no longer listed."""
LONGEST = 3600.0
"""Seconds between looks at a quiet one that is never there, at most."""
LONGEST_REFRESHING = 300.0
"""Seconds between looks at one that is never there and posts again and again, at most."""
MAX_REMEMBERED = 10_000
"""Results, and failures in a row, that are remembered."""

_log = Logger()


def may_look(address: str, poster: str, anywhere: bool = False) -> bool:
    """Whether a server at ``address`` is looked at whose entry was posted from ``poster``; a name is decided later.

    :param poster: an address, or a block of them.
    :param anywhere: what is private, too, whoever posted it.
    """
    found = _read(address)
    if found is None:
        return False
    target, _, _ = found
    return target is None or kind_of(target) in _kinds(poster, anywhere)


def _kinds(poster: str, anywhere: bool) -> frozenset[str]:
    """Of networks in which what somebody posts is looked at."""
    source = literal(poster.partition("/")[0])
    kind = "public" if source is None else kind_of(source)
    kinds = {"public"} if kind == "none" else {"public", kind}
    return frozenset(kinds | {"private", "loopback"}) if anywhere else frozenset(kinds)


def _read(address: str) -> tuple[Address | None, str, int] | None:
    """The number that an entry's address is (None for a name), its host and port; None: nothing to look at."""
    try:
        host, port = parse_address(address)
    except DmsgError:
        return None
    number = literal(host)
    if "%" in host or (number is None and not _NAME.fullmatch(host)):
        return None
    return number, host, port


class _Way(NamedTuple):
    """An address as a number, a port, who has posted it, and whether it is listed."""

    number: str
    port: int
    place: str
    listed: bool


_Target = tuple[str, int, str]
"""An address as a number, a port, and the key whose proof is asked for; empty: whoever is there."""


class Looks:
    """Looks at the servers of a store.

    :param store: provides :class:`~dmsg.discovery.store.IEntryStore`.
    :param now: seconds since 1970.
    :param ttl: seconds after which a quiet server is not listed that was not seen.
    :param lasts: seconds for which a quiet one that was there is kept.
    :param openings: how servers are asked for a proof.
    :param anywhere: private addresses are looked at, too, whoever posted them.
    :param reach: connects to a host and a port, with an opening or none; fires when what is there is right, and fails
        when not.
    :ivar looked: connections that were tried.
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
        reach: Callable[[str, int, Opening | None], Awaitable[object]] | None = None,
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
        self._reach = reach or partial(proof.reach, reactor)
        self._again = Again(reactor, self._round, lambda failures: LOOK_EVERY, "looking at servers")
        self._under_way: set[Deferred[None]] = set()
        self._stopped = True
        self._failures: OrderedDict[str, int] = OrderedDict()
        self._results: OrderedDict[_Target, tuple[float, str]] = OrderedDict()
        self._proved: OrderedDict[_Target, float] = OrderedDict()
        self._pending: dict[_Target, list[Deferred[str | None]]] = {}
        self._allowance = Allowance(ttl / LOOKS_IN_TTL)
        self._names = Names(reactor)
        self._hosts = Hosts(2 * PROVED_FOR)
        self._listed, self._own, self._others, self._silent = (
            FairQueue(most, AT_ONCE_OF_PLACE, AT_ONCE_OF_WIDE, WAITING, WAITING_OF_PLACE)
            for most in (AT_ONCE_OWN, AT_ONCE_OWN, AT_ONCE, AT_ONCE_SILENT)
        )
        self._silences = RateLimit(SILENT_RATE, SILENT_BURST, blocks_of)
        self._postponed: deque[float] = deque()
        self.looked = 0

    def start(self) -> None:
        """Look from now on."""
        self._stopped = False
        self._again.start()
        self._again.soon(LOOK_EVERY)

    def soon(self) -> None:
        """A server has come: look at it."""
        self._again.soon(SOON)

    async def stop(self) -> None:
        """Look no more."""
        self._stopped = True
        self._again.stop()
        for look in list(self._under_way):
            look.cancel()

    async def _round(self) -> float:
        room = min(IN_SLICE, IN_ROUND - len(self._under_way))
        due: list[Due] = []
        if room > 0:
            now = self._now()
            try:
                due = await self._store.due(room, now, now + LOST_AFTER)
            except Exception as error:  # the store is away; who asks discovery something has it logged
                _log.info("servers are not checked: {error}", error=str(error))
            for one in due:
                self._begin(one)
        return SOON if len(due) == IN_SLICE else LOOK_EVERY

    def _begin(self, due: Due) -> None:
        def over(result: object) -> None:
            self._under_way.discard(look)
            if isinstance(result, Failure) and not self._stopped:
                _log.info("checking a server failed: {error}", error=str(result.value))

        look = Deferred.fromCoroutine(self._look_at(due))
        self._under_way.add(look)
        look.addBoth(over)

    async def _look_at(self, due: Due) -> None:
        try:
            entry = decode(due.json)
        except EntryError:
            return
        if entry.server is None:
            return
        address = entry.server.address
        try:
            why = await self._why_not(entry, due.place, due.refreshes, due.listed)
        except Postponed:
            await self._store.seen(entry.static, address, None, self._now() + self._postpone())
            return
        now = self._now()
        if not why:
            if self._failures.pop(entry.static, 0) >= UNLISTED_AFTER:
                _log.info("server {key} is reachable again", key=entry.static)
            next_look = now + (PROVED_FOR if due.refreshes else self._ttl / LOOKS_IN_TTL)
            await self._store.seen(entry.static, address, now, next_look, self._lasts)
            return
        failures = self._failures.pop(entry.static, 0) + 1
        if failures == 1:
            _log.info("server {key} is not reachable: {why}", key=entry.static, why=why)
        remember(self._failures, entry.static, failures, MAX_REMEMBERED)
        listed = failures < UNLISTED_AFTER
        if failures >= TRIES and not due.refreshes:
            self._failures.pop(entry.static, None)
            await self._store.seen(entry.static, address, None, NEVER, listed=False)
            return
        longest = LONGEST_REFRESHING if due.refreshes else LONGEST
        delay = min(longest, self._ttl / LOOKS_IN_TTL * 2 ** min(failures - 1, 20))
        await self._store.seen(entry.static, address, None, now + delay, listed=listed)

    def _postpone(self) -> float:
        """Seconds after which a server is looked at for which there is no room.

        What is postponed comes again and again, and must not take the time of the store from what is listed.
        """
        now = self._reactor.seconds()
        while self._postponed and self._postponed[0] <= now:
            self._postponed.popleft()
        seconds = max(POSTPONED_FOR, len(self._postponed) / POSTPONED_RATE)
        # by chance: those that came together would come back together, and keep a newcomer waiting
        seconds *= self._random.uniform(0.5, 1.5)
        self._postponed.append(now + seconds)
        return seconds

    async def _why_not(self, entry: Entry, place: str, refreshes: bool, listed: bool = False) -> str:
        """Why a server is not there; empty: it is.

        :raises Postponed: it cannot be looked at now.
        """
        assert entry.server is not None
        found = _read(entry.server.address)
        if found is None:
            return "its address cannot be read"
        number, host, port = found
        kinds = _kinds(place, self._anywhere)
        # what is connected to is the number, never a text that somebody wrote
        candidates = [number] if number is not None else await self._names.resolve(host, place)
        numbers = [one for one in candidates if kind_of(one) in kinds]
        if not numbers:
            return "its address is not one that is looked at for who posted it" if candidates else "no such host"
        why = ""
        for one in numbers[:2]:
            why = await self._ask(_Way(str(one), port, place, listed), entry, refreshes)
            if not why:
                if number is None:
                    self._names.led_to_a_server(host, [one])
                break
        return why

    async def _ask(self, way: _Way, entry: Entry, refreshes: bool) -> str:
        """By a proof, if one is due, or by a connection."""
        target = way.number, way.port, entry.static
        now = self._reactor.seconds()
        proved = self._proved.get(target)
        known = proved is not None or way.listed
        if not refreshes and proved is not None and now - proved < PROVED_FOR:
            return await self._once((way.number, way.port, ""), way, known, lambda: self._try(way, None))
        why = await self._once(target, way, known, lambda: self._prove(way, entry))
        if not why and not self._hosts.has_room(way.number, entry.static, now):
            return "there are as many servers at its address as may be"
        if not why:
            remember(self._proved, target, now, MAX_REMEMBERED)
        return why

    async def _once(self, target: _Target, way: _Way, known: bool, ask: Callable[[], Awaitable[str]]) -> str:
        """As an earlier look, or one under way, found it, or by a new one.

        :param known: it has proved its key there before.
        """
        now = self._reactor.seconds()
        anybody = way.number, way.port, ""
        for one in (target, anybody):
            at, why = self._results.get(one, (-self._ttl, ""))
            # that somebody is there does not say that it is who is looked for
            if now - at < self._ttl / LOOKS_IN_TTL and (one == target or why):
                return why
        waiting = self._pending.get(target)
        if waiting is not None:
            shared: Deferred[str | None] = Deferred()
            waiting.append(shared)
            said = await shared
            if said is None:
                raise Postponed("another check of it ended without a result")
            return said
        self._allowance.take(way.number, way.port, way.place, known=known, now=now)
        self._pending[target] = []
        found: str | None = None
        try:
            found = await self._in_turn(way, ask)
        finally:
            for shared in self._pending.pop(target):
                shared.callback(found)
        remember(self._results, target, (now, found), MAX_REMEMBERED)
        return found

    def _queue(self, way: _Way) -> FairQueue:
        """Where a server waits for its turn."""
        if way.listed:
            return self._listed
        if self._silences.owes(way.place, self._reactor.seconds()):
            return self._silent
        return self._own if block_of(way.number) == way.place else self._others

    async def _in_turn(self, way: _Way, ask: Callable[[], Awaitable[str]]) -> str:
        """Few at a time; of who posts from one place, and from the blocks around it, fewer."""
        queue = self._queue(way)
        try:
            await queue.acquire(way.place)
        except Crowded:
            raise Postponed("too many servers are waiting for their check") from None
        try:
            why = await ask()
            if why.startswith(NO_ANSWER):
                self._silences.charge(way.place, 1.0, self._reactor.seconds())
            return why
        finally:
            queue.release(way.place)

    def _is_short(self, way: _Way) -> bool:
        """Whether others wait for the place that a server has, which nobody has met yet."""
        return not way.listed and self._queue(way).is_scarce

    async def _prove(self, way: _Way, entry: Entry) -> str:
        openings = openings_of(entry, self._openings)
        if len(openings) > 1 and self._is_short(way):  # one after the other a silent server has its time for each
            tries = [Deferred.fromCoroutine(self._try(way, opening(entry.key))) for opening in openings]
            found = await gatherResults(tries, consumeErrors=True)
            return "" if "" in found else found[0]
        why = "nothing is known that it might speak"
        for opening in openings:
            why = await self._try(way, opening(entry.key))
            if not why or (way.number, way.port, "") in self._results:
                break
        return why

    async def _try(self, way: _Way, opening: Opening | None) -> str:
        number, port = way.number, way.port
        self.looked += 1
        self._results.pop((number, port, ""), None)
        try:
            reaching: Deferred[object] = maybeDeferred(self._reach, number, port, opening)
            await reaching.addTimeout(SHORT_PATIENCE if self._is_short(way) else PATIENCE, self._reactor)
        except CancelledError:
            if self._stopped:
                raise
            return NO_ANSWER
        except HandshakeError as error:
            return f"{number}:{port} does not prove its key: {error}"
        except Exception as error:  # whatever a connection can die of: it is not there
            _log.debug("{host}:{port} is not there: {error!r}", host=number, port=port, error=error)
            why = f"{number}:{port}: {str(error) or type(error).__name__}"
            if isinstance(error, TimeoutError | ConnectTimeout):
                why = f"{NO_ANSWER} from {number}:{port}"
            if isinstance(error, ConnectError):
                remember(self._results, (number, port, ""), (self._reactor.seconds(), why), MAX_REMEMBERED)
            return why
        return ""
