"""The HTTP client of discovery's clients: its requests, the connections that it keeps, and its timeouts. ``test_fetch``
tests hostile servers and ending connections over real TCP.
"""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.error import ConnectionDone, ConnectionLost, ConnectionRefusedError
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.web.plain_client import IDLE_TIMEOUT, MAX_IDLE, PlainClient, is_plain
from dmsg.net.web.response import AnswerTooLong, MalformedResponse
from tests.net.test_own_pauses import let_pause, pass_time

HEADERS = {"accept": "application/json"}
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
TIMEOUT = 10.0


class PlainClientTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.reactor = MemoryReactorClock()
        self.client = PlainClient(self.reactor, "http://192.0.2.1:9090/base", timeout=TIMEOUT, limit=1000)

    def ask(self, path: str = "/entry", body: bytes | None = None) -> Deferred[tuple[int, bytes]]:
        return self.client.request("GET" if body is None else "POST", path, HEADERS, body)

    def connect(self) -> tuple[Any, StringTransport]:
        """Accept the last connection attempt; return its protocol and its transport."""
        factory = self.reactor.tcpClients[-1][2]
        transport: Any = StringTransport()
        transport.protocol = factory.buildProtocol(None)
        transport.protocol.makeConnection(transport)
        transport.abortConnection = lambda: self.lose(transport, ConnectionLost())
        transport.loseConnection = lambda: self.lose(transport, ConnectionDone())
        return transport.protocol, transport

    def lose(self, transport: Any, error: Exception) -> None:
        if transport.connected:
            transport.connected = False
            transport.protocol.connectionLost(Failure(error))

    def exchange(self) -> tuple[Any, Any]:
        """Make one request, which is answered; return the idle connection."""
        asked = self.ask()
        protocol, transport = self.connect()
        protocol.dataReceived(EMPTY)
        self.assertEqual(self.successResultOf(asked), (200, b"{}"))
        transport.clear()
        return protocol, transport

    def test_requests(self) -> None:
        self.ask("/a b?x=1&y=%20#é\r\nX: y")
        _, transport = self.connect()
        self.assertEqual(
            transport.value(),
            b"GET /base/a%20b?x=1&y=%20%23%C3%A9%0D%0AX:%20y HTTP/1.1\r\nHost: 192.0.2.1:9090\r\n"
            b"accept: application/json\r\nAccept-Encoding: identity\r\n\r\n",
        )
        self.ask("/entry", b"body")
        _, transport = self.connect()
        self.assertEqual(
            transport.value(),
            b"POST /base/entry HTTP/1.1\r\nHost: 192.0.2.1:9090\r\naccept: application/json\r\n"
            b"Accept-Encoding: identity\r\nContent-Length: 4\r\n\r\nbody",
        )

    def test_an_idle_connection_is_used_again(self) -> None:
        protocol, transport = self.exchange()
        asked = self.ask()
        self.assertIn(b"GET /base/entry", transport.value())
        self.assertEqual(len(self.reactor.tcpClients), 1)
        for byte in EMPTY:
            protocol.dataReceived(bytes([byte]))
        self.assertEqual(self.successResultOf(asked), (200, b"{}"))

    def test_idle_connections_are_few_and_end(self) -> None:
        asked = [self.ask() for _ in range(MAX_IDLE + 1)]
        made = []
        for _, _, factory, _, _ in self.reactor.tcpClients:
            transport: Any = StringTransport()
            transport.protocol = factory.buildProtocol(None)
            transport.protocol.makeConnection(transport)
            transport.abortConnection = lambda one=transport: self.lose(one, ConnectionLost())
            transport.loseConnection = lambda one=transport: self.lose(one, ConnectionDone())
            made.append(transport)
        for transport in made:
            transport.protocol.dataReceived(EMPTY)
        for each in asked:
            self.successResultOf(each)
        self.assertEqual([one.connected for one in made], [True] * MAX_IDLE + [False])
        self.reactor.advance(IDLE_TIMEOUT - 0.1)
        self.assertEqual([one.connected for one in made], [True] * MAX_IDLE + [False])
        self.reactor.advance(0.1)
        self.assertEqual([one.connected for one in made], [False] * (MAX_IDLE + 1))
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_data_that_nobody_requested_ends_an_idle_connection(self) -> None:
        protocol, transport = self.exchange()
        protocol.dataReceived(EMPTY)
        self.assertFalse(transport.connected)
        self.ask()
        self.assertEqual(len(self.reactor.tcpClients), 2)

    def test_a_kept_connection_that_ends_unanswered(self) -> None:
        """The request is sent once more. After the first byte of a response it is not."""
        for answer, attempts in ((b"", 2), (b"H", 1)):
            protocol, transport = self.exchange()
            self.reactor.tcpClients.clear()
            asked = self.ask()
            if answer:
                protocol.dataReceived(answer)
            self.lose(transport, ConnectionDone())
            self.assertEqual(len(self.reactor.tcpClients), attempts - 1)
            if attempts == 2:
                protocol, transport = self.connect()
                self.lose(transport, ConnectionDone())
            self.failureResultOf(asked, ConnectionDone)
            self.assertEqual(len(self.reactor.tcpClients), attempts - 1)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_timeouts_of_the_head_and_of_the_body(self) -> None:
        for received, left in ((b"", TIMEOUT), (b"HTTP/1.1 200", TIMEOUT), (EMPTY[:-1], TIMEOUT)):
            asked = self.ask()
            protocol, transport = self.connect()
            self.reactor.advance(TIMEOUT - 1)
            protocol.dataReceived(received)
            self.assertNoResult(asked)
            self.reactor.advance(0.9)
            self.assertNoResult(asked)
            self.reactor.advance(0.1 if received != EMPTY[:-1] else left - 0.9)
            self.failureResultOf(asked, TimeoutError)
            self.assertFalse(transport.connected)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_pauses_of_this_process_do_not_count(self) -> None:
        let_pause(self.reactor)
        for received in (b"", EMPTY[:-1]):
            asked = self.ask()
            self.reactor.advance(5 * TIMEOUT)
            pass_time(self.reactor, 1.0)
            protocol, _ = self.connect()
            protocol.dataReceived(received)
            left = TIMEOUT if received else TIMEOUT - 1.0
            self.reactor.advance(5 * TIMEOUT)
            pass_time(self.reactor, left - 0.4)
            self.assertNoResult(asked)
            pass_time(self.reactor, 0.8)
            self.failureResultOf(asked, TimeoutError)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_the_time_to_connect_counts(self) -> None:
        asked = self.ask()
        self.reactor.advance(TIMEOUT - 1)
        self.connect()
        self.reactor.advance(1)
        self.failureResultOf(asked, TimeoutError)

    def test_a_timeout_on_a_kept_connection_is_not_repeated(self) -> None:
        self.exchange()
        asked = self.ask()
        self.reactor.advance(TIMEOUT)
        self.failureResultOf(asked, TimeoutError)
        self.assertEqual(len(self.reactor.tcpClients), 1)

    def test_cancelled_requests(self) -> None:
        self.exchange()
        for connected in (True, True, False):
            asked = self.ask()
            if len(self.reactor.tcpClients) > 1 and connected:
                self.connect()
            asked.cancel()
            self.failureResultOf(asked, CancelledError) if connected else self.failureResultOf(asked)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_wrong_answers_end_the_connection(self) -> None:
        for answer, error in (
            (b"SSH-2.0-x\r\n\r\n", MalformedResponse),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n", AnswerTooLong),
        ):
            asked = self.ask()
            protocol, transport = self.connect()
            protocol.dataReceived(answer)
            self.failureResultOf(asked, error)
            self.assertFalse(transport.connected)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_an_answer_until_the_end_of_the_connection(self) -> None:
        asked = self.ask()
        protocol, transport = self.connect()
        protocol.dataReceived(b"HTTP/1.0 200 OK\r\n\r\n{")
        protocol.dataReceived(b"}")
        self.assertNoResult(asked)
        self.lose(transport, ConnectionDone())
        self.assertEqual(self.successResultOf(asked), (200, b"{}"))

    def test_a_refused_connection(self) -> None:
        asked = self.ask()
        self.reactor.tcpClients[0][2].clientConnectionFailed(cast(Any, None), Failure(ConnectionRefusedError()))
        self.failureResultOf(asked, ConnectionRefusedError)

    def test_close(self) -> None:
        busy = self.ask()
        _, transport = self.connect()
        _, idle = self.exchange()
        self.successResultOf(self.client.close())
        self.assertEqual((idle.connected, transport.connected), (False, False))
        self.failureResultOf(busy, ConnectionLost)
        late = self.ask()
        protocol, transport = self.connect()
        protocol.dataReceived(EMPTY)
        self.assertEqual(self.successResultOf(late), (200, b"{}"))
        self.assertFalse(transport.connected)
        self.assertEqual(self.reactor.getDelayedCalls(), [])


class UrlTests(SynchronousTestCase):
    def test_urls_that_need_another_client(self) -> None:
        for url in ("http://a.example", "http://192.0.2.1:9090", "http://[2001:db8::1]:80/x/y", "HTTP://localhost/"):
            self.assertTrue(is_plain(url), url)
        for url in (
            "https://a.example",
            "http://user@a.example",
            "http://:password@a.example",
            "http://bücher.example",
            "http://a.example:port",
            "http://a.example:0",
            "http://a.example:70000",
            "http://",
            "http://a b",
            "http://a.example/?x",
            "http://a.example/#x",
            "http://[::1",
            "dmsg://a",
            "",
        ):
            self.assertFalse(is_plain(url), url)
