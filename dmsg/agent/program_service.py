"""Service of a program at a port of the agent's key: the peers that may connect, their streams, and the limits."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol as Interface

from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory

from dmsg.agent.bridge import Bridge, SharedWindow
from dmsg.agent.wire import ALLOW_LIMIT, OFFERS_SIZE, Answer, WireError
from dmsg.base.eviction import Seniority
from dmsg.base.printable import printable
from dmsg.errors import CloseReason
from dmsg.keys import PubKey
from dmsg.net.own_pauses import FairTimeout
from dmsg.net.reactor import Reactor
from dmsg.net.streams.address import DmsgAddress
from dmsg.v2019.client import Client

MAX_PROGRAMS = 4096
"""Maximum number of connections from programs; fewer if the agent may open fewer files.  Each stream of a program has a
connection of its own.
"""
MAX_STREAMS_PER_SERVICE = 1024
"""Maximum number of streams of one service, including those that its program has not accepted yet.  Above it, a peer
that has many streams loses one to a peer that has few; otherwise further streams are refused.
"""
PROTECTED_DIVISOR = 64
"""Divisor of ``MAX_STREAMS_PER_SERVICE``.  The quotient is the number of streams that a peer never loses to another
peer.
"""
ACCEPT_TIMEOUT = 10.0
"""Seconds that a program may take to accept a stream that a peer has opened."""
STATUS_ALLOW = 8
"""Maximum number of allowed keys that ``status`` lists for a service.  The number of all allowed keys is reported,
too.
"""
STREAM_NUMBERS_START, STREAM_NUMBERS_END = 10**15, 2**53
"""Range of the numbers of streams that programs accept.  The agent draws each number at random, so that a program
cannot guess the number of a stream that was offered to another program.  All numbers have 16 digits, and languages
whose numbers are doubles can represent all of them exactly.
"""


class ServingAgent(Interface):
    """Interface of the agent, as the connections of programs use it."""

    client: Client
    bridges: dict[Bridge, None]
    shared: SharedWindow
    services: dict[int, Service]
    untaken: dict[int, Bridge]
    seniority: Seniority[PubKey]

    @property
    def max_programs(self) -> int:
        """Maximum number of connections from programs."""

    @property
    def is_full(self) -> bool:
        """Whether the agent has reached its limit of connections from programs.  It then accepts only the requests in
        ``ALWAYS_ACCEPTED_REQUESTS``.
        """

    def hello(self) -> Answer:
        """Return the answer to ``hello``: the agent's key and process id, and other facts about it."""

    def status(self) -> Answer:
        """Return the answer to ``status``."""

    def down(self) -> None:
        """Stop the agent, in a later reactor turn."""


class ServingProgram(Interface):
    """Interface of a program's connection, over which a ``Service`` offers streams to the program."""

    reactor: Reactor
    program: str
    pid: int

    def say(self, content: Mapping[str, object]) -> None:
        """Send a line of JSON to the program."""


@dataclass(frozen=True)
class ServiceOffer:
    """Description of a service, as its program sends it.

    :ivar anyone: whether every peer may connect; None if the program does not say.
    :ivar keys: keys of all peers that may connect; None if the program has not sent all of them.
    :ivar allowed: number of peers that may connect, if ``anyone`` is False; otherwise 0.
    :ivar allowed_sample: some of the keys of these peers, in hexadecimal, for ``status``.
    :ivar offers: text about what the service offers to peers.
    """

    anyone: bool | None = None
    keys: frozenset[PubKey] | None = None
    allowed: int = 0
    allowed_sample: tuple[str, ...] = ()
    offers: str = ""


def parse_service_offer(request: dict[str, object]) -> ServiceOffer:
    """Return the description of a service in a program's request.

    :raises WireError: the description is malformed.
    """
    anyone, allow, allowed = request.get("anyone"), request.get("allow", []), request.get("allowed", 0)
    text = printable(str(request.get("offers", "")))[:OFFERS_SIZE]
    if anyone not in (None, True, False) or not isinstance(allow, list) or len(allow) > ALLOW_LIMIT:
        raise WireError("the list of allowed peers is malformed")
    if anyone is not False:
        return ServiceOffer(anyone, offers=text)
    keys = frozenset(PubKey.from_hex(str(one)) for one in allow)
    if type(allowed) is not int or allowed < len(keys):
        raise WireError("the list of allowed peers is malformed")
    some = tuple(sorted(map(str, keys))[:STATUS_ALLOW])
    return ServiceOffer(False, keys if len(keys) == allowed else None, allowed, some, text)


