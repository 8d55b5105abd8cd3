"""Connections to a discovery that say nothing, too slowly, or are too many."""

from __future__ import annotations

import gc
import os
from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.http import HTTPChannel
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from dmsg.net.web.channel import HEADER_COST, MAX_HEADERS, MAX_PARAMETERS, MAX_TRAILERS
from dmsg.net.web.guard import TIME_TO_ASK, WHOLE_WITHIN, GuardedFactory
from dmsg.net.web.site import IDLE_TIMEOUT, MAX_WAITING_OF_ADDRESS, Requesters, gated_site
from tests.net.test_own_pauses import let_pause, pass_time
from tests.support import TurnClock


class Page(Resource):
    """Answers at once, or, for /later, when told."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Any] = []

    def render_GET(self, request: Any) -> Any:
        if request.path == b"/later":
            self.waiting.append(request)
            return NOT_DONE_YET
        return b"here"


class Connection(StringTransport):
    """Connection from an address."""

    def __init__(self, address: Any) -> None:
        super().__init__(peerAddress=address)
        self.gone = False
        self.protocol: Any = None

    def abortConnection(self) -> None:
        if not self.gone:
            self.gone = True
            self.protocol.connectionLost()

    def loseConnection(self) -> None:
        self.abortConnection()


class GuardTests(SynchronousTestCase):
    """The guard in memory."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.page = Page()
        self.refused: list[str] = []
        self.site = gated_site(self.page, self.clock, self.refused.append, Requesters(self.clock, 0, 1), max_body=1000)

    def guard(self, **options: Any) -> GuardedFactory:
        return GuardedFactory(self.site, self.clock, on_refused=self.refused.append, **options)

    def connect(self, factory: GuardedFactory, host: str = "203.0.113.1", said: bytes = b"") -> Connection:
        kind = IPv6Address if ":" in host else IPv4Address
        connection = Connection(kind("TCP", host, 5))
        connection.protocol = factory.buildProtocol(connection.getPeer())
        connection.protocol.makeConnection(connection)
        if said:
            connection.protocol.dataReceived(said)
        return connection

    def test_many_blocks_of_one_site(self) -> None:
        """Connections of a /48 fill only the limit of the /48, and the address in it with the fewest requests is
        closed.
        """
        factory = self.guard(most_of_block=4, limit=100)
        honest = self.connect(factory, "2600:2::1")
        crowd = [self.connect(factory, f"2600:1:0:{number:x}::1") for number in range(60)]
        self.assertEqual(sum(not one.gone for one in crowd), 16)
        crowd += [self.connect(factory, f"2600:1:0:{number:x}::1") for number in range(0x100, 0x4000, 0x100)]
        self.assertEqual(sum(not one.gone for one in crowd), 32)
        self.assertFalse(honest.gone)

    def test_a_request_that_drips(self) -> None:
        factory = self.guard()
        connection = self.connect(factory)
        for byte in b"GET / HTTP/1.1\r\nHost: x\r\nX: y":
            connection.protocol.dataReceived(bytes((byte,)))
            self.clock.advance(WHOLE_WITHIN / 20)
            if connection.gone:
                break
        self.assertTrue(connection.gone)
        self.assertEqual((self.refused, len(factory)), (["slow_request"], 0))

    def test_requests_of_a_connection_are_answered_in_order(self) -> None:
        connection = self.connect(self.guard())
        for _ in range(5):
            connection.protocol.dataReceived(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            self.clock.advance(WHOLE_WITHIN)
        self.assertEqual(connection.value().count(b"200 OK"), 5)
        self.assertFalse(connection.gone)

    def test_a_slow_answer_is_no_slow_request(self) -> None:
        connection = self.connect(self.guard(), said=b"GET /later HTTP/1.1\r\nHost: x\r\n\r\n")
        self.clock.advance(WHOLE_WITHIN * 2)
        self.assertFalse(connection.gone)
        self.page.waiting[0].write(b"now")
        self.page.waiting[0].finish()
        self.assertIn(b"now", connection.value())

    def test_a_connection_without_data_is_closed(self) -> None:
        connection = self.connect(self.guard())
        for _ in range(3):
            connection.protocol.dataReceived(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            self.clock.advance(IDLE_TIMEOUT - 1)
            self.assertFalse(connection.gone)
        self.clock.advance(1)
        self.assertTrue(connection.gone)
        self.assertEqual((self.refused, self.clock.getDelayedCalls()), ([], []))

    def test_the_idle_timeout_starts_after_a_slow_answer(self) -> None:
        connection = self.connect(self.guard(), said=b"GET /later HTTP/1.1\r\nHost: x\r\n\r\n")
        self.clock.advance(IDLE_TIMEOUT * 3)
        self.page.waiting[0].finish()
        self.clock.advance(IDLE_TIMEOUT - 1)
        self.assertFalse(connection.gone)
        self.clock.advance(1)
        self.assertTrue(connection.gone)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_whole_requests_make_no_timers(self) -> None:
        connection = self.connect(self.guard())
        timers = self.clock.getDelayedCalls()
        for _ in range(5):
            connection.protocol.dataReceived(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            self.assertEqual(self.clock.getDelayedCalls(), timers)
        self.assertEqual(len(timers), 1)
        connection.protocol.dataReceived(b"GET / HT")
        self.assertEqual(len(self.clock.getDelayedCalls()), 2)

    def test_each_incomplete_request_has_a_deadline_of_its_own(self) -> None:
        """One timer serves all requests of a connection, and none is closed too early or too late."""
        connection = self.connect(self.guard())
        connection.protocol.dataReceived(b"GET / HTTP/1.1\r\n")
        self.clock.advance(WHOLE_WITHIN / 2)
        connection.protocol.dataReceived(b"Host: x\r\n\r\n")
        connection.protocol.dataReceived(b"GET / HTTP")
        timers = self.clock.getDelayedCalls()
        self.clock.advance(WHOLE_WITHIN / 2)
        self.assertEqual(len(self.clock.getDelayedCalls()), len(timers))
        self.clock.advance(WHOLE_WITHIN / 2 - 1)
        self.assertEqual((connection.gone, self.refused), (False, []))
        self.clock.advance(1)
        self.assertEqual((connection.gone, self.refused), (True, ["slow_request"]))

    def test_a_timer_without_an_incomplete_request_ends(self) -> None:
        connection = self.connect(self.guard())
        connection.protocol.dataReceived(b"GET / HTTP/1.1\r\n")
        connection.protocol.dataReceived(b"Host: x\r\n\r\n")
        self.assertEqual(len(self.clock.getDelayedCalls()), 2)
        self.clock.advance(WHOLE_WITHIN)
        self.assertEqual((connection.gone, self.refused), (False, []))
        self.assertEqual(len(self.clock.getDelayedCalls()), 1)

    def test_pauses_of_this_process_do_not_count(self) -> None:
        """After a pause, the timers run before the requests that have arrived are read."""
        let_pause(self.clock)
        incomplete = self.connect(self.guard(), said=b"GET / HTTP/1.1\r\n")
        idle = self.connect(self.guard())
        for _ in range(2):
            pass_time(self.clock, 1.0)
            self.clock.advance(10 * IDLE_TIMEOUT)
        pass_time(self.clock, WHOLE_WITHIN - 3.0)
        self.assertEqual((incomplete.gone, idle.gone, self.refused), (False, False, []))
        pass_time(self.clock, 2.0)
        self.assertEqual((incomplete.gone, idle.gone, self.refused), (True, False, ["slow_request"]))
        pass_time(self.clock, IDLE_TIMEOUT - WHOLE_WITHIN)
        self.assertEqual((idle.gone, self.clock.getDelayedCalls()), (True, []))

    def test_the_largest_block_of_addresses_loses_a_connection(self) -> None:
        """1,100 connections of a stranger that do not end their requests: somebody else gets in, and is answered."""
        factory = self.guard(limit=1000, most_of_block=5000)
        theirs = [self.connect(factory, said=b"GET / HTTP/1.1\r\nHo") for _ in range(1100)]
        self.assertEqual(len(factory), 1000)
        mine = self.connect(factory, "198.51.100.7", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        self.assertIn(b"here", mine.value())
        self.assertFalse(mine.gone)
        self.assertEqual(sum(one.gone for one in theirs), 101)
        self.assertEqual(set(self.refused), {"too_many_connections"})

    def test_connections_of_one_block_are_limited(self) -> None:
        factory = self.guard(most_of_block=3)
        waiting = self.connect(factory, "2001:db8::1", b"GET /later HTTP/1.1\r\nHost: x\r\n\r\n")
        others = [self.connect(factory, f"2001:db8::{number:x}") for number in range(2, 6)]
        elsewhere = self.connect(factory, "2001:db8:0:1::1")
        # A connection that waits for this server's answer is closed last.
        self.assertEqual([one.gone for one in (waiting, *others, elsewhere)], [False, True, True, False, False, False])

    def test_waiting_does_not_shut_others_out(self) -> None:
        """Behind a proxy all clients have one address: a connection that waits for an answer is closed, not the newest
        one.
        """
        factory = self.guard(limit=50, by_place=False)
        waiting = [self.connect(factory, said=b"GET /later HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(50)]
        for _ in range(5):
            mine = self.connect(factory)
            self.assertFalse(mine.gone)
            mine.protocol.dataReceived(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            self.assertIn(b"here", mine.value())
            self.clock.advance(TIME_TO_ASK)
        # The first connection makes room. Then connections that have had an answer would be closed.
        self.assertEqual(sum(one.gone for one in waiting), 1)

    def test_unparsable_requests_are_answered_without_traceback(self) -> None:
        """Exceptions of Twisted's parser write no traceback to the log."""
        self.patch(HTTPChannel, "lineReceived", lambda *_: int("x"))
        mine = self.connect(self.guard(), said=b"POST / HTTP/1.1\r\n")
        self.assertTrue(mine.gone)
        self.assertEqual((self.refused, self.flushLoggedErrors()), (["unreadable_request"], []))

    def test_requests_behind_each_other_take_turns(self) -> None:
        """Two thousand requests arrive in one read; another client is answered in the next turn."""
        self.clock = TurnClock()
        page = Page()
        page.render_GET = self.slowly  # type: ignore[method-assign]
        self.site = gated_site(page, self.clock, self.refused.append, Requesters(self.clock, 0, 1), max_body=1000)
        factory = self.guard()
        flood = self.connect(factory, said=b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)
        self.assertLess(flood.value().count(b"slowly"), 10)
        mine = self.connect(factory, "198.51.100.7", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        self.assertIn(b"slowly", mine.value())
        for _ in range(2000):
            self.clock.advance(0)
        self.assertEqual(flood.value().count(b"slowly"), 2000)

    def slowly(self, request: Any) -> bytes:
        self.clock.rightNow += 0.001
        return b"slowly"

    def test_a_body_takes_no_descriptor(self) -> None:
        """Twisted takes a temporary file for a body whose length nobody says."""
        # Garbage of earlier tests may hold descriptors, which would be closed at any moment.
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        factory = self.guard()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        held = [self.connect(factory, said=head) for _ in range(50)]
        self.assertEqual((len(os.listdir("/proc/self/fd")), len(held)), (before, 50))

    def test_the_address_with_most_pending_data_loses_its_oldest(self) -> None:
        """The address with most pending data loses its oldest request, whichever address sent the last one."""
        account = self.site.unanswered
        account.most = 6000
        factory = self.guard()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        asked = head + bytes(900)
        one, two = (self.connect(factory, "198.51.100.7", asked) for _ in range(2))
        each = len(asked) + 2 * HEADER_COST
        self.assertEqual((account.held, self.refused), (2 * each, []))
        late, other = (self.connect(factory, address, asked) for address in ("198.51.100.7", "203.0.113.9"))
        self.assertTrue(one.value().startswith(b"HTTP/1.1 503"))
        self.assertEqual((account.held, self.refused), (3 * each, ["busy"]))
        self.assertEqual((two.value(), late.value(), other.value()), (b"", b"", b""))
        two.abortConnection()
        for left in (late, other):
            left.protocol.dataReceived(bytes(100))
            self.assertTrue(left.value().startswith(b"HTTP/1.1 405"))
        self.assertEqual(account.held, 0)

    def test_headers_trailers_and_parameters_count_as_held(self) -> None:
        """Headers, trailers and parameters that are small themselves."""
        factory = self.guard()
        line = b"GET /slowly HTTP/1.1\r\nHost: x\r\n"
        for asked in (
            line + b"".join(b"a%d:\r\n" % number for number in range(MAX_HEADERS + 1)),
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a\r\n" * MAX_TRAILERS,
            line.replace(b"slowly", b"slowly?" + b"&a" * MAX_PARAMETERS) + b"\r\n",
        ):
            one = self.connect(factory, said=asked)
            self.assertTrue(one.gone or one.disconnecting or one.value().startswith(b"HTTP/1.1 400"), asked[:40])
            one.abortConnection()
        self.assertEqual(self.site.unanswered.held, 0)
        good = line.replace(b"slowly", b"slowly?" + b"a&" * (MAX_PARAMETERS - 1)) + b"Cookie: a=b; c=d\r\n\r\n"
        self.assertIn(b"200 OK", self.connect(factory, said=good).value())

    def test_too_many_of_one_address_wait(self) -> None:
        factory = self.guard()
        asked = b"GET /later HTTP/1.1\r\nHost: x\r\n\r\n"
        waiting = [self.connect(factory, said=asked) for _ in range(MAX_WAITING_OF_ADDRESS)]
        more = self.connect(factory, said=asked)
        self.assertTrue(more.value().startswith(b"HTTP/1.1 429"))
        waiting[0].abortConnection()
        self.assertEqual(self.connect(factory, said=asked).value(), b"")

    def test_limits_by_address_do_not_apply_behind_a_proxy(self) -> None:
        factory = self.guard(most_of_block=3, by_place=False)
        self.assertFalse(any(one.gone for one in [self.connect(factory) for _ in range(10)]))
