"""Addresses of servers, which strangers write: malformed addresses are refused, and no host adds lines to a request."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import example, given, settings, strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.checks.overrides import parse_check_target
from dmsg.errors import DmsgError
from dmsg.keys import SecKey
from dmsg.net.addresses import is_host, parse_address
from dmsg.net.carriers.endpoint import carrier_endpoint, over_carrier
from dmsg.net.carriers.names import PLAIN, SECURE_WEBSOCKET, TLS, WEBSOCKET, Carrier
from dmsg.net.proxies import ProxyEndpoint, ProxyError, parse_proxy
from dmsg.rmb.twins.twin import check_relay

BAD_HOSTS = (
    "a\r\nX-Forwarded-For: 1.2.3.4\r\nX: b",
    "a\nb",
    "a\rb",
    "a b",
    " a",
    "a ",
    "a\tb",
    "a\0b",
    "a\x7fb",
    "a\u00a0b",
    "a\u2028b",
    "a/b",
    "a?b",
    "a#b",
    "user@a",
    "a,b",
    "b\u00fccher.example",
    "a\u2100b",
    "fe80::1%a\r\nX: b",
    "fe80::1%a b",
    "fe80::1%",
    "::1]:1\r\nX: [",
    "a..b",
    ".a",
    "-a",
    f"{'a' * 64}.example",
    ".".join(["a" * 60] * 5),
)
"""Hosts that would add to a request, or that no name server could find."""
GOOD_HOSTS = (
    "localhost",
    "relay.example",
    "relay.example.",
    "_a.b-c",
    "10.0.0.1",
    "::1",
    "2001:db8::1",
    "fe80::1%eth0.7",
)
_SAFE = re.compile(r"[A-Za-z0-9._:%-]+")


def at_port(host: str) -> str:
    return f"[{host}]:80" if ":" in host else f"{host}:80"


class _At:
    """Endpoint that connects in memory."""

    def __init__(self) -> None:
        self.transport = StringTransport()

    def connect(self, factory: Any) -> Deferred[Any]:
        protocol = factory.buildProtocol(None)
        protocol.makeConnection(self.transport)
        connected: Deferred[Any] = Deferred()
        connected.callback(protocol)
        return connected


class ParsingTests(SynchronousTestCase):
    """Texts that are addresses, and texts that are not."""

    def test_names_and_numbers_are_returned_as_they_are(self) -> None:
        for host in GOOD_HOSTS:
            with self.subTest(host=host):
                self.assertEqual(parse_address(at_port(host)), (host, 80))

    def test_a_host_that_would_add_to_a_request_is_refused(self) -> None:
        for host in BAD_HOSTS:
            with self.subTest(host=host):
                error = self.assertRaises(DmsgError, parse_address, at_port(host))
                self.assertTrue(str(error).isprintable())
                self.assertRaises(DmsgError, parse_address, f"[{host}]:80")
                self.assertRaises(DmsgError, parse_check_target, f"{SecKey.generate().public.hex()}@{at_port(host)}")
                self.assertFalse(is_host(host))

    def test_a_relay_of_the_bus_is_no_host_with_spaces(self) -> None:
        for text in ("http://[fe80::1%a b]:80", " http://a", "http://a b", "http://a\r\nX: b", "a\r\nb"):
            with self.subTest(text=text):
                self.assertRaises(ValueError, check_relay, text)

    @given(st.text(max_size=80))
    @example("::ffff:1.2.3.4%\r")
    @settings(max_examples=400, deadline=None)
    def test_every_accepted_host_can_stand_in_a_request_and_in_a_query_of_dns(self, host: str) -> None:
        for text in (f"{host}:80", f"[{host}]:80"):
            try:
                found, _ = parse_address(text)
            except DmsgError:
                continue
            self.assertTrue(_SAFE.fullmatch(found), found)
            found.encode("idna")


class RequestTests(SynchronousTestCase):
    """Hosts of strangers in the requests of clients."""

    def test_no_endpoint_is_made_for_a_bad_address(self) -> None:
        for host in BAD_HOSTS:
            for carrier in (PLAIN, Carrier(WEBSOCKET), Carrier(SECURE_WEBSOCKET, 443), Carrier(TLS, 443)):
                with self.subTest(host=host, carrier=carrier):
                    self.assertRaises(
                        DmsgError, carrier_endpoint, Clock(), at_port(host), carrier, encrypted=True, timeout=1.0
                    )

    def test_no_proxy_is_asked_for_a_bad_host(self) -> None:
        for host in BAD_HOSTS:
            for url in ("http://proxy", "socks5://proxy"):
                with self.subTest(host=host, url=url):
                    at: Any = _At()
                    endpoint = ProxyEndpoint(Clock(), at, parse_proxy(url), host, 80, 1.0)
                    asking = endpoint.connect(Factory.forProtocol(Protocol))
                    text = str(self.failureResultOf(asking, ProxyError).value)
                    self.assertTrue(text.isprintable(), text)
                    self.assertEqual(at.transport.value(), b"")

    def test_the_header_host_of_a_websocket_names_the_server_without_the_zone_of_this_machine(self) -> None:
        for host, named in (("relay.example", b"relay.example:80"), ("fe80::1%eth0.7", b"[fe80::1]:80")):
            at: Any = _At()
            endpoint = over_carrier(
                Clock(),
                at,
                host,
                80,
                Carrier(WEBSOCKET),
                encrypted=True,
                timeout=1.0,
            )
            asking = endpoint.connect(Factory.forProtocol(Protocol))
            self.assertIn(b"\r\nHost: " + named + b"\r\n", at.transport.value())
            asking.addErrback(lambda _: None)
            asking.cancel()