class Service(Factory):
    """Factory that accepts the streams of peers at one port of the agent's key, for one program.

    :ivar is_congested: whether the program does not read the lines that offer streams.  Further streams are refused,
        so that these lines do not fill the agent's memory.
    :ivar open: streams that the program has accepted and that have not ended.
    :ivar waiting: streams that the program has not accepted yet, by number, each with the timeout that refuses it.
    """

    noisy = False

    def __init__(
        self, agent: ServingAgent, connection: ServingProgram, port: int, offer: ServiceOffer | None = None
    ) -> None:
        self.offer = offer or ServiceOffer()
        self._agent = agent
        self._connection = connection
        self.port = port
        self.program, self.pid = connection.program, connection.pid
        self.since = time.time()
        self.stream_count = 0
        self.refused = 0
        self.is_congested = False
        self.open: dict[Bridge, None] = {}
        self.waiting: dict[int, tuple[Bridge, FairTimeout]] = {}

    def admits(self, addr: IAddress) -> bool:
        """Whether a peer may connect, according to the keys that the program has sent.

        If the program has not sent all keys, every peer may connect here, and the program itself refuses peers.
        """
        return self.offer.keys is None or (isinstance(addr, DmsgAddress) and addr.public_key in self.offer.keys)

    def buildProtocol(self, addr: IAddress | None) -> Bridge | None:
        assert isinstance(addr, DmsgAddress)
        if not self.admits(addr):
            self.refused += 1
            return None
        if self._agent.is_full or self.is_congested or not self._ensure_room(addr.public_key):
            self.refused += 1
            return None
        bridge = Bridge(self._connection.reactor, self._agent.shared, incoming=True)
        number = STREAM_NUMBERS_START + secrets.randbelow(STREAM_NUMBERS_END - STREAM_NUMBERS_START)
        late = FairTimeout(self._connection.reactor, ACCEPT_TIMEOUT, partial(self._on_timeout, number))
        self.waiting[number] = bridge, late
        self._agent.untaken[number] = bridge
        self._connection.say({"stream": number, "peer": str(addr.public_key), "peer_port": addr.port})
        return bridge

    @property
    def open_count(self) -> int:
        """Number of streams that have not ended, including those that wait for the program."""
        return len(self.open) + len(self.waiting)

    @property
    def bridges(self) -> list[Bridge]:
        """Streams that have not ended: the accepted ones in the order of acceptance, and then those that wait for the
        program, oldest first.
        """
        return [*self.open, *(bridge for bridge, _ in self.waiting.values())]

    def _ensure_room(self, peer: PubKey) -> bool:
        """Return whether a peer may open a stream.  At a limit, end a stream of another peer to make room, if
        possible.

        All services together may have half as many streams as the agent accepts connections from programs.  So peers
        cannot use up the connections that programs need for their own requests.
        """
        services = list(self._agent.services.values())
        return (self.open_count < MAX_STREAMS_PER_SERVICE or self._make_room([self], peer)) and (
            sum(one.open_count for one in services) < self._agent.max_programs // 2 or self._make_room(services, peer)
        )

    def _make_room(self, services: list[Service], newcomer: PubKey) -> bool:
        """End the newest stream of a peer, to make room for a stream of a newcomer.

        :returns: whether a stream was ended.  :meth:`Seniority.pick_loser` says which peer loses a
            stream, if any.
        """
        streams = [(service, bridge) for service in services for bridge in service.bridges]
        counts = Counter(bridge.peer.public_key for _, bridge in streams)
        protected = MAX_STREAMS_PER_SERVICE // PROTECTED_DIVISOR
        loser = self._agent.seniority.pick_loser(counts, newcomer, protected)
        if loser is None:
            return False
        # If several streams began at the same time, max returns the first of them, which has to be the newest.
        of_loser = [one for one in reversed(streams) if one[1].peer.public_key == loser]
        service, bridge = max(of_loser, key=lambda one: one[1].since)
        service.evict(bridge)
        return True

    def evict(self, bridge: Bridge) -> None:
        """End a stream to make room for another one."""
        number = next((number for number, (one, _) in self.waiting.items() if one is bridge), None)
        if number is None:
            self.open.pop(bridge, None)
            bridge.transport.abort(CloseReason.TOO_MANY_TRANSPORTS)
        else:
            self.refuse(number, CloseReason.TOO_MANY_TRANSPORTS)

    def take(self, number: int) -> None:
        """Count a waiting stream as accepted, because its program has accepted it."""
        self.stream_count += 1
        bridge = self._stop_waiting(number)
        self.open[bridge] = None
        self._agent.seniority.record(bridge.peer.public_key)

    def stream_ended(self, bridge: Bridge) -> None:
        """Remove a stream that has ended."""
        self.open.pop(bridge, None)
        if bridge.is_refused:
            self.stream_count -= 1
            self.refused += 1

    def _stop_waiting(self, number: int) -> Bridge:
        self._agent.untaken.pop(number, None)
        bridge, late = self.waiting.pop(number)
        late.stop()
        return bridge

    def _on_timeout(self, number: int) -> None:
        self.refuse(number, CloseReason.TIMEOUT)

    def refuse(self, number: int, reason: int) -> None:
        """Refuse a waiting stream."""
        if number not in self.waiting:
            return
        bridge = self._stop_waiting(number)
        self.refused += 1
        if bridge.transport is not None:
            bridge.transport.abort(reason)

    def stop(self) -> None:
        """Refuse all waiting streams, because the program has ended."""
        for number in list(self.waiting):
            self.refuse(number, CloseReason.REFUSED)


class OfferProducer:
    """Push producer of the lines that offer streams to a program.  While the program does not read these lines, its
    service refuses further streams.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def pauseProducing(self) -> None:
        self._service.is_congested = True

    def resumeProducing(self) -> None:
        self._service.is_congested = False

    def stopProducing(self) -> None:
        """Do nothing: the protocol itself learns that the connection was lost."""
