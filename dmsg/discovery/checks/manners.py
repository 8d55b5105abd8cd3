"""How much discovery does to others because of what strangers write into entries.

Whoever posts an entry names an address: connections to it, and questions for its
name, are counted by address and by who posted.  What cannot be done now is
postponed, which says nothing of the server.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import cast

from attrs import Factory, define
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import (
    IAddress,
    IHostResolution,
    IReactorPluggableNameResolver,
    IReactorTime,
    IResolutionReceiver,
)
from zope.interface import implementer

from dmsg.base.tables import remember
from dmsg.net.addresses import Address, block_of, is_public, literal
from dmsg.net.blocks import BlockCounts, blocks_of

PORTS, PORTS_OF_PLACE = 16, 4
"""Ports of one address that are looked at in a window, in all, and for who posts from one place: nobody has discovery
look for open ones.  For who posts from the blocks around a place: half of all."""
PROOFS, PROOFS_OF_PLACE = 32, 8
"""Looks at one address in a window, in all, and for who posts from one place, with blocks around each as there; at
servers in the blocks around an address as many times as much as the factor of the block."""
OWN_LOOKS = 16
"""Looks in a window at servers that are posted from that very address."""
OF_HOST = 32
"""Servers that may be listed at one public address; in the blocks around it as many times as many as their factor."""
RESOLVING, RESOLVING_OF_PLACE = 8, 2
"""Names that are resolved at a time, in all, and for who posts from one place (from a block around it: half of all):
each keeps a thread until it is over."""
NAME_TIMEOUT = 3.0
"""Seconds for a name."""
MAX_REMEMBERED = 10_000
"""Addresses, and names that led to servers."""


class Postponed(Exception):
    """Nothing is known of the server: it is looked at later.  The text says why."""


@define
class _Window:
    since: float
    own: int = 0
    total: int = 0
    every: set[int] = Factory(set)
    looks: Counter[str] = Factory(Counter)
    ports: dict[str, set[int]] = Factory(dict)


class Allowance:
    """Looks at addresses.

    :param seconds: of a window.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._windows: OrderedDict[str, _Window] = OrderedDict()

    def take(self, number: str, port: int, place: str, *, known: bool, now: float) -> None:
        """One look more.

        :param place: who posted the entry.
        :param known: the server has proved its key there before.
        :raises Postponed: in this window there were enough.
        """
        if known:  # of these there are few at one address: OF_HOST
            return
        windows = [(self._window(name, now), factor) for name, factor in blocks_of(number)]
        window, _ = windows[0]
        if place == block_of(number) and window.own < OWN_LOOKS:
            window.own += 1
            return
        places = blocks_of(place)
        of_place = [
            (PROOFS_OF_PLACE, PORTS_OF_PLACE) if one.factor == 1 else (PROOFS // 2, PORTS // 2) for one in places
        ]
        if any(one.total >= PROOFS * factor for one, factor in windows) or (
            port not in window.every and len(window.every) >= PORTS
        ):
            raise Postponed("too many servers claim its address")
        for (name, _), (looks, ports) in zip(places, of_place, strict=True):
            asked = window.ports.get(name, set())
            if window.looks[name] >= looks or (port not in asked and len(asked) >= ports):
                raise Postponed("too many servers claim its address")
        window.every.add(port)
        for name, _ in places:
            window.ports.setdefault(name, set()).add(port)
            window.looks[name] += 1
        for one, _ in windows:
            one.total += 1

    def _window(self, name: str, now: float) -> _Window:
        window = self._windows.get(name)
        if window is None or now - window.since >= self._seconds:
            window = _Window(now)
        remember(self._windows, name, window, MAX_REMEMBERED)
        return window


class Names:
    """Names of servers, as few at a time as do not keep the resolver's threads from others."""

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._resolving = BlockCounts()
        self._running = 0
        self._good: OrderedDict[str, list[Address]] = OrderedDict()

    def led_to_a_server(self, host: str, addresses: list[Address]) -> None:
        """While there is no room its server is looked for there."""
        remember(self._good, host, addresses, MAX_REMEMBERED)

    async def resolve(self, host: str, place: str) -> list[Address]:
        """The addresses of a name; none: there is no such name.

        :raises Postponed: there is no room for another, or it takes long.
        """
        if self._running >= RESOLVING or self._resolving.crowded(place, RESOLVING_OF_PLACE, RESOLVING // 2):
            known = self._good.get(host)
            if known is None:
                raise Postponed("too many host names are being resolved")
            return known
        found: list[str] = []
        done: Deferred[None] = Deferred()
        self._resolving.add(place)
        self._running += 1

        def over() -> None:
            self._resolving.remove(place)
            self._running -= 1

        @implementer(IResolutionReceiver)
        class Receiver:
            def resolutionBegan(self, resolution: IHostResolution) -> None:
                """The addresses follow."""

            def addressResolved(self, address: IAddress) -> None:
                if isinstance(address, IPv4Address | IPv6Address):
                    found.append(address.host)

            def resolutionComplete(self) -> None:
                over()  # also of one that nobody waits for any more: its thread was busy until now
                if not done.called:
                    done.callback(None)

        try:
            cast(IReactorPluggableNameResolver, self._reactor).nameResolver.resolveHostName(Receiver(), host)
        except Exception:
            over()
            return []
        try:
            await done.addTimeout(NAME_TIMEOUT, self._reactor)
        except Exception:
            known = self._good.get(host)
            if known is None:
                raise Postponed("its host name takes too long to resolve") from None
            return known
        return [number for one in found if (number := literal(one)) is not None]


class Hosts:
    """How many servers have proved their keys at one public address: clients are all sent there."""

    def __init__(self, seconds: float) -> None:
        """:param seconds: after which a server that proved nothing again is forgotten."""
        self._seconds = seconds
        self._at: OrderedDict[str, dict[str, float]] = OrderedDict()

    def has_room(self, number: str, static: str, now: float) -> bool:
        """Whether a server that has proved its key there is not one too many; it is counted then."""
        if not is_public(number):
            return True
        blocks = blocks_of(number)
        room = True
        for name, factor in blocks:
            there = {one: at for one, at in self._at.get(name, {}).items() if now - at < self._seconds}
            remember(self._at, name, there, MAX_REMEMBERED)
            room = room and (static in there or len(there) < OF_HOST * factor)
        if room:
            for name, _ in blocks:
                self._at[name][static] = now
        return room
