"""Whether servers are there: discovery connects to them before it lists them, and from time to time.

What is connected to is what strangers write into entries, so: few at a time; an
address is resolved once and then connected to as a number; each once in a while,
however many entries name it.  What is not public is looked at only for who
posted from the same kind of network (:func:`may_look`), or anybody could ask
this machine what is beside it.

A server has to prove its key (:mod:`dmsg.discovery.proof`) when it comes, and
once an hour.  Programs of 2019 post their entry once: between proofs a TCP
connection says whether they are still there.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore
from twisted.internet.error import ConnectError
from twisted.internet.interfaces import IResolutionReceiver
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.discovery import proof
from dmsg.discovery.entry import Entry, Form, decode
from dmsg.discovery.proof import OPENINGS, Opening, Openings, openings_of
from dmsg.discovery.store.base import NEVER, Due
from dmsg.errors import DmsgError, EntryError, HandshakeError
from dmsg.net.addresses import Address, kind_of, literal, parse_address
from dmsg.net.again import Again

LOOK_EVERY = 5.0
"""Seconds between rounds."""
SOON = 0.05
"""Seconds after which a server is looked at whose entry came just now."""
AT_ONCE = 64
"""Connections at a time."""
IN_ROUND = 256
"""Servers that are looked at, or wait for it, at a time."""
LOST_AFTER = 120.0
"""Seconds after which a server is looked at again whose look never ended: the process did."""
PORTS = 4
"""Ports of one address that are looked at in the time between two looks: nobody has discovery look for open ones."""
PROOFS = 32
"""Proofs that one address is asked for in that time."""
PROVED_FOR = 3600.0
"""Seconds for which a proof is good."""
UNLISTED_AFTER = 3
"""Looks in a row after which a server is not listed any more that was not there."""
TRIES = 6
"""Looks in a row after which a quiet server is not looked at any more before its entry is posted again."""
LOOK_TIMEOUT = 3.0
"""Seconds for resolving a name."""
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
        reactor: Any,
        store: Any,
        now: Callable[[], float],
        ttl: float,
        *,
        lasts: float = 0.0,
        openings: Openings = OPENINGS,
        anywhere: bool = False,
        reach: Callable[[str, int, Opening | None], Any] | None = None,
    ) -> None:
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
        self._pending: dict[_Target, list[Deferred[str]]] = {}
        self._addresses: OrderedDict[str, tuple[float, set[int], int]] = OrderedDict()
        self._semaphore = DeferredSemaphore(AT_ONCE)
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
        room = IN_ROUND - len(self._under_way)
        if room > 0:
            now = self._now()
            try:
                due = await self._store.due(room, now, now + LOST_AFTER)
            except Exception as error:  # the store is away; who asks discovery something has it logged
                _log.info("servers are not looked at: {error}", error=str(error))
                due = []
            for one in due:
                self._begin(one)
        return LOOK_EVERY

    def _begin(self, due: Due) -> None:
        def over(result: Any) -> None:
            self._under_way.discard(look)
            if isinstance(result, Failure) and not self._stopped:
                _log.info("looking at a server failed: {error}", error=str(result.value))

        look = Deferred.fromCoroutine(self._look_at(due))
        self._under_way.add(look)
        look.addBoth(over)

    async def _look_at(self, due: Due) -> None:
        try:
            entry, _ = decode(due.json, Form.SEED)
        except EntryError:
            return
        if entry.server is None:
            return
        why = await self._why_not(entry, due.place, due.refreshes)
        now = self._now()
        if not why:
            if self._failures.pop(entry.static, 0) >= UNLISTED_AFTER:
                _log.info("server {key} is there again", key=entry.static)
            next_look = now + (PROVED_FOR if due.refreshes else self._ttl / LOOKS_IN_TTL)
            await self._store.seen(entry.static, now, next_look, self._lasts)
            return
        failures = self._failures.pop(entry.static, 0) + 1
        if failures == 1:
            _log.info("server {key} is not there: {why}", key=entry.static, why=why)
        _remember(self._failures, entry.static, failures)
        listed = failures < UNLISTED_AFTER
        if failures >= TRIES and not due.refreshes:
            self._failures.pop(entry.static, None)
            await self._store.seen(entry.static, None, NEVER, listed=False)
            return
        longest = LONGEST_REFRESHING if due.refreshes else LONGEST
        delay = min(longest, self._ttl / LOOKS_IN_TTL * 2 ** min(failures - 1, 20))
        await self._store.seen(entry.static, None, now + delay, listed=listed)

    async def _why_not(self, entry: Entry, place: str, refreshes: bool) -> str:
        """Why a server is not there; empty: it is."""
        assert entry.server is not None
        found = _read(entry.server.address)
        if found is None:
            return "its address cannot be read"
        number, host, port = found
        kinds = _kinds(place, self._anywhere)
        # what is connected to is the number, never a text that somebody wrote
        candidates = [number] if number is not None else await self._resolve(host)
        numbers = [str(one) for one in candidates if kind_of(one) in kinds]
        if not numbers:
            return "its address is not one that is looked at for who posted it" if candidates else "no such host"
        why = ""
        for one in numbers[:2]:
            why = await self._ask(one, port, entry, refreshes)
            if not why:
                break
        return why

    async def _ask(self, number: str, port: int, entry: Entry, refreshes: bool) -> str:
        """By a proof, if one is due, or by a connection."""
        target = number, port, entry.static
        now = self._reactor.seconds()
        if not refreshes and now - self._proved.get(target, -PROVED_FOR) < PROVED_FOR:
            return await self._once((number, port, ""), lambda: self._try(number, port, None))
        why = await self._once(target, lambda: self._prove(number, port, entry))
        if not why:
            _remember(self._proved, target, now)
        return why

    async def _once(self, target: _Target, ask: Callable[[], Coroutine[Any, Any, str]]) -> str:
        """As an earlier look, or one under way, found it, or by a new one."""
        number, port, _ = target
        now = self._reactor.seconds()
        for known in (target, (number, port, "")):
            at, why = self._results.get(known, (-self._ttl, ""))
            # that somebody is there does not say that it is who is looked for
            if now - at < self._ttl / LOOKS_IN_TTL and (known == target or why):
                return why
        waiting = self._pending.get(target)
        if waiting is not None:
            shared: Deferred[str] = Deferred()
            waiting.append(shared)
            return await shared
        if not self._allows(number, port, now):
            return "too many servers are said to be at its address"
        self._pending[target] = []
        why = "it was not asked"
        try:
            await self._semaphore.acquire()
            try:
                why = await ask()
            finally:
                self._semaphore.release()
        finally:
            for shared in self._pending.pop(target):
                shared.callback(why)
        _remember(self._results, target, (now, why))
        return why

    def _allows(self, number: str, port: int, now: float) -> bool:
        since, ports, looks = self._addresses.pop(number, (now, set(), 0))
        if now - since >= self._ttl / LOOKS_IN_TTL:
            since, ports, looks = now, set(), 0
        allowed = looks < PROOFS and (port in ports or len(ports) < PORTS)
        if allowed:
            ports.add(port)
            looks += 1
        _remember(self._addresses, number, (since, ports, looks))
        return allowed

    async def _prove(self, number: str, port: int, entry: Entry) -> str:
        why = "nothing is known that it might speak"
        for opening in openings_of(entry, self._openings):
            why = await self._try(number, port, opening(entry.key))
            if not why or (number, port, "") in self._results:
                break
        return why

    async def _try(self, number: str, port: int, opening: Opening | None) -> str:
        self.looked += 1
        self._results.pop((number, port, ""), None)
        try:
            await self._reach(number, port, opening)
        except CancelledError:
            if self._stopped:
                raise
            return "no answer"
        except HandshakeError as error:
            return f"{number}:{port} does not prove its key: {error}"
        except Exception as error:  # whatever a connection can die of: it is not there
            _log.debug("{host}:{port} is not there: {error!r}", host=number, port=port, error=error)
            why = f"{number}:{port}: {str(error) or type(error).__name__}"
            if isinstance(error, ConnectError):
                _remember(self._results, (number, port, ""), (self._reactor.seconds(), why))
            return why
        return ""

    async def _resolve(self, host: str) -> list[Address]:
        found: list[str] = []
        done: Deferred[None] = Deferred()

        @implementer(IResolutionReceiver)
        class Receiver:
            def resolutionBegan(self, resolution: Any) -> None:
                """The addresses follow."""

            def addressResolved(self, address: Any) -> None:
                if isinstance(address, IPv4Address | IPv6Address):
                    found.append(address.host)

            def resolutionComplete(self) -> None:
                if not done.called:
                    done.callback(None)

        try:
            self._reactor.nameResolver.resolveHostName(Receiver(), host)
            await done.addTimeout(LOOK_TIMEOUT, self._reactor)
        except Exception:
            return []
        return [number for one in found if (number := literal(one)) is not None]


def _remember(known: OrderedDict[Any, Any], name: Any, value: Any) -> None:
    """As the newest of at most ``MAX_REMEMBERED``."""
    known.pop(name, None)
    known[name] = value
    if len(known) > MAX_REMEMBERED:
        known.popitem(last=False)
