"""Whether servers are there that do not say so again: a TCP connection from time to time.

Programs of 2019 post their entry once.  They stay on the list as long as they
can be reached.  What is connected to is what strangers write into entries, so:
few at a time; an address is resolved once and then connected to as a number;
each once in a while, however many entries name it; nothing is sent.  What is
not public is looked at only for who posted from the same kind of network
(:func:`may_look`), or anybody could ask this machine what is beside it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import CancelledError, Deferred, DeferredList, DeferredSemaphore
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP6ClientEndpoint
from twisted.internet.interfaces import IDelayedCall, IResolutionReceiver
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.discovery.entry import Form, decode
from dmsg.errors import DmsgError, EntryError
from dmsg.net.addresses import Address, kind_of, literal, parse_address

LOOK_EVERY = 5.0
"""Seconds between rounds."""
AT_ONCE = 16
"""Connections at a time."""
IN_ROUND = 64
"""Servers that are looked at in one round."""
PORTS = 4
"""Ports of one address that are looked at in the time between two looks: nobody has discovery look for open ones."""
TRIES = 6
"""Looks in a row after which a server that was not there is not looked at before its entry is posted again."""
LOOK_TIMEOUT = 3.0
"""Seconds for a connection."""
NEVER = 1e18
"""Seconds since 1970."""
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*\.?")
LOOKS_IN_TTL = 3
"""How often a server is looked at in the time after which it is no longer listed."""
LONGEST = 3600.0
"""Seconds between looks at one that is never there, at most."""
MAX_REMEMBERED = 10_000
"""Results, and failures in a row, that are remembered."""

_log = Logger()


def may_look(address: str, poster: str) -> bool:
    """Whether a server at ``address`` is looked at whose entry was posted from ``poster``; a name is decided later."""
    found = _read(address)
    if found is None:
        return False
    target, _, _ = found
    if target is None:
        return True
    kind = kind_of(target)
    source = literal(poster)
    return kind == "public" or (kind != "none" and source is not None and kind_of(source) == kind)


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


class Looks:
    """Looks at the quiet servers of a store.

    :param store: provides :class:`~dmsg.discovery.store.IEntryStore`.
    :param now: seconds since 1970.
    :param ttl: seconds after which a server is not listed that was not seen.
    :param reach: connects to (host, port); fires when it could, and fails when not.
    """

    def __init__(
        self,
        reactor: Any,
        store: Any,
        now: Callable[[], float],
        ttl: float,
        *,
        reach: Callable[[str, int], Deferred[Any]] | None = None,
    ) -> None:
        self._reactor = reactor
        self._store = store
        self._now = now
        self._ttl = ttl
        self._reach = reach or self._connect
        self._call: IDelayedCall | None = None
        self._running: Deferred[Any] | None = None
        self._stopped = True
        self._failures: OrderedDict[str, int] = OrderedDict()
        self._results: OrderedDict[tuple[str, int], tuple[float, bool]] = OrderedDict()
        self._pending: dict[tuple[str, int], list[Deferred[bool]]] = {}
        self._ports: OrderedDict[str, tuple[float, set[int]]] = OrderedDict()
        self._semaphore = DeferredSemaphore(AT_ONCE)
        self.looked = 0
        """Connections that were tried."""

    def start(self) -> None:
        """Look from now on."""
        self._stopped = False
        self._soon()

    async def stop(self) -> None:
        """Look no more."""
        self._stopped = True
        if self._call is not None and self._call.active():
            self._call.cancel()
        if self._running is not None:
            self._running.cancel()

    def _soon(self) -> None:
        if not self._stopped:
            self._call = self._reactor.callLater(LOOK_EVERY, self._round)

    def _round(self) -> None:
        def over(result: Any) -> None:
            self._running = None
            if isinstance(result, Failure) and not self._stopped:
                _log.info("looking at servers failed: {error}", error=str(result.value))
            self._soon()

        self._running = Deferred.fromCoroutine(self.look())
        self._running.addBoth(over)

    async def look(self) -> None:
        """One round."""
        now = self._now()
        due = await self._store.due(IN_ROUND, now, now + LOOK_TIMEOUT + LOOK_EVERY)
        await DeferredList([Deferred.fromCoroutine(self._look_at(body)) for body in due], consumeErrors=True)

    async def _look_at(self, body: bytes) -> None:
        try:
            entry, _ = decode(body, Form.SEED)
        except EntryError:
            return
        if entry.server is None:
            return
        there = await self._is_there(entry.server.address)
        now = self._now()
        if there:
            self._failures.pop(entry.static, None)
            await self._store.seen(entry.static, now, now + self._ttl / LOOKS_IN_TTL)
            return
        failures = self._failures.pop(entry.static, 0) + 1
        self._failures[entry.static] = failures
        if len(self._failures) > MAX_REMEMBERED:
            self._failures.popitem(last=False)
        if failures >= TRIES:
            self._failures.pop(entry.static, None)
            await self._store.seen(entry.static, None, NEVER)
            return
        delay = min(LONGEST, self._ttl / LOOKS_IN_TTL * 2 ** min(failures - 1, 20))
        await self._store.seen(entry.static, None, now + delay)

    async def _is_there(self, address: str) -> bool:
        found = _read(address)
        if found is None:
            return False
        number, host, port = found
        # what is connected to is the number, never a text that somebody wrote
        numbers = [str(number)] if number is not None else await self._resolve(host)
        for one in numbers[:2]:
            if await self._answers(one, port):
                return True
        return False

    async def _answers(self, number: str, port: int) -> bool:
        """As an earlier look, or one under way, found it, or by a connection."""
        target = number, port
        now = self._reactor.seconds()
        at, there = self._results.get(target, (-self._ttl, False))
        if now - at < self._ttl / LOOKS_IN_TTL:
            return there
        waiting = self._pending.get(target)
        if waiting is not None:
            shared: Deferred[bool] = Deferred()
            waiting.append(shared)
            return await shared
        if not self._allows(number, port, now):
            return False
        self._pending[target] = []
        there = False
        try:
            await self._semaphore.acquire()
            try:
                self.looked += 1
                there = await self._try(number, port)
            finally:
                self._semaphore.release()
        finally:
            for shared in self._pending.pop(target):
                shared.callback(there)
        self._results.pop(target, None)
        self._results[target] = now, there
        if len(self._results) > MAX_REMEMBERED:
            self._results.popitem(last=False)
        return there

    def _allows(self, number: str, port: int, now: float) -> bool:
        since, ports = self._ports.pop(number, (now, set()))
        if now - since >= self._ttl / LOOKS_IN_TTL:
            since, ports = now, set()
        allowed = port in ports or len(ports) < PORTS
        if allowed:
            ports.add(port)
        self._ports[number] = since, ports
        if len(self._ports) > MAX_REMEMBERED:
            self._ports.popitem(last=False)
        return allowed

    async def _try(self, host: str, port: int) -> bool:
        try:
            await self._reach(host, port)
        except CancelledError:
            if self._stopped:
                raise
            return False
        except Exception as error:  # whatever a connection can die of: it is not there
            _log.debug("{host}:{port} is not there: {error!r}", host=host, port=port, error=error)
            return False
        return True

    async def _connect(self, host: str, port: int) -> None:
        kind = TCP6ClientEndpoint if ":" in host else TCP4ClientEndpoint
        connecting = kind(self._reactor, host, port, timeout=LOOK_TIMEOUT).connect(_QUIET)
        protocol: Any = await connecting
        protocol.transport.abortConnection()

    async def _resolve(self, host: str) -> list[str]:
        """The public addresses of a name; all others belong to somebody who did not post it."""
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
        addresses = [(one, literal(one)) for one in found]
        return [str(number) for _, number in addresses if number is not None and kind_of(number) == "public"]


_QUIET = Factory.forProtocol(Protocol)
_QUIET.noisy = False
