"""A client's session with a server, as every family has it: back-pressure of one stream and of the link, the end."""

from __future__ import annotations

from typing import Any

from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure

from dmsg.clients import session as session_module
from dmsg.errors import DropReason
from tests.messaging.test_channels import B, ChannelCase
from tests.support import Accepting
from tests.v2019.secure_support import SecureCase


class Rules:
    """The rules, for a family whose case opens streams."""

    a: Any
    network: Any
    open_stream: Any
    assertEqual: Any
    assertTrue: Any

    def test_a_waiting_stream_does_not_delay_others(self) -> None:
        held, goes_on = self.open_stream(), self.open_stream()
        carrier = held[0].transport._carrier
        carrier.congested()
        for one, _ in (held, goes_on):
            one.transport.write(b"written")
        self.network.settle()
        self.assertEqual((held[1].data, goes_on[1].data), (b"", b"written"))
        carrier.relieved()
        self.network.settle()
        self.assertEqual(held[1].data, b"written")

    def test_a_congested_link_holds_all_streams(self) -> None:
        pairs = [self.open_stream() for _ in range(3)]
        pairs[0][0].transport._carrier.congested()
        self.a.link_congested()
        for one, _ in pairs:
            one.transport.write(b"written")
        self.network.settle()
        self.assertEqual([two.data for _, two in pairs], [b"", b"", b""])
        self.a.link_relieved()
        self.network.settle()
        self.assertEqual([two.data for _, two in pairs], [b"", b"written", b"written"])

    def test_the_loss_is_reported_before_streams_are_ended(self) -> None:
        """A program that is notified may open the next stream at once. It must not find the lost session."""
        told: list[str] = []
        one, _ = self.open_stream()
        self.a.lost.addCallback(lambda _: told.append("lost"))
        one.connectionLost = lambda reason: told.append("stream")
        self.a.link.connectionLost(Failure(ConnectionDone()))
        self.network.settle()
        self.assertEqual(told[:1], ["lost"])
        self.assertEqual((self.a.connected, self.a._link), (False, None))

    def test_a_server_that_has_answers_sent_and_reads_none(self) -> None:
        link = self.a._link
        self.open_stream()
        link._congested = True
        link.queued = lambda: session_module.CLIENT_QUEUE_LIMIT + 1
        self.answer()
        self.assertEqual(link.ended_for, DropReason.SEND_BUFFER_FULL)

    def answer(self) -> None:
        """Let the server send a frame."""
        raise NotImplementedError


class V2019Tests(Rules, SecureCase):
    """The rules over transports of 2019."""

    resume_timeout = 0.0

    def open_stream(self) -> tuple[Any, Any]:
        return self.open()

    def answer(self) -> None:
        self.ask()


class MessagingTests(Rules, ChannelCase):
    """The rules over channels of the Messaging System."""

    def open_stream(self) -> tuple[Any, Any]:
        return self.pair()

    def answer(self) -> None:
        self.a.open(B.public, Accepting())
        self.network.settle()
