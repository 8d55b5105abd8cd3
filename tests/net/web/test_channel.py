"""Requests that come faster than they are answered, over one connection."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

from hypothesis import given, strategies as st
from twisted.internet.protocol import connectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from dmsg.net.turn_share import MAX_SHARE
from dmsg.net.web.channel import LINGER_FOR, PARSE_SIZE, BoundedSite
from tests.net.test_own_pauses import PausingClock, pass_time


class Echo(Resource):
    """Answers with path and body, at once or, below /later, when told."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Any] = []

    def render(self, request: Any) -> Any:
        if request.path.startswith(b"/later"):
            self.waiting.append(request)
            return NOT_DONE_YET
        return self.answer(request)

    def answer(self, request: Any) -> bytes:
        return request.path + b" " + request.content.read() + b"\n"

    def proceed(self) -> None:
        while self.waiting:
            request = self.waiting.pop(0)
            request.write(self.answer(request))
            request.finish()


class Case:
    """Connection to the site."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.page = Echo()
        self.site = BoundedSite(self.page, reactor=clock or Clock())
        self.site.log = lambda request: None  # type: ignore[method-assign]
        self.transport = StringTransport()
        self.channel = self.site.buildProtocol(self.transport.getPeer())
        self.channel.makeConnection(self.transport)

    @property
    def reading(self) -> bool:
        return self.transport.producerState == "producing"

    def answers(self) -> list[bytes]:
        """Return the bodies of the answers."""
        return re.findall(rb"(?m)^(/\S* .*)$", self.transport.value())


def request(path: str, body: bytes, *, chunked: bool = False) -> bytes:
    if chunked:
        parts = b"".join(b"%x\r\n%s\r\n" % (1, body[at : at + 1]) for at in range(len(body)))
        return f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + parts + b"0\r\n\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class TargetTests(SynchronousTestCase):
    """Path and host of a request."""

    def hosts(self, target: str, *hosts: str) -> tuple[Case, list[Any]]:
        case = Case()
        lines = "".join(f"Host: {host}\r\n" for host in hosts)
        case.channel.dataReceived(f"GET {target} HTTP/1.1\r\n{lines}\r\n".encode())
        return case, case.page.waiting

    def test_a_pause_of_this_process_does_not_reset_a_connection(self) -> None:
        """After the pause, the rest of the request is still read, so that the client gets the response."""
        clock = PausingClock()
        case = Case(clock)
        case.channel.linger()
        pass_time(clock, 1.0)
        clock.advance(10 * LINGER_FOR)
        self.assertFalse(case.transport.disconnecting)
        pass_time(clock, LINGER_FOR)
        self.assertTrue(case.transport.disconnecting)

    def test_the_authority_of_an_absolute_url_counts(self) -> None:
        """The authority of the URL takes precedence over Host (RFC 9112, 3.2.2)."""
        for target, path in (
            ("http://a.example:8080/later/x?y=1", b"/later/x"),
            ("HTTPS://a.example:8080/later", b"/later"),
        ):
            _, waiting = self.hosts(target, "b.example")
            self.assertEqual([(one.path, one.getHeader(b"host")) for one in waiting], [(path, b"a.example:8080")])
        self.assertEqual(waiting[0].uri, b"/later")

    def test_a_whole_url_without_a_path(self) -> None:
        for target, path in (("http://a.example", b"/"), ("http://a.example?later", b"/")):
            case, _ = self.hosts(target, "b.example")
            self.assertEqual(case.answers(), [path + b" "])

    def test_targets_that_are_no_urls_are_unchanged(self) -> None:
        for target in ("a.example:80", "http:///x", "ftp://a.example/x"):
            case, _ = self.hosts(target, "b.example")
            self.assertIn(target.encode() + b" \n", case.transport.value())

    def test_a_request_with_two_hosts_is_refused(self) -> None:
        """Programs differ in which of them they use."""
        case, waiting = self.hosts("/later", "127.0.0.1", "b.example")
        self.assertEqual(waiting, [])
        self.assertTrue(case.transport.value().startswith(b"HTTP/1.1 400 "))
        self.assertTrue(case.transport.disconnecting)


class ChannelTests(SynchronousTestCase):
    """Connections in memory."""

    @given(
        st.lists(
            st.tuples(st.booleans(), st.binary(max_size=30).map(lambda data: data.hex().encode()), st.booleans()),
            max_size=12,
        ),
        st.lists(st.integers(1, 3 * PARSE_SIZE), max_size=12),
        st.integers(0, 3),
    )
    def test_every_request_is_answered_once_and_in_order(
        self, asked: list[tuple[bool, bytes, bool]], cuts: list[int], big: int
    ) -> None:
        """Requests are answered once and in order, whatever pieces they arrive in."""
        case = Case()
        expected = []
        data = b""
        for number, (later, body, chunked) in enumerate(asked):
            if number == big:
                body = body * 2000
            path = f"/{'later' if later else 'now'}/{number}"
            data += request(path, body, chunked=chunked and number != big)
            expected.append(path.encode() + b" " + body)
        for cut in cuts:
            case.channel.dataReceived(data[:cut])
            data = data[cut:]
            case.page.proceed()
        case.channel.dataReceived(data)
        case.page.proceed()
        self.assertEqual(case.answers(), expected)
        self.assertTrue(case.reading)

    def test_reading_stops_while_requests_wait(self) -> None:
        case = Case()
        many = request("/later", b"x") * 2000
        case.channel.dataReceived(many[:65536])
        self.assertFalse(case.reading)
        for _ in range(20):
            request_ = case.page.waiting.pop(0)
            request_.finish()
            self.assertEqual(len(case.page.waiting), 1)
            self.assertFalse(case.reading)
            self.assertLessEqual(len(case.channel._buffer) + sum(map(len, case.channel._dataBuffer)), 2 * PARSE_SIZE)
        while case.page.waiting:
            case.page.proceed()
        self.assertTrue(case.reading)
        self.assertEqual(len(case.answers()) + 20, 65536 // len(request("/later", b"x")))

    def test_reading_goes_on_while_a_single_request_waits(self) -> None:
        """One small request of a client may wait for the next turn, and one more piece stops reading."""
        clock = Clock()
        case = Case(clock)
        case.site.share.used(case.channel.block, MAX_SHARE)
        case.channel.dataReceived(request("/now", b"1"))
        self.assertEqual((case.answers(), case.reading), ([], True))
        case.channel.dataReceived(request("/now", b"2"))
        self.assertEqual((case.answers(), case.reading), ([], False))
        clock.advance(0)
        self.assertEqual((case.answers(), case.reading), ([b"/now 1", b"/now 2"], True))

    def test_parsing_takes_turns(self) -> None:
        """A body in chunks of one byte is dear; another address is answered before it is through."""
        clock = Clock()
        dear, other = Case(clock), Case(clock)
        share = other.site.share = dear.site.share
        share.now = lambda ticks=itertools.count(): next(ticks) * 0.0005  # type: ignore[misc]
        other.channel.block = "another"
        dear.channel.dataReceived(request("/dear", b"x" * 9000, chunked=True))
        self.assertFalse(dear.reading)
        other.channel.dataReceived(request("/other", b""))
        self.assertEqual((dear.answers(), other.answers()), ([], [b"/other "]))
        clock.advance(0)
        self.assertEqual(dear.answers(), [b"/dear " + b"x" * 9000])
        self.assertGreaterEqual(share.waited, 3)
        self.assertTrue(dear.reading)
        self.assertEqual((dear.site.unanswered.held, other.site.unanswered.held), (0, 0))

    def test_a_client_that_reads_no_answers_is_disconnected(self) -> None:
        case = Case()
        case.channel.pauseProducing()
        case.channel.dataReceived(request("/now", b"1") + request("/now", b"2"))
        self.assertEqual((case.answers(), case.reading), ([], False))
        case.channel.resumeProducing()
        self.assertEqual((len(case.answers()), case.reading), (2, True))

    def test_a_closed_channel_releases_its_memory(self) -> None:
        for number, said in enumerate((b"GET", request("/later", b""), request("/now", b"body", chunked=True)[:-5])):
            case = Case()
            case.channel.dataReceived(said)
            self.assertGreater(case.site.unanswered.held, 0)
            case.channel.connectionLost(Failure(connectionDone.value))
            self.assertEqual(case.site.unanswered.held, 0, number)
            self.assertEqual((case.channel.requests, case.channel._transferDecoder), ([], None))

    def test_lengths_of_thousands_of_digits(self) -> None:
        for name in (b"Content-Length: ", b"content-length:" + b"0" * 5000):
            case = Case()
            case.channel.dataReceived(b"POST / HTTP/1.1\r\nHost: x\r\n" + name + b"1" * 5000 + b"\r\n\r\n")
            self.assertTrue(case.transport.value().startswith(b"HTTP/1.1 400"))
            self.assertTrue(case.transport.disconnecting)

    def test_data_behind_the_last_request_is_ignored(self) -> None:
        """Data behind a request that ends the connection is not parsed."""
        case = Case()
        last = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        case.channel.dataReceived(last + request("/now", b"") * 1000)
        self.assertEqual(case.answers(), [b"/last "])
        self.assertTrue(case.transport.disconnecting)
        self.assertFalse(case.channel._unparsed)

    def test_unreadable_requests_end_the_connection(self) -> None:
        case = Case()
        case.channel.dataReceived(request("/now", b"") + b"nonsense\r\n" + request("/now", b"") * 1000)
        self.assertEqual(case.answers(), [b"/now "])
        self.assertIn(b"400 Bad Request", case.transport.value())
        self.assertFalse(case.channel._unparsed)

    def test_a_connection_that_is_lost(self) -> None:
        case = Case()
        case.channel.dataReceived(request("/later", b"x") * 1000)
        gone: list[Any] = []
        case.page.waiting[0].notifyFinish().addErrback(gone.append)
        case.channel.connectionLost(connectionDone)
        self.assertEqual((len(gone), len(case.channel._unparsed)), (1, 0))

    def test_no_other_protocol_over_TLS(self) -> None:
        self.assertEqual(Case().site.acceptableProtocols(), [b"http/1.1"])


class _Writes(StringTransport):
    """Transport that stores each write on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def writeSequence(self, data: Iterable[bytes]) -> None:
        self.writes.append(b"".join(data))


