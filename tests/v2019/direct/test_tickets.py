"""Tags of direct links."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import HandshakeError
from dmsg.keys import SecKey
from dmsg.v2019.direct.tickets import (
    MAX_TICKETS,
    TAG_SIZE,
    TICKET_TIME,
    DiallerHandshake,
    ListenerHandshake,
    Tickets,
    dialler_tag,
    listener_tag,
)

ALICE, BOB = SecKey.from_seed(b"direct alice").public, SecKey.from_seed(b"direct bob").public
SECRET = bytes(range(32))


class TicketTests(SynchronousTestCase):
    """Tickets of a port."""

    def test_a_ticket_is_good_until_its_time_is_over(self) -> None:
        tickets = Tickets()
        tickets.issue(SECRET, BOB, 5.0)
        tag = dialler_tag(SECRET)
        self.assertEqual(tickets.find(tag, 5.0 + TICKET_TIME - 1), (BOB, listener_tag(SECRET)))
        self.assertIsNone(tickets.find(tag, 5.0 + TICKET_TIME))
        tickets.issue(SECRET, BOB, 5.0 + TICKET_TIME)
        self.assertIsNotNone(tickets.find(tag, 5.0 + TICKET_TIME))

    def test_the_oldest_ticket_makes_room(self) -> None:
        tickets = Tickets()
        secrets = [bytes((number,)) * 32 for number in range(MAX_TICKETS + 1)]
        for secret in secrets:
            tickets.issue(secret, BOB, 0.0)
        found = [tickets.find(dialler_tag(secret), 0.0) is not None for secret in secrets]
        self.assertEqual(found, [False] + [True] * MAX_TICKETS)
        self.assertEqual(tickets.evicted, 1)
        tickets.issue(secrets[1], BOB, 0.0)
        tickets.issue(secrets[0], BOB, 0.0)
        self.assertIsNotNone(tickets.find(dialler_tag(secrets[1]), 0.0))
        self.assertIsNone(tickets.find(dialler_tag(secrets[2]), 0.0))

    def test_the_tags_of_both_ends_differ(self) -> None:
        self.assertEqual(len({dialler_tag(SECRET), listener_tag(SECRET), dialler_tag(bytes(32))}), 3)
        self.assertEqual(len(dialler_tag(SECRET)), TAG_SIZE)


class HandshakeTests(SynchronousTestCase):
    """Handshake of the two ends of a direct link."""

    def setUp(self) -> None:
        self.tickets = Tickets()
        self.tickets.issue(SECRET, BOB, 0.0)
        self.dialler = DiallerHandshake(SECRET, ALICE)
        self.listener = ListenerHandshake(self.tickets, 0.0)

    @given(st.lists(st.integers(1, 20), max_size=20))
    def test_both_know_each_other_however_the_bytes_are_cut(self, sizes: list[int]) -> None:
        dialler, listener = DiallerHandshake(SECRET, ALICE), ListenerHandshake(self.tickets, 0.0)
        self.assertEqual(listener.data_to_send(), b"")
        data = dialler.data_to_send() + b"frames"
        for size in [*sizes, len(data)]:
            piece, data = data[:size], data[size:]
            if listener.remote is None:
                listener.receive_data(piece)
            else:
                data = b""
        self.assertEqual(listener.remote, BOB)
        dialler.receive_data(listener.data_to_send())
        self.assertEqual(dialler.remote, ALICE)

    def test_what_follows_the_tag_is_kept(self) -> None:
        self.listener.receive_data(self.dialler.data_to_send() + b"frames")
        self.assertEqual(self.listener.trailing_data(), b"frames")

    def test_a_wrong_tag_is_answered_with_nothing(self) -> None:
        with self.assertRaises(HandshakeError):
            self.listener.receive_data(listener_tag(SECRET))
        self.assertEqual(self.listener.data_to_send(), b"")

    def test_a_listener_that_does_not_know_the_secret(self) -> None:
        self.dialler.data_to_send()
        with self.assertRaises(HandshakeError):
            self.dialler.receive_data(dialler_tag(SECRET))
        self.assertIsNone(self.dialler.remote)
