"""The fast router: its answers are those of Klein."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st
from klein import Klein
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.server import Site
from werkzeug.exceptions import HTTPException

from dmsg.net.web.routes import QuickKlein, QuickResource
from dmsg.net.web.site import answer, answer_http_error


class Refused(Exception):
    """Error that the error map contains."""


def application(kind: type[Klein]) -> Any:
    """The same routes, declared to either."""
    app = kind()

    @app.route("/plain", methods=["GET"])
    def plain(request: Any) -> bytes:
        return b"plain"

    @app.route("/plain", methods=["POST"])
    def posted(request: Any) -> bytes:
        return b"posted " + request.content.read()

    @app.route("/things/<name>", methods=["GET", "DELETE"])
    def thing(request: Any, name: str) -> bytes:
        return f"thing {name} {request.method.decode()}".encode()

    @app.route("/things/all", methods=["GET"])
    def every(request: Any) -> bytes:
        return b"all things"

    @app.route("/numbers/<int:number>", methods=["GET"])
    def of_number(request: Any, number: int) -> bytes:
        return b"number %d" % number

    @app.route("/deep/<one>/<two>", methods=["GET"])
    def deep(request: Any, one: str, two: str) -> bytes:
        return f"deep {one} {two}".encode()

    @app.route("/branch/", branch=True)
    def branch(request: Any) -> bytes:
        return b"branch " + request.path

    @app.route("/refused", methods=["GET"])
    def refused(request: Any) -> bytes:
        raise Refused("no")

    @app.handle_errors(Refused)
    def of_refused(request: Any, failure: Failure) -> bytes:
        return answer(request, 403, str(failure.value))

    @app.handle_errors(HTTPException)
    def of_http(request: Any, failure: Failure) -> bytes:
        return answer_http_error(request, failure)

    return app


def connection(app: Any) -> tuple[Any, StringTransport]:
    """A connection to a site of its own."""
    site = Site(app.resource(), reactor=Clock())
    site.noisy = False
    channel: Any = site.buildProtocol(None)
    transport = StringTransport()
    channel.makeConnection(transport)
    return channel, transport


def ask(app: Any, request: bytes) -> tuple[bytes, bytes]:
    """Status line and body, put together where it came in chunks."""
    channel, transport = connection(app)
    channel.dataReceived(request)
    head, _, body = transport.value().partition(b"\r\n\r\n")
    if b"chunked" in head:
        whole = b""
        while body and (size := int(body.partition(b"\r\n")[0], 16)):
            rest = body.partition(b"\r\n")[2]
            whole, body = whole + rest[:size], rest[size + 2 :]
        body = whole
    return head.partition(b"\r\n")[0], body


QUICK, SLOW = application(QuickKlein), application(Klein)
segments = st.sampled_from(
    ["plain", "things", "all", "numbers", "7", "007", "deep", "branch", "a", "", "%41", "a-b", "ä", "refused", ".."]
)


class SameTests(SynchronousTestCase):
    """Any path, method and host that is text."""

    @given(
        st.sampled_from(["GET", "HEAD", "POST", "DELETE", "PUT", "OPTIONS"]),
        st.lists(segments, max_size=4),
        st.sampled_from(["", "?x=1", "?"]),
        st.sampled_from(["x", "x:80", "10.0.0.1:9090", "[::1]:80", "a.b", "x_y"]),
    )
    def test_routes_answer_as_klein_does(self, method: str, path: list[str], query: str, host: str) -> None:
        request = f"{method} /{'/'.join(path)}{query} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n".encode()
        self.assertEqual(ask(QUICK, request), ask(SLOW, request), request)

    def test_static_routes_bypass_klein(self) -> None:
        def slow(*_: Any) -> None:
            raise AssertionError("went Klein's way")

        self.patch(QuickResource.__bases__[0], "render", slow)
        for path in ("plain", "things/0a", "things/all", "branch/", "branch/0a", "refused"):
            status, _ = ask(QUICK, f"GET /{path} HTTP/1.1\r\nHost: x:1\r\n\r\n".encode())
            self.assertIn(status.split()[1], (b"200", b"403"), path)


class LaterTests(SynchronousTestCase):
    """Routes that answer later."""

    def setUp(self) -> None:
        self.waiting: list[Deferred[bytes]] = []
        self.cancelled: list[Deferred[Any]] = []
        self.told: list[Failure] = []
        app = self.app = QuickKlein()

        @app.route("/later", methods=["GET"])
        def later(request: Any) -> Deferred[bytes]:
            self.waiting.append(Deferred(self.cancelled.append))
            return self.waiting[-1]

        @app.route("/soon", methods=["GET"])
        def until_something_is_there_or_nobody_waits(request: Any) -> Deferred[bytes]:
            self.waiting.append(Deferred(lambda waiting: waiting.callback(b"nothing")))
            return self.waiting[-1]

        @app.handle_errors(Refused)
        def of_refused(request: Any, failure: Failure) -> bytes:
            return answer(request, 403, str(failure.value))

        @app.handle_errors(CancelledError)
        def of_those_who_left(request: Any, failure: Failure) -> bytes:
            self.told.append(failure)
            return b""

        self.channel, self.transport = connection(app)

    def ask(self, method: str = "GET", path: str = "later") -> None:
        self.channel.dataReceived(f"{method} /{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    def test_a_deferred_answer_is_sent(self) -> None:
        self.ask()
        self.assertEqual(self.transport.value(), b"")
        self.waiting[0].callback(b"now")
        self.assertTrue(self.transport.value().endswith(b"\r\n\r\nnow"))
        self.assertIn(b"Content-Length: 3\r\n", self.transport.value())

    def test_head_has_the_length_alone(self) -> None:
        self.ask("HEAD")
        self.waiting[0].callback(b"now")
        self.assertIn(b"Content-Length: 3\r\n", self.transport.value())
        self.assertTrue(self.transport.value().endswith(b"\r\n\r\n"))

    def test_an_error_that_the_map_knows(self) -> None:
        self.ask()
        self.waiting[0].errback(Refused("no"))
        self.assertIn(b" 403 ", self.transport.value())

    def test_an_unknown_route_goes_to_klein(self) -> None:
        self.ask()
        self.waiting[0].errback(RuntimeError("a fault"))
        self.assertIn(b" 500 ", self.transport.value())
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_a_client_that_left_is_not_answered(self) -> None:
        self.ask()
        self.channel.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(self.cancelled, self.waiting)
        self.assertEqual(self.told, [])
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_a_route_may_answer_after_its_client_left(self) -> None:
        self.ask(path="soon")
        self.channel.connectionLost(Failure(ConnectionDone()))
        self.assertTrue(self.waiting[0].called)
        self.assertEqual(self.flushLoggedErrors(), [])
