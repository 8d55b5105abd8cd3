"""Limits on the load that discovery puts on other machines because of the addresses that strangers write into entries.

Whoever posts an entry chooses the address in it. So connections to that address and resolutions of its host name are
counted, both by target and by poster. A check that exceeds a limit is postponed. A postponed check is not a failed one.
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

from dmsg.base.bounded_tables import remember
from dmsg.net.addresses import Address, block_of, is_public, parse_ip
from dmsg.net.blocks import BlockCounts, blocks_of
from dmsg.net.own_pauses import add_fair_timeout

PORTS, PORTS_PER_BLOCK = 16, 4
"""Maximum number of ports of one address that are checked per period (:class:`Allowance`): for all posters together,
and for the posters in one address block. The posters in a wider block together may use half of the first number. These
limits prevent port scans through discovery.
"""
PROOFS, PROOFS_PER_BLOCK = 32, 8
"""Two limits on the checks of servers at one address per period. ``PROOFS`` is for all posters together, and
``PROOFS_PER_BLOCK`` for the posters in one address block. The posters in a wider block together may use half of
``PROOFS``.

Each wider block that contains the checked address has a limit, too: ``PROOFS``, multiplied by the factor of the block
(:func:`~dmsg.net.blocks.blocks_of`).
"""
OWN_CHECKS = 16
"""Maximum number of checks of one address per period that do not count towards ``PROOFS``. They are checks of servers
that were posted from the block of the checked address.
"""
MAX_PER_HOST = 32
"""Maximum number of servers listed at one public address. For a wider address block, the number is multiplied by the
factor of the block.
"""
RESOLVING, RESOLVING_PER_BLOCK = 8, 2
"""Maximum number of concurrent resolutions of host names: for all posters together, and for the posters in one address
block. The posters in a wider block together may use half of the first number. The number is small because each
resolution occupies a thread until it ends.
"""
NAME_TIMEOUT = 3.0
"""Seconds to wait for the resolution of a host name."""
MAX_REMEMBERED = 10_000
"""Maximum number of addresses whose checks are counted, and of host names whose last working addresses are stored."""


class CheckPostponed(Exception):
    """Error: the server could not be checked now and will be checked later; the text says why."""


@define
class _Window:
    since: float
    own_checks: int = 0
    total: int = 0
    every: set[int] = Factory(set)
    checks: Counter[str] = Factory(Counter)
    ports: dict[str, set[int]] = Factory(dict)


class Allowance:
    """Counter of the checks of each target address in the present period.

    :param seconds: length of a period.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._windows: OrderedDict[str, _Window] = OrderedDict()

    def take(self, number: str, port: int, place: str, *, is_known: bool, now: float) -> None:
        """Count one check of an address, or refuse it if a limit is reached.

        :param place: address block of the poster.
        :param is_known: whether the server has proved its key at this address before.
        :raises CheckPostponed: the address has had as many checks in this period as the limits allow.
        """
        if is_known:  # Known servers need no limit here, because MAX_PER_HOST already limits their number.
            return
        windows = [(self._window(name, now), factor) for name, factor in blocks_of(number)]
        window, _ = windows[0]
        if place == block_of(number) and window.own_checks < OWN_CHECKS:
            window.own_checks += 1
            return
        places = blocks_of(place)
        of_block = [
            (PROOFS_PER_BLOCK, PORTS_PER_BLOCK) if one.factor == 1 else (PROOFS // 2, PORTS // 2) for one in places
        ]
        if any(one.total >= PROOFS * factor for one, factor in windows) or (
            port not in window.every and len(window.every) >= PORTS
        ):
            raise CheckPostponed("too many servers claim the address of this server")
        for (name, _), (looks, ports) in zip(places, of_block, strict=True):
            asked = window.ports.get(name, set())
            if window.checks[name] >= looks or (port not in asked and len(asked) >= ports):
                raise CheckPostponed("too many servers claim the address of this server")
        window.every.add(port)
        for name, _ in places:
            window.ports.setdefault(name, set()).add(port)
            window.checks[name] += 1
        for one, _ in windows:
            one.total += 1

    def _window(self, name: str, now: float) -> _Window:
        window = self._windows.get(name)
        if window is None or now - window.since >= self._seconds:
            window = _Window(now)
        remember(self._windows, name, window, MAX_REMEMBERED)
        return window


class NameResolver:
    """Resolver of servers' host names. The number of concurrent resolutions is limited, because other parts of the
    program need threads of Twisted's resolver, too.
    """

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._resolving = BlockCounts()
        self._running = 0
        self._good: OrderedDict[str, list[Address]] = OrderedDict()

    def remember_addresses(self, host: str, addresses: list[Address]) -> None:
        """Store the addresses of a name at which a server was found; :meth:`resolve` returns them if a resolution is
        not possible.
        """
        remember(self._good, host, addresses, MAX_REMEMBERED)

    async def resolve(self, host: str, place: str) -> list[Address]:
        """Resolve a name; return an empty list if the name does not exist.

        If too many resolutions are under way, or this one takes too long, return the addresses at which the server was
        found before.

        :raises CheckPostponed: the name cannot be resolved now, and no earlier addresses are stored.
        """
        if self._running >= RESOLVING or self._resolving.crowded_block(place, RESOLVING_PER_BLOCK, RESOLVING // 2):
            known = self._good.get(host)
            if known is None:
                raise CheckPostponed("too many host names are being resolved")
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
                """Do nothing at the start of a resolution; the addresses follow."""

            def addressResolved(self, address: IAddress) -> None:
                if isinstance(address, IPv4Address | IPv6Address):
                    found.append(address.host)

            def resolutionComplete(self) -> None:
                # The resolution counts as ended only now, because it has occupied its thread until now. The caller may
                # have stopped waiting earlier.
                over()
                if not done.called:
                    done.callback(None)

        try:
            cast(IReactorPluggableNameResolver, self._reactor).nameResolver.resolveHostName(Receiver(), host)
        except Exception:
            over()
            return []
        try:
            await add_fair_timeout(done, NAME_TIMEOUT, self._reactor)
        except Exception:
            known = self._good.get(host)
            if known is None:
                raise CheckPostponed("the server's host name takes too long to resolve") from None
            return known
        return [number for one in found if (number := parse_ip(one)) is not None]


class ProvedHosts:
    """Counter of the servers that have proved their keys at each public address. Their number per address is limited:
    discovery sends clients there, so an attacker with many keys could direct many clients to a victim's address.
    """

    def __init__(self, seconds: float) -> None:
        """Start empty.

        :param seconds: time after which a server without a new proof is forgotten.
        """
        self._seconds = seconds
        self._at: OrderedDict[str, dict[str, float]] = OrderedDict()

    def has_room(self, number: str, static: str, now: float) -> bool:
        """Return whether a server may be listed at this address, and count the server if it may.

        A server may be listed if it is already counted at this address, or if the address has not reached its limit.
        """
        if not is_public(number):
            return True
        blocks = blocks_of(number)
        room = True
        for name, factor in blocks:
            there = {one: at for one, at in self._at.get(name, {}).items() if now - at < self._seconds}
            remember(self._at, name, there, MAX_REMEMBERED)
            room = room and (static in there or len(there) < MAX_PER_HOST * factor)
        if room:
            for name, _ in blocks:
                self._at[name][static] = now
        return room
