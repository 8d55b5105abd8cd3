"""Connections through proxies, and when they go directly."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings, strategies as st
from OpenSSL import SSL
from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.interfaces import IProtocol, IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from dmsg.net.outgoing import outgoing_endpoint
from dmsg.net.proxies import MAX_ANSWER, Proxy, ProxyEndpoint, ProxyError, parse_proxy, proxy_for
from tests.net.test_own_pauses import pass_time


class ChoiceTests(SynchronousTestCase):
    """Proxy that the environment names for a host."""

    def test_the_variable_of_dmsg_goes_before_those_of_all_programs(self) -> None:
        environment = {"ALL_PROXY": "socks5://c", "https_proxy": "http://b:3128", "DMSG_PROXY": "http://a"}
        self.assertEqual(proxy_for("relay.example", environment), Proxy("http", "a", 80))
        del environment["DMSG_PROXY"]
        self.assertEqual(proxy_for("relay.example", environment), Proxy("http", "b", 3128))
        del environment["https_proxy"]
        self.assertEqual(proxy_for("relay.example", environment), Proxy("socks5", "c", 1080))
        self.assertIsNone(proxy_for("relay.example", {}))

    def test_loopback_and_hosts_that_are_exempt_are_connected_to_directly(self) -> None:
        environment = {"DMSG_PROXY": "http://a", "NO_PROXY": "example.org, .inside, 10.0.0.7"}
        for host in ("127.0.0.1", "::1", "localhost", "example.org", "a.example.org", "b.inside", "10.0.0.7"):
            self.assertIsNone(proxy_for(host, environment), host)
        for host in ("10.0.0.8", "example.com", "192.168.1.1"):
            self.assertIsNotNone(proxy_for(host, environment), host)

    def test_a_malformed_url_is_an_error_without_its_password(self) -> None:
        for url in ("ftp://u:secret@a", "http://u:secret@", "http://u:secret@a:99999", "socks4://u:secret@a"):
            with self.subTest(url=url):
                error = self.assertRaises(ProxyError, parse_proxy, url)
                self.assertNotIn("secret", str(error))

    def test_user_and_password_are_decoded_and_hidden(self) -> None:
        proxy = parse_proxy("socks5://al%40ice:p%3Aw@[::1]:9050")
        self.assertEqual((proxy.user, proxy.password, proxy.display_url), ("al@ice", "p:w", "socks5://[::1]:9050"))


@implementer(IStreamClientEndpoint)
class _At:
    """Endpoint that hands out its protocol with a transport in memory."""

    def __init__(self) -> None:
        self.transport = StringTransport()

    def connect(self, factory: Any) -> Deferred[Any]:
        protocol = self.protocol = factory.buildProtocol(None)
        protocol.makeConnection(self.transport)
        connected: Deferred[Any] = Deferred()
        connected.callback(protocol)
        return connected


class _Kept(Protocol):
    def __init__(self) -> None:
        self.data = b""

    def dataReceived(self, data: bytes) -> None:
        self.data += data


class HandshakeCase(SynchronousTestCase):
    """Test case with a connection through a proxy whose part the test takes."""

    def begin(self, url: str, host: str = "relay.example", port: int = 8080) -> None:
        self.clock = Clock()
        self.at = _At()
        self.wanted = _Kept()
        endpoint = ProxyEndpoint(self.clock, self.at, parse_proxy(url), host, port, 10.0)
        self.connecting = endpoint.connect(Factory.forProtocol(lambda: self.wanted))

    def said(self) -> bytes:
        data = self.at.transport.value()
        self.at.transport.clear()
        return data

    def answer(self, data: bytes) -> None:
        """Deliver data to the protocol of the connection."""
        protocol = getattr(self.at.transport, "protocol", None) or self.at.protocol
        protocol.dataReceived(data)

    def error(self) -> str:
        self.assertTrue(self.at.transport.disconnecting or self.at.transport.disconnected)
        return str(self.failureResultOf(self.connecting, ProxyError).value)


class HTTPTests(HandshakeCase):
    """HTTP CONNECT."""

    def test_data_behind_the_proxys_answer_reaches_the_protocol(self) -> None:
        self.begin("http://proxy:3128")
        self.assertEqual(self.said(), b"CONNECT relay.example:8080 HTTP/1.1\r\nHost: relay.example:8080\r\n\r\n")
        for one in (b"HTTP/1.1 200 Connection est", b"ablished\r\nVia: x\r\n\r", b"\nfirst"):
            self.answer(one)
        self.assertIs(self.successResultOf(self.connecting), self.wanted)
        self.answer(b" then")
        self.assertEqual(self.wanted.data, b"first then")

    def test_user_and_password_are_sent(self) -> None:
        self.begin("http://alice:secret@proxy", "2001:db8::1")
        said = self.said()
        self.assertIn(b"CONNECT [2001:db8::1]:8080 ", said)
        self.assertIn(b"Proxy-Authorization: Basic " + base64.b64encode(b"alice:secret"), said)

    def test_a_refusal_names_proxy_and_target_and_no_password(self) -> None:
        self.begin("http://alice:secret@proxy")
        self.answer(b"HTTP/1.1 403 Forbidden by policy\r\n\r\n")
        text = self.error()
        expected = "the proxy http://proxy:80 refused: 403 Forbidden by policy (asked for relay.example:8080)"
        self.assertEqual(text, expected)

    def test_a_proxy_whose_certificate_is_not_trusted_says_so(self) -> None:
        self.begin("http://proxy")
        error = SSL.Error([("SSL routines", "", "certificate verify failed")])
        self.at.protocol.connectionLost(Failure(error))
        self.assertIn("no CA that this machine trusts", self.error())

    def test_an_endless_answer_is_an_error(self) -> None:
        self.begin("http://proxy")
        self.answer(b"HTTP/1.1 200 OK\r\nX: " + bytes(MAX_ANSWER))
        self.assertIn("sent a longer answer than the protocol allows", self.error())

    def test_an_endless_answer_byte_by_byte_is_an_error(self) -> None:
        self.begin("http://proxy")
        for _ in range(MAX_ANSWER + 1):
            self.assertNoResult(self.connecting)
            self.answer(b"x")
        self.assertIn("sent a longer answer than the protocol allows", self.error())

    def test_silence_is_an_error(self) -> None:
        self.begin("http://proxy")
        pass_time(self.clock, 10.1)
        self.assertIn("did not answer within 10 s", self.error())


class SocksTests(HandshakeCase):
    """SOCKS5."""

    def test_the_proxy_resolves_names(self) -> None:
        self.begin("socks5://proxy")
        self.assertEqual(self.said(), b"\x05\x01\x00")
        self.answer(b"\x05\x00")
        self.assertEqual(self.said(), b"\x05\x01\x00\x03\x0drelay.example\x1f\x90")
        self.answer(b"\x05\x00\x00\x01" + bytes(6) + b"first")
        self.assertIs(self.successResultOf(self.connecting), self.wanted)
        self.assertEqual(self.wanted.data, b"first")

    def test_addresses_go_as_numbers(self) -> None:
        for host, sent in (
            ("10.0.0.1", b"\x01\x0a\x00\x00\x01"),
            ("2001:db8::1", b"\x04 \x01\r\xb8" + bytes(11) + b"\x01"),
        ):
            self.begin("socks5h://proxy", host)
            self.answer(b"\x05\x00")
            self.assertEqual(self.said(), b"\x05\x01\x00" + b"\x05\x01\x00" + sent + b"\x1f\x90")

    def test_user_and_password_are_sent_on_demand(self) -> None:
        self.begin("socks5://alice:secret@proxy")
        self.assertEqual(self.said(), b"\x05\x02\x00\x02")
        self.answer(b"\x05\x02")
        self.assertEqual(self.said(), b"\x01\x05alice\x06secret")
        self.answer(b"\x01\x01")
        self.assertIn("did not accept the user or the password", self.error())

    def test_a_proxy_that_wants_a_password_says_so(self) -> None:
        self.begin("socks5://proxy")
        self.answer(b"\x05\xff")
        self.assertIn("wants a user and a password", self.error())

    def test_a_refusal_has_its_reason(self) -> None:
        self.begin("socks5://proxy")
        self.answer(b"\x05\x00")
        self.answer(b"\x05\x05\x00\x01" + bytes(6))
        self.assertIn("refused: connection refused", self.error())

    def test_an_answer_of_another_version_is_an_error(self) -> None:
        self.begin("socks5://proxy")
        self.answer(b"\x05\x00")
        self.answer(b"\x00\x00\x00\x01" + bytes(6))
        self.assertIn("is no SOCKS5 proxy", self.error())

    def test_a_password_that_does_not_fit_is_an_error(self) -> None:
        self.begin(f"socks5://alice:{'x' * 256}@proxy")
        self.said()
        self.answer(b"\x05\x02")
        self.assertIn("of more than 255 bytes", self.error())
        self.assertEqual(self.said(), b"")

    @given(st.lists(st.binary(max_size=40), max_size=6), st.sampled_from(["http://proxy", "socks5://a:b@proxy"]))
    @settings(max_examples=150, deadline=None)
    def test_any_answer_leads_to_a_connection_or_to_an_error_in_words(self, pieces: list[bytes], url: str) -> None:
        self.begin(url)
        results: list[Any] = []
        self.connecting.addBoth(results.append)
        for one in pieces:
            self.answer(one)
            if results:
                break
        pass_time(self.clock, 10.1)
        (result,) = results
        if result is not self.wanted:
            result.trap(ProxyError)


class EndpointTests(SynchronousTestCase):
    """Destination of an outgoing connection."""

    def connected_to(self, host: str, **environment: str) -> tuple[str, int]:
        for name in ("DMSG_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
            for spelled in (name, name.lower()):
                self.patch_environment(spelled, environment.get(spelled, ""))
        reactor = MemoryReactorClock()
        outgoing_endpoint(reactor, host, 8080, 10.0).connect(Factory.forProtocol(Protocol))
        return reactor.tcpClients[0][:2]

    def patch_environment(self, name: str, value: str) -> None:
        import os

        changed: Callable[[], object]
        before = os.environ.get(name)
        os.environ[name] = value
        changed = (lambda: os.environ.pop(name, None)) if before is None else lambda: os.environ.update({name: before})
        self.addCleanup(changed)

    def test_a_proxy_that_refuses_the_connection_is_named_without_its_password(self) -> None:
        class Refusing:
            def connect(self, factory: object) -> Deferred[IProtocol]:
                return fail(ConnectionRefusedError("Connection refused"))

        proxy = parse_proxy("http://user:secret@10.0.0.9:3128")
        endpoint = ProxyEndpoint(Clock(), Refusing(), proxy, "192.0.2.1", 80, 10.0)  # type: ignore[arg-type]
        error = self.failureResultOf(endpoint.connect(Factory.forProtocol(Protocol)), ProxyError)
        self.assertIn("cannot connect to the proxy http://10.0.0.9:3128: ", str(error.value))
        self.assertNotIn("secret", str(error.value))

    def test_only_the_proxy_is_connected(self) -> None:
        self.assertEqual(self.connected_to("192.0.2.1", DMSG_PROXY="socks5://10.0.0.9"), ("10.0.0.9", 1080))
        self.assertEqual(self.connected_to("192.0.2.1"), ("192.0.2.1", 8080))
