"""Rules by which the sender of a code decides which questions on the network it answers. No I/O; the time is an
argument."""

from __future__ import annotations

from collections import Counter

from dmsg.base.buckets import Bucket, RateLimit
from dmsg.keys import PubKey, SecKey
from dmsg.net.mdns.interfaces import Interface
from dmsg.net.mdns.packets import MalformedPacket, Question, parse_question
from dmsg.v2019.direct.tickets import Tickets
from dmsg.v2019.lan.messages import Announcement, BadMessage, LanDrop, is_for_codes, receiver_of, shared_secret

PACKETS_RATE, PACKETS_BURST = 500.0, 1000.0
"""Maximum number of packets that are parsed per second, and in a burst, over all networks. The numbers are large,
because other programs use multicast DNS, too."""
QUESTIONS_RATE, QUESTIONS_BURST = 2.0, 10.0
"""Maximum number of DNS questions for codes per second, and in a burst, from one address. At this rate, it takes an
hour to try all nameplates."""
ANSWERS_RATE, ANSWERS_BURST = 10.0, 32.0
"""Maximum number of answers per second, and in a burst, to all addresses together. Each answer costs a key
agreement."""


class CodeAnswers:
    """Answers of the sender of one code.

    :param key: ephemeral key of the sender.
    :param nameplate: number of the code.
    :param tickets: table to which a ticket is added for each receiver that is answered.
    :ivar drops: number of packets that were not answered, by reason.
    """

    def __init__(self, key: SecKey, nameplate: int, tickets: Tickets, now: float) -> None:
        self._key = key
        self._nameplate = nameplate
        self._tickets = tickets
        self._packets = Bucket(PACKETS_BURST, now)
        self._questions = RateLimit(QUESTIONS_RATE, QUESTIONS_BURST)
        self._answers = Bucket(ANSWERS_BURST, now)
        self.drops: Counter[LanDrop] = Counter()

    def receive(self, data: bytes, source: str, interface: Interface, port: int, now: float) -> bytes | None:
        """Return the answer to a packet, which is to be sent only to the packet's sender; None for no answer.

        :param source: address of the packet's sender.
        :param interface: network on which the packet arrived.
        :param port: TCP port at which the sender of the code listens on this network.
        """
        answer = self._answer(data, source, interface, port, now)
        if isinstance(answer, LanDrop):
            self.drops[answer] += 1
            return None
        return answer

    def _answer(self, data: bytes, source: str, interface: Interface, port: int, now: float) -> bytes | LanDrop:
        try:
            receiver, question = self._admit(data, source, interface, now)
        except (MalformedPacket, BadMessage):
            return LanDrop.MALFORMED
        except _Ignored as ignored:
            return ignored.reason
        secret = shared_secret(self._key, sender=self._key.public, receiver=receiver)
        self._tickets.issue(secret, receiver, now)
        return question.encode_answer(Announcement(self._key.public, port).encode())

    def _admit(self, data: bytes, source: str, interface: Interface, now: float) -> tuple[PubKey, Question]:
        """Return the receiver that asks for this code, and its question.

        :raises _Ignored: the packet must not be answered.
        """
        _check(self._packets.take(1.0, PACKETS_RATE, PACKETS_BURST, now), LanDrop.RATE_LIMITED)
        question = parse_question(data)
        _check(is_for_codes(question.name), LanDrop.OTHER_NAME)
        _check(interface.has_on_link(source), LanDrop.OFF_LINK)
        # Only questions for codes count towards the limit of their address, because other questions are not meant for
        # this program.
        _check(self._questions.allow(source, now), LanDrop.RATE_LIMITED)
        receiver = receiver_of(question.name, self._nameplate)
        if receiver is None:
            raise _Ignored(LanDrop.OTHER_CODE)
        _check(self._answers.take(1.0, ANSWERS_RATE, ANSWERS_BURST, now), LanDrop.RATE_LIMITED)
        return receiver, question


class _Ignored(Exception):
    """Exception that says why a packet is not answered."""

    def __init__(self, reason: LanDrop) -> None:
        self.reason = reason


def _check(is_fine: bool, reason: LanDrop) -> None:
    if not is_fine:
        raise _Ignored(reason)
