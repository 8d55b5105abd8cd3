"""Rules by which the receiver of a code decides which answers to follow. No I/O; the time is an argument.

Anybody on the network can answer. So the receiver tries a limited number of keys, and each address may announce one key
only. An attacker who answers with a key of its own gets one guess at the words of the code, and uses up one of the keys
that the receiver tries.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

from dmsg.base.buckets import Bucket
from dmsg.keys import PubKey, SecKey
from dmsg.net.mdns import packets
from dmsg.net.mdns.interfaces import Interface
from dmsg.net.mdns.packets import MalformedPacket, Question, parse_answer
from dmsg.v2019.lan.messages import Announcement, BadMessage, LanDrop, name_for, shared_secret

MAX_ANNOUNCERS = 3
"""Maximum number of keys that a receiver tries for one code."""
ADDRESSES_OF_ONE = 4
"""Maximum number of addresses that a receiver tries for one key. A sender has an address for each network and IP
version."""
PACKETS_RATE, PACKETS_BURST = 100.0, 200.0
"""Maximum number of packets that are parsed per second, and in a burst."""


@dataclass(frozen=True, slots=True)
class Announcer:
    """Peer that claims to offer the code.

    :ivar key: ephemeral key that the peer announced.
    :ivar interface: network on which the peer answered.
    :ivar host: address from which the peer answered, with its scope if it is an IPv6 address.
    :ivar port: TCP port at which the peer listens, according to its answer.
    :ivar secret: 32 bytes that only this end and the owner of ``key`` can compute.
    """

    key: PubKey
    interface: Interface
    host: str
    port: int
    secret: bytes


class CodeQuestion:
    """Question for one code, and the answers to it.

    :param key: ephemeral key of the receiver.
    :param nameplate: number of the code.
    :ivar packet: packet to send to the multicast DNS group.
    :ivar drops: number of packets that were ignored, by reason.
    """

    def __init__(self, key: SecKey, nameplate: int, now: float) -> None:
        self._key = key
        self._question = Question(int.from_bytes(os.urandom(2), "big"), name_for(key.public, nameplate))
        self._budget = Bucket(PACKETS_BURST, now)
        self._places: dict[str, tuple[PubKey, int]] = {}
        self.packet = self._question.encode()
        self.drops: Counter[LanDrop] = Counter()

    @property
    def announcers(self) -> int:
        """Number of different keys, in the answers so far, to which the receiver may try to connect."""
        return len({key for key, _ in self._places.values()})

    def receive(self, data: bytes, source: str, port: int, interface: Interface, now: float) -> Announcer | None:
        """Process a packet. If it is an answer to follow, return the peer that sent it; otherwise None.

        :param source: address of the packet's sender.
        :param port: UDP port of the packet's sender.
        :param interface: network on which the packet arrived.
        """
        found = self._look(data, source, port, interface, now)
        if isinstance(found, LanDrop):
            self.drops[found] += 1
            return None
        return found

    def _look(self, data: bytes, source: str, port: int, interface: Interface, now: float) -> Announcer | LanDrop:
        if not self._budget.take(1.0, PACKETS_RATE, PACKETS_BURST, now):
            return LanDrop.RATE_LIMITED
        if port != packets.PORT:
            return LanDrop.OTHER_PORT
        if not interface.has_on_link(source):
            return LanDrop.OFF_LINK
        try:
            answer = parse_answer(data)
            told = Announcement.parse(answer.text)
        except (MalformedPacket, BadMessage):
            return LanDrop.MALFORMED
        if answer.question != self._question or told.key == self._key.public:
            return LanDrop.OTHER_NAME
        return self._admit(told, interface.scoped(source), interface)

    def _admit(self, told: Announcement, host: str, interface: Interface) -> Announcer | LanDrop:
        """Record an announced key and address, and return the peer to try. Return the reason to ignore the answer if
        there are too many keys or addresses, or if this address has already answered."""
        place = told.key, told.port
        if host in self._places:
            return LanDrop.REPEATED if self._places[host] == place else LanDrop.TOO_MANY
        keys = [key for key, _ in self._places.values()]
        is_new = told.key not in keys
        if (is_new and len(set(keys)) >= MAX_ANNOUNCERS) or keys.count(told.key) >= ADDRESSES_OF_ONE:
            return LanDrop.TOO_MANY
        self._places[host] = place
        secret = shared_secret(self._key, sender=told.key, receiver=self._key.public)
        return Announcer(told.key, interface, host, told.port, secret)