class WriteTests(SynchronousTestCase):
    """Writes of a response's head and body."""

    def answers(self, request: bytes) -> tuple[Case, list[bytes]]:
        case = Case()
        transport = _Writes()
        case.channel = case.site.buildProtocol(transport.getPeer())
        case.channel.makeConnection(transport)
        case.channel.dataReceived(request + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        return case, transport.writes

    def test_head_and_body_are_one_write(self) -> None:
        _, writes = self.answers(b"GET /here")
        self.assertEqual(len(writes), 1)
        head, _, body = writes[0].partition(b"\r\n\r\n")
        self.assertTrue(head.startswith(b"HTTP/1.1 200 OK\r\n"))
        self.assertEqual(body, b"/here \n")

    def test_a_head_without_body_is_written(self) -> None:
        _, writes = self.answers(b"HEAD /here")
        self.assertTrue(b"".join(writes).endswith(b"\r\n\r\n"))

    def test_a_head_does_not_wait_for_a_later_body(self) -> None:
        case, writes = self.answers(b"GET /later")
        case.page.waiting[0].write(b"")
        self.assertTrue(b"".join(writes).startswith(b"HTTP/1.1 200 OK\r\n"))
        self.assertTrue(b"".join(writes).endswith(b"\r\n\r\n"))
        case.page.proceed()
        self.assertTrue(b"".join(writes).endswith(b"\r\n0\r\n\r\n"))
